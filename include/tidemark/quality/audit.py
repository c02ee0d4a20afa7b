"""Audits a consumer: the location of every record at one moment, and missing records (I3)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tidemark.db import rows, statements, transaction
from tidemark.kafka.cluster import Cluster
from tidemark.offsets.store import require_group
from tidemark.quality.conservation import check_conservation
from tidemark.records.ranges import TopicPartition
from tidemark.spec import ConsumerSpec
from tidemark.text.wording import counted

if TYPE_CHECKING:
    from tidemark.db import Connection

SQL = statements("tidemark.quality", "audit.sql")


@dataclass(frozen=True, slots=True)
class Account:
    """The offsets read of a partition, by outcome. ``waiting`` is counted by retry topic; its key ``held`` counts records behind others."""

    partition: TopicPartition
    read: int
    loaded_at_once: int
    loaded_later: int
    skipped: int
    waiting: Mapping[str, int]
    failed: int
    discarded: int
    unaccounted: int

    @property
    def explained(self) -> int:
        """The sum over all outcomes. Must equal ``read``."""
        settled = self.loaded_at_once + self.loaded_later + self.skipped + self.failed + self.discarded + self.unaccounted
        return settled + sum(self.waiting.values())


@dataclass(frozen=True, slots=True)
class Audit:
    """``differences`` between tables; none means balanced. ``astray``: waiting records whose messages are not at their registered offsets.
    Nothing is lost: the next drain publishes these records again."""

    group: str
    accounts: tuple[Account, ...]
    differences: tuple[str, ...]
    astray: tuple[str, ...]

    @property
    def balanced(self) -> bool:
        return not self.differences


def audit(connection: Connection, cluster: Cluster, spec: ConsumerSpec) -> Audit:
    """Compares the ledger with the failed records, the sink and the topics. Reads the tables in one snapshot. Changes nothing.

    Raises `BadInput` for a group that has never run.
    """
    with transaction(connection) as cur:
        cur.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
        group_id = require_group(cur, spec.group)
        cur.execute(SQL["accounts"], {"group_id": group_id})
        account_rows = rows(cur)
        violations = check_conservation(cur, spec.group, spec.table_names, upsert=spec.upserts)
        cur.execute(SQL["registered"], {"group_id": group_id})
        registered = rows(cur)
    accounts = tuple(_account(row) for row in account_rows)
    differences = [
        f"{account.partition}: {counted(account.read, 'record was', 'records were')} read, {account.explained:,} accounted for."
        for account in accounts
        if account.read != account.explained
    ]
    differences += [
        f"{row['topic']}/{row['partition']}: records not loaded at once: {row['handed_off']:,} in the ledger, {row['kept']:,} stored."
        for row in account_rows
        if row["handed_off"] != row["kept"]
    ]
    return Audit(spec.group, accounts, (*differences, *map(str, violations)), tuple(_astray(cluster, registered)))


def _account(row: Mapping[str, Any]) -> Account:
    names = ("read", "loaded_at_once", "loaded_later", "skipped", "waiting", "failed", "discarded", "unaccounted")
    return Account(TopicPartition(row["topic"], row["partition"]), **{name: row[name] for name in names})


def _astray(cluster: Cluster, registered: list[dict[str, Any]]) -> list[str]:
    """Reports misplaced messages. Reads Kafka after the snapshot, so a log cannot end before a message that the snapshot has registered."""
    topics = {topic.name: topic for topic in cluster.topics({row["topic"] for row in registered}, missing_ok=True)}
    problems, existing = [], {}
    for row in registered:
        partition, topic = TopicPartition(row["topic"], row["partition"]), topics.get(row["topic"])
        if topic is None or topic.kafka_uuid != row["kafka_uuid"]:
            problems.append(f"{partition}: {counted(row['records'], 'record waits', 'records wait')} for this topic, which is gone.")
        else:
            existing[partition] = row
        if row["passed"]:
            waits = counted(row["passed"], "record waits at an offset", "records wait at offsets")
            problems.append(f"{partition}: {waits} that a drain has already passed.")
    starts, ends = cluster.log_starts(existing), cluster.stable_ends(existing)
    for partition, row in existing.items():
        if row["first"] < starts[partition] or row["last"] >= ends[partition]:
            log = f"[{starts[partition]}, {ends[partition]})"
            problems.append(f"{partition}: records wait at offsets {row['first']} to {row['last']}, but the log is {log}.")
    return problems

"""Plans and applies erasures, in one transaction each, while the group runs.

A plan and its application find rows by the same condition: in the sink, in archives of rewinds and among overwritten rows. The lineage of
these rows leads to failed records and examples of validations. A message key is a condition too: that a row's record has this key.
Applying removes all matches, stores for each batch how many of its counted rows are gone, and suppresses the records
(`tidemark.sink.suppressed`), so that no replay restores the rows.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import logging
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import psycopg2
import psycopg2.errors

from tidemark.db import ERASE_LOCK, REWIND_LOCK, data_error, rows, scalar, statements, transaction
from tidemark.erase.kafka_records import InKafka, Keyed, in_kafka, of_logs
from tidemark.errors import BadInput, Refused
from tidemark.kafka.cluster import Cluster
from tidemark.offsets import store
from tidemark.offsets.store import require_group
from tidemark.rewind import guards
from tidemark.rewind.beside import require_none
from tidemark.rewind.guards import RowsStay
from tidemark.rewind.rows.archive import open_archive
from tidemark.sink import suppressed
from tidemark.sink.table import quoted_table
from tidemark.spec import ConsumerSpec, Sink
from tidemark.text.problems import only

if TYPE_CHECKING:
    from tidemark.db import Connection, Cursor

log = logging.getLogger(__name__)

SQL = statements("tidemark.erase", "erasure.sql")


class ErasureState(StrEnum):
    PLANNED = "PLANNED"
    APPLIED = "APPLIED"


@dataclass(frozen=True, slots=True)
class Erasure:
    """An erasure with its plan's counts; once applied, with the numbers removed."""

    erasure_id: int
    group_id: int
    consumer: str
    sink: str
    state: ErasureState
    sink_rows: int
    archived_rows: int
    overwritten_rows: int
    failed_records: int
    examples: int
    """Results of validations whose example rows are removed."""
    suppressed: int
    """Records, or keys of an upsert sink, that replays skip."""
    not_suppressed: int
    """Matching records whose rows a replay restores: they keep other rows, or are part of an aggregate."""
    reason: str
    planned_by: str
    planned_at: datetime
    applied_by: str | None
    applied_at: datetime | None


@dataclass(frozen=True, slots=True)
class Person:
    """The person to erase: an SQL condition over the sink's columns, or the key of messages in the consumer's topics."""

    where: str | None = None
    key: bytes | None = None

    @property
    def condition(self) -> str:
        if self.where is not None:
            return self.where
        return "(kafka_topic_id, kafka_partition, kafka_offset) IN (TABLE pg_temp.tidemark_person)"

    def digest(self, salt: bytes) -> bytes:
        """Slow on purpose: the text often holds a number that could be guessed. A key never has the digest of a condition."""
        text = (self.where or "").strip().encode() if self.key is None else b"\0key\0" + self.key
        return hashlib.scrypt(text, salt=salt, n=2**14, r=8, p=1)


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan, with data that it cannot remove."""

    erasure: Erasure
    in_kafka: Sequence[InKafka]
    not_searched: int
    """Failed records without rows, which a condition cannot find."""
    older_rows: int
    """Rows in the sink from before the start of the topics, which a key cannot find."""


ReadKafka = Callable[[ConsumerSpec, bytes], Keyed]
"""Finds the records of a key in the consumer's topics."""


class OtherCondition(Refused):
    """The condition or the key differs from the plan's."""

    erasure_id: int

    def __str__(self) -> str:
        return (
            f"The condition or key is not the one that erasure {self.erasure_id} was planned with. Nothing was erased. Repeat it character "
            "by character, or make a new plan."
        )


class EraseNotAllowed(Refused):
    """The role lacks a privilege, or row security would hide rows from it. ``message`` is from Postgres."""

    message: str

    def __str__(self) -> str:
        return f"Nothing was erased: {self.message} Use the role that owns the sink and the schema tidemark, or one with BYPASSRLS."


def plan(
    connection: Connection, cluster: Cluster, spec: ConsumerSpec, person: Person, read_kafka: ReadKafka, *, reason: str, by: str
) -> Planned:
    """Counts the matches and stores the counts, with a salted hash of the condition or key. Removes nothing.

    Raises `BadInput` if Postgres cannot evaluate the condition, or for the key if the sink's rows do not belong to single records, and
    `ReplayExists` while a rewind of the group reads beside.
    """
    sink = _only_sink(spec)
    keyed = None if person.key is None else read_kafka(spec, person.key)
    with _allowed(), transaction(connection) as cur:
        group_id = require_group(cur, spec.group)
        require_none(cur, {group_id: spec.group})
        cur.execute(SQL["make_found"])
        ids = _add_keyed(cur, group_id, person, keyed)
        salt = secrets.token_bytes(16)
        search = _Search(cur, group_id, sink.table, sink.key, person, salt)
        counts = search.count()
        values = {"consumer": spec.name, "sink": sink.table, "salt": salt, "digest": person.digest(salt), "reason": reason, "by": by}
        cur.execute(SQL["add"], {**counts, **values, "group_id": group_id})
        erasure_id = scalar(cur)
        older = 0
        if keyed is not None:
            logs = of_logs({partition: log.start for partition, log in keyed.logs.items()}, ids)
            old_ids = [topic_id for topic_id in search.topic_ids if topic_id not in ids.values()]
            cur.execute(SQL["older_rows"].format(table=quoted_table(sink.table).replace("%", "%%")), {**logs, "old": old_ids})
            older = scalar(cur)
        not_searched_records = not_searched(cur, group_id) if person.key is None else 0
        return Planned(read(cur, erasure_id), in_kafka(cur, cluster, spec, group_id), not_searched_records, older)


def _only_sink(spec: ConsumerSpec) -> Sink:
    """Returns the consumer's only sink. Raises `BadInput`."""
    if len(spec.sinks) > 1:
        problem = f"{spec.name} loads several tables, and rows can be erased from consumers with one table only"
        raise BadInput(what="consumer", found=problem, fix="Give each table a consumer of its own.")
    return next(iter(spec.sinks.values()))


def apply(
    connection: Connection, spec_of: Callable[[str], ConsumerSpec], erasure_id: int, person: Person, read_kafka: ReadKafka, *, by: str
) -> Erasure:
    """Removes all current matches, or nothing, and returns the erasure with the actual numbers. Safe to repeat.

    Waits up to one minute for rewinds and drains of the group, and up to ten for its commits. Raises `OtherCondition`, `BadInput`,
    `ReplayExists`, and `RowsStay` if the sink keeps rows.
    """
    with _allowed(), transaction(connection) as cur:
        erasure, salt = _locked_erasure(cur, erasure_id, person)
    spec = spec_of(erasure.consumer)
    sink = _only_sink(spec)
    if sink.table != erasure.sink:
        raise BadInput(what="erasure", found=f"the sink was {erasure.sink} and is now {sink.table}", fix="Plan again.")
    if erasure.state is ErasureState.APPLIED:
        return erasure
    keyed = None if person.key is None else read_kafka(spec, person.key)
    key = {"group_id": erasure.group_id, "erasure_id": erasure_id}
    with _allowed(), transaction(connection) as cur:
        cur.execute(SQL["begin"], {**key, "rewinds": REWIND_LOCK, "commits": ERASE_LOCK})
        erasure, salt = _locked_erasure(cur, erasure_id, person)
        if erasure.state is ErasureState.APPLIED:
            return erasure
        require_none(cur, {erasure.group_id: spec.group})
        cur.execute(SQL["make_found"])
        _add_keyed(cur, erasure.group_id, person, keyed)
        if sink.key:
            cur.execute(SQL["key_salt"], {"sink": sink.table})
            salt = bytes((cur.fetchone() or (secrets.token_bytes(16),))[0])
        search = _Search(cur, erasure.group_id, sink.table, sink.key, person, salt)
        counts = search.remove()
        cur.execute(SQL["record"], key)
        cur.execute(SQL["suppress_keys" if search.by_row else "suppress_records"], {**key, "sink": sink.table, "salt": salt})
        cur.execute(SQL["applied"], {**counts, **key, "by": by})
        with guards.rows_stay(sink.table):
            cur.execute("SET CONSTRAINTS ALL IMMEDIATE")
        done = read(cur, erasure_id)
    log.info(
        "erased consumer=%s erasure=%s rows=%s archived=%s overwritten=%s failed_records=%s suppressed=%s",
        done.consumer, erasure_id, done.sink_rows, done.archived_rows, done.overwritten_rows, done.failed_records, done.suppressed,
    )  # fmt: skip
    return done


def _locked_erasure(cur: Cursor, erasure_id: int, person: Person) -> tuple[Erasure, bytes]:
    """Locks a stored erasure and returns it with its salt. Raises `OtherCondition` unless it was planned for this person."""
    cur.execute(SQL["lock"], {"erasure_id": erasure_id})
    salt, digest = map(bytes, (cur.fetchone() or (b"", b"")))
    erasure = read(cur, erasure_id)
    if not hmac.compare_digest(person.digest(salt), digest):
        raise OtherCondition(erasure_id=erasure_id)
    return erasure, salt


def _add_keyed(cur: Cursor, group_id: int, person: Person, keyed: Keyed | None) -> dict[str, int]:
    """Stores the records of the key, and returns the ids of the consumer's topics. Does nothing without a key."""
    if keyed is None:
        return {}
    cur.execute(SQL["aggregates"], {"group_id": group_id})
    if scalar(cur):
        problem = "rows of the sink belong to whole batches (aggregates), not to records, so that a key finds none"
        raise BadInput(what="--key", found=problem, fix="Use --where.")
    ids = {name: store.ensure_topic(cur, name, uuid) for name, uuid in keyed.uuids.items()}
    for partition, offsets in keyed.offsets.items():
        partition_key = {"topic_id": ids[partition.topic], "partition": partition.partition}
        cur.execute(SQL["add_records"], {**partition_key, "offsets": list(offsets)})
    cur.execute(SQL["add_failed"], {"group_id": group_id, "key": person.key})
    return ids


def read(cur: Cursor, erasure_id: int) -> Erasure:
    """Reads a stored erasure. Raises `BadInput` if it does not exist."""
    return only(_read(cur, erasure_id, None, 1), "erasure", erasure_id, "tidemark erase list")


def history(connection: Connection, consumer: str | None, *, limit: int) -> list[Erasure]:
    """Reads the erasures of a consumer, or all, newest first."""
    with transaction(connection) as cur:
        return _read(cur, None, consumer, limit)


def not_searched(cur: Cursor, group_id: int) -> int:
    """Counts records with payloads but without rows, which no condition can find."""
    cur.execute(SQL["not_searched"], {"group_id": group_id})
    return int(scalar(cur))


def _read(cur: Cursor, erasure_id: int | None, consumer: str | None, limit: int) -> list[Erasure]:
    cur.execute(SQL["read"], {"erasure_id": erasure_id, "consumer": consumer, "limit": limit})
    return [Erasure(**{**row, "state": ErasureState(row["state"])}) for row in rows(cur)]


class _Search:
    """Finds a person's data, in one transaction. ``by_row``: suppresses keys of an upsert sink, not records, which may have other rows."""

    def __init__(self, cur: Cursor, group_id: int, sink: str, key: Sequence[str], person: Person, salt: bytes) -> None:
        self._cur, self._group_id, self._sink, self._person = cur, group_id, sink, person
        self.by_row = bool(key) and person.key is None
        self._digest = suppressed.digest(key, "present", salt) if self.by_row else "NULL::bytea"
        cur.execute(SQL["topics"], self._key)
        self.topic_ids = [topic_id for (topic_id,) in cur.fetchall()]

    @property
    def _key(self) -> dict[str, Any]:
        return {"group_id": self._group_id, "sink": self._sink, "by_row": self.by_row}

    def count(self) -> dict[str, int]:
        for table, key in self._relations():
            with _condition_on(table):
                self._cur.execute(self._filled("find", table), key)
            self._cur.execute(SQL["mark_left_over"].format(table=table), {**key, "planned": True})
        return self._count_matches()

    def remove(self) -> dict[str, int]:
        cur = self._cur
        for table, key in self._relations():
            with guards.rows_stay(table):
                cur.execute(self._filled("remove", table), key)
            cur.execute(self._filled("left", table), key)
            if remaining := scalar(cur):
                keepers = " and ".join(guards.hooks(cur, self._sink, "DELETE")) or "another session, which has added them meanwhile"
                raise RowsStay(table=table, message=f"{remaining:,} rows remain, because of {keepers}.")
            cur.execute(SQL["mark_left_over"].format(table=table), {**key, "planned": False})
            if key["rewind_id"] is not None:
                cur.execute(SQL["shrink_archive"], key)
        counts = self._count_matches()
        for name in ("remove_overwritten", "remove_deleted"):
            cur.execute(SQL[name])
        cur.execute(SQL["empty_edits"])
        for records in ("failed_record", "rewound_failed_record"):
            cur.execute(SQL["empty_failed"].format(records=records))
        cur.execute(SQL["remove_examples"])
        return counts

    def _count_matches(self) -> dict[str, int]:
        """Counts all matches. Needs the rows of the sink and the archives; finds overwritten rows, records and keys first."""
        cur = self._cur
        with _condition_on("tidemark.rewound_row"):
            for name in ("find_overwritten", "find_deleted"):
                cur.execute(self._filled(name, quoted_table(self._sink)), self._key)
        if self._person.key is None:
            cur.execute(SQL["mark_again"], self._key)
            cur.execute(SQL["choose"])
        cur.execute(SQL["mark_failed"], self._key)
        counts: dict[str, int] = {}
        for name in ("count_found", "count_suppressed"):
            cur.execute(SQL[name], self._key)
            counts |= rows(cur)[0]
        for name, statement in (("failed_records", "count_failed"), ("examples", "count_examples")):
            cur.execute(SQL[statement])
            counts[name] = scalar(cur)
        return counts

    def _relations(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """Yields the sink and the archives of its rewinds, as SQL, with the parameters of their statements."""
        self._cur.execute(SQL["archives"], self._key)
        archives = rows(self._cur)
        yield quoted_table(self._sink), {"place": "sink", "rewind_id": None, "topic_ids": self.topic_ids}
        for archive in archives:
            relation = open_archive(self._cur, archive)
            if relation is not None:
                yield relation, {**archive, "place": relation, "topic_ids": self.topic_ids}

    def _filled(self, name: str, table: str) -> str:
        where, digest = self._person.condition, self._digest
        return SQL[name].format(table=table.replace("%", "%%"), where=where.replace("%", "%%"), digest=digest.replace("%", "%%"))


@contextlib.contextmanager
def _allowed() -> Iterator[None]:
    try:
        yield
    except psycopg2.errors.InsufficientPrivilege as error:
        raise EraseNotAllowed(message=data_error(error).message) from None


@contextlib.contextmanager
def _condition_on(table: str) -> Iterator[None]:
    try:
        yield
    except psycopg2.Error as error:
        if (error.pgcode or "")[:2] not in {"22", "42"} or error.pgcode == "42501":
            raise
        fix = "Write a condition over columns that the sink and the archives of its rewinds have: customer_id = 42."
        raise BadInput(what="--where", found=f"{table} cannot be searched: {data_error(error).message}", fix=fix) from None

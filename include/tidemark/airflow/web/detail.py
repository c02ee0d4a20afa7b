"""One group: partitions, members, batches, attempts, and its consumer's file as it is in force."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import yaml

from tidemark.airflow.dags import Declared
from tidemark.airflow.web.consumers import database
from tidemark.airflow.web.overview import groups, problems
from tidemark.db import rows, statements, transaction
from tidemark.group.coordinator import Coordinator
from tidemark.offsets import store
from tidemark.offsets.flow import Flow, Target
from tidemark.records.ranges import TopicPartition
from tidemark.rewind.store import replays
from tidemark.spec.problem import masked

if TYPE_CHECKING:
    from tidemark.db import Cursor

SQL = statements("tidemark.airflow.web", "detail.sql")

ATTEMPTS, BATCHES, LOST, PARTITIONS = 30, 300, 50, 2_000
"""How many of the newest are shown, and how many partitions at most."""


def group(one: Declared) -> dict[str, Any]:
    """Everything on the page of a group."""
    spec = one.spec
    overview = groups({spec.name: one})
    said = {
        "summary": overview["groups"][0],
        "banners": overview["banners"],
        "problems": problems(one),
        "file": spec.source.path.name,
        "spec": in_force(one),
        "partitions": [],
        "lost": [],
        "flow": [],
        "attempts": [],
        "batches": [],
        "membership": None,
    }
    if overview["banners"]:
        return said
    with database(spec) as connection:
        described = Coordinator(connection, spec.group).describe()
        with transaction(connection) as cur:
            cur.execute(SQL["group_id"], {"group": spec.group})
            found = rows(cur)
            said |= _of_group(cur, spec.group, found[0]["group_id"]) | {"now": found[0]["now"]} if found else {}
    return said | {"membership": described}


def _of_group(cur: Cursor, name: str, group_id: int) -> dict[str, Any]:
    key = {"group_id": group_id}

    def ask(statement: str, **more: Any) -> list[dict[str, Any]]:
        cur.execute(SQL[statement], {**key, **more})
        return rows(cur)

    flow = ask("pauses")
    paused = Flow(frozenset(Target(row["topic"], row["partition"]) for row in flow if row["paused"]))
    until = {replay.partition: replay for replay in replays(cur, name)}
    positions = store.positions(cur, name)
    attempts = ask("attempts", limit=ATTEMPTS)
    return {
        "partitions": [_partition(each, paused, until) for each in positions[:PARTITIONS]],
        "partitions_in_all": len(positions),
        "lost": ask("lost", limit=LOST),
        "flow": flow,
        "attempts": attempts,
        "batches": ask("batches", attempt_ids=[row["attempt_id"] for row in attempts], limit=BATCHES),
    }


def _partition(each: store.Position, paused: Flow, until: Mapping[TopicPartition, Any]) -> dict[str, Any]:
    replay = until.get(each.partition)
    return {
        "topic": each.partition.topic,
        "partition": each.partition.partition,
        "position": each.position,
        "validated": each.validated,
        "owner": each.owner,
        "seat": each.instance_id,
        "epoch": each.epoch,
        "generation": each.generation,
        "committed_at": each.committed_at,
        "paused": paused.is_paused(each.partition),
        "replaying_until": None if replay is None else replay.until,
        "rewind_id": None if replay is None else replay.rewind_id,
    }


def in_force(one: Declared) -> str:
    """The consumer's file with every default filled in. Values of settings that name a secret are masked."""
    text: str = yaml.safe_dump(one.spec.model_dump(mode="json", exclude={"name"}), sort_keys=False, allow_unicode=True)
    return "\n".join(map(masked, text.splitlines()))

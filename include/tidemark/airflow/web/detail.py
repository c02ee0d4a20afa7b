"""One group: partitions, members, batches, attempts, and its consumer's file as it is in force."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import yaml

from tidemark.airflow.dags.consume import Declared
from tidemark.airflow.web.consumers import database
from tidemark.airflow.web.overview import groups, problems
from tidemark.airflow.web.rebalances import rebalances
from tidemark.airflow.web.source import place
from tidemark.consume.membership import instance_id
from tidemark.db import rows, statements, transaction
from tidemark.group.coordinator import Coordinator
from tidemark.offsets import lag, samples, store
from tidemark.offsets.flow import Flow, FlowTarget
from tidemark.records.ranges import TopicPartition
from tidemark.rewind.store import replays
from tidemark.spec.problem import masked
from tidemark.spec.scope import spans

if TYPE_CHECKING:
    from tidemark.db import Cursor

SQL = statements("tidemark.airflow.web", "detail.sql")

ATTEMPTS, BATCHES, LOST, PARTITIONS = 30, 300, 50, 2_000
"""How many of the newest are shown, and how many partitions at most."""
DAY = timedelta(days=1)
"""What the chart of the lag shows."""


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
        "source": place(spec),
        "lag": None,
        "unvalidated": None,
        "partitions": [],
        "lost": [],
        "flow": [],
        "attempts": [],
        "batches": [],
        "membership": None,
        "seats": _seats(spec.name, spec.members, ()),
        "rebalances": [],
        "queries": {},
        "history": [],
        "rewinds": [],
    }
    if overview["banners"]:
        return said
    with database(spec) as connection:
        described = Coordinator(connection, spec.group).describe()
        with transaction(connection) as cur:
            cur.execute(SQL["group_id"], {"group": spec.group})
            found = rows(cur)
            if found:
                positions = _newest(store.positions(cur, spec.group))
                said["unvalidated"] = sum(each.position - each.validated for each in positions)
                said |= _of_group(cur, spec.group, found[0]["group_id"], positions) | {"now": found[0]["now"]}
                said |= {"seats": _seats(spec.name, spec.members, positions)}
            said |= {"history": _history(cur, spec.group), "rewinds": _rewinds(cur, spec.group)}
    return said | {"membership": described}


def _newest(positions: Sequence[store.Position]) -> list[store.Position]:
    """Without those of topics that were created again."""
    newest = {each.partition.topic: each.topic_id for each in sorted(positions, key=lambda each: each.topic_id)}
    return [each for each in positions if newest[each.partition.topic] == each.topic_id]


def _of_group(cur: Cursor, name: str, group_id: int, positions: Sequence[store.Position]) -> dict[str, Any]:
    queries: dict[str, str] = {}

    def ask(statement: str, **more: Any) -> list[dict[str, Any]]:
        queries[statement] = cur.mogrify(SQL[statement], {"group_id": group_id, **more}).decode()
        cur.execute(queries[statement])
        return rows(cur)

    flow = ask("pauses")
    paused = Flow(frozenset(FlowTarget(row["topic"], row["partition"]) for row in flow if row["paused"]))
    until = {replay.partition: replay for replay in replays(cur, name)}
    lags = lag.group(cur, name)
    behind = {(each.topic, each.partition): each for each in lags.partitions} if lags else {}
    attempts = ask("attempts", limit=ATTEMPTS)
    return {
        "lag": lags and lags.lag,
        "partitions": [
            _partition(each, paused, until) | {"lag": behind.get((each.partition.topic, each.partition.partition))}
            for each in positions[:PARTITIONS]
        ],
        "partitions_in_all": len(positions),
        "lost": ask("lost", limit=LOST),
        "flow": flow,
        "attempts": attempts,
        "rebalances": rebalances(ask("rebalances")),
        "batches": ask("batches", attempt_ids=[row["attempt_id"] for row in attempts], limit=BATCHES),
        "queries": queries,
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


def _seats(consumer: str, members: int, positions: Sequence[store.Position]) -> list[dict[str, Any]]:
    """The seats of the consumer's mapped task, with the partitions that each read last; none without group membership."""
    seats = []
    for number in range(members if members > 1 else 0):
        seat = instance_id(consumer, number)
        read: dict[str, list[int]] = {}
        for each in positions:
            if each.instance_id == seat:
                read.setdefault(each.partition.topic, []).append(each.partition.partition)
        seats.append({"seat": seat, "map_index": number, "read": " ".join(f"{topic}:{spans(parts)}" for topic, parts in read.items())})
    return seats


def _history(cur: Cursor, name: str) -> list[dict[str, Any]]:
    """The lag of the last day: the sums of its topics."""
    steps: dict[Any, dict[str, Any]] = {}
    for one in samples.history(cur, name, DAY):
        step = steps.setdefault(one.at, {"at": one.sampled_at, "records": 0, "replay": 0, "seconds": 0.0, "unknown": 0})
        step |= {"records": step["records"] + one.records, "replay": step["replay"] + one.replay, "unknown": step["unknown"] + one.unknown}
        step["seconds"] = None if one.seconds is None or step["seconds"] is None else max(step["seconds"], one.seconds)
    return [steps[at] for at in sorted(steps)]


def _rewinds(cur: Cursor, name: str) -> list[dict[str, Any]]:
    cur.execute(SQL["rewinds"], {"group": name, "period": DAY})
    return rows(cur)


def in_force(one: Declared) -> str:
    """The consumer's file with every default filled in. Values of settings that name a secret are masked."""
    text: str = yaml.safe_dump(one.spec.model_dump(mode="json", exclude={"name"}), sort_keys=False, allow_unicode=True)
    return "\n".join(map(masked, text.splitlines()))

"""One group: partitions, members, batches, attempts, and the effective spec of its consumer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import yaml

from tidemark.airflow.dags.consume import DeclaredConsumer
from tidemark.airflow.web.consumers import database
from tidemark.airflow.web.overview import groups, problems
from tidemark.airflow.web.rebalances import rebalances
from tidemark.airflow.web.replays import of_group
from tidemark.airflow.web.retries import open_errors
from tidemark.airflow.web.source import place
from tidemark.consume.membership import instance_id
from tidemark.db import Cursor, rows, statements, transaction
from tidemark.group.coordinator import Coordinator
from tidemark.offsets import lag, samples, store
from tidemark.offsets.flow import Flow, FlowTarget
from tidemark.offsets.samples import replays
from tidemark.records.ranges import TopicPartition
from tidemark.spec.problem import masked
from tidemark.spec.scope import spans

SQL = statements("tidemark.airflow.web", "detail.sql")

ATTEMPTS, BATCHES, LOST, PARTITIONS = 30, 300, 50, 2_000
"""Maximum numbers shown: the newest attempts, batches and lost ranges, and partitions."""
DAY = timedelta(days=1)
"""The period of the lag's chart."""


def group(consumer: DeclaredConsumer) -> dict[str, Any]:
    """Returns everything on the page of a group."""
    spec = consumer.spec
    overview = groups({spec.name: consumer})
    page = {
        "summary": overview["groups"][0],
        "banners": overview["banners"],
        "most": overview["most"],
        "problems": problems(consumer),
        "file": spec.source.path.name,
        "spec": effective_spec(consumer),
        "source": place(spec),
        "instances": _instances(spec.name, spec.members, ()),
        "queries": {},
        **dict.fromkeys(("lag", "unvalidated", "membership", "replay_beside")),
        **dict.fromkeys(("partitions", "lost", "flow", "attempts", "batches", "rebalances", "history", "rewinds", "failing", "errors"), ()),
    }
    if overview["banners"]:
        return page
    with database(spec) as connection:
        membership = Coordinator(connection, spec.group).describe()
        with transaction(connection) as cur:
            cur.execute(SQL["group_id"], {"group": spec.group})
            group_rows = rows(cur)
            if group_rows:
                positions = _newest(store.positions(cur, spec.group))
                page["unvalidated"] = sum(position.position - position.validated for position in positions)
                page |= group_facts(cur, spec.group, group_rows[0]["group_id"], positions) | {"now": group_rows[0]["now"]}
                page |= {"instances": _instances(spec.name, spec.members, positions)}
                cur.execute(SQL["failing"], {"validation_id": page["summary"].get("blocked_by")})
                page["failing"] = [row["expectation"] for row in rows(cur)]
            page |= {"history": _history(cur, spec.group), "rewinds": recent_rewinds(cur, spec.group)}
        page["errors"] = open_errors(connection, [spec.group]).get(spec.group, [])
        page["replay_beside"] = of_group(connection, spec.group)
    return page | {"membership": membership}


def _newest(positions: Sequence[store.Position]) -> list[store.Position]:
    """Returns the positions without those in earlier topics of the same names."""
    newest = {position.partition.topic: position.topic_id for position in sorted(positions, key=lambda position: position.topic_id)}
    return [position for position in positions if newest[position.partition.topic] == position.topic_id]


def group_facts(cur: Cursor, name: str, group_id: int, positions: Sequence[store.Position]) -> dict[str, Any]:
    """Returns what the page shows of a group, with the queries that it comes from."""
    queries: dict[str, str] = {}

    def query(statement: str, **parameters: Any) -> list[dict[str, Any]]:
        queries[statement] = cur.mogrify(SQL[statement], {"group_id": group_id, **parameters}).decode()
        cur.execute(queries[statement])
        return rows(cur)

    flow = query("pauses")
    paused = Flow(frozenset(FlowTarget(row["topic"], row["partition"]) for row in flow if row["paused"]))
    replays_by_partition = {replay.partition: replay for replay in replays(cur, name)}
    lags = lag.group(cur, name)
    lags_by_partition = {(row.topic, row.partition): row for row in lags.partitions} if lags else {}
    attempts = query("attempts", limit=ATTEMPTS)
    return {
        "lag": lags and lags.lag,
        "partitions": [
            _partition(position, paused, replays_by_partition)
            | {"lag": lags_by_partition.get((position.partition.topic, position.partition.partition))}
            for position in positions[:PARTITIONS]
        ],
        "partitions_in_all": len(positions),
        "lost": query("lost", limit=LOST),
        "flow": flow,
        "attempts": attempts,
        "rebalances": rebalances(query("rebalances")),
        "batches": query("batches", attempt_ids=[row["attempt_id"] for row in attempts], limit=BATCHES),
        "queries": queries,
    }


def _partition(position: store.Position, paused: Flow, replays_by_partition: Mapping[TopicPartition, Any]) -> dict[str, Any]:
    replay = replays_by_partition.get(position.partition)
    return {
        "topic": position.partition.topic,
        "partition": position.partition.partition,
        "instance": position.instance_id,
        "paused": paused.is_paused(position.partition),
        "replaying_until": None if replay is None else replay.until,
        "rewind_id": None if replay is None else replay.rewind_id,
    } | {name: getattr(position, name) for name in ("position", "validated", "owner", "epoch", "generation", "committed_at")}


def _instances(consumer: str, members: int, positions: Sequence[store.Position]) -> list[dict[str, Any]]:
    """Returns the static members of the consumer's mapped task, with the partitions that each read last. Empty without a group."""
    names = [instance_id(consumer, number) for number in range(members if members > 1 else 0)]
    partitions_read: dict[str, dict[str, list[int]]] = {name: {} for name in names}
    for position in positions:
        if position.instance_id in partitions_read:
            partitions_read[position.instance_id].setdefault(position.partition.topic, []).append(position.partition.partition)
    return [
        {
            "instance": name,
            "map_index": number,
            "read": " ".join(f"{topic}:{spans(parts)}" for topic, parts in partitions_read[name].items()),
        }
        for number, name in enumerate(names)
    ]


def _history(cur: Cursor, name: str) -> list[dict[str, Any]]:
    """Returns the largest lag of each step of the last day, summed over the topics. ``at``: the start of the step, which never moves."""
    steps: dict[Any, dict[str, Any]] = {}
    for sample in samples.history(cur, name, DAY):
        step = steps.setdefault(sample.at, {"at": sample.at, "records": 0, "replay": 0, "seconds": 0.0, "unknown": 0})
        step |= {
            "records": step["records"] + sample.records,
            "replay": step["replay"] + sample.replay,
            "unknown": step["unknown"] + sample.unknown,
        }
        step["seconds"] = None if sample.seconds is None or step["seconds"] is None else max(step["seconds"], sample.seconds)
    return [steps[at] for at in sorted(steps)]


def recent_rewinds(cur: Cursor, name: str) -> list[dict[str, Any]]:
    """Returns the rewinds of a group that were applied within the last day."""
    cur.execute(SQL["rewinds"], {"group": name, "period": DAY})
    return rows(cur)


def effective_spec(consumer: DeclaredConsumer) -> str:
    """Returns the consumer's file with every default filled in. Values of settings that name a secret are masked."""
    text: str = yaml.safe_dump(consumer.spec.model_dump(mode="json", exclude={"name"}), sort_keys=False, allow_unicode=True)
    return "\n".join(map(masked, text.splitlines()))

"""``tidemark offsets``: shows a group's positions and lag."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from datetime import UTC

from rich.table import Table

from tidemark.cli.common import Name, Output, OutputFormat, plain_table, print_json, stdout
from tidemark.cli.lag import age_of, try_sample
from tidemark.cli.servers import connected, kafka_cluster
from tidemark.db import transaction
from tidemark.offsets import store
from tidemark.offsets.ends import PartitionEnd, current, lags, truncations
from tidemark.offsets.lag import Lag
from tidemark.offsets.lag import group as lag_of
from tidemark.offsets.samples import Replay, replays
from tidemark.records.ranges import TopicPartition
from tidemark.rewind.backfill import backfills
from tidemark.spec import find_consumer
from tidemark.text.wording import counted


def offsets(name: Name, output: Output = OutputFormat.TABLE) -> None:
    spec = find_consumer(name)
    with connected() as connection:
        try_sample(connection, [spec])
        with transaction(connection) as cur:
            positions = store.positions(cur, spec.group)
            replaying = {replay.partition: replay for replay in replays(cur, spec.group)}
            unfinished = [backfill for backfill in backfills(cur, spec.group) if backfill.left]
            group_lag = lag_of(cur, spec.group)
    sampled_lags = {TopicPartition(lag.topic or "", lag.partition or 0): lag for lag in (group_lag.partitions if group_lag else ())}
    cluster = kafka_cluster()
    topics = cluster.topics(cluster.subscribed(spec))
    uuids = {topic.name: topic.kafka_uuid for topic in topics}
    logs = cluster.logs(partition for topic in topics for partition in topic.all() if spec.fixed.covers(partition))
    held = current(positions, uuids, logs)
    truncated = truncations(held, logs, cluster.truncated)
    rows = lags(held, logs, truncated)
    if output is OutputFormat.JSON:
        lag_records = None if any(row.lag_records is None for row in rows) else sum(row.lag_records or 0 for row in rows)
        partitions = [dataclasses.asdict(row) | {"replaying_until": _until(replaying, row)} | _sampled(sampled_lags, row) for row in rows]
        to_backfill = [
            {"rewind_id": backfill.rewind_id, "topic": part.partition.topic, "partition": part.partition.partition}
            | {"position": part.position, "end": part.end, "left": part.left}
            for backfill in unfinished
            for part in backfill.parts
            if part.left
        ]
        print_json({"group": spec.group, "lag_records": lag_records, "partitions": partitions, "backfills": to_backfill})
    else:
        stdout.print(_table(spec.group, rows, sampled_lags))
        for partition in sorted(truncated):
            stdout.print(str(truncated[partition]).replace(" NAME ", f" {name} "))
        for replay in replaying.values():
            stdout.print(f"{replay.partition} is replaying until {replay.until:,} after rewind {replay.rewind_id}")
        for backfill in unfinished:
            remaining = counted(backfill.left, "is", "are")
            stdout.print(f"of {counted(backfill.skipped, 'offset')} that rewind {backfill.rewind_id} skipped, {remaining} left to backfill")


def _until(replaying: Mapping[TopicPartition, Replay], row: PartitionEnd) -> int | None:
    replay = replaying.get(TopicPartition(row.topic, row.partition))
    return None if replay is None else replay.until


def _sampled(sampled_lags: Mapping[TopicPartition, Lag], row: PartitionEnd) -> dict[str, object]:
    lag = sampled_lags.get(TopicPartition(row.topic, row.partition))
    return {"seconds": None if lag is None else lag.seconds, "health": None if lag is None else lag.health}


def _table(group: str, rows: list[PartitionEnd], sampled_lags: Mapping[TopicPartition, Lag]) -> Table:
    headings = ("partition", "position", "end", "lag", "age", "validated", "owner", "epoch", "committed at (UTC)", "health")
    table = plain_table(group, *headings, left=(0, 6, 9))
    for row in rows:
        lag = sampled_lags.get(TopicPartition(row.topic, row.partition))
        table.add_row(
            f"{row.topic}/{row.partition}",
            _number(row.position),
            _number(row.end),
            "truncated" if row.truncated else _number(row.lag_records),
            "-" if lag is None else age_of(lag),
            _number(row.validated),
            row.owner or "-",
            _number(row.epoch),
            f"{row.committed_at.astimezone(UTC):%Y-%m-%d %H:%M:%S}" if row.committed_at else "-",
            "-" if lag is None else lag.health,
        )
    return table


def _number(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"

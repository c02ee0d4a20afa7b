"""How the rates of the Arrow form and the Spark form change with records, partitions, record width, batch and kind of sink."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.harness.site import PARTITIONS, Job, Topic
from benchmarks.harness.turns import figures
from benchmarks.measurement import Bar, Bench, Figures, Measurement, Table
from benchmarks.throughput.contestants import BY_NAME

KEY = "event_id"
SMALL = 100
"""Records of each partition, if there are many partitions."""
CONTESTANTS = {"Arrow": BY_NAME["arrow_transform"], "Spark": BY_NAME["spark_transform"]}
Case = tuple[str, str, Job, dict[str, Any]]
"""Series, value, job, and what is special about the table."""


def measure(bench: Bench, rounds: int, sink_records: int, **extent: Any) -> Figures:
    warm = Job(bench.stage.topic(Topic("events-warm", PARTITIONS, 40_000, bench.width)))
    for contestant in CONTESTANTS.values():
        bench.harness.once(contestant, warm)
    rows = []
    for series, value, job, table in _cases(bench, sink_records, **extent):
        row: dict[str, Any] = {"series": series, "value": value}
        for form, contestant in CONTESTANTS.items():
            runs = [bench.harness.once(contestant, job, **table) for _ in range(rounds)]
            row[form] = {**figures(runs), "seconds": statistics.mean(run.seconds for run in runs)}
            for run in runs:
                bench.report(f"{series:<10} {value:<22} {contestant.title:<40} {run}")
        rows.append(row)
    return {"rows": rows, **_compared({row["value"]: row["Arrow"] for row in rows if row["series"] == "partitions"})}


def _cases(
    bench: Bench,
    sink_records: int,
    records: Sequence[int],
    batches: Sequence[int],
    partitions: Sequence[int],
    partition_records: int,
    small_partitions: int,
    widths: Sequence[int],
    width_records: int,
) -> Iterator[Case]:
    large = bench.stage.topic(Topic("events-large", PARTITIONS, max(*records, sink_records), bench.width))
    each = sink_records // PARTITIONS
    for count in records:
        yield "records", f"{count:,}", Job(large, count // PARTITIONS), {}
    for batch in batches:
        yield "batch", f"{batch:,} records", Job(large, each, {"max_records": batch}), {}
    yield "sink", "append", Job(large, each), {}
    yield "sink", "append, LIST-partitioned", Job(large, each), {"list_partitions": PARTITIONS}
    yield "sink", "upsert", Job(large, each, {"upsert": KEY}), {"key": KEY}
    for count in partitions:
        yield "partitions", f"{count}", Job(bench.stage.topic(Topic(f"events-p{count}", count, partition_records, bench.width))), {}
    small = Topic("events-small-partitions", small_partitions, small_partitions * SMALL, bench.width)
    yield "partitions", f"{small_partitions:,} of {SMALL} records", Job(bench.stage.topic(small)), {}
    for width in widths:
        yield "width", f"{width} B", Job(bench.stage.topic(Topic(f"events-w{width}", PARTITIONS, width_records, width))), {}


def _compared(partitions: dict[str, Any]) -> dict[str, float | None]:
    """The figures that have a bar, of the Arrow form."""
    many, few = (partitions.get(value, {}).get("rows_per_s") for value in ("64", "4"))
    small = partitions.get(f"1,000 of {SMALL} records")
    seconds = statistics.median(run["seconds"] for run in small["runs"]) if small else None
    return {"many_to_few": many / few if many and few else None, "small_partitions_s": seconds}


MEASUREMENT = Measurement(
    "growth",
    measure,
    Table(
        "Growth",
        "series | value | Arrow form rows/s | s | Spark form rows/s | s",
        "{series} | {value} | {Arrow[rows_per_s]:,.0f} | {Arrow[seconds]:.1f} | {Spark[rows_per_s]:,.0f} | {Spark[seconds]:.1f}",
    ),
    needs=[one.name for one in CONTESTANTS.values()],
    full={
        "rounds": 2,
        "records": (1_000, 250_000, 1_000_000, 2_000_000, 5_000_000, 10_000_000),
        "batches": (100_000, 500_000, 2_000_000),
        "sink_records": 2_000_000,
        "partitions": (1, 4, 16, 64),
        "partition_records": 1_000_000,
        "small_partitions": 1_000,
        "widths": (160, 500, 2000),
        "width_records": 400_000,
    },
    quick={
        "rounds": 1,
        "records": (1_000, 50_000),
        "batches": (50_000,),
        "sink_records": 100_000,
        "partitions": (1, 16),
        "partition_records": 48_000,
        "small_partitions": 32,
        "widths": (160, 500),
        "width_records": 40_000,
    },
    bars=[
        Bar("rows/s with 64 partitions / with 4", lambda of: of["many_to_few"], at_least=0.9),
        Bar("1,000 partitions with 100 records each, s", lambda of: of["small_partitions_s"], at_most=8.0),
    ],
)

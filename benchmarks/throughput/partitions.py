"""How the rates of the Arrow form and the Spark form change with the number of partitions."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.harness.site import PARTITIONS, Job, Topic
from benchmarks.harness.turns import figures
from benchmarks.measurement import Bar, Bench, Figures, Measurement, Table
from benchmarks.throughput.contestants import BY_NAME

SMALL = 100
"""Records of each partition, if there are many partitions."""
FORMS = {"Arrow": BY_NAME["arrow_transform"], "Spark": BY_NAME["spark_transform"]}


def measure(bench: Bench, partitions: Sequence[int], records: int, small: int, rounds: int) -> Figures:
    """A row for ``records`` in each number of partitions, and one for ``small`` partitions of `SMALL` records each. ``many_to_few`` and
    ``small_s`` are for the Arrow form."""
    warm = Job(bench.stage.topic(Topic("events-warm", PARTITIONS, 40_000, bench.width)))
    for contestant in FORMS.values():
        bench.harness.once(contestant, warm)
    rows = [_row(bench, f"{count}", Topic(f"events-p{count}", count, records, bench.width), rounds) for count in partitions]
    few, many = (row["Arrow"]["rows_per_s"] for row in (rows[0], rows[-1]))
    topic = Topic("events-small-partitions", small, small * SMALL, bench.width)
    rows.append(_row(bench, f"{small:,} of {SMALL} records", topic, rounds))
    return {"rows": rows, "many_to_few": many / few if many and few else None, "small_s": rows[-1]["Arrow"]["seconds"]}


def _row(bench: Bench, partitions: str, topic: Topic, rounds: int) -> dict[str, Any]:
    row: dict[str, Any] = {"partitions": partitions}
    job = Job(bench.stage.topic(topic))
    for form, contestant in FORMS.items():
        runs = [bench.harness.once(contestant, job) for _ in range(rounds)]
        row[form] = {**figures(runs), "seconds": statistics.median(run.seconds for run in runs)}
        for run in runs:
            bench.report(f"{partitions:<20} {contestant.title:<40} {run}")
    return row


MEASUREMENT = Measurement(
    "partitions",
    measure,
    Table(
        "Partitions",
        "partitions | Arrow form rows/s | s | Spark form rows/s | s",
        "{partitions} | {Arrow[rows_per_s]:,.0f} | {Arrow[seconds]:.1f} | {Spark[rows_per_s]:,.0f} | {Spark[seconds]:.1f}",
    ),
    bars=[
        Bar("rows/s with 64 partitions / with 4", lambda of: of["many_to_few"], at_least=0.9),
        Bar("1,000 partitions with 100 records each, s", lambda of: of["small_s"], at_most=8.0),
    ],
    needs=[one.name for one in FORMS.values()],
    full={"partitions": (4, 16, 64), "records": 1_000_000, "small": 1_000, "rounds": 2},
    quick={"partitions": (4, 16), "records": 48_000, "small": 32, "rounds": 1},
)

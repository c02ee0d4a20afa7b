"""How the rates of the Arrow form and the Spark form change with records, partitions, record width, batch and kind of sink."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks.contestants import BY_NAME
from benchmarks.harness import Figure, Harness, said
from benchmarks.site import Job, Topic
from benchmarks.stage import Stage

KEY = "event_id"
SMALL = 100
FORMS = ("arrow_transform", "spark_transform")


@dataclass(frozen=True, slots=True)
class Extent:
    """The sizes to measure. `QUICK` only checks that everything works."""

    records: tuple[int, ...]
    partitions: tuple[int, ...]
    partition_records: int
    small_partitions: int
    """Partitions of a topic with `SMALL` records in each."""
    widths: tuple[int, ...]
    width_records: int
    batches: tuple[int, ...]
    kind_records: int


FULL = Extent(
    records=(1_000, 250_000, 1_000_000, 2_000_000, 5_000_000, 10_000_000),
    partitions=(1, 4, 16, 64),
    partition_records=1_000_000,
    small_partitions=1_000,
    widths=(160, 500, 2000),
    width_records=400_000,
    batches=(100_000, 500_000, 2_000_000),
    kind_records=2_000_000,
)
QUICK = Extent(
    records=(1_000, 50_000),
    partitions=(1, 16),
    partition_records=48_000,
    small_partitions=32,
    widths=(160, 500),
    width_records=40_000,
    batches=(50_000,),
    kind_records=100_000,
)


@dataclass(frozen=True, slots=True)
class Case:
    series: str
    value: str
    form: str
    job: Job
    list_partitions: int = 0
    key: str = ""


def measure(stage: Stage, harness: Harness, extent: Extent, width: int, rounds: int, report: Callable[[str], None]) -> list[dict[str, Any]]:
    """A row per case: ``series, value, form`` and the figure."""
    rows = []
    warm = Job(stage.topic(Topic("events-warm", 4, 40_000, width)))
    for form in FORMS:
        harness.once(BY_NAME[form], warm)
    for case in _cases(stage, extent, width):
        contestant = BY_NAME[case.form]
        runs = tuple(harness.once(contestant, case.job, list_partitions=case.list_partitions, key=case.key) for _ in range(rounds))
        figure = Figure(runs)
        for run in runs:
            report(f"{case.series:<10} {case.value:<22} {contestant.title:<40} {said(run)}")
        rows.append({"series": case.series, "value": case.value, "form": case.form, **figure.to_dict()})
    return rows


def _cases(stage: Stage, extent: Extent, width: int) -> Iterator[Case]:
    large = stage.topic(Topic("events-large", 4, max(*extent.records, extent.kind_records), width))
    for records in extent.records:
        for form in FORMS:
            yield Case("records", f"{records:,}", form, Job(large, records // 4))
    for batch in extent.batches:
        for form in FORMS:
            job = Job(large, extent.kind_records // 4, {"max_records": batch})
            yield Case("batch", f"{batch:,} records", form, job)
    kinds = Job(large, extent.kind_records // 4)
    for form in FORMS:
        yield Case("sink", "append", form, kinds)
        yield Case("sink", "append, LIST-partitioned", form, kinds, list_partitions=4)
        yield Case("sink", "upsert", form, Job(large, extent.kind_records // 4, {"upsert": KEY}), key=KEY)
    for partitions in extent.partitions:
        topic = stage.topic(Topic(f"events-p{partitions}", partitions, extent.partition_records, width))
        for form in FORMS:
            yield Case("partitions", f"{partitions}", form, Job(topic))
    many = extent.small_partitions
    topic = stage.topic(Topic("events-small-partitions", many, many * SMALL, width))
    for form in FORMS:
        yield Case("partitions", f"{many:,} of {SMALL} records", form, Job(topic))
    for wide in extent.widths:
        topic = stage.topic(Topic(f"events-w{wide}", 4, extent.width_records, wide))
        for form in FORMS:
            yield Case("width", f"{wide} B", form, Job(topic))

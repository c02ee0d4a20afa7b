"""From Kafka to Postgres: rows a second of all contestants, CPU by family of process, and the ratios to the limit and to the peers."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from benchmarks.harness.processes import FAMILIES
from benchmarks.harness.site import PARTITIONS, Job, Topic
from benchmarks.harness.turns import figures
from benchmarks.measurement import Bar, Bench, Figures, Measurement, Table
from benchmarks.throughput.contestants import BY_NAME, Contestant, Reads
from benchmarks.throughput.peers.jars import RECIPES

from tidemark.errors import TidemarkError
from tidemark.jvm.jars import jars_of

RATIOS = {
    "writer/limit": 0.95,
    "spark_transform/jdbc_tuned": 1.4,
    "arrow_transform/jdbc_tuned": 3.0,
    "arrow_transform/execute_values_2": 7.0,
    "arrow_transform/debezium_tuned": 5.0,
    "arrow_transform/limit_2": 0.65,
    "avro_without_code/arrow_transform": 1.0,
    "protobuf_without_code/arrow_transform": 1.0,
    "json_without_code/arrow_transform": 0.75,
    "changes/debezium_changes": 3.0,
    "changes_avro/debezium_changes_avro": 3.0,
}
"""The median of one contestant divided by that of another, and the bar on 2 cores: at least. ``arrow_transform`` has as many connections as
concurrent tasks, so its limit is that of two."""


def measure(bench: Bench) -> Figures:
    skipped = _equip(bench)
    jobs = [(one, job) for one, job in _jobs(bench) if one.name not in skipped]
    skipped |= bench.harness.warm(jobs)
    jobs = [(one, job) for one, job in jobs if one.name not in skipped]
    runs = bench.harness.rounds(jobs, bench.rounds)
    rows = []
    for one, job in jobs:
        about = {"name": one.name, "what": f"({one.letter}) {one.title}", "exactly_once": one.exactly_once, "records": job.topic.records}
        rows.append({**about, **figures(runs[one.name])})
        rows[-1]["text"] = _rate(rows[-1])
    settings = {"records": bench.records, "partitions": PARTITIONS, "width": bench.width, "rounds": bench.rounds}
    return {"settings": settings, "contestants": rows, "skipped": skipped}


def _equip(bench: Bench) -> dict[str, str]:
    """Fetches what the contestants need, and returns those whose jars are unavailable, with reasons."""
    skipped: dict[str, str] = {}
    jars: dict[str, list[str]] = {}
    for package in sorted({one.package for one in bench.contestants if one.package}):
        try:
            jars[package] = [str(jar) for jar in jars_of(RECIPES[package], package, bench.report)]
        except TidemarkError as error:
            skipped |= {one.name: str(error) for one in bench.contestants if one.package == package}
            bench.report(f"skipped, because {package} is unavailable: {error}")
    registry = bench.stage.start_registry() if any(one.reads.registry for one in bench.contestants) else None
    bench.harness.site = replace(bench.harness.site, jars=jars, registry=registry)
    return skipped


def _jobs(bench: Bench) -> list[tuple[Contestant, Job]]:
    topics: dict[Reads, Topic] = {}
    jobs = []
    for one in bench.contestants:
        if one.reads not in topics:
            name, form, share = one.reads.value
            topics[one.reads] = bench.stage.topic(Topic(name, PARTITIONS, bench.records // share, bench.width, form=form))
        jobs.append((one, Job(topics[one.reads], one.connections)))
    return jobs


def _rate(row: Figures) -> str:
    if row["rows_per_s"] is None:
        return f"no figure: {(*row['errors'], 'did not run')[0]}"
    return f"{row['rows_per_s']:,.0f}" + (f" ({row['disturbed_runs']} disturbed)" if row["disturbed_runs"] else "")


def _ratio(name: str, figures: Figures) -> float | None:
    """`None` unless both contestants have a figure."""
    rates = {row["name"]: row["rows_per_s"] for row in figures["contestants"]}
    one, other = (rates.get(contestant) for contestant in name.split("/"))
    return one / other if one and other else None


_CPU = " | ".join(f"{{cpu_us_per_row[{family}]:.1f}}" for family in FAMILIES)
MEASUREMENT = Measurement(
    "ratios",
    measure,
    Table(
        "Kafka to Postgres: rows a second, and CPU in µs a row",
        f"| rows/s | min | max | records | {' µs | '.join(FAMILIES)} µs | exactly once",
        f"{{what}} | {{text}} | {{lowest:,.0f}} | {{highest:,.0f}} | {{records:,}} | {_CPU} | {{exactly_once}}",
        "contestants",
    ),
    bars=[Bar(name, partial(_ratio, name), at_least=bar) for name, bar in RATIOS.items()],
    needs=list(BY_NAME),
)

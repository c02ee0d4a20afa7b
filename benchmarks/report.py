"""Reports the figures: as tables, as ``bench.json``, and as the generated section of ``docs/benchmarks.md``."""

from __future__ import annotations

import json
import platform
import re
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from benchmarks import backlog, bars, dag_run, deletes, fleet, history, memory, model, page, parse, pinned, retries, rewind
from benchmarks.contestants import ALL, RATIOS
from benchmarks.cpu import FAMILIES
from benchmarks.harness import Figure
from tidemark.jvm.java import find_java, major

WHAT = (
    "ratios",
    "growth",
    "cold",
    "dag_run",
    "fleet",
    "where",
    "memory",
    "assignors",
    "group",
    "latency",
    "rewind",
    "retries",
    "deletes",
    "backlog",
    "page",
    "history",
    "parse",
    "model",
    "pinned",
)

BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"


def machine() -> dict[str, Any]:
    """Hardware and versions that the figures depend on; nothing that identifies the machine."""
    import subprocess

    said = subprocess.run([find_java(), "-version"], capture_output=True, text=True, check=False)
    cpu = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE) if Path("/proc/cpuinfo").exists() else None
    return {
        "cpu": cpu[1] if cpu else platform.machine(),
        "cores": psutil.cpu_count() or 0,
        "memory_gb": round(psutil.virtual_memory().total / 2**30),
        "system": f"{platform.system()} {platform.release().split('-')[0]}",
        "python": platform.python_version(),
        "java": major(said.stderr + said.stdout),
        **{name: version(name) for name in ("pyspark", "pyarrow", "pgpq", "confluent-kafka", "psycopg2-binary")},
    }


def ratios(figures: Mapping[str, Figure]) -> dict[str, float]:
    """The ratios of medians for which both contestants have a figure."""
    found = {}
    for ratio in RATIOS:
        of = figures[ratio.of].median if ratio.of in figures else None
        to = figures[ratio.to].median if ratio.to in figures else None
        if of and to:
            found[ratio.name] = of / to
    return found


def ratio_section(figures: Mapping[str, Figure], skipped: Mapping[str, str], jobs: Mapping[str, int]) -> dict[str, Any]:
    contestants = {
        one.name: {
            "what": f"({one.letter}) {one.title}",
            "exactly_once": one.exactly_once,
            "reads": one.reads.value,
            "records": jobs[one.name],
            **figures[one.name].to_dict(),
        }
        for one in ALL
        if one.name in figures
    }
    return {"ratios": ratios(figures), "contestants": contestants, "skipped": dict(skipped)}


def merge(file: Path, sections: Mapping[str, Any]) -> dict[str, Any]:
    """Replaces the sections that were measured, and keeps those of the last run."""
    found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    found.update(sections)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(found, indent=1) + "\n")
    return found


def show(console: Console, found: Mapping[str, Any], only: set[str]) -> None:
    """The tables of the sections in ``only``."""
    for title, columns, rows in tables(found, only):
        table = Table(title=title, title_justify="left")
        for number, column in enumerate(columns):
            table.add_column(column, justify="left" if number == 0 else "right", overflow="fold")
        for row in rows:
            table.add_row(*row)
        console.print(table)
    for name, why in found.get("skipped", {}).items() if "ratios" in only else ():
        console.print(f"skipped: {name}: {why}", markup=False)


def write_docs(found: Mapping[str, Any], docs: Path) -> None:
    """Writes the generated section of the page."""
    text = docs.read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    parts = [_machine_text(found)]
    for title, columns, rows in tables(found, set(WHAT)):
        lines = [f"**{title}**", "", "| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
        lines += ["| " + " | ".join(row) + " |" for row in rows]
        parts.append("\n".join(lines))
    parts += [f"Skipped: `{name}`: {why}" for name, why in found.get("skipped", {}).items()]
    docs.write_text(f"{before}{BEGIN}\n\n" + "\n\n".join(parts) + f"\n\n{END}{after}")


TableOf = tuple[str, list[str], list[list[str]]]


def tables(found: Mapping[str, Any], only: set[str]) -> list[TableOf]:
    """The tables of the sections in ``only`` that were measured, in the order of the page."""
    of: dict[str, Callable[[Any], list[TableOf]]] = {
        "contestants": lambda part: [_contestants(part)],
        "ratios": lambda part: [_ratios(part)],
        "growth": lambda part: [_growth(part)],
        "cold": lambda part: [_cold(one) for one in part],
        "memory": lambda part: [memory.table(part)],
        "assignors": lambda part: [_assignors(part)],
        "group": _group,
        "latency": lambda part: [_latency(part)],
        "rewind": rewind.table,
        "dag_run": lambda part: [dag_run.table(part)],
        "fleet": lambda part: [fleet.table(part)],
        "retries": lambda part: [retries.table(part)],
        "deletes": lambda part: [deletes.table(part)],
        "parse": lambda part: [parse.table(part)],
        "model": model.tables,
        "pinned": lambda part: [pinned.table(part)],
        "backlog": backlog.tables,
        "page": page.tables,
        "history": history.tables,
        "where": lambda part: [_where(part)],
    }
    wanted = only | ({"contestants"} if "ratios" in only else set())
    made = [table for name, made_of in of.items() if name in wanted and name in found for table in made_of(found[name])]
    held = [bars.table(found, only)] if bars.bars(found, only) else []
    return [*held, *made]


def _where(stages: list[dict[str, Any]]) -> TableOf:
    rows = [[one["stage"], f"{one['cpu_us_per_row']:.2f}", f"{one['min']:.2f}", f"{one['max']:.2f}"] for one in stages]
    return "The Python worker's path, Arrow form: CPU in µs a row", ["stage", "median", "min", "max"], rows


def _contestants(contestants: Mapping[str, Any]) -> TableOf:
    columns = ["", "rows/s", "min", "max", "records", *(f"{family} µs" for family in FAMILIES), "exactly once"]
    rows = []
    for one in contestants.values():
        rate = one["rows_per_s"]
        cpu = [f"{one['cpu_us_per_row'][family]:.1f}" if one["cpu_us_per_row"] else "" for family in FAMILIES]
        mark = f" ({one['disturbed_runs']} disturbed)" if one["disturbed_runs"] else ""
        if rate["median"] is None:
            figures = [f"no figure: {one['errors'][0] if one['errors'] else 'did not run'}", "", ""]
        else:
            figures = [f"{rate['median']:,.0f}{mark}", f"{rate['min']:,.0f}", f"{rate['max']:,.0f}"]
        rows.append([one["what"], *figures, f"{one['records']:,}", *cpu, one["exactly_once"]])
    return "Kafka to Postgres: rows a second, and CPU in µs a row", columns, rows


def _ratios(ratios: Mapping[str, float]) -> TableOf:
    return "Ratios of medians", ["", "measured"], [[name, f"{value:.2f}"] for name, value in ratios.items()]


def _growth(growth: list[dict[str, Any]]) -> TableOf:
    by: dict[tuple[str, str], dict[str, Any]] = {}
    for one in growth:
        by.setdefault((one["series"], one["value"]), {})[one["form"]] = one
    rows = []
    for (series, value), forms in by.items():
        cells = []
        for form in ("arrow_transform", "spark_transform"):
            one = forms.get(form)
            rate = one["rows_per_s"]["median"] if one else None
            seconds = sum(run["seconds"] for run in one["runs"]) / len(one["runs"]) if one and one["runs"] else 0
            cells += [f"{rate:,.0f}" if rate else "no figure", f"{seconds:.1f}"]
        rows.append([series, value, *cells])
    return "Growth", ["series", "value", "Arrow form rows/s", "s", "Spark form rows/s", "s"], rows


def _cold(one: Mapping[str, Any]) -> TableOf:
    first = one["first_commit_s"]
    rows = [[what, f"{seconds:.1f}"] for what, seconds in one["stages_s"].items()]
    rows += [
        ["first commit", f"{first['median']:.1f} ({first['min']:.1f} to {first['max']:.1f})"],
        ["end of the run", f"{one['end_s']:.1f}"],
        *_warm(one.get("warm")),
    ]
    return f"A cold run of 1,000 records, {one['form'].capitalize()} form", ["stage", "s"], rows


def _warm(found: Mapping[str, float] | None) -> list[list[str]]:
    if found is None:
        return []
    return [
        ["in the shared application: first commit", f"{found['first_commit_s']:.2f} (at most {found['first_commit_max_s']:.2f})"],
        ["in the shared application: end of the run", f"{found['end_s']:.2f}"],
    ]


def _assignors(rows: list[dict[str, Any]]) -> TableOf:
    cells = []
    for one in rows:
        name = one["assignor"] if one["of"] == "tidemark" else f"{one['of']}'s {one['assignor']}"
        ratios = [f" ({one[f'ratio_{what}']:.0f} times ours)" if f"ratio_{what}" in one else "" for what in ("fresh", "one_left")]
        times = [f"{one['fresh_s']:.3g}{ratios[0]}", f"{one['one_left_s']:.3g}{ratios[1]}"]
        cells.append([name, one["group"], "equal" if one["equal"] else "unequal", *times])
    return "Assignors: CPU seconds of an assignment", ["assignor", "group", "subscriptions", "fresh", "one member gone"], cells


def _group(found: Mapping[str, Any]) -> list[TableOf]:
    rebalances = [
        [
            str(one["members"]),
            one["assignor"],
            str(one["count"]),
            *(f"{one[name]:.3f}" for name in ("median_s", "p99_s", "leaves_median_s", "joins_median_s")),
            *(f"{one[name]:.1f}" for name in ("statements_of_joiner", "statements_of_each_other")),
        ]
        for one in found["rebalances"]
    ]
    columns = ["members", "assignor", "rebalances", "median", "p99", "one leaves", "one joins", "statements of a joiner", "of each other"]
    statements = [[name, str(count)] for name, count in found["statements"].items()]
    overhead = [
        [
            f"{one['records']:,}",
            f"{one['by_hand_s']:.3f}",
            f"{one['in_a_group_s']:.3f}",
            f"{one['in_a_group_s'] - one['by_hand_s']:+.3f}",
            f"{one['in_a_group_s'] / one['by_hand_s']:.2f}",
        ]
        for one in found["overhead"]
    ]
    return [
        ("Rebalances of a group: seconds until all have their partitions", columns, rebalances),
        ("Statements of Postgres, beside BEGIN and COMMIT", ["", "statements"], statements),
        ("A run in a group of one, in seconds", ["records", "by hand", "in a group", "difference", "ratio"], overhead),
    ]


def _latency(rows: list[dict[str, Any]]) -> TableOf:
    cells = [[one["form"], *(f"{one[name]:.0f}" for name in ("p50_ms", "p99_ms", "max_ms", "handover_ms"))] for one in rows]
    return (
        "A continuous run at 1,000 records/s: milliseconds from produce to commit",
        ["form", "p50", "p99", "max", "max while the next run takes over"],
        cells,
    )


def _machine_text(found: Mapping[str, Any]) -> str:
    about = found.get("machine")
    if not about:
        return "Not measured yet."
    versions = ", ".join(f"{name} {value}" for name, value in about.items() if name not in ("cpu", "cores", "memory_gb", "system"))
    settings = found.get("settings", {})
    said = ", ".join(f"{name} {value:,}" if isinstance(value, int) else f"{name} {value}" for name, value in settings.items())
    return f"{about['cpu']}, {about['cores']} cores, {about['memory_gb']} GB, {about['system']}; {versions}. Settings: {said}."

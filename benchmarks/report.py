"""Reports the figures: as tables, as ``bench.json``, and as the generated section of ``docs/benchmarks.md``."""

from __future__ import annotations

import json
import platform
import re
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.measurement import Judged, Measurement, Printed
from tidemark.jvm.java import find_java, major

BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"


def machine() -> dict[str, Any]:
    """Hardware and versions that the figures depend on; nothing that identifies the machine."""
    java = subprocess.run([find_java(), "-version"], capture_output=True, text=True, check=False)
    cpu = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE) if Path("/proc/cpuinfo").exists() else None
    return {
        "cpu": cpu[1] if cpu else platform.machine(),
        "cores": psutil.cpu_count() or 0,
        "memory_gb": round(psutil.virtual_memory().total / 2**30),
        "system": f"{platform.system()} {platform.release().split('-')[0]}",
        "python": platform.python_version(),
        "java": major(java.stderr + java.stdout),
        **{name: version(name) for name in ("pyspark", "pyarrow", "confluent-kafka", "psycopg2-binary")},
    }


def merge(file: Path, sections: Mapping[str, Any]) -> dict[str, Any]:
    """Replaces the sections that were measured. The others stay as the last run left them."""
    everything: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    everything.update(sections)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(everything, indent=1) + "\n")
    return everything


def judged(everything: Mapping[str, Any], measurements: Iterable[Measurement]) -> list[Judged]:
    """Every figure that has a bar, of the measurements that were made."""
    of = [one for one in measurements if one.name in everything]
    return [figure for one in of for bar in one.bars for figure in bar.judged(everything[one.name])]


def tables(everything: Mapping[str, Any], measurements: Sequence[Measurement]) -> list[Printed]:
    """The table of bars, and the tables of the measurements that were made, in the order of the page."""
    of = [one for one in measurements if one.name in everything]
    printed = [table.printed(everything[one.name]) for one in of for table in one.tables]
    bars = [figure.cells for figure in judged(everything, measurements)]
    return [*([("Bars on 2 cores", ["", "measured", "bar", "met"], bars)] if bars else []), *printed]


def show(console: Console, everything: Mapping[str, Any], measurements: Sequence[Measurement]) -> None:
    for title, columns, rows in tables(everything, measurements):
        table = Table(title=title, title_justify="left")
        for number, column in enumerate(columns):
            table.add_column(column, justify="left" if number == 0 else "right", overflow="fold")
        for row in rows:
            table.add_row(*row)
        console.print(table)
    for line in _skipped(everything):
        console.print(line, markup=False)


def write_page(everything: Mapping[str, Any], measurements: Sequence[Measurement], page: Path) -> None:
    """Writes the generated section of the page."""
    before, _, rest = page.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    parts = [_machine_text(everything)]
    for title, columns, rows in tables(everything, measurements):
        lines = [f"**{title}**", "", "| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
        parts.append("\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)]))
    parts += _skipped(everything)
    page.write_text(f"{before}{BEGIN}\n\n" + "\n\n".join(parts) + f"\n\n{END}{after}")


def _skipped(everything: Mapping[str, Any]) -> list[str]:
    return [f"Skipped: `{name}`: {why}" for name, why in everything.get("ratios", {}).get("skipped", {}).items()]


def _machine_text(everything: Mapping[str, Any]) -> str:
    about = everything.get("machine")
    if not about:
        return "Not measured yet."
    versions = ", ".join(f"{name} {value}" for name, value in about.items() if name not in ("cpu", "cores", "memory_gb", "system"))
    settings = ", ".join(f"{name} {value:,}" for name, value in everything.get("ratios", {}).get("settings", {}).items())
    return f"{about['cpu']}, {about['cores']} cores, {about['memory_gb']} GB, {about['system']}; {versions}. Settings: {settings}."

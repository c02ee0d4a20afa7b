"""DAG files: CPU seconds of reading each with 100 consumers, in Airflow's DAG processor and in a task of one of their DAGs.

Each reading is a separate process that has already imported ``airflow.sdk``, like the processes that Airflow forks. A task builds only its
own DAG.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.harness import ROOT

CONSUMERS = 100
CONSUMER = """
topics: [orders-{number}]
transform: orders:transform
sink: {{table: shop.orders_{number}}}
schedule: "*/5 * * * *"
retry: {{delays: [5m, 30m, 1h], order: key}}
validation: {{suite: orders}}
airflow: {{tags: [shop], execution_timeout: 2h}}
"""
READ = """
import runpy, sys, time
import airflow.sdk
began = time.process_time()
try:
    runpy.run_path(sys.argv[1])
finally:
    print("seconds", time.process_time() - began)
"""


def measure(rounds: int, report: Callable[[str], None]) -> list[dict[str, Any]]:
    """Medians for each file: ``processor_s`` and, where the file has DAGs, ``task_s``."""
    found = []
    with tempfile.TemporaryDirectory(prefix="tidemark-bench-dags-") as folder:
        consumers = Path(folder, "consumers")
        consumers.mkdir()
        for number in range(CONSUMERS):
            (consumers / f"orders_{number}.yaml").write_text(CONSUMER.format(number=number))
        for file in sorted((ROOT / "dags").glob("*.py")):
            dag = {"consume": f"consume__orders_{CONSUMERS // 2}", "broken_consumers": None}.get(file.stem, file.stem)
            seconds = {"processor_s": _median(file, folder, None, rounds), "task_s": dag and _median(file, folder, dag, rounds)}
            report(f"parse   {file.name}: " + ", ".join(f"{name} {value:.2f}" for name, value in seconds.items() if value is not None))
            found.append({"file": file.name, "consumers": CONSUMERS, **seconds})
    return found


def table(found: list[dict[str, Any]]) -> tuple[str, list[str], list[list[str]]]:
    """Title, columns and rows, as `benchmarks.report` prints them."""
    rows = [[one["file"], f"{one['processor_s']:.2f}", "" if one["task_s"] is None else f"{one['task_s']:.2f}"] for one in found]
    return f"DAG files with {found[0]['consumers']} consumers: CPU seconds of reading one", ["file", "DAG processor", "task"], rows


def _median(file: Path, home: str, dag: str | None, rounds: int) -> float:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("AIRFLOW", "TIDEMARK"))}
    env |= {"AIRFLOW_HOME": home, "AIRFLOW__CORE__LOAD_EXAMPLES": "False", "TIDEMARK_CONSUMERS": f"{home}/consumers"}
    env |= {"_AIRFLOW_PARSING_CONTEXT_DAG_ID": dag} if dag else {}
    return statistics.median(_seconds([sys.executable, "-c", READ, str(file)], env) for _ in range(rounds))


def _seconds(command: list[str], env: dict[str, str]) -> float:
    said = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return float(next(line for line in said.splitlines() if line.startswith("seconds ")).split()[1])

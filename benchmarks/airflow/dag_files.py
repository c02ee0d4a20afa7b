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
from pathlib import Path

from benchmarks.harness.site import ROOT
from benchmarks.measurement import Bench, Figures, Measurement, Table

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


def measure(bench: Bench, rounds: int) -> Figures:
    """Medians for each file: ``processor_s`` and, where the file has DAGs, ``task_s``."""
    rows = []
    with tempfile.TemporaryDirectory(prefix="tidemark-bench-dags-") as folder:
        Path(folder, "consumers").mkdir()
        for number in range(CONSUMERS):
            Path(folder, "consumers", f"orders_{number}.yaml").write_text(CONSUMER.format(number=number))
        for file in sorted((ROOT / "dags").glob("*.py")):
            dag = {"consume": f"consume__orders_{CONSUMERS // 2}", "broken_consumers": None}.get(file.stem, file.stem)
            task_s = _median(file, folder, dag, rounds) if dag else None
            rows.append({"file": file.name, "processor_s": _median(file, folder, None, rounds), "task_s": task_s})
            bench.report("parse   " + ", ".join(f"{name} {value}" for name, value in rows[-1].items()))
    return {"consumers": CONSUMERS, "rows": rows}


def _median(file: Path, home: str, dag: str | None, rounds: int) -> float:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("AIRFLOW", "TIDEMARK"))}
    env |= {"AIRFLOW_HOME": home, "AIRFLOW__CORE__LOAD_EXAMPLES": "False", "TIDEMARK_CONSUMERS": f"{home}/consumers"}
    env |= {"_AIRFLOW_PARSING_CONTEXT_DAG_ID": dag} if dag else {}
    seconds = []
    for _ in range(rounds):
        done = subprocess.run([sys.executable, "-c", READ, str(file)], env=env, cwd=ROOT, capture_output=True, text=True, check=True)
        seconds.append(next(float(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("seconds ")))
    return statistics.median(seconds)


_TITLE = "DAG files with {consumers} consumers: CPU seconds of reading one"
MEASUREMENT = Measurement(
    "parse",
    measure,
    Table(_TITLE, "file | DAG processor | task", "{file} | {processor_s:.2f} | {task_s:.2f}"),
    full={"rounds": 5},
    quick={"rounds": 1},
)

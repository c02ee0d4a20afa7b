"""A whole DAG run of a small consumer in a real Airflow: with nothing to read, and with 1,000 records. Everything is warm.

CPU seconds cover the scheduler, its executor's workers, the tasks, their drivers and descendants, and the api-server, from the trigger
to the end of the run. The dag-processor and the triggerer work the same without runs and are not counted. Kafka and Postgres have a
separate column.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

import yaml
from benchmarks.harness.processes import seconds_of, spread
from benchmarks.harness.stage import Stage, created
from benchmarks.measurement import Bar, Bench, Figures, Measurement, Table
from tests.support.kafka_topics import Topics

from tidemark import project
from tidemark.author.check import sink_ddl
from tidemark.local import airflow_settings
from tidemark.local.airflow import LocalAirflow
from tidemark.local.airflow_client import AirflowClient
from tidemark.spec import find_consumer
from tidemark.spec.user_transform import load_transform

BARS = {0: 1.2, 1_000: 4.0}
"""Records, and the bar in CPU seconds."""
WARM_RUNS = 2
LIMIT_S = 180
COUNTED = ("scheduler", "api-server")
NAME = "small"
DAG = f"consume__{NAME}"
SCHEMA = "bench_dag_run"
TRANSFORM = """
from typing import TypedDict

from tidemark.transform import Record


class Row(TypedDict):
    number: int


def transform(record: Record) -> Row:
    return {"number": int(record.value or b"0")}
"""
SUITE = """
{"expectations": [{"type": "expect_column_values_to_be_between", "kwargs": {"column": "number", "max_value": 1000000}}]}
"""


def measure(bench: Bench, rounds: int) -> Figures:
    """A row for each of `BARS`."""
    runs: dict[int, list[dict[str, float]]] = {records: [] for records in BARS}
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tidemark-bench-dag-", ignore_cleanup_errors=True)))
        topics = Topics(bench.stage.servers)
        stack.callback(topics.delete_all)
        topics.create(name=NAME)
        airflow = stack.enter_context(small_consumers(bench.stage, folder, {NAME: ""}))
        client = stack.enter_context(airflow.client())
        client.wait_for_dag(DAG, LIMIT_S)
        client.unpause(DAG)
        for number in range(WARM_RUNS + rounds):
            for records, done in runs.items():
                topics.produce(NAME, [str(one) for one in range(records)])
                done.append(_one(bench.stage, airflow, client, records))
                what = "warm-up" if number < WARM_RUNS else f"{number - WARM_RUNS + 1}/{rounds}"
                figures = ", ".join(f"{name} {value:.2f}" for name, value in done[-1].items())
                bench.report(f"DAG run {what}  {records:>5,} records  {figures}")
    rows = []
    for records, done in runs.items():
        of = {name: spread([run[name] for run in done[WARM_RUNS:]]) for name in done[0]}
        rows.append({"records": records, **of})
    return {"rows": rows, **{f"rows_{row['records']}": [row] for row in rows}}


@contextlib.contextmanager
def small_consumers(stage: Stage, folder: Path, schedules: Mapping[str, str], **settings: str) -> Iterator[LocalAirflow]:
    """An Airflow with a consumer for each name, which is also the name of its topic. ``schedules``: cron expressions, "" for none."""
    module = f"numbers_{uuid.uuid4().hex}"  # this process may have imported the one of another folder
    files = {f"transforms/{module}.py": TRANSFORM, "expectations/small.json": SUITE}
    for name, schedule in schedules.items():
        keys = {"topics": [name], "transform": f"{module}:transform", "sink": {"table": f"{SCHEMA}.{name}"}}
        files[f"consumers/{name}.yaml"] = yaml.safe_dump(
            keys | {"validation": {"suite": "small"}} | ({"schedule": schedule} if schedule else {})
        )
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    stage.execute(f"DROP SCHEMA IF EXISTS {SCHEMA} CASCADE")
    for name in schedules:
        spec = find_consumer(name, folder / "consumers")
        stage.execute(sink_ddl(spec, load_transform(spec, [folder / "transforms"]), _no_spark))
    folders = {f"TIDEMARK_{name.upper()}": str(folder / name) for name in ("consumers", "transforms", "expectations")}
    connections = airflow_settings.connections_env(stage.database_url, {"bootstrap.servers": stage.servers}, "local[1]")
    with created(stage.database_url, "airflow_dag_run") as metadata_url:
        env = {**connections, **folders, **settings}
        airflow = LocalAirflow(folder / "airflow", metadata_url=metadata_url, env=env, dags=project.root() / "dags", plugins=None)
        try:
            airflow.up()
            yield airflow
        finally:
            airflow.down()


def _one(stage: Stage, airflow: LocalAirflow, client: AirflowClient, records: int) -> dict[str, float]:
    servers, used, began = stage.cpu_s(), _cpu(airflow), time.time()
    run_id = client.trigger(DAG)
    state = client.wait(DAG, run_id, LIMIT_S)
    cpu, servers = _cpu(airflow) - used, stage.cpu_s() - servers
    run = client.get(f"dags/{DAG}/dagRuns/{quote(run_id, safe='')}")
    loaded = client.xcom(DAG, run_id, "consume")["loaded"]
    if (state, loaded) != ("success", records):
        raise RuntimeError(f"the DAG run ended as {state} with {loaded} of {records} records")
    seconds = datetime.fromisoformat(run["end_date"]).timestamp() - began
    return {"seconds": seconds, "cpu_s": cpu, "servers_cpu_s": servers}


def _cpu(airflow: LocalAirflow) -> float:
    """CPU seconds up to now. The time of a process that has ended counts for the parent that has waited for it."""
    return sum(seconds_of(process, ended=True) for name in COUNTED for process in airflow.family(name))


def _no_spark(*_: Any) -> Any:
    raise AssertionError("the transform is not of the Spark form")


_SPREAD = "{%s[median]:.2f} ({%s[min]:.2f} to {%s[max]:.2f})"
SECONDS, CPU, SERVERS = (_SPREAD.replace("%s", name) for name in ("seconds", "cpu_s", "servers_cpu_s"))
MEASUREMENT = Measurement(
    "dag_run",
    measure,
    Table(
        "A DAG run of a small consumer in Airflow: median (least to most)",
        "records | s | CPU s | CPU s of Kafka and Postgres",
        f"{{records:,}} | {SECONDS} | {CPU} | {SERVERS}",
    ),
    bars=[
        Bar("CPU s of a DAG run with {records:,} records", lambda row: row["cpu_s"]["median"], f"rows_{records}", at_most=bar)
        for records, bar in BARS.items()
    ],
    full={"rounds": 5},
    quick={"rounds": 1},
)

"""A whole DAG run of a small consumer in a real Airflow: with nothing to read, and with 1,000 records. Everything is warm.

CPU seconds are those of the scheduler, its executor's workers, the tasks, their drivers and descendants, and the api-server, from the
trigger to the end of the run. The dag-processor and the triggerer work the same without runs and are not counted. Kafka and Postgres have a
separate column.
"""

from __future__ import annotations

import contextlib
import statistics
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit, urlunsplit

import psycopg2
import yaml
from tests.support.kafka_topics import Topics

from benchmarks.cpu import seconds_of
from benchmarks.stage import Stage
from tidemark import project
from tidemark.author.check import sink_ddl
from tidemark.local import airflow_processes, airflow_settings
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


def measure(stage: Stage, rounds: int, report: Callable[[str], None]) -> list[dict[str, Any]]:
    """A row for each of `BARS`: median, minimum and maximum."""
    runs: dict[int, list[dict[str, float]]] = {records: [] for records in BARS}
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tidemark-bench-dag-", ignore_cleanup_errors=True)))
        topics = Topics(stage.servers)
        stack.callback(topics.delete_all)
        topics.create(name=NAME)
        airflow = stack.enter_context(small_consumers(stage, folder, {NAME: ""}))
        client = stack.enter_context(airflow.client())
        client.wait_for_dag(DAG, LIMIT_S)
        client.unpause(DAG)
        for number in range(WARM_RUNS + rounds):
            for records, done in runs.items():
                topics.produce(NAME, [str(one) for one in range(records)])
                run = _one(stage, airflow, client, records)
                warm = number < WARM_RUNS
                what = "warm-up" if warm else f"{number - WARM_RUNS + 1}/{rounds}"
                report(f"DAG run {what}  {records:>5,} records  {run['seconds']:.1f} s, CPU {run['cpu_s']:.2f} s")
                if not warm:
                    done.append(run)
    names = ("seconds", "cpu_s", "servers_cpu_s")
    return [
        {"records": records, "bar": BARS[records], **{name: _spread([run[name] for run in done]) for name in names}}
        for records, done in runs.items()
    ]


def table(rows: list[dict[str, Any]]) -> tuple[str, list[str], list[list[str]]]:
    """Title, columns and rows, as `benchmarks.report` prints them."""
    cells = [
        [f"{one['records']:,}", *(_said(one[name]) for name in ("seconds", "cpu_s")), f"{one['bar']:g}", _said(one["servers_cpu_s"])]
        for one in rows
    ]
    return (
        "A DAG run of a small consumer in Airflow: median (least to most)",
        ["records", "s", "CPU s", "at most", "CPU s of Kafka and Postgres"],
        cells,
    )


@contextlib.contextmanager
def small_consumers(stage: Stage, folder: Path, schedules: Mapping[str, str], **settings: str) -> Iterator[LocalAirflow]:
    """An Airflow with a consumer for each name, which is also the name of its topic. ``schedules``: cron expressions, "" for none."""
    module = f"numbers_{uuid.uuid4().hex}"  # this process may have imported the one of another folder
    files = {f"consumers/{name}.yaml": _spec(name, schedule, module) for name, schedule in schedules.items()}
    for name, text in {f"transforms/{module}.py": TRANSFORM, "expectations/small.json": SUITE, **files}.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    metadata = urlunsplit(urlsplit(stage.database_url)._replace(path="/airflow_dag_run"))
    with contextlib.closing(psycopg2.connect(stage.database_url)) as connection:
        connection.autocommit = True
        with connection.cursor() as cur:
            cur.execute("DROP DATABASE IF EXISTS airflow_dag_run WITH (FORCE)")
            cur.execute("CREATE DATABASE airflow_dag_run")
            cur.execute(f"DROP SCHEMA IF EXISTS {SCHEMA} CASCADE")
            for name in schedules:
                spec = find_consumer(name, folder / "consumers")
                cur.execute(sink_ddl(spec, load_transform(spec, [folder / "transforms"]), _no_spark))
    folders = {f"TIDEMARK_{name.upper()}": str(folder / name) for name in ("consumers", "transforms", "expectations")}
    connections = airflow_settings.connections_env(stage.database_url, {"bootstrap.servers": stage.servers}, "local[1]")
    env = {**connections, **folders, **settings}
    airflow = LocalAirflow(folder / "airflow", metadata_url=metadata, env=env, dags=project.root() / "dags", plugins=None)
    try:
        airflow.up()
        yield airflow
    finally:
        airflow.down()


def _spec(name: str, schedule: str, module: str) -> str:
    keys = {"topics": [name], "transform": f"{module}:transform", "sink": {"table": f"{SCHEMA}.{name}"}}
    return yaml.safe_dump(keys | {"validation": {"suite": "small"}} | ({"schedule": schedule} if schedule else {}))


def _one(stage: Stage, airflow: LocalAirflow, client: AirflowClient, records: int) -> dict[str, float]:
    servers = stage.meter()
    before, used, began = servers.read(), _cpu(airflow), time.time()
    run_id = client.trigger(DAG)
    state = client.wait(DAG, run_id, LIMIT_S)
    cpu, of_servers = _cpu(airflow) - used, servers.read().since(before)
    found = client.get(f"dags/{DAG}/dagRuns/{quote(run_id, safe='')}")
    loaded = client.xcom(DAG, run_id, "consume")["loaded"]
    if (state, loaded) != ("success", records):
        raise RuntimeError(f"the DAG run ended as {state} with {loaded} of {records} records")
    return {
        "seconds": datetime.fromisoformat(found["end_date"]).timestamp() - began,
        "cpu_s": cpu,
        "servers_cpu_s": of_servers.by_family["broker"] + of_servers.by_family["Postgres"],
    }


def _cpu(airflow: LocalAirflow) -> float:
    """CPU seconds up to now. The time of a process that has ended counts for the parent that has waited for it."""
    marks = [airflow_settings.mark(name, airflow.folder) for name in COUNTED]
    return sum(seconds_of(process, ended=True) for mark in marks for process in airflow_processes.family(mark))


def _spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def _said(spread: dict[str, float]) -> str:
    return f"{spread['median']:.2f} ({spread['min']:.2f} to {spread['max']:.2f})"


def _no_spark(*_: Any) -> Any:
    raise AssertionError("the transform is not of the Spark form")

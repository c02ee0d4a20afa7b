"""A hundred small consumers on one machine, scheduled by a real Airflow: is the machine large enough, and are they on time?

Every consumer runs every five minutes and finds 1,000 records. The schedules are spread over the minutes, as an operator would spread them.
Airflow, the drivers, Spark, Kafka and Postgres all run on this machine, so the CPU time of the whole machine counts, and the memory of all
processes: PSS, which divides a shared page among the processes that share it.
"""

from __future__ import annotations

import contextlib
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import psycopg2
from tests.support.kafka_topics import Topics

from benchmarks.cpu import seconds_of
from benchmarks.dag_run import SCHEMA, small_consumers
from benchmarks.stage import Stage
from tidemark.local import airflow_processes, airflow_settings
from tidemark.local.airflow import PROCESSES, LocalAirflow

RECORDS = 1_000
LATE_S, CPU_SHARE, MEMORY_GIB = 30.0, 0.6, 4.0
"""The bars: seconds from a run's start to its last row at the 99th percentile, share of all cores, memory."""
MINUTE = 60
LOOK_S = 20
SETTINGS = {
    # Airflow's defaults, not the short intervals of the local Airflow
    "AIRFLOW__DAG_PROCESSOR__REFRESH_INTERVAL": "300",
    "AIRFLOW__DAG_PROCESSOR__MIN_FILE_PROCESS_INTERVAL": "30",
    "AIRFLOW__CORE__PARALLELISM": "8",
}


@dataclass(frozen=True, slots=True)
class Extent:
    consumers: int
    minutes: int
    every: int
    """Minutes between two runs of a consumer."""


FULL = Extent(consumers=100, minutes=30, every=5)
QUICK = Extent(consumers=4, minutes=2, every=1)


def measure(stage: Stage, extent: Extent, report: Callable[[str], None]) -> dict[str, Any]:
    names = [f"small_{number:03}" for number in range(extent.consumers)]
    groups = [names[minute :: extent.every] for minute in range(extent.every)]
    schedules = {name: f"{minute}-59/{extent.every} * * * *" for minute, group in enumerate(groups) for name in group}
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tidemark-bench-fleet-", ignore_cleanup_errors=True)))
        topics = Topics(stage.servers)
        stack.callback(topics.delete_all)
        for name in names:
            topics.create(name=name)
        airflow = stack.enter_context(small_consumers(stage, folder, schedules, **SETTINGS))
        client = stack.enter_context(airflow.client())
        for name in names:
            client.wait_for_dag(f"consume__{name}")
            client.unpause(f"consume__{name}")
        producing = stack.enter_context(_producing(stage.servers, groups, report))
        report(f"warm-up: {extent.every + 1} minutes")
        begin = _minute_after(time.time() + extent.every * MINUTE)
        _sleep_until(begin)
        measured = _watch(stage, airflow, begin + extent.minutes * MINUTE, report)
        end = begin + extent.minutes * MINUTE
        producing.set()
        found = _runs(airflow.metadata_url, stage.database_url, begin, end, due=extent.consumers * extent.minutes // extent.every)
        _check(stage, names)
    return {"consumers": extent.consumers, "minutes": extent.minutes, "every": extent.every, **found, **measured}


@contextlib.contextmanager
def _producing(servers: str, groups: list[list[str]], report: Callable[[str], None]) -> Iterator[threading.Event]:
    """Until the event is set, produces each topic's records half a minute before the next run of its consumer."""
    from confluent_kafka import Producer

    stop = threading.Event()
    producer = Producer({"bootstrap.servers": servers, "linger.ms": 50, "log_level": 3})

    def produce() -> None:
        while True:
            due = _minute_after(time.time() + MINUTE / 2)
            if stop.wait(max(0.0, due - MINUTE / 2 - time.time())):
                return
            for name in groups[int(due // MINUTE) % 60 % len(groups)]:
                for number in range(RECORDS):
                    producer.produce(name, value=str(number))
                producer.flush(LOOK_S)
            if stop.wait(max(0.0, due - time.time())):
                return

    thread = threading.Thread(target=produce)
    thread.start()
    try:
        yield stop
    finally:
        stop.set()
        thread.join()


def _watch(stage: Stage, airflow: LocalAirflow, until: float, report: Callable[[str], None]) -> dict[str, Any]:
    """The share of the machine's CPU time, CPU seconds by family of processes, and peak memory."""
    began, busy, before, peak, memory = time.time(), _busy(), _cpu(stage, airflow), 0, {}
    while time.time() < until:
        _sleep_until(min(until, time.time() + LOOK_S))
        now = {name: sum(map(_pss, family)) for name, family in _families(stage, airflow).items()}
        if sum(now.values()) > peak:
            peak, memory = sum(now.values()), now
        share = (_busy() - busy) / (time.time() - began) / (psutil.cpu_count() or 1)
        report(f"{(time.time() - began) / MINUTE:5.1f} minutes  CPU {share:.0%}  memory {peak / 2**30:.2f} GiB")
    after = _cpu(stage, airflow)
    seconds = {name: after[name] - before[name] for name in after}
    of = {name: (seconds[name], memory[name] / 2**30) for name in seconds}
    return {"seconds": time.time() - began, "cpu_share": share, "memory_gib": peak / 2**30, "families": of}


def _families(stage: Stage, airflow: LocalAirflow) -> dict[str, list[psutil.Process]]:
    found = {name: airflow_processes.family(airflow_settings.mark(name, airflow.folder)) for name in PROCESSES}
    return found | stage.processes()


def _cpu(stage: Stage, airflow: LocalAirflow) -> dict[str, float]:
    return {name: sum(seconds_of(one, ended=True) for one in family) for name, family in _families(stage, airflow).items()}


def _busy() -> float:
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system)


def _pss(process: psutil.Process) -> int:
    """PSS in bytes. 0 if the process has ended."""
    with contextlib.suppress(OSError, psutil.Error):
        for line in Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0


def _runs(metadata_url: str, database_url: str, begin: float, end: float, due: int) -> dict[str, Any]:
    """Waits for the runs that were due in this time, and returns how they ended."""
    within = "run_after >= to_timestamp(%s) AND run_after < to_timestamp(%s)"
    deadline = time.time() + 2 * MINUTE
    with contextlib.closing(psycopg2.connect(metadata_url)) as connection, connection.cursor() as cur:
        connection.autocommit = True
        while True:
            cur.execute(
                "SELECT dag_id, run_id, state, extract(epoch FROM run_after), extract(epoch FROM start_date),"
                f" extract(epoch FROM end_date) FROM dag_run WHERE dag_id LIKE 'consume\\_\\_%%' AND {within}",
                (begin, end),
            )
            runs = cur.fetchall()
            if (len(runs) >= due and all(run[2] in ("success", "failed") for run in runs)) or time.time() > deadline:
                break
            time.sleep(1)
    with contextlib.closing(psycopg2.connect(database_url)) as connection, connection.cursor() as cur:
        cur.execute(
            "SELECT dag_id, run_id, extract(epoch FROM max(committed_at)), sum(loaded)"
            " FROM tidemark.batch JOIN tidemark.attempt USING (attempt_id) WHERE dag_id IS NOT NULL GROUP BY 1, 2"
        )
        commits = {(dag, run): (float(at), int(loaded)) for dag, run, at, loaded in cur.fetchall()}
    done = [run for run in runs if run[2] == "success" and (run[0], run[1]) in commits]
    return {
        "due": due,
        "succeeded": len(done),
        "records": sum(commits[run[0], run[1]][1] for run in done),
        "start_late_s": _spread([float(run[4] - run[3]) for run in done]),
        "loaded_after_s": _spread([commits[run[0], run[1]][0] - float(run[4]) for run in done]),
        "ended_after_s": _spread([float(run[5] - run[4]) for run in done]),
    }


def _check(stage: Stage, names: list[str]) -> None:
    """Checks that every record that was read is in its table once."""
    with contextlib.closing(psycopg2.connect(stage.database_url)) as connection, connection.cursor() as cur:
        for name in names:
            cur.execute(f"SELECT count(*), count(DISTINCT kafka_offset), max(kafka_offset) FROM {SCHEMA}.{name}")
            count, different, last = cur.fetchone() or (0, 0, None)
            if not count == different == (-1 if last is None else last) + 1:
                raise RuntimeError(f"{name}: {count} rows of {different} records, the last one at offset {last}")


def _spread(values: list[float]) -> dict[str, float]:
    ordered = sorted(values) or [float("nan")]
    return {"median": statistics.median(ordered), "p99": ordered[int(len(ordered) * 0.99)], "max": ordered[-1]}


def _minute_after(moment: float) -> float:
    return (moment // MINUTE + 1) * MINUTE


def _sleep_until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.time()))


def table(found: Mapping[str, Any]) -> tuple[str, list[str], list[list[str]]]:
    """Title, columns and rows, as `benchmarks.report` prints them."""
    late, loaded, ended = (found[name] for name in ("start_late_s", "loaded_after_s", "ended_after_s"))
    cells = [
        ["runs that succeeded, of those that were due", f"{found['succeeded']:,} of {found['due']:,}", "all"],
        ["start after the scheduled time, s: median, p99, longest", _three(late), "-"],
        ["last row after the start, s: median, p99, longest", _three(loaded), f"p99 {LATE_S:g}"],
        ["end after the start, s: median, p99, longest", _three(ended), "-"],
        ["share of the machine's CPU time", f"{found['cpu_share']:.0%}", f"{CPU_SHARE:.0%}"],
        ["memory of all processes, GiB", f"{found['memory_gib']:.1f}", f"{MEMORY_GIB:g}"],
        *(
            [f"{name}: cores, GiB", f"{seconds / found['seconds']:.2f}, {memory:.2f}", "-"]
            for name, (seconds, memory) in found["families"].items()
        ),
    ]
    title = f"{found['consumers']} consumers, {RECORDS:,} records each every {found['every']} minutes, for {found['minutes']} minutes"
    return title, ["", "measured", "at most"], cells


def _three(spread: Mapping[str, float]) -> str:
    return ", ".join(f"{spread[name]:.1f}" for name in ("median", "p99", "max"))

"""A hundred small consumers on one machine, scheduled by a real Airflow: is the machine large enough, and are they on time?

Every consumer runs every five minutes and finds 1,000 records. The schedules are spread over the minutes, as an operator would spread them.
Airflow, the drivers, Spark, Kafka and Postgres all run on this machine, so the CPU time of the whole machine counts, and the memory of all
processes: PSS, which divides a shared page among the processes that share it.
"""

from __future__ import annotations

import contextlib
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
from benchmarks.airflow.dag_run import SCHEMA, small_consumers
from benchmarks.harness.processes import pss, seconds_of, spread
from benchmarks.harness.stage import Stage, autocommit
from benchmarks.measurement import Bar, Bench, Figures, Measurement, Table
from tests.support.kafka_topics import Topics

from tidemark.local.airflow import PROCESSES, LocalAirflow

RECORDS = 1_000
MINUTE = 60
LOOK_S = 20
SETTINGS = {
    # Airflow's defaults, not the short intervals of the local Airflow
    "AIRFLOW__DAG_PROCESSOR__REFRESH_INTERVAL": "300",
    "AIRFLOW__DAG_PROCESSOR__MIN_FILE_PROCESS_INTERVAL": "30",
    "AIRFLOW__CORE__PARALLELISM": "8",
}
RUNS = """
SELECT dag_id, run_id, state, extract(epoch FROM run_after)::float, extract(epoch FROM start_date)::float,
       extract(epoch FROM end_date)::float
  FROM dag_run WHERE dag_id LIKE 'consume\\_\\_%%' AND run_after >= to_timestamp(%s) AND run_after < to_timestamp(%s)
"""
COMMITS = """
SELECT dag_id, run_id, extract(epoch FROM max(committed_at))::float, sum(loaded)
  FROM tidemark.batch JOIN tidemark.attempt USING (attempt_id) WHERE dag_id IS NOT NULL GROUP BY 1, 2
"""


def measure(bench: Bench, consumers: int, minutes: int, every: int) -> Figures:
    """``every``: minutes between two runs of a consumer."""
    stage, names = bench.stage, [f"small_{number:03}" for number in range(consumers)]
    groups = [names[minute::every] for minute in range(every)]
    schedules = {name: f"{minute}-59/{every} * * * *" for minute, group in enumerate(groups) for name in group}
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
        producing = stack.enter_context(_producing(stage.servers, groups))
        bench.report(f"warm-up: {every + 1} minutes")
        begin = _minute_after(time.time() + every * MINUTE)
        end = begin + minutes * MINUTE
        _sleep_until(begin)
        usage = _watch(bench, airflow, end)
        producing.set()
        runs = _runs(airflow.metadata_url, stage.database_url, begin, end, due=consumers * minutes // every)
        _check(stage, names)
    figures = {"consumers": consumers, "minutes": minutes, "every": every, **runs, **usage}
    return {**figures, "rows": _rows(figures)}


@contextlib.contextmanager
def _producing(servers: str, groups: Sequence[Sequence[str]]) -> Iterator[threading.Event]:
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


def _watch(bench: Bench, airflow: LocalAirflow, until: float) -> dict[str, Any]:
    """The share of the machine's CPU time, cores by family of processes, and peak memory."""
    began, busy, before, peak, memory, share = time.time(), _busy(), _cpu(bench.stage, airflow), 0, dict[str, int](), 0.0
    while time.time() < until:
        _sleep_until(min(until, time.time() + LOOK_S))
        now = {name: sum(map(pss, family)) for name, family in _families(bench.stage, airflow).items()}
        if sum(now.values()) > peak:
            peak, memory = sum(now.values()), now
        share = (_busy() - busy) / (time.time() - began) / (psutil.cpu_count() or 1)
        bench.report(f"{(time.time() - began) / MINUTE:5.1f} minutes  CPU {share:.0%}  memory {peak / 2**30:.2f} GiB")
    seconds, after = time.time() - began, _cpu(bench.stage, airflow)
    families = {name: ((after[name] - before[name]) / seconds, memory[name] / 2**30) for name in after}
    return {"cpu_share": share, "memory_gib": peak / 2**30, "families": families}


def _families(stage: Stage, airflow: LocalAirflow) -> dict[str, list[psutil.Process]]:
    of_airflow = {name: airflow.family(name) for name in PROCESSES}
    return of_airflow | stage.processes()


def _cpu(stage: Stage, airflow: LocalAirflow) -> dict[str, float]:
    return {name: sum(seconds_of(one, ended=True) for one in family) for name, family in _families(stage, airflow).items()}


def _busy() -> float:
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system)


def _runs(metadata_url: str, database_url: str, begin: float, end: float, due: int) -> dict[str, Any]:
    """Waits for the runs that were due in this time, and returns how they ended."""
    deadline = time.time() + 2 * MINUTE
    while True:
        with autocommit(metadata_url) as cur:
            cur.execute(RUNS, (begin, end))
            runs = cur.fetchall()
        if (len(runs) >= due and all(run[2] in ("success", "failed") for run in runs)) or time.time() > deadline:
            break
        time.sleep(1)
    with autocommit(database_url) as cur:
        cur.execute(COMMITS)
        commits = {(dag, run): at for dag, run, at, _ in cur.fetchall()}
    done = [run for run in runs if run[2] == "success" and run[:2] in commits]
    return {
        "due": due,
        "succeeded": len(done),
        "start_late_s": spread([start - scheduled for _, _, _, scheduled, start, _ in done]),
        "loaded_after_s": spread([commits[run[:2]] - run[4] for run in done]),
        "ended_after_s": spread([ended - start for _, _, _, _, start, ended in done]),
    }


def _check(stage: Stage, names: Sequence[str]) -> None:
    """Checks that every record that was read is in its table once."""
    with autocommit(stage.database_url) as cur:
        for name in names:
            cur.execute(f"SELECT count(*), count(DISTINCT kafka_offset), coalesce(max(kafka_offset), -1) + 1 FROM {SCHEMA}.{name}")
            ((count, different, end),) = cur.fetchall()
            if not count == different == end:
                raise RuntimeError(f"{name}: {count} rows of {different} records, which end at offset {end}")


def _minute_after(moment: float) -> float:
    return (moment // MINUTE + 1) * MINUTE


def _sleep_until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.time()))


def _rows(of: Mapping[str, Any]) -> list[dict[str, str]]:
    def three(name: str) -> str:
        return ", ".join(f"{of[name][figure]:.1f}" for figure in ("median", "p99", "max"))

    rows = [
        ("runs that succeeded, of those that were due", f"{of['succeeded']:,} of {of['due']:,}"),
        ("start after the scheduled time, s: median, p99, longest", three("start_late_s")),
        ("last row after the start, s: median, p99, longest", three("loaded_after_s")),
        ("end after the start, s: median, p99, longest", three("ended_after_s")),
        *((f"{name}: cores, GiB", f"{cores:.2f}, {memory:.2f}") for name, (cores, memory) in of["families"].items()),
    ]
    return [{"what": what, "measured": measured} for what, measured in rows]


_TITLE = f"{{consumers}} consumers, {RECORDS:,} records each every {{every}} minutes, for {{minutes}} minutes"
_LAST_ROW = "{consumers} small consumers: s from a run's start to its last row, p99"
MEASUREMENT = Measurement(
    "fleet",
    measure,
    Table(_TITLE, "| measured", "{what} | {measured}"),
    bars=[
        Bar("{consumers} small consumers: runs missed", lambda of: of["due"] - of["succeeded"], at_most=0),
        Bar(_LAST_ROW, lambda of: of["loaded_after_s"]["p99"], at_most=30.0),
        Bar("{consumers} small consumers: share of the CPU", lambda of: of["cpu_share"], at_most=0.6),
        Bar("{consumers} small consumers: GiB of memory", lambda of: of["memory_gib"], at_most=4.0),
    ],
    full={"consumers": 100, "minutes": 30, "every": 5},
    quick={"consumers": 4, "minutes": 2, "every": 1},
)

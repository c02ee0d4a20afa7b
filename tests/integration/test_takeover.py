"""A driver that hangs, is given up, and wakes up when a newer attempt has read on: it stores nothing any more (I2)."""

from __future__ import annotations

import contextlib
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from tests.kafka_topics import Topics

from tidemark.connections import Connections
from tidemark.consume.launch import Progress, kill_group, progress, run_attempt
from tidemark.consume.run import open_attempt
from tidemark.db import session, transaction
from tidemark.errors import Fenced, TidemarkError
from tidemark.offsets.store import TaskIdentity
from tidemark.quality import check_conservation
from tidemark.spec import ConsumerSpec, load_consumer

BATCH, RECORDS = 100, 250
NAME = "takeover"

TRANSFORM = """
from typing import TypedDict

from tidemark.transform import Record


class Row(TypedDict):
    number: int


def transform(record: Record) -> Row:
    return {"number": int(record.value or b"0")}
"""

BRAKE = """
import os
import time
from pathlib import Path


def hook(step, part):
    flag = Path(os.environ["TAKEOVER_FLAG"])
    while flag.exists() and flag.read_text() == step.name and part.start > 0:
        flag.with_suffix(".stopped").touch()
        time.sleep(0.02)
"""


DDL = """
CREATE TABLE public.numbers (
    number bigint,
    kafka_topic_id smallint NOT NULL, kafka_partition integer NOT NULL, kafka_offset bigint NOT NULL, kafka_seq integer NOT NULL,
    UNIQUE (kafka_topic_id, kafka_partition, kafka_offset, kafka_seq)
)
"""


class Attempt:
    """An attempt that is followed in a thread of its own, as a task does."""

    def __init__(self, spec: ConsumerSpec, connections: Connections, folder: Path, try_number: int) -> None:
        task = TaskIdentity("consume__takeover", "run", "consume", -1, try_number)
        self.attempt_id = open_attempt(connections.database_url, spec.group, task)
        self.lines: list[str] = []
        self.driver: subprocess.Popen[str] | None = None
        self.result: Progress | TidemarkError | None = None
        self._arguments = (spec.name, connections, self.attempt_id, folder)
        self._thread = threading.Thread(target=self._follow)
        self._thread.start()

    def _follow(self) -> None:
        name, connections, attempt_id, folder = self._arguments
        folders = {"consumers": [folder / "consumers"], "transforms": [folder / "transforms"]}
        try:
            self.result = run_attempt(
                name,
                connections,
                attempt_id,
                folders=folders,
                on_log=self.lines.append,
                on_progress=lambda _: None,
                on_start=self._started,
            )
        except TidemarkError as error:
            self.result = error

    def _started(self, driver: subprocess.Popen[str]) -> None:
        self.driver = driver

    def tree(self) -> list[psutil.Process]:
        """Driver, JVM and Python workers."""
        assert self.driver is not None
        driver = psutil.Process(self.driver.pid)
        return [driver, *driver.children(recursive=True)]

    def suspend(self) -> list[psutil.Process]:
        tree = self.tree()
        for process in tree:
            process.suspend()
        return tree

    def wait(self, timeout_s: float = 120) -> Progress | TidemarkError | None:
        self._thread.join(timeout_s)
        assert not self._thread.is_alive(), "".join(self.lines)
        return self.result

    def end(self) -> None:
        if self._thread.is_alive() and self.driver is not None:
            for process in self.tree():
                with contextlib.suppress(psutil.Error):
                    process.resume()
            kill_group(self.driver)
        self._thread.join(30)


@pytest.fixture
def flag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Holds the name of the step before which commits stop; every driver sees it."""
    monkeypatch.setenv("TIDEMARK_STEP_HOOK", "takeover_brake:hook")
    monkeypatch.setenv("TAKEOVER_FLAG", str(tmp_path / "flag"))
    return tmp_path / "flag"


@pytest.fixture
def begin(project_dir: Path, database_url: str, topics: Topics, kafka_servers: str, flag: Path) -> Iterator[Callable[[int], Attempt]]:
    """Begins an attempt (of one Airflow task, with this try number) over a topic of 250 records, read in batches of 100."""
    topic = topics.create()
    topics.produce(topic, [str(number) for number in range(RECORDS)])
    (project_dir / "transforms" / "takeover_numbers.py").write_text(TRANSFORM)
    (project_dir / "transforms" / "takeover_brake.py").write_text(BRAKE)
    path = project_dir / "consumers" / f"{NAME}.yaml"
    path.write_text(
        f"topics: [{topic}]\ntransform: takeover_numbers:transform\nsink: {{table: public.numbers}}\nbatch: {{max_records: {BATCH}}}\n"
    )
    spec = load_consumer(path)
    with session(database_url) as connection, transaction(connection) as cursor:
        cursor.execute(DDL)
    connections = Connections(database_url, {"bootstrap.servers": kafka_servers}, "local[1]")
    begun: list[Attempt] = []

    def start(try_number: int) -> Attempt:
        begun.append(Attempt(spec, connections, project_dir, try_number))
        return begun[-1]

    yield start
    for attempt in begun:
        attempt.end()


def numbers(database_url: str) -> list[int]:
    with session(database_url) as connection, transaction(connection) as cursor:
        cursor.execute("SELECT number FROM public.numbers ORDER BY kafka_offset")
        return [number for (number,) in cursor.fetchall()]


def eventually(true: Callable[[], bool], within_s: float = 60) -> None:
    deadline = time.monotonic() + within_s
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("step", "said"),
    [
        pytest.param("MOVE_OFFSET", "is fenced: this attempt holds epoch 1", id="before-it-asked-for-the-row"),
        pytest.param("COMMIT", "Postgres is not available", id="while-it-held-the-row"),
    ],
)
def test_driver_that_wakes_up_after_a_takeover_stores_nothing(begin, flag, database_url, step, said):
    """Every record is in the sink once, whoever slept where: the old driver is fenced, or its session was ended by the new attempt."""
    flag.write_text(step)
    old = begin(1)
    eventually(flag.with_suffix(".stopped").exists)
    suspended = old.suspend()
    flag.unlink()

    new = begin(2).wait()
    assert isinstance(new, Progress)
    assert (new.state, [(part.start, part.end) for part in new.partitions]) == ("COMMITTED", [(BATCH, RECORDS)])
    assert numbers(database_url) == list(range(RECORDS))

    for process in suspended:
        process.resume()
    assert isinstance(old.wait(), Fenced)
    assert any(said in line for line in old.lines)
    assert progress(database_url, old.attempt_id).state == "FAILED"
    assert numbers(database_url) == list(range(RECORDS))
    with session(database_url) as connection, transaction(connection) as cursor:
        assert check_conservation(cursor, NAME, "public.numbers") == []
    eventually(lambda: not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in suspended), 20)


def test_retried_try_of_a_finished_run_says_so_and_reads_nothing(begin, database_url):
    """The first try committed all that its run had planned, and then was lost: the second starts no Spark and succeeds."""
    first = begin(1).wait()
    assert isinstance(first, Progress)
    second = begin(2)
    done = second.wait()
    assert isinstance(done, Progress)
    assert (done.state, done.records) == ("COMMITTED", 0)
    assert any(f"an earlier attempt has committed the whole run group={NAME}" in line for line in second.lines)
    assert numbers(database_url) == list(range(RECORDS))

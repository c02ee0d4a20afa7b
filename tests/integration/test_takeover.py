"""A driver hangs, is given up, and wakes up after a newer one has taken over: it stores nothing more (I2).

Here both are real drivers, and claims wait as long as in production. `tests.chaos` suspends the older driver at every step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.support.attempts import FAST_JVM, Attempt, all_gone
from tests.support.kafka_topics import Topics
from tests.support.points import Points
from tests.support.waiting import until

from tidemark.connections import Connections
from tidemark.consume.launch import Progress, progress
from tidemark.db import session, transaction
from tidemark.errors import Fenced
from tidemark.offsets.store import TaskIdentity
from tidemark.quality import check_conservation
from tidemark.sink.steps import Step
from tidemark.spec import load_consumer

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

DDL = """
CREATE TABLE public.numbers (
    number bigint,
    kafka_topic_id smallint NOT NULL, kafka_partition integer NOT NULL, kafka_offset bigint NOT NULL, kafka_seq integer NOT NULL,
    UNIQUE (kafka_topic_id, kafka_partition, kafka_offset, kafka_seq)
)
"""


@pytest.fixture
def points(tmp_path: Path, project_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Points]:
    """Points at which a test can hold the commits of every driver."""
    folder = tmp_path / "points"
    folder.mkdir()
    points = Points(folder)
    points.install(project_dir / "transforms")
    for name, value in points.env.items():
        monkeypatch.setenv(name, value)
    yield points
    points.check_all_reached()


@pytest.fixture
def begin(project_dir: Path, database_url: str, topics: Topics, kafka_servers: str, points: Points) -> Iterator[Callable[[int], Attempt]]:
    """Starts an attempt (of one Airflow task, with this try number) over a topic of 250 records, read in batches of 100."""
    topic = topics.create()
    topics.produce(topic, [str(number) for number in range(RECORDS)])
    (project_dir / "transforms" / "takeover_numbers.py").write_text(TRANSFORM)
    path = project_dir / "consumers" / f"{NAME}.yaml"
    path.write_text(
        f"topics: [{topic}]\ntransform: takeover_numbers:transform\nsink: {{table: public.numbers}}\nbatch: {{max_records: {BATCH}}}\n"
    )
    spec = load_consumer(path)
    with session(database_url) as connection, transaction(connection) as cursor:
        cursor.execute(DDL)
    connections = Connections(database_url, {"bootstrap.servers": kafka_servers}, "local[1]", FAST_JVM)
    begun: list[Attempt] = []

    def start(try_number: int) -> Attempt:
        task = TaskIdentity("consume__takeover", "run", "consume", -1, try_number)
        begun.append(Attempt(spec, connections, project_dir, task))
        return begun[-1]

    yield start
    for attempt in begun:
        attempt.end()


def numbers(database_url: str) -> list[int]:
    with session(database_url) as connection, transaction(connection) as cursor:
        cursor.execute("SELECT number FROM public.numbers ORDER BY kafka_offset")
        return [number for (number,) in cursor.fetchall()]


def test_driver_that_wakes_up_after_a_takeover_stores_nothing(begin, points, database_url):
    """The old driver holds the partition's row: the newer one waits for it, then ends that session. Every record is in the sink once."""
    point = points.at(Step.COMMIT, start=1)
    old = begin(1)
    point.reached()
    suspended = old.suspend()
    point.release()

    new = begin(2).wait()
    assert isinstance(new, Progress)
    assert (new.state, [(part.start, part.end) for part in new.partitions]) == ("COMMITTED", [(BATCH, RECORDS)])
    assert numbers(database_url) == list(range(RECORDS))

    for process in suspended:
        process.resume()
    assert isinstance(old.wait(), Fenced)
    assert "Postgres is not available" in old.log or "holds epoch 1, the row is at epoch 2" in old.log  # whichever is noticed first
    assert progress(database_url, old.attempt_id).state == "FAILED"
    assert numbers(database_url) == list(range(RECORDS))
    with session(database_url) as connection, transaction(connection) as cursor:
        assert check_conservation(cursor, NAME, ["public.numbers"]) == []
    until(lambda: all_gone(suspended), "the old driver, its JVM and its workers gone")


def test_retried_try_of_a_finished_run_says_so_and_reads_nothing(begin, database_url):
    """The first try committed everything that its run had planned, and was then lost. The second starts no Spark and succeeds."""
    first = begin(1).wait()
    assert isinstance(first, Progress)
    second = begin(2)
    done = second.wait()
    assert isinstance(done, Progress)
    assert (done.state, done.records) == ("COMMITTED", 0)
    assert any(f"an earlier attempt has committed the whole run group={NAME}" in line for line in second.lines)
    assert numbers(database_url) == list(range(RECORDS))

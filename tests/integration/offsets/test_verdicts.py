"""Whatever ended a run, the next validation of its group gives its batches a verdict, and the next event announces them."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psycopg2
import pytest
from airflow.sdk import DAG, Asset
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from tests.support.departures import DDL, TABLE, Departures
from tests.support.sampling import ALL
from tests.support.waiting import until

from tidemark.airflow import ConsumeOperator, PublishOperator, ValidateOperator
from tidemark.offsets.health import Health, LagFacts, judge
from tidemark.offsets.lag import groups
from tidemark.offsets.window import Trend
from tidemark.quality import ValidatedRun, Verdict, announced, unannounced, unjudged, validate_with_earlier

PUBLISHABLE = (Verdict.PASSED, Verdict.WARNING)
GROUPS = itertools.count(1)


@dataclass
class Batch:
    run: str
    start: int
    end: int
    bad: bool
    passes: bool | None = None
    """Its verdict; None if it has none, or one on rows of which a rewind has taken some."""
    announced: bool = False


@pytest.fixture
def connection(database_url: str) -> Iterator[Any]:
    with contextlib.closing(psycopg2.connect(database_url)) as connection:
        connection.autocommit = True
        with connection.cursor() as cur:
            cur.execute(DDL)
        yield connection


class Runs(RuleBasedStateMachine):
    """Runs of one partition that end in any way. A bad batch has lost a row, which the conservation check finds."""

    url: str
    folder: Path
    connection: Any

    def __init__(self) -> None:
        super().__init__()
        number = next(GROUPS)
        self.made = Departures(self.url, self.folder, self.connection, group=f"group{number}", topic=f"topic{number}")
        self.batches: list[Batch] = []
        self.alive: str | None = None
        """The run of the attempt that holds the partition and whose driver is at work."""
        self.driver: Any = None
        """The driver's session, by which it is known to be at work."""
        self.epoch = 1
        self.runs = 0

    @property
    def end(self) -> int:
        return self.batches[-1].end if self.batches else 0

    def of(self, run: str) -> ValidatedRun:
        return ValidatedRun("consume", run)

    @rule(parts=st.lists(st.booleans(), min_size=1, max_size=3), state=st.sampled_from(["COMMITTED", "FAILED", "RUNNING", "KILLED"]))
    def run(self, parts: list[bool], state: str) -> None:
        """A new run takes the partition and commits batches. Its task ends well, fails, or its driver is at work or was killed."""
        self.runs += 1
        self.epoch += 1
        name = f"run{self.runs}"
        self.made.sql("UPDATE tidemark.partition_offset SET owner_epoch = %s WHERE topic_id = %s", self.epoch, self.made.topic_id)
        for bad in parts:
            start = self.end
            self.made.batch(name, start, start + 5)
            self.batches.append(Batch(name, start, start + 5, bad))
            if bad:
                self.made.sql(f"DELETE FROM {TABLE} WHERE kafka_topic_id = %s AND kafka_offset = %s", self.made.topic_id, start)
        attempt = self.made.attempts[name]
        self.made.sql("UPDATE tidemark.batch SET owner_epoch = %s WHERE attempt_id = %s", self.epoch, attempt)
        self.end_driver()
        if state == "RUNNING":
            self.driver = psycopg2.connect(self.url, application_name=f"tidemark driver {attempt}")
        ended = "NULL" if state in ("RUNNING", "KILLED") else "now()"
        error = '{"kind": "refused", "type": "E", "text": "e"}' if state == "FAILED" else None
        set_ = f"UPDATE tidemark.attempt SET state = %s, error = %s, ended_at = {ended} WHERE attempt_id = %s"
        self.made.sql(set_, state.replace("KILLED", "RUNNING"), error, attempt)
        self.alive = name if state == "RUNNING" else None

    def end_driver(self) -> None:
        if self.driver is not None:
            name = self.driver.get_dsn_parameters()["application_name"]
            self.driver.close()
            until(lambda: not self.made.sql("SELECT FROM pg_stat_activity WHERE application_name = %s", name))
            self.driver = None

    @precondition(lambda self: self.runs)
    @rule(data=st.data())
    def validate(self, data: st.DataObject) -> None:
        """Of any run: the newest one, one whose task was cleared, or one that was marked as success while its driver was at work."""
        run = f"run{data.draw(st.integers(1, self.runs))}"
        validate_with_earlier(self.url, self.of(run), group=self.made.group, suites={TABLE: None})
        self.judge(run)

    def judge(self, run: str) -> None:
        """A run has one verdict on all its batches."""
        if run == self.alive:
            self.alive = None
        for judged in {run, *self.unjudged()} - {self.alive}:
            batches = [batch for batch in self.batches if batch.run == judged]
            for batch in batches:
                batch.passes, batch.announced = not any(each.bad for each in batches), False

    def unjudged(self) -> set[str]:
        return {batch.run for batch in self.batches if batch.passes is None}

    @precondition(lambda self: any(batch.passes is not None for batch in self.batches))
    @rule(done=st.booleans())
    def publish(self, *, done: bool) -> None:
        """``done``: else it was killed after its event, and before it was noted."""
        new = unannounced(self.url, self.made.group, PUBLISHABLE)
        offsets = {offset for spans in new.ranges.values() for start, end in spans for offset in range(start, end)}
        expected = [batch for batch in self.batches if batch.passes and not batch.announced]
        assert offsets == {offset for batch in expected for offset in range(batch.start, batch.end)}
        assert new.counts.loaded == len(offsets)
        if done:
            announced(self.url, new.validation_ids)
            for batch in expected:
                batch.announced = True

    @precondition(lambda self: self.batches)
    @rule(data=st.data())
    def rewind(self, data: st.DataObject) -> None:
        """To the start of a batch: it and the later ones are taken out."""
        at = data.draw(st.sampled_from([batch.start for batch in self.batches]))
        self.epoch += 1
        self.made.rewind(at, self.epoch)
        taken = {batch.run for batch in self.batches if batch.start >= at and batch.passes is False}
        self.batches = [batch for batch in self.batches if batch.start < at]
        for batch in self.batches:
            if batch.run in taken:
                batch.passes = None
        self.alive = None

    @invariant()
    def what_is_unjudged_is_known(self) -> None:
        running = {each.run.run_id: each.running for each in unjudged(self.connection, self.made.group)} if self.batches else {}
        self.connection.autocommit = True
        assert set(running) == self.unjudged()
        assert {run for run, attempt in running.items() if attempt is not None} <= {self.alive}

    @invariant()
    def view_ends_before_what_has_no_verdict_or_a_critical_one(self) -> None:
        assert self.made.validated() <= self.good_until()

    def good_until(self) -> int:
        return min((batch.start for batch in self.batches if not batch.passes), default=self.end)

    def teardown(self) -> None:
        """One good run is enough: every batch that passes, and has none before it that does not, is shown and announced."""
        self.run([False], "COMMITTED")
        newest = f"run{self.runs}"
        validate_with_earlier(self.url, self.of(newest), group=self.made.group, suites={TABLE: None})
        self.judge(newest)
        self.publish(done=True)
        assert unjudged(self.connection, self.made.group) == []
        self.connection.autocommit = True
        assert self.made.validated() == self.good_until()
        self.end_driver()
        for batch in self.batches:
            assert batch.passes == batch.announced == all(not each.bad for each in self.batches if each.run == batch.run)


def test_any_sequence_of_runs_and_one_good_run_leave_nothing_without_a_verdict(database_url: str, tmp_path: Path, connection: Any) -> None:
    machine = type("Machine", (Runs,), {"url": database_url, "folder": tmp_path, "connection": connection})
    limits = settings(
        max_examples=300 if ALL else 25, stateful_step_count=8, deadline=None, suppress_health_check=list(HealthCheck), print_blob=False
    )
    run_state_machine_as_test(machine, settings=limits)  # type: ignore[no-untyped-call]


def health(made: Departures) -> tuple[Health, int | None]:
    """Of the group, and the validation that stops the view. Its lag counts as known."""
    (one,) = groups(made.connection.cursor(), names=[made.group])
    known = LagFacts(datetime.now(UTC), datetime.now(UTC), trends=frozenset({Trend.KEEPING_UP}))
    return judge(known, one.runs, None, one.ledger).health, one.ledger.blocked_by


def test_health_says_why_the_view_stops(database_url: str, tmp_path: Path, connection: Any) -> None:
    """Good runs after a critical one do not hide it; a rewind or a repair ends it."""
    made = Departures(database_url, tmp_path, connection)
    made.batch("run1", 0, 10)
    assert health(made) == (Health.UNVALIDATED, None)
    made.sql(f"DELETE FROM {TABLE} WHERE kafka_offset = 5")
    critical = made.validate("run1").validation_id
    assert health(made) == (Health.BLOCKED, critical)
    made.batch("run2", 10, 20)
    made.validate("run2")
    assert health(made) == (Health.BLOCKED, critical)
    made.sql(f"INSERT INTO {TABLE} SELECT carrier, delay, origin, kafka_topic_id, 0, 5, 0 FROM {TABLE} WHERE kafka_offset = 4")
    made.validate("run1")
    assert health(made) == (Health.OK, None)
    made.batch("run3", 20, 30)
    made.sql(f"DELETE FROM {TABLE} WHERE kafka_offset = 25")
    assert health(made) == (Health.UNVALIDATED, None)
    taken = made.validate("run3").validation_id
    assert health(made) == (Health.BLOCKED, taken)
    made.sql("DELETE FROM tidemark.batch WHERE start_offset = 20")
    made.sql(f"DELETE FROM {TABLE} WHERE kafka_offset >= 20")
    made.move(20)
    assert health(made) == (Health.OK, None)


@pytest.mark.parametrize("publishes", [True, False])
def test_idle_run_skips_its_tasks_unless_one_has_something_to_do(
    database_url: str, tmp_path: Path, connection: Any, monkeypatch: pytest.MonkeyPatch, *, publishes: bool
) -> None:
    """A DAG without a task that announces is idle although nothing was ever announced."""
    made = Departures(database_url, tmp_path, connection)
    with DAG("own", schedule=None, start_date=datetime(2026, 1, 1, tzinfo=UTC)):
        consume = ConsumeOperator(task_id="consume", consumer="cities")
        consume >> (validate := ValidateOperator(task_id="judge", consumer="cities"))
        if publishes:
            validate >> PublishOperator(task_id="tell", assets=[Asset(TABLE)])
    monkeypatch.setattr("tidemark.airflow.connections.database_url", lambda _: database_url)
    spec: Any = SimpleNamespace(group=made.group, validation=None)
    context: Any = {"ti": SimpleNamespace(map_index=-1)}

    def skipped() -> list[str]:
        return consume._idle_tasks(context, spec, {"records": 0, "attempt_id": made.attempt("idle")})

    every = ["judge", "tell"] if publishes else ["judge"]
    assert skipped() == every
    made.batch("run1", 0, 10)
    assert skipped() == []
    made.validate("run1")
    assert skipped() == ([] if publishes else every)
    announced(database_url, unannounced(database_url, made.group, PUBLISHABLE).validation_ids)
    assert skipped() == every

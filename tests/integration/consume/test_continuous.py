"""Continuous runs read new records until the next run takes over, or until their time is up. Real Kafka and Postgres."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psycopg2.extensions
import pytest
from tests.support.kafka_topics import Topics
from tests.support.scenario import LocalEngine, Scenario
from tests.support.waiting import until

from tidemark.connections import BOOTSTRAP_SERVERS, DATABASE_URL, FILES, from_env
from tidemark.consume import extent, rewind_watch, run
from tidemark.driver import launch
from tidemark.errors import TidemarkError
from tidemark.kafka import groups
from tidemark.offsets import mirror
from tidemark.offsets.store import OffsetFenced, TaskIdentity
from tidemark.records.ranges import Slice
from tidemark.spec.user_transform import load_transform

HOUR = "1h"


class Running:
    """A run of a scenario's consumer, in a separate thread and with a separate engine."""

    def __init__(self, scenario: Scenario, task: TaskIdentity, before: Callable[[Slice], None]) -> None:
        self._scenario, self._before = scenario, before
        self.attempt_id = run.open_attempt(scenario.database_url, scenario.spec.group, task)
        self.error: TidemarkError | None = None
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        scenario, spec = self._scenario, self._scenario.spec
        transform = load_transform(spec, scenario.folders)

        def start(_records: int | None, _rehearsed: str | None) -> LocalEngine:
            return LocalEngine(spec, transform, scenario.connections, (), self._before)

        try:
            run.consume(spec, scenario.connections, self.attempt_id, start)
        except TidemarkError as error:
            self.error = error

    @property
    def alive(self) -> bool:
        return self.thread.is_alive()

    @property
    def progress(self) -> launch.Progress:
        return launch.progress(self._scenario.database_url, self.attempt_id)

    def ended(self, within_s: float = 180) -> launch.Progress:
        self.thread.join(within_s)
        assert not self.alive
        assert self.error is None, self.error
        return self.progress


@pytest.fixture
def begin(scenario: Scenario, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Running]]:
    """Starts the next run of the consumer's DAG. At the end of the test, it stops the runs that are still reading."""
    monkeypatch.setattr(extent, "LOOK_EVERY_S", 0.2)
    begun: list[Running] = []
    stop = threading.Event()
    over = extent.Continuous.over
    monkeypatch.setattr(extent.Continuous, "over", lambda self, *args, **named: stop.is_set() or over(self, *args, **named))

    def start(member: int = -1, before: Callable[[Slice], None] = lambda part: None) -> Running:
        begun.append(Running(scenario, TaskIdentity(f"consume__{scenario.name}", f"run {len(begun)}", "consume", member, 1), before))
        return begun[-1]

    def end() -> None:
        stop.set()
        for one in begun:
            one.thread.join(120)
            assert not one.alive

    start.end = end  # type: ignore[attr-defined]
    yield start
    end()


def loaded(scenario: Scenario) -> list[str]:
    return sorted(row.decode() for row in scenario.rows())


def test_reads_what_comes_until_its_time_is_up(scenario: Scenario, topics: Topics, begin, monkeypatch: pytest.MonkeyPatch) -> None:
    """No other run takes over: it ends by itself, and its attempt shows what it has read."""
    passed_s = 0
    monkeypatch.setattr(extent, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + passed_s))
    topic = topics.create(partitions=2)
    scenario.write(topics=topic, run="continuous", run_for=HOUR).make_sink()
    running = begin()
    for number in range(3):
        topics.produce(topic, [f"{number}{letter}" for letter in "abc"])
        until(lambda number=number: len(scenario.rows()) == 3 * (number + 1), f"what came {number}")  # type: ignore[misc]
    assert running.alive
    passed_s = 3600 + int(extent.HANDOVER_S)
    done = running.ended()
    assert loaded(scenario) == sorted(f"{number}{letter}" for number in range(3) for letter in "abc")
    assert (done.state, done.records) == ("COMMITTED", 9)
    assert {(part.start, part.end == part.planned_end) for part in done.partitions} == {(0, True)}
    scenario.check()


@pytest.mark.parametrize("members", [1, 2])
def test_next_run_takes_over_from_one_that_reads_on(scenario: Scenario, topics: Topics, begin, members: int) -> None:
    """The older runs succeed although their time is not up. Every record is loaded once while new records keep arriving."""
    topic = topics.create(partitions=4)
    scenario.write(topics=topic, run="continuous", run_for=HOUR, members=members).make_sink()
    seats = [-1] if members == 1 else list(range(members))
    old = [begin(seat) for seat in seats]
    topics.produce(topic, [str(number) for number in range(100)])
    until(lambda: len(scenario.rows()) == 100, "the first run reads")
    owners = "SELECT count(DISTINCT owner) FROM tidemark.partition_offset"
    until(lambda: scenario.sql(owners) == [(members,)], "each member has partitions")
    generation = scenario.sql("SELECT generation FROM tidemark.consumer_group WHERE name = %s", scenario.spec.group)
    new = [begin(seat) for seat in seats]
    produced = 100
    while any(one.alive for one in old):
        topics.produce(topic, [str(number) for number in range(produced, produced + 5)])
        produced += 5
    assert {one.ended().state for one in old} == {"COMMITTED"}
    topics.produce(topic, [str(produced)])
    until(lambda: len(scenario.rows()) == produced + 1, "the next run reads on")
    assert loaded(scenario) == sorted(str(number) for number in range(produced + 1))
    assert all(one.alive for one in new)
    assert sum(one.progress.records for one in new) > 0
    if members > 1:  # each seat was taken over without a rebalance
        assert scenario.sql("SELECT generation FROM tidemark.consumer_group WHERE name = %s", scenario.spec.group) == generation
    scenario.check()


def test_idle_run_learns_too_that_it_was_taken_over(scenario: Scenario, topics: Topics, begin) -> None:
    """An idle run commits nothing, so no commit can tell it that it was fenced."""
    scenario.write(topics=topics.create(), run="continuous", run_for=HOUR).make_sink()
    old = begin()
    until(lambda: scenario.sql("SELECT 1 FROM tidemark.partition_offset WHERE owner = %s", f"attempt {old.attempt_id}"), "claimed")
    begin()
    assert old.ended().records == 0


def test_partitions_and_topics_may_come_and_go(scenario: Scenario, topics: Topics, begin) -> None:
    """Those that match the pattern are read by the run that is there. A deleted topic does not keep the others from being read. A topic
    created again under its name is a new topic, which ``offset_reset`` must allow."""
    first = topics.create()
    scenario.write(topics=None, topic_pattern=f"{first}.*", run="continuous", run_for=HOUR, offset_reset="earliest").make_sink()
    running = begin()
    topics.produce(first, ["a"])
    until(lambda: loaded(scenario) == ["a"], "what is there")
    topics.grow(first, 2)
    topics.produce(first, ["b"], partition=1)
    second = topics.create(name=f"{first}-more")
    topics.produce(second, ["c"])
    until(lambda: loaded(scenario) == ["a", "b", "c"], "what is new")
    topics.delete(second)
    topics.produce(first, ["d"])
    until(lambda: loaded(scenario) == ["a", "b", "c", "d"], "the one that is there is read")
    topics.create(name=second)
    topics.produce(second, ["e"])
    until(lambda: loaded(scenario) == ["a", "b", "c", "d", "e"], "the new one is read")
    assert running.alive


def test_run_goes_on_from_where_a_rewind_has_put_it(scenario: Scenario, topics: Topics, begin) -> None:
    """The rewind changes the epoch and the position of its partition, but not the owner or the generation. A run gives up after several
    failed batches in a row; no batch has failed here, so the number of rewinds does not matter."""
    topic = topics.create()
    scenario.write(topics=topic, run="continuous", run_for=HOUR).make_sink()
    topics.produce(topic, ["a", "b"])
    running = begin()
    until(lambda: len(scenario.rows()) == 2, "read")
    scenario.sql(
        f"DELETE FROM {scenario.table}; DELETE FROM tidemark.batch; "
        "UPDATE tidemark.partition_offset SET owner_epoch = owner_epoch + 1, next_offset = 0"
    )
    until(lambda: loaded(scenario) == ["a", "b"], "read again")
    again = "SELECT 1 FROM tidemark.partition_offset WHERE owner_epoch > %s"
    for _ in range(5):
        ((epoch,),) = scenario.sql("UPDATE tidemark.partition_offset SET owner_epoch = owner_epoch + 1 RETURNING owner_epoch")
        until(lambda epoch=epoch: scenario.sql(again, epoch) or not running.alive, "claimed again")  # type: ignore[misc]
    topics.produce(topic, ["c"])
    until(lambda: loaded(scenario) == ["a", "b", "c"] or not running.alive, "read on")
    assert running.alive
    scenario.check()


def test_run_whose_partition_is_taken_at_each_try_gives_up(scenario: Scenario, topics: Topics) -> None:
    """Each try finds a raised epoch, while owner and generation stay the same, as after a rewind."""
    topic = topics.create()
    scenario.write(topics=topic).make_sink()
    topics.produce(topic, ["a"])
    tries = []

    def rewound(part: object) -> None:
        tries.append(part)
        scenario.sql("UPDATE tidemark.partition_offset SET owner_epoch = owner_epoch + 1")

    with pytest.raises(OffsetFenced):
        scenario.run(before=rewound)
    assert len(tries) == 3


@pytest.mark.sampled
@pytest.mark.parametrize("members", [1, 2])
def test_run_goes_on_with_a_password_that_changes_in_the_file(
    scenario: Scenario, topics: Topics, begin, tmp_path: Path, members: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a batch runs, the password changes for the role and in the file, and all sessions except the driver's end. The batch, which got
    the old password, is refused and retried. The listener for changes of the group reconnects."""
    monkeypatch.setattr(rewind_watch, "LOOK_EVERY_S", 1.0)
    topic = topics.create()
    scenario.write(topics=topic, run="continuous", run_for=HOUR, members=members).make_sink()
    role, file = f"r_{scenario.name}", tmp_path / "url"
    ours = psycopg2.extensions.parse_dsn(scenario.database_url)

    def use(password: str) -> None:
        scenario.sql(f"ALTER ROLE {role} PASSWORD '{password}'")
        file.write_text(f"postgresql://{role}:{password}@{ours['host']}:{ours['port']}/{ours['dbname']}")

    def rotate(_part: Slice) -> None:
        if scenario.rows() and "first" in file.read_text():
            use("second")
            sessions = "pg_stat_activity WHERE usename = %s AND application_name NOT LIKE 'tidemark driver%%'"
            scenario.sql(f"SELECT pg_terminate_backend(pid) FROM {sessions}", role)

    scenario.sql(f"CREATE ROLE {role} LOGIN SUPERUSER")
    try:
        use("first")
        scenario.connections = from_env({FILES[DATABASE_URL]: str(file), BOOTSTRAP_SERVERS: topics.servers})
        run = begin(0 if members > 1 else -1, rotate)
        topics.produce(topic, ["before"])
        until(lambda: loaded(scenario) == ["before"], "the old password is good")
        topics.produce(topic, ["after"])
        until(lambda: loaded(scenario) == ["after", "before"], "the new password is used")
        assert "second" in file.read_text()
        until(lambda: listening(scenario, role), "the run listens again")
        assert run.alive
        scenario.check()
    finally:
        begin.end()
        scenario.sql(f"DROP ROLE {role}")


def listening(scenario: Scenario, role: str) -> bool:
    return bool(scenario.sql("SELECT 1 FROM pg_stat_activity WHERE usename = %s AND application_name = 'tidemark listen'", role))


def test_mirror_follows_a_run_that_reads_on_and_a_rewind_that_it_reads_again(scenario: Scenario, topics: Topics, begin) -> None:
    """The rewind publishes the positions that it set, the run publishes its progress after that, and the next run publishes the positions
    that it took over."""
    topic, go_on = topics.create(partitions=2), threading.Event()
    go_on.set()
    scenario.write(topics=topic, run="continuous", run_for=HOUR, mirror=True).make_sink()
    running = begin(before=lambda _: go_on.wait(120))
    for number, partition in enumerate((0, 1, 0)):
        topics.produce(topic, ["a", "b"], partition=partition)
        until(lambda number=number: len(scenario.rows()) == 2 * (number + 1), f"what came {number}")  # type: ignore[misc]
        until(lambda: scenario.mirrored() == scenario.positions(), "the mirror")
    go_on.clear()
    where = ("--to-offset", "1", "--topic", f"{topic}:0", "--reason", "a test of mirrors")
    assert scenario.command("rewind", "plan", scenario.name, *where).returncode == 0
    assert scenario.command("rewind", "apply", "1").returncode == 0
    assert scenario.mirrored() == {(topic, 0): 1, (topic, 1): 2}
    go_on.set()
    until(lambda: len(scenario.rows()) == 6, "read again")
    until(lambda: scenario.mirrored() == scenario.positions() == {(topic, 0): 4, (topic, 1): 2}, "the mirror after the rewind")
    assert running.alive
    new = begin()
    running.ended()
    topics.produce(topic, ["c"])
    until(lambda: scenario.mirrored() == scenario.positions() == {(topic, 0): 5, (topic, 1): 2}, "the mirror of the next run")
    assert new.alive


def test_member_that_lost_a_partition_moves_the_mirror_back_for_a_moment_only(
    scenario: Scenario, topics: Topics, begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last request reaches Kafka late, after another member has read further. No more records arrive, and no run ends."""
    monkeypatch.setattr(mirror, "RENEW_S", 1.0)
    late, delivered = threading.Event(), threading.Event()
    send, held = groups.commit, []

    def commit(*asked: Any) -> Any:
        if held or threading.current_thread() is not first.thread or sum(asked[2].values()) < 8:
            return send(*asked)
        held.append(asked)
        answer: Future[Any] = Future()

        def deliver() -> None:
            assert late.wait(120)
            sent = send(*asked)
            sent.wait()
            answer.set_result(sent.answer.result())
            delivered.set()

        threading.Thread(target=deliver).start()
        return groups.Commit(asked[1], dict(asked[2]), asked[0].servers, asked[0].admin(), answer)

    def produce_two() -> None:
        for partition in range(4):
            topics.produce(topic, ["a", "b"], partition=partition)

    topic = topics.create(partitions=4)
    scenario.write(topics=topic, run="continuous", run_for=HOUR, members=2, mirror=True).make_sink()
    first = begin(0)
    monkeypatch.setattr(groups, "commit", commit)
    produce_two()
    until(lambda: held, "the first member has sent where all four partitions are")
    owners = "SELECT partition FROM tidemark.partition_offset WHERE owner <> %s"
    (before,) = {owner for (owner,) in scenario.sql("SELECT owner FROM tidemark.partition_offset")}
    second = begin(1)
    until(lambda: len(scenario.sql(owners, before)) == 2, "the second member has its partitions")
    taken = [partition for (partition,) in scenario.sql(owners, before)]
    produce_two()
    until(lambda: len(scenario.rows()) == 16, "both read")
    until(lambda: all(scenario.mirrored().get((topic, partition)) == 4 for partition in taken), "the second member's mirror")
    late.set()
    assert delivered.wait(60)
    until(lambda: scenario.mirrored() == scenario.positions() == {(topic, partition): 4 for partition in range(4)}, "the mirror", 60)
    assert (first.alive, second.alive) == (True, True)
    scenario.check()

"""Backfills: records that a forward rewind skipped are loaded later into the same sink, exactly once, whatever happens meanwhile."""

from __future__ import annotations

import contextlib
import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from psycopg2.extensions import cursor as PostgresCursor
from tests.integration.rewind.lab import Hanging, Lab, of_all_kinds, role_on
from tests.support.deaths import commits_on
from tests.support.erasing import erase
from tests.support.kafka_topics import Topics
from tests.support.ledger import in_thread, payloads
from tests.support.machines import run_machine
from tests.support.scenario import Scenario as Consumer
from tests.support.shell import tidemark
from tests.support.waiting import until

from tidemark.consume import run
from tidemark.db import session, transaction
from tidemark.driver import launch
from tidemark.errors import BadInput
from tidemark.group.coordinator import Coordinator, list_groups
from tidemark.offsets import store
from tidemark.offsets.reset import OffsetOutOfRange
from tidemark.offsets.store import OffsetFenced, TaskIdentity
from tidemark.profiles import Profile
from tidemark.records.ranges import Slice, TopicPartition
from tidemark.rewind import backfill
from tidemark.rewind.backfill import Backfill, SkippedTopicRecreated
from tidemark.rewind.plan import PlanRefused
from tidemark.rewind.plan_model import FromFile, Plan, ToCurrent, ToOffset, Undo
from tidemark.sink.commit import Receipt, commit_slice
from tidemark.sink.target import Target

OLD, NEW, END = 30, 70, 90
"""The rewind skips the offsets from `OLD` to `NEW`; the group then reads up to `END`."""

TRANSFORM = """
    from typing import TypedDict

    from tidemark.transform import Fail, Record, Retry


    class Row(TypedDict):
        city: str
        population: int


    def transform(record: Record) -> list[Row]:
        kind = record.offset % 10
        if kind == 1:
            raise Retry(str(record.offset))
        if kind == 2:
            raise Fail(str(record.offset))
        return [Row(city=f"city {record.offset}", population=record.offset)] * (0 if kind == 0 else 3 if kind == 4 else 1)
"""
"""The same outcomes as those of `of_all_kinds`."""


class FillLab(Lab):
    """A group whose skipped ranges are loaded by hand, or by the run loop with an engine in this process."""

    def skip(self, to: int = NEW, *scope: str) -> Plan:
        return self.rewind(ToOffset(to), *(scope or (f"{self.topic}:0",)), backfill=True)

    def backfill(self, rewind_id: int) -> Backfill:
        with self.watch.cursor() as cur:
            return backfill.find(cur, self.spec.group, rewind_id)

    def left(self, rewind_id: int) -> int:
        return self.backfill(rewind_id).left

    def slice_back(self, rewind_id: int, records: int, partition: int = 0) -> Slice:
        """Claims the partition for the backfill, and returns the next slice of up to ``records`` offsets."""
        one = self.backfill(rewind_id)
        (part,) = (part for part in one.parts if part.partition.partition == partition)
        with session(self.url) as connection, transaction(connection) as cur:
            claim = store.claim(cur, one.side_id, part.topic_id, part.partition, store.Owner(store.next_generation(cur), "me"))
        return Slice(part.partition, part.topic_id, claim.position, min(part.end, claim.position + records), claim.epoch)

    def target_back(self, rewind_id: int) -> Target:
        return replace(self.target(), side_id=self.backfill(rewind_id).side_id)

    def fill(self, rewind_id: int, records: int = 1000, partition: int = 0) -> Receipt:
        part = self.slice_back(rewind_id, records, partition)
        return commit_slice(self.target_back(rewind_id), part, of_all_kinds(part), payloads)

    def run_back(self, rewind_id: int, before: Callable[[Slice], None] = lambda part: None) -> launch.Progress:
        """Runs the backfill as `tidemark backfill` does."""
        return self.consumer.run(before=before, of_rewind=rewind_id)

    def audit(self) -> list[Any]:
        """Adds the backfills, and the positions of side groups."""
        tables = ("backfill", "backfill_cut", "consumer_group")
        kept = [sorted(str(row[0]) for row in self.sql(f"SELECT to_jsonb(t) FROM tidemark.{table} t")) for table in tables]
        places = "SELECT topic_id, partition, next_offset, owner_epoch FROM tidemark.partition_offset WHERE group_id <> %s ORDER BY 1, 2, 3"
        return [*super().audit(), *kept, self.sql(places, self.group_id)]

    def check_once(self, end: int) -> None:
        """Checks that each record of partition 0 below ``end`` was read once and has exactly its rows."""
        self.check()
        rows = [offset for offset in range(end) for _ in range(3 if offset % 10 == 4 and not self.key else 1) if offset % 10 > 2]
        found = f"SELECT kafka_offset FROM {self.table} WHERE kafka_partition = 0 ORDER BY kafka_offset, kafka_seq"
        assert [offset for (offset,) in self.sql(found)] == rows
        failed = "SELECT record_offset FROM tidemark.failed_record WHERE group_id = %s AND partition = 0 ORDER BY 1"
        assert [offset for (offset,) in self.sql(failed, self.group_id)] == [o for o in range(end) if o % 10 in (1, 2)]
        assert self.sql("SELECT 1 FROM tidemark.lost_range WHERE group_id = %s AND partition = 0", self.group_id) == []


@pytest.fixture(params=[(), ("city",)], ids=["append", "upsert"])
def lab(request: pytest.FixtureRequest, scenario: Consumer, topics: Topics) -> Iterator[FillLab]:
    """Two partitions of 100 records, of which the first has been read up to `OLD`. Both kinds of sinks."""
    with made(scenario, topics, key=request.param) as lab:
        yield lab


@pytest.fixture
def plain(scenario: Consumer, topics: Topics) -> Iterator[FillLab]:
    """The same, with an append sink only."""
    with made(scenario, topics) as lab:
        yield lab


@contextlib.contextmanager
def made(scenario: Consumer, topics: Topics, **options: Any) -> Iterator[FillLab]:
    topic = topics.create(2)
    for partition in (0, 1):
        topics.produce(topic, [f"{number}".encode() for number in range(100)], partition=partition)
    ddl = "city text NOT NULL, population bigint, UNIQUE (city)" if options.get("key") else None
    with contextlib.closing(FillLab(scenario, topic, ddl=ddl, **options)) as lab:
        scenario.transform(TRANSFORM)
        lab.read(OLD, step=20)
        yield lab


def test_what_a_backfill_cannot_load_climbs_the_ladder_of_the_group(plain: FillLab) -> None:
    plain.consumer.write(topics=plain.topic, sink={"table": plain.table}, retry={"delays": ["5m"]})
    plain.consumer.transform(TRANSFORM)
    skipped = plain.skip().rewind_id
    plain.run_back(skipped)
    found = plain.sql("SELECT DISTINCT state, retry_topic FROM tidemark.failed_record WHERE record_offset >= %s ORDER BY state", OLD)
    assert found == [("FAILED", f"{plain.spec.group}.failed"), ("WAITING", f"{plain.spec.group}.retry.5m")]
    plain.check()


@pytest.mark.sampled
def test_backfill_does_not_bring_erased_rows_back(lab: FillLab) -> None:
    """The erased rows are from the skipped range and from before it."""
    lab.rewind(ToOffset(0), f"{lab.topic}:0")
    lab.read(END)
    erase(lab, "city IN ('city 5', 'city 33')")
    lab.rewind(ToOffset(OLD), f"{lab.topic}:0")
    skipped = lab.skip().rewind_id
    lab.fill(skipped)
    lab.read(END)
    assert not {5, 33} & set(lab.offsets())
    assert {35, 36, 75} <= set(lab.offsets())
    lab.check()


@pytest.mark.sampled
def test_the_groups_own_run_and_the_backfills_do_not_meet(lab: FillLab) -> None:
    """The run loop reads exactly the skipped range, in one attempt of the group, and does not change the group's position or epoch."""
    skipped = lab.skip().rewind_id
    epochs = lab.epochs()
    done = lab.run_back(skipped)
    assert [(part.partition, part.start, part.end) for part in done.partitions] == [(0, OLD, NEW)]
    assert (done.state, lab.positions(), lab.epochs()) == ("COMMITTED", [NEW, 0], epochs)
    lab.check_once(NEW)
    again = lab.run_back(skipped)
    assert (again.state, again.records) == ("COMMITTED", 0)


def test_what_is_left_is_read_with_the_plan_and_what_skips_nothing_has_no_backfill(plain: FillLab) -> None:
    """A rewind that skips nothing has nothing to backfill, and neither has an undo. `tests/unit/rewind/test_show.py` has the words."""
    for scenario in (ToOffset(OLD - 1), ToCurrent()):
        with pytest.raises(PlanRefused, match="skips nothing"):
            plain.plan(scenario, f"{plain.topic}:0", backfill=True)
    skipped = plain.skip().rewind_id
    with pytest.raises(PlanRefused, match="skips nothing"):
        plain.plan(Undo(skipped), backfill=True)
    for records, left in ((15, 25), (1000, 0)):
        plain.fill(skipped, records)
        (part,) = plain.apply(skipped).plan.groups[0].partitions
        assert (part.skip, part.backfill_left) == (40, left)


def test_a_side_group_is_nobodys_group(plain: FillLab) -> None:
    """It is not listed, and no rewind moves it."""
    skipped = plain.skip().rewind_id
    with plain.session() as connection:
        assert [one.group for one in list_groups(connection)] == [plain.spec.group]
    side = plain.backfill(skipped).side
    assert side == f"{plain.spec.group} (backfill of rewind {skipped})"
    assert len(plain.plan(ToOffset(10), f"{plain.topic}:0").groups[0].partitions) == 1
    with pytest.raises(BadInput, match=f"rewind {skipped + 77} left no backfill"):
        run.open_attempt(plain.url, plain.spec.group, TaskIdentity(), of_rewind=skipped + 77)


# ---- rewinds during a backfill


@pytest.mark.sampled("lab", "done")
@pytest.mark.parametrize("done", [0, 20], ids=["not begun", "half done"])
@pytest.mark.parametrize("target", [10, OLD, 40, 60, 80])
def test_a_rewind_of_the_group_leaves_each_record_to_one_of_both(lab: FillLab, target: int, done: int) -> None:
    """The group reads again from the rewind's target, and the backfill keeps only the offsets before it. An undo restores everything."""
    skipped = lab.skip().rewind_id
    lab.read(END)
    if done:
        lab.fill(skipped, done)
    before, left = lab.image(), lab.left(skipped)
    back = lab.rewind(ToOffset(target), f"{lab.topic}:0").rewind_id
    lab.check()
    assert lab.left(skipped) == max(0, min(NEW, target) - OLD - done)
    assert lab.undo(back).undo_of == back
    assert (lab.image(), lab.left(skipped)) == (before, left)

    lab.rewind(ToOffset(target), f"{lab.topic}:0")
    lab.read(target + 5)
    lab.check()
    lab.run_back(skipped)
    assert lab.left(skipped) == 0
    lab.check()
    lab.read(END)
    lab.check_once(END)


def test_a_backfill_of_a_group_that_is_deleted_commits_no_more(plain: FillLab) -> None:
    plain.read(20)
    made = plain.skip()
    part, target = plain.slice_back(made.rewind_id, 10), plain.target_back(made.rewind_id)
    with plain.session() as connection:
        Coordinator(connection, plain.spec.group).delete_group()
    with pytest.raises(OffsetFenced):
        commit_slice(target, part, of_all_kinds(part), payloads)


# ---- concurrent commits and runs


@pytest.mark.sampled
@pytest.mark.parametrize("target", [10, 60])
def test_a_rewind_waits_for_a_commit_of_the_backfill_and_fences_the_next(plain: FillLab, target: int) -> None:
    """The slice in flight is stored, and the part that the group reads itself is removed. The next slice of that claim stores nothing."""
    skipped = plain.skip().rewind_id
    plain.read(END)
    held = Hanging(plain.slice_back(skipped, 35))
    planned = plain.plan(ToOffset(target), f"{plain.topic}:0")
    target_back = plain.target_back(skipped)
    with in_thread(lambda: commit_slice(target_back, held.part, held.judged(), payloads)) as filling:
        assert held.stands.wait(60)
        with in_thread(lambda: plain.apply(planned.rewind_id)) as rewinding:
            until(plain.waits)
            held.go.set()
            assert filling.result(180).counts.loaded > 0
            rewinding.result(180)
    plain.check()
    late = Slice(held.part.partition, held.part.topic_id, 65, NEW, held.part.epoch)
    with pytest.raises(OffsetFenced):
        commit_slice(plain.target_back(skipped), late, of_all_kinds(late), payloads)
    plain.read(END)
    plain.check_once(END)


@pytest.mark.sampled
@pytest.mark.parametrize("target", [10, 60, 80])
def test_a_run_that_a_rewind_has_fenced_goes_on_up_to_what_is_left(plain: FillLab, target: int) -> None:
    """It reads in batches of 10, and the group is rewound before the second one is read."""
    plain.consumer.set(batch={"max_records": 10})
    skipped = plain.skip().rewind_id
    plain.read(END)
    rewound = []

    def strike(part: Slice) -> None:
        if part.start == OLD + 10 and not rewound:
            rewound.append(plain.rewind(ToOffset(target), f"{plain.topic}:0"))

    done = plain.run_back(skipped, strike)
    assert (rewound != [], done.state, plain.left(skipped)) == (True, "COMMITTED", 0)
    plain.check()
    plain.read(END)
    plain.check_once(END)


def test_of_two_backfills_at_once_the_later_one_reads(plain: FillLab) -> None:
    """The earlier one stores nothing more, and ends as fenced."""
    plain.consumer.set(batch={"max_records": 10})
    skipped = plain.skip().rewind_id
    stands, go = threading.Event(), threading.Event()

    def hold(part: Slice) -> None:
        if part.start == OLD + 10:
            stands.set()
            assert go.wait(60)

    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(plain.run_back, skipped, hold)
        assert stands.wait(60)
        assert plain.run_back(skipped).records == 30
        go.set()
        with pytest.raises(OffsetFenced):
            first.result(180)
    plain.check_once(NEW)


def test_a_paused_consumer_is_not_backfilled_either(plain: FillLab) -> None:
    from tidemark.offsets import flow

    skipped = plain.skip().rewind_id
    with plain.watch.cursor() as cur:
        flow.pause(cur, plain.group_id, [flow.FlowTarget()], "a look at the sink")
    assert plain.run_back(skipped).records == 0
    with plain.watch.cursor() as cur:
        flow.resume(cur, plain.group_id, [flow.FlowTarget()])
    plain.run_back(skipped)
    plain.check_once(NEW)


# ---- gone from Kafka


def test_what_retention_has_taken_of_the_rest_is_lost_for_good(plain: FillLab) -> None:
    """It is refused or stored as lost, as the consumer's file says for all records. `latest` skips only the missing records. A rest that is
    gone altogether is done with."""
    skipped = plain.skip().rewind_id
    plain.read(END)
    plain.fill(skipped, 10)
    plain.consumer.topics.trim(plain.topic, {0: 55})
    before = plain.image()
    with pytest.raises(OffsetOutOfRange, match="records 40 to 54 are gone"):
        plain.run_back(skipped)
    assert plain.image() == before
    plain.consumer.set(offset_reset="latest")
    done = plain.run_back(skipped)
    assert [(lost.start, lost.end, lost.reason) for lost in done.lost] == [(40, 55, "retention")]
    assert plain.consumer.lost() == [(0, 40, 55, "retention")]
    assert (plain.left(skipped), plain.offsets()[-1]) == (0, END - 1)
    plain.check()
    plain.consumer.set(offset_reset="earliest")
    again = plain.skip(95).rewind_id
    plain.consumer.topics.trim(plain.topic, {0: 97})
    plain.run_back(again)
    assert (plain.consumer.lost(), plain.left(again)) == ([(0, 40, 55, "retention"), (0, END, 95, "retention")], 0)
    plain.check()


def test_a_topic_that_was_created_again_is_refused(plain: FillLab) -> None:
    """Its offsets belong to other records."""
    skipped = plain.skip().rewind_id
    plain.consumer.set(offset_reset="earliest")
    plain.consumer.topics.recreate(plain.topic, 2)
    plain.consumer.topics.produce(plain.topic, ["other"] * 100)
    before = plain.image()
    with pytest.raises(SkippedTopicRecreated, match="stays stored as lost"):
        plain.run_back(skipped)
    assert plain.image() == before


# ---- deaths


@pytest.mark.sampled
def test_a_backfill_that_dies_between_any_two_statements_has_stored_nothing(lab: FillLab) -> None:
    """Position, lost range, ledger and rows are unchanged, and the next backfill reads the same records."""
    skipped = lab.skip().rewind_id
    lab.read(END)
    lab.fill(skipped, 10)
    target, part = lab.target_back(skipped), lab.slice_back(skipped, 15)

    def act(cursor: type[PostgresCursor]) -> None:
        with commits_on(cursor):
            commit_slice(target, part, of_all_kinds(part), payloads)

    assert lab.struck(act) >= 1
    assert commit_slice(target, part, of_all_kinds(part), payloads).twin
    assert lab.left(skipped) == 15
    lab.run_back(skipped)
    lab.check_once(END)


def test_a_commit_whose_answer_was_lost_is_found_in_the_groups_ledger(plain: FillLab) -> None:
    """The position belongs to the side group and the ledger to the group; both are checked."""
    skipped = plain.skip().rewind_id
    part = plain.slice_back(skipped, 15)
    target = plain.target_back(skipped)
    counts = commit_slice(target, part, of_all_kinds(part), payloads).counts
    with plain.watch.cursor() as cur:
        assert store.committed(cur, target.position_of, part, ledger=target.group_id) == counts
        assert store.committed(cur, target.position_of, replace(part, end=part.end + 1), ledger=target.group_id) is None


def test_a_role_with_the_documented_grants_backfills(plain: FillLab) -> None:
    skipped = plain.skip().rewind_id
    with role_on(plain, Profile.RUNNER, "docs/deployment/index.md") as url:
        for records in (10, 100):
            part = plain.slice_back(skipped, records)
            commit_slice(replace(plain.target_back(skipped), database_url=url), part, of_all_kinds(part), payloads)
    plain.check_once(NEW)


# ---- in any order

LOST, READ = "lost", "read"


@dataclass
class Step:
    """An applied rewind: by partition, the position before it, the offset from which it removed, and what it removed."""

    rewind_id: int
    before: dict[int, tuple[int, int, dict[int, str]]]
    undo_of: int | None = None


class Backfills(RuleBasedStateMachine):
    """Each offset below a partition's position is in exactly one state: read, lost, or skipped by a rewind and still to be backfilled. The
    model does not know where a backfill ends, or to whose batch an offset belongs."""

    make: Any = None

    @initialize(ends=st.lists(st.integers(5, 30), min_size=2, max_size=2))
    def start(self, ends: list[int]) -> None:
        self.stack = contextlib.ExitStack()
        self.lab: FillLab = self.stack.enter_context(contextlib.closing(type(self).make()))
        self.positions = [0, 0]
        self.offsets: list[dict[int, str]] = [{}, {}]
        self.steps: list[Step] = []
        for partition, end in enumerate(ends):
            self.read(partition, end)

    def teardown(self) -> None:
        """Finally, completes all backfills and reads to the end of the log."""
        if not hasattr(self, "stack"):
            return
        with self.stack:
            for partition, rewind_id in self.waiting():
                self.fill(partition, rewind_id, 100)
            for partition in (0, 1):
                self.read(partition, 100)
            self.everything_is_as_it_should_be()
            assert {name for of_one in self.offsets for name in of_one.values()} <= {LOST, READ}

    @rule(partition=st.integers(0, 1), records=st.integers(1, 30))
    def read(self, partition: int, records: int) -> None:
        end = min(100, self.positions[partition] + records)
        self.lab.read(end, partition, step=17)
        self.offsets[partition] |= dict.fromkeys(range(self.positions[partition], end), READ)
        self.positions[partition] = end

    @rule(
        moves=st.dictionaries(st.integers(0, 1), st.integers(-40, 40).filter(bool), min_size=1),
        backfill=st.sampled_from([True, True, False]),
    )
    def rewind(self, moves: dict[int, int], backfill: bool) -> None:
        targets = {number: max(0, min(100, self.positions[number] + move)) for number, move in sorted(moves.items())}
        forward = any(target > self.positions[number] for number, target in targets.items())
        file = FromFile({TopicPartition(self.lab.topic, number): target for number, target in targets.items()})
        done = Step(self.lab.rewind(file, backfill=backfill and forward).rewind_id, {})
        for number, target in targets.items():
            self.take(done, number, min(target, self.positions[number]))
            skipped = range(self.positions[number], target)
            self.offsets[number] |= dict.fromkeys(skipped, str(done.rewind_id) if backfill else LOST)
            self.positions[number] = target
        self.steps.append(done)

    @rule(moves=st.dictionaries(st.integers(0, 1), st.integers(1, 40), min_size=1), filled=st.integers(0, 25))
    def rewind_beside(self, moves: dict[int, int], filled: int) -> None:
        """``filled``: the records of a backfill that are read before the swap."""
        targets = {number: self.positions[number] - move for number, move in moves.items() if move <= self.positions[number]}
        if not targets:
            return
        file = FromFile({TopicPartition(self.lab.topic, number): target for number, target in targets.items()})
        done = Step(self.lab.rewind(file, beside=True).rewind_id, {})
        if filled and (waiting := self.waiting()):
            self.fill(*waiting[0], filled)
        self.lab.replay(done.rewind_id)
        self.lab.swap(done.rewind_id)
        for number, target in targets.items():
            self.take(done, number, target)
            self.offsets[number] |= dict.fromkeys(range(target, self.positions[number]), READ)
        self.steps.append(done)

    @precondition(lambda self: self.steps)
    @rule(which=st.integers(1, 3))
    def undo(self, which: int) -> None:
        """Undoes the newest rewind, or an earlier one unless that is refused."""
        one = self.steps[-min(which, len(self.steps))]
        try:
            done = Step(self.lab.undo(one.rewind_id).rewind_id, {}, one.rewind_id)
        except PlanRefused:
            assert one is not self.steps[-1]
            return
        for number, (position, start, taken) in one.before.items():
            self.take(done, number, start)
            self.offsets[number] |= taken
            self.positions[number] = position
        self.steps.append(done)

    @precondition(lambda self: self.waiting())
    @rule(data=st.data(), records=st.integers(1, 25))
    def fill_some(self, data: Any, records: int) -> None:
        self.fill(*data.draw(st.sampled_from(self.waiting())), records)

    @invariant()
    def everything_is_as_it_should_be(self) -> None:
        self.lab.check()
        assert self.lab.positions() == self.positions
        for number, of_one in enumerate(self.offsets):
            assert sorted(of_one) == list(range(self.positions[number]))
            read = [offset for offset, name in sorted(of_one.items()) if name == READ]
            assert self.lab.offsets(number) == [offset for offset in read if offset % 10 > 2]
            lost = "SELECT start_offset, end_offset FROM tidemark.lost_range WHERE group_id = %s AND partition = %s"
            spans = self.lab.sql(lost, self.lab.group_id, number)
            found = sorted(offset for start, end in spans for offset in range(start, end))
            assert found == [offset for offset, name in sorted(of_one.items()) if name != READ]
        with self.lab.watch.cursor() as cur:
            left = {str(one.rewind_id): one.left for one in backfill.backfills(cur, self.lab.spec.group) if one.left}
        assert left == Counter(name for of_one in self.offsets for name in of_one.values() if name not in (LOST, READ))

    @precondition(lambda self: self.waiting())
    @rule(data=st.data(), records=st.integers(1, 25), beside=st.booleans(), again=st.booleans())
    def go_back_into_a_backfill_and_undo_it(self, data: Any, records: int, beside: bool, again: bool) -> None:
        """Backfills a piece in between. ``again``: also undoes the undo, with another piece before it."""
        number, name = data.draw(st.sampled_from(self.waiting()))
        offset = data.draw(st.sampled_from(sorted(offset for offset, whose in self.offsets[number].items() if whose == name)))
        if offset == self.positions[number]:
            return
        if beside:
            self.rewind_beside({number: self.positions[number] - offset}, 0)
        else:
            self.rewind({number: offset - self.positions[number]}, False)
        for _ in range(2 if again else 1):
            if (number, name) in self.waiting():
                self.fill(number, name, records)
            self.undo(1)
            self.everything_is_as_it_should_be()

    def waiting(self) -> list[tuple[int, str]]:
        """Returns the partitions and rewinds with skipped offsets that are still to be backfilled."""
        return sorted(
            {(number, name) for number, of_one in enumerate(self.offsets) for name in of_one.values() if name not in (LOST, READ)}
        )

    def take(self, done: Step, number: int, start: int) -> None:
        taken = {offset: name for offset, name in self.offsets[number].items() if offset >= start}
        done.before[number] = (self.positions[number], start, taken)
        self.offsets[number] = {offset: name for offset, name in self.offsets[number].items() if offset < start}

    def fill(self, partition: int, rewind_id: str, records: int) -> None:
        waiting = sorted(offset for offset, name in self.offsets[partition].items() if name == rewind_id)[:records]
        self.lab.fill(int(rewind_id), records, partition)
        self.offsets[partition] |= dict.fromkeys(waiting, READ)


def test_swap_ends_a_backfill_whose_range_its_replay_has_read(lab: FillLab) -> None:
    """An undo of the swap gives the range back to the backfill."""
    skipped = lab.skip().rewind_id
    lab.read(END)
    lab.fill(skipped, 10)
    rewind_id = lab.rewind(ToOffset(OLD - 5), f"{lab.topic}:0", beside=True).rewind_id
    lab.fill(skipped, 10)
    lab.replay(rewind_id)
    lab.swap(rewind_id)
    assert lab.left(skipped) == 0
    lab.check_once(END)
    lab.undo(rewind_id)
    assert lab.left(skipped) == NEW - OLD - 20
    lab.fill(skipped)
    lab.check_once(END)


def test_rewinds_undos_and_backfills_in_any_order_read_each_record_once(database_url: str, topics: Topics, project_dir: Path) -> None:
    """After every step, each record is read once, lost, or waiting for its backfill. In the end, none is waiting."""
    topic = topics.create(2)
    for partition in (0, 1):
        topics.produce(topic, ["x"] * 100, partition=partition)
    make = staticmethod(lambda: FillLab(Consumer(project_dir, database_url, topics), topic))
    run_machine(Backfills, database_url, number=8, steps=12, make=make)


# ---- the command


STAGED = """
    from pyspark.sql import DataFrame


    def transform(records: DataFrame) -> DataFrame:
        lineage = ["kafka_topic", "kafka_partition", "kafka_offset"]
        return records.selectExpr(*lineage, "concat('city ', offset) AS city", "offset AS population").repartition(3, "city")
"""
"""The shuffle mixes rows of several slices, so the batch is staged and committed as a whole."""


def test_the_command_reads_what_is_left_with_spark_and_says_so(plain: FillLab) -> None:
    """A separate driver, two partitions and a staged batch. Afterwards nothing is left to backfill."""
    consumer = plain.consumer
    consumer.transform(STAGED)
    told = tidemark(consumer, "rewind", "plan", plain.spec.name, "--to-offset", "70", "--backfill", "--reason", "the queue is too long")
    assert "110 skipped, to be read by the backfill" in " ".join(told.stdout.split()), told.stderr
    plain.apply(1)
    shown = tidemark(consumer, "offsets", plain.spec.name)
    assert "of 110 offsets that rewind 1 skipped, 110 are left to backfill" in shown.stdout
    done = consumer.command("backfill", plain.spec.name, "--output", "json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    (one,) = result["backfills"]
    assert (result["group"], one["rewind_id"], one["records"], one["loaded"], one["left"]) == (plain.spec.group, 1, 110, 110, 0)
    plain.check()
    assert plain.offsets()[-40:] == list(range(OLD, NEW))
    assert plain.offsets(1) == list(range(NEW))
    batches = plain.sql("SELECT count(*), count(DISTINCT xmin::text) FROM tidemark.batch WHERE attempt_id = %s", one["attempt"])
    assert batches == [(2, 1)]  # both partitions in one transaction
    refused = tidemark(consumer, "backfill", plain.spec.name, "2")
    assert (refused.returncode, "left no backfill" in refused.stderr) == (1, True)

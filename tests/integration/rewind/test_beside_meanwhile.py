"""What happens to a rewind beside while its replay waits: other rewinds, retries, erasures, deleted groups and topics, deaths."""

from __future__ import annotations

import contextlib
import functools
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from psycopg2.extensions import STATUS_IN_TRANSACTION
from tests.integration.retry.lab import Lab as RetryLab
from tests.integration.rewind.hands import Hands
from tests.integration.rewind.lab import Hanging, Lab, lab_on, of_all_kinds
from tests.support.by_hand import REASON
from tests.support.erasing import erase
from tests.support.kafka_topics import Topics
from tests.support.ledger import in_thread, payloads
from tests.support.records import numbers
from tests.support.scenario import Scenario as Consumer
from tests.support.waiting import until

from tidemark import quality
from tidemark.db import transaction
from tidemark.errors import BadInput, DatabaseUnavailable, TidemarkError
from tidemark.offsets import flow
from tidemark.offsets.flow import FlowTarget
from tidemark.offsets.store import ClaimRefused, OffsetFenced
from tidemark.quality import ValidationReport, Verdict, validated_view_ddl
from tidemark.records.ranges import Slice
from tidemark.rewind import apply as applying
from tidemark.rewind import beside
from tidemark.rewind.apply import NotCaughtUp, StalePlan
from tidemark.rewind.beside import ReplayTopicRecreated
from tidemark.rewind.plan import PlanRefused, PlanRequest, plan
from tidemark.rewind.plan_model import RewindState, ToEarliest, ToLatest, ToOffset
from tidemark.rewind.store import AlreadyDecided
from tidemark.sink import commit as committing
from tidemark.sink.commit import commit_slice
from tidemark.sink.steps import Step
from tidemark.sink.table import Column
from tidemark.spec.scope import Scope


@pytest.fixture(params=[pytest.param("append", marks=pytest.mark.thorough), "upsert"])
def lab(request: pytest.FixtureRequest, scenario: Consumer, topics: Topics) -> Iterator[Lab]:
    options: dict[str, Any] = {} if request.param == "append" else {"key": ("city",)}
    with lab_on(scenario, topics, (100, 100), **options) as lab:
        yield lab


append_only = pytest.mark.parametrize("lab", ["append"], indirect=True)
upsert_only = pytest.mark.parametrize("lab", ["upsert"], indirect=True)


def cities(lab: Lab, word: str) -> Callable[[Slice], Iterator[Any]]:
    """Keys that repeat in an upsert sink."""
    number = (lambda offset: offset % 11) if lab.key else (lambda offset: offset)
    return lambda part: of_all_kinds(part, lambda offset: [f"{word} {part.partition.partition} {number(offset)}"])


def read(lab: Lab, *ends: int, word: str = "city") -> None:
    for partition, end in enumerate(ends):
        target = lab.target()
        while (position := lab.position(partition)) < end:
            piece = lab.slice(min(end, position + 13), partition)
            commit_slice(target, piece, cities(lab, word)(piece), payloads)


def begun(lab: Lab, target: int = 20, *scope: str, word: str = "city", **options: Any) -> int:
    rewind_id = lab.rewind(ToOffset(target), *scope, beside=True, **options).rewind_id
    lab.replay(rewind_id, cities(lab, word), step=9)
    return rewind_id


def discard(lab: Lab | Hands, rewind_id: int) -> None:
    with lab.session() as connection:
        assert beside.discard(connection, rewind_id, by="ann").state is RewindState.DISCARDED


# ---- other rewinds


@pytest.mark.parametrize("scenario_of_other", [ToOffset(5), ToLatest()], ids=["back", "forward"])
def test_other_rewind_makes_the_swap_stale_and_the_replay_is_discarded(lab: Lab, scenario_of_other: Any) -> None:
    read(lab, 50, 50)
    rewind_id = begun(lab)
    other = lab.rewind(scenario_of_other, f"{lab.topic}:0").rewind_id
    with lab.unchanged(StalePlan, rf"(?s)has been rewound since.*tidemark rewind discard {rewind_id}, and plan again"):
        lab.swap(rewind_id)
    lab.undo(other)
    with lab.unchanged(StalePlan, "has been rewound since"):
        lab.swap(rewind_id)
    before = lab.image()
    discard(lab, rewind_id)
    assert lab.image() == before
    lab.check()


@pytest.mark.thorough
def test_swaps_on_top_of_each_other_and_of_a_rewind_are_undone_one_after_the_other(lab: Lab) -> None:
    read(lab, 60, 60)
    images, done = [lab.image()], [lab.rewind(ToOffset(30)).rewind_id]
    read(lab, 70, 50, word="town" if lab.key else "city")
    for target, word in ((40, "city"), (10, "town"), (25, "city")):
        images.append(lab.image())
        done.append(begun(lab, target, word=word))
        assert lab.image() == images[-1]
        lab.swap(done[-1])
        lab.check()
    with pytest.raises(PlanRefused, match="Undo the newest first"):
        lab.undo(done[0])
    redone = lab.image()
    first = lab.undo(done[-1])
    assert lab.image() == images[-1]
    lab.undo(first.rewind_id)
    assert lab.image().sink == redone.sink
    lab.undo(lab.sql("SELECT max(rewind_id) FROM tidemark.rewind")[0][0])
    for image, rewind_id in zip(reversed(images[:-1]), reversed(done[:-1]), strict=True):
        lab.undo(rewind_id)
        assert lab.image() == image
        lab.check()


def test_chosen_partition_is_read_beside_alone(lab: Lab) -> None:
    read(lab, 50, 40)
    before = lab.image()
    rewind_id = begun(lab, 20, f"{lab.topic}:1", word="town")
    read(lab, 60)
    lab.swap(rewind_id)
    assert lab.positions() == [60, 40]
    assert {row[3].split()[0] for row in lab.rows() if row[0] == 0} == {"city"}
    lab.check()
    lab.undo(rewind_id)
    read_rows = [row for row in lab.image().sink if row[3] == 1]
    assert read_rows == [row for row in before.sink if row[3] == 1]


# ---- retries and erasures


def test_retry_before_the_swap_is_withdrawn_and_comes_back_with_the_undo(scenario: Consumer, topics: Topics) -> None:
    lab = RetryLab(scenario, topics)
    lab.read("a", "b", "c", answers={"b": "retry", "c": "retry"})
    rewind_id = lab.rewind(ToEarliest(), beside=True).rewind_id
    lab.consumer.run(of_rewind=rewind_id)
    lab.say({})
    lab.age(timedelta(minutes=6))
    assert lab.relay() == 2
    lab.drain()
    assert scenario.rows() == [b"a", b"b", b"c"]
    lab.swap(rewind_id)
    assert scenario.rows() == [b"a"]
    assert scenario.failed("record_offset, state") == [(1, "WAITING"), (2, "WAITING")]
    lab.age(timedelta(minutes=6))
    assert lab.relay() == 2
    lab.drain()
    assert scenario.rows() == [b"a", b"b", b"c"]
    lab.undo(rewind_id)
    assert scenario.rows() == [b"a", b"b", b"c"]
    assert scenario.failed("record_offset, state") == [(1, "LOADED"), (2, "LOADED")]


def test_erased_records_are_not_read_again_beside(lab: Lab) -> None:
    read(lab, 50, 50)
    where = f"city = '{lab.rows()[-1][3]}'"
    erase(lab, where)
    gone = lab.image()
    rewind_id = begun(lab)
    lab.swap(rewind_id)
    assert lab.sql(f"SELECT count(*) FROM {lab.table} WHERE {where}") == [(0,)]
    lab.check()
    lab.undo(rewind_id)
    assert lab.image() == gone


# ---- groups and topics


def test_replay_of_a_deleted_group_can_only_be_discarded(lab: Lab) -> None:
    read(lab, 50, 50)
    rewind_id = begun(lab)
    lab.sql("UPDATE tidemark.consumer_group SET name = name || ' (deleted, group ' || group_id || ')' WHERE group_id = %s", lab.group_id)
    with lab.unchanged(StalePlan, "was deleted"):
        lab.swap(rewind_id)
    discard(lab, rewind_id)


@pytest.mark.thorough
def test_replay_of_a_position_that_was_deleted_can_only_be_discarded(lab: Lab) -> None:
    lab.read(50)
    rewind_id = lab.rewind(ToOffset(20), f"{lab.topic}:0", beside=True).rewind_id
    lab.sql("DELETE FROM tidemark.batch; DELETE FROM tidemark.failed_record")
    lab.sql("DELETE FROM tidemark.partition_offset WHERE group_id = %s AND partition = 0", lab.group_id)
    with pytest.raises(StalePlan, match="position was deleted"):
        lab.swap(rewind_id)
    discard(lab, rewind_id)


@pytest.mark.thorough
@upsert_only
def test_replay_of_a_topic_that_was_created_again_can_only_be_discarded(lab: Lab, topics: Topics) -> None:
    read(lab, 50, 50)
    rewind_id = begun(lab)
    topics.recreate(lab.topic, 2)
    with pytest.raises(ReplayTopicRecreated, match="tidemark rewind discard"):
        lab.consumer.run(of_rewind=rewind_id)
    with lab.unchanged(StalePlan, "deleted and created again"):
        lab.swap(rewind_id)
    discard(lab, rewind_id)


# ---- at once


def test_continuous_reading_does_not_keep_a_swap_from_its_end(hands: Hands) -> None:
    """The group reads whatever comes while the swap tries; the hold lets the replay reach it."""
    consumer, stop = hands.consumer, threading.Event()
    consumer.run()
    consumer.transform(hands.source("b"))
    rewind_id = hands.rewind(ToEarliest(), beside=True).rewind_id

    def go_on() -> None:
        while not stop.is_set():
            consumer.topics.produce(hands.topic, numbers(30, 33), partition=0)
            consumer.run()

    with in_thread(go_on) as reading:
        try:
            until(lambda: hands.sql("SELECT count(*) > 12 FROM tidemark.batch") == [(True,)])
            plan = hands.catch_up_and_swap(rewind_id)
        finally:
            stop.set()
        reading.result()
    assert plan.state is RewindState.APPLIED
    hands.check()
    assert hands.sql("SELECT hold_until FROM tidemark.rewind") == [(None,)]


@append_only
def test_group_commits_while_a_swap_moves_its_rows(lab: Lab) -> None:
    """Only the last rows move under the locks of the positions. Readers see none of it until the end."""
    read(lab, 50, 50)
    rewind_id = begun(lab, word="town")
    read(lab, 60)
    ends, looks = iter([(70, 55), (80,)]), []

    def read_on() -> None:
        lab.replay(rewind_id, cities(lab, "town"))
        read(lab, *next(ends, ()))
        looks.append({row[3].split()[0] for row in lab.rows()})

    plan = lab.swap(rewind_id, read_on).plan
    assert looks == [{"city"}] * 3
    assert lab.positions() == [80, 55]
    assert {row[3].split()[0] for row in lab.rows() if row[1] >= 20} == {"town"}
    lab.check()
    archives = lab.sql("SELECT rows FROM tidemark.rewind_archive WHERE NOT shadow ORDER BY number")
    assert sum(rows for (rows,) in archives) == sum(part.sink_rows for _, part in plan)
    assert len(archives) == 2, "the last rows were moved apart from the others"
    lab.undo(rewind_id)
    assert {row[3].split()[0] for row in lab.rows()} == {"city"}
    assert lab.offsets() == [offset for offset in range(80) if offset % 10 > 2]
    lab.check()


@append_only
def test_locks_of_a_swap_whose_process_vanishes_while_it_reads_on_end_soon(lab: Lab) -> None:
    """The server's keepalives detect it, long before the transaction has been idle for too long."""
    read(lab, 50)
    rewind_id, settings = begun(lab, 20, f"{lab.topic}:0", word="town"), []
    with lab.session() as connection, connection.cursor() as cur:

        def read_on() -> None:
            if connection.status == STATUS_IN_TRANSACTION:
                cur.execute("SHOW tcp_user_timeout")
                settings.extend(cur.fetchall())
            lab.replay(rewind_id, cities(lab, "town"))
            read(lab, 60)

        read(lab, 55)
        lab.swap(rewind_id, read_on, connection=connection)
    assert settings == [("60000",)]
    lab.check()


@append_only
def test_swap_that_loses_its_session_changes_nothing_and_holds_nobody(lab: Lab) -> None:
    read(lab, 50)
    rewind_id = begun(lab, 20, f"{lab.topic}:0", word="town")
    held = []

    def read_on() -> None:
        held.extend(lab.sql("SELECT FROM tidemark.rewind WHERE hold_until IS NOT NULL"))
        lab.replay(rewind_id, cities(lab, "town"))
        if held:
            mine = "datname = current_database() AND application_name = %s"
            lab.sql(f"SELECT pg_terminate_backend(pid, 60000) FROM pg_stat_activity WHERE {mine}", lab.application)
        else:
            read(lab, 60)

    read(lab, 55)
    with pytest.raises(DatabaseUnavailable):
        lab.swap(rewind_id, read_on)
    assert held
    assert lab.sql("SELECT state, hold_until FROM tidemark.rewind") == [("BESIDE", None)]
    assert {row[3].split()[0] for row in lab.rows()} == {"city"}
    lab.swap(rewind_id)
    lab.check()


@append_only
def test_group_commits_records_that_retention_has_taken_from_its_replay(lab: Lab, topics: Topics) -> None:
    """A commit in flight ends while the swap moves rows, where the replay has nothing to read any more."""
    read(lab, 50, 50)
    topics.trim(lab.topic, {0: 60, 1: 60})
    rewind_id = begun(lab, allow_loss=True)
    assert [part.position for part in lab.side(rewind_id).parts] == [60, 60]
    runs = iter([lambda: None, lambda: read(lab, 60, 60)])
    lab.swap(rewind_id, lambda: next(runs)())
    assert {row[1] for row in lab.rows()} == {offset for offset in range(20) if offset % 10 > 2}
    lab.check()


@upsert_only
def test_group_is_held_while_the_rows_of_a_table_with_a_key_move(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """So none of its commits waits for them, also if the replay has reached the group before."""
    read(lab, 60, 50)
    rewind_id = begun(lab, word="town")
    moved, put_in = list[Any](), beside.put_in

    def watched(*arguments: Any) -> None:
        moved.extend(lab.sql("SELECT hold_until > clock_timestamp() FROM tidemark.rewind"))
        put_in(*arguments)

    monkeypatch.setattr(beside, "put_in", watched)
    lab.swap(rewind_id)
    assert moved == [(True,)]
    assert lab.sql("SELECT hold_until FROM tidemark.rewind") == [(None,)]


@append_only
def test_new_column_does_not_wait_for_a_swap_that_waits_for_the_replay(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """The swap has locked the shadow, and its transaction lasts until the replay has read on."""
    monkeypatch.setattr(beside, "LOCK_MS", 200)
    read(lab, 50, 50)
    replay = lab.side(begun(lab))
    lab.sql(f"ALTER TABLE {lab.table} ADD COLUMN note text")
    wider = replace(lab.layout, columns=(*lab.layout.columns, Column("note", "text")))
    with lab.session() as swapping, transaction(swapping) as cur:
        beside.open_shadows(replay, cur)
        with lab.session() as connection, pytest.raises(DatabaseUnavailable, match="lock timeout"), transaction(connection) as other:
            beside.follow_columns(other, replay, [wider])


@upsert_only
def test_swap_ends_a_commit_in_flight(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is waited for, then its session is ended: nothing of it is stored."""
    monkeypatch.setattr(applying, "GRACE_MS", 200)
    read(lab, 60, 50)
    rewind_id = begun(lab, word="town")
    hanging = Hanging(lab.slice(70))
    with in_thread(lambda: commit_slice(lab.target(), hanging.part, hanging.judged(), payloads)) as commit:
        assert hanging.stands.wait(60)
        lab.swap(rewind_id)
        hanging.go.set()
        with pytest.raises((DatabaseUnavailable, OffsetFenced)):
            commit.result()
    assert lab.positions() == [60, 50]
    lab.check()


def test_second_run_of_a_replay_takes_over(hands: Hands) -> None:
    consumer, ran = hands.consumer, list[object]()
    consumer.run()
    consumer.transform(hands.source("b"))
    rewind_id = hands.rewind(ToEarliest(), beside=True).rewind_id
    with pytest.raises((OffsetFenced, ClaimRefused)):
        consumer.run(of_rewind=rewind_id, before=lambda part: ran or ran.append(consumer.run(of_rewind=rewind_id)))
    hands.swap(rewind_id)
    assert all(payload.endswith("b") for payload in consumer.rows())
    hands.check()


def test_run_of_a_replay_that_is_discarded_meanwhile_stores_nothing_more(hands: Hands) -> None:
    consumer, done = hands.consumer, list[object]()
    consumer.run()
    rewind_id = hands.rewind(ToEarliest(), beside=True).rewind_id

    def discard_once(part: Slice) -> None:
        if not done and part.start > 0:
            with hands.session() as connection:
                done.append(beside.discard(connection, rewind_id, by="ann"))

    consumer.run(of_rewind=rewind_id, before=discard_once)
    assert done
    assert hands.sql("SELECT DISTINCT name FROM tidemark.batch JOIN tidemark.consumer_group USING (group_id)") == [(hands.group,)]
    with pytest.raises(BadInput, match=r"left no backfill|no replay beside"):
        consumer.run(of_rewind=rewind_id)


def test_of_swaps_and_discards_at_once_one_wins(lab: Lab) -> None:
    read(lab, 50, 50)
    before = lab.image()
    rewind_id = begun(lab, word="town")
    barrier = threading.Barrier(4)

    def act(name: str) -> str:
        barrier.wait()
        try:
            if name == "swap":
                lab.swap(rewind_id)
            else:
                discard(lab, rewind_id)
        except AlreadyDecided:
            return "late"
        return name

    with ThreadPoolExecutor(4) as pool:
        answers = sorted(pool.map(act, ["swap", "discard", "swap", "discard"]))
    ((state,),) = lab.sql("SELECT state FROM tidemark.rewind")
    assert answers == {"APPLIED": ["late", "late", "swap", "swap"], "DISCARDED": ["discard", "discard", "late", "late"]}[state]
    assert (lab.image() == before) == (state == "DISCARDED")
    lab.check()


@pytest.mark.sampled
@upsert_only
@pytest.mark.parametrize("step", [step for step in Step if step is not Step.BEGIN])
def test_commit_of_a_replay_that_dies_is_stored_whole_or_not_at_all(lab: Lab, monkeypatch: pytest.MonkeyPatch, step: Step) -> None:
    read(lab, 50, 50)
    before = lab.image()
    rewind_id = lab.rewind(ToOffset(20), beside=True).rewind_id
    deaths = iter([False, True])

    class Died(TidemarkError):
        pass

    def reached(at: Step, part: Slice) -> None:
        if at is step and next(deaths, False):
            raise Died

    monkeypatch.setattr(committing, "reached", reached)
    with pytest.raises(Died):
        lab.replay(rewind_id, cities(lab, "town"), step=11)
    assert lab.image() == before
    lab.replay(rewind_id, cities(lab, "town"), step=11)
    lab.swap(rewind_id)
    lab.check()
    assert {row[3].split()[0] for row in lab.rows() if row[1] >= 20} == {"town"}
    lab.undo(rewind_id)
    assert lab.image() == before


# ---- consumers


@pytest.mark.thorough
def test_replay_lags_retention_and_does_as_offset_reset_says(hands: Hands, topics: Topics) -> None:
    """Without a reset, its run is refused. With one, the gap is stored as lost, and becomes the group's with the swap."""
    consumer = hands.consumer
    consumer.run()
    before = sorted(consumer.rows())
    consumer.transform(hands.source("b"))
    rewind_id = hands.rewind(ToEarliest(), beside=True).rewind_id
    topics.trim(hands.topic, {0: 5})
    consumer.set(offset_reset="none")
    with pytest.raises(TidemarkError, match=r"offset_reset"):
        consumer.run(of_rewind=rewind_id)
    assert sorted(consumer.rows()) == before
    consumer.set(offset_reset="earliest")
    consumer.run(of_rewind=rewind_id)
    assert consumer.lost() == [(0, 0, 5, "retention")]
    hands.check()
    hands.catch_up_and_swap(rewind_id)
    assert sorted(consumer.rows()) == sorted(f"{number}b" for start in (5, 0) for number in range(start, 30) if number % 10 not in (1, 2))
    hands.check()
    hands.undo(rewind_id)
    assert sorted(consumer.rows()) == before
    assert consumer.lost() == []
    hands.check()


@pytest.mark.thorough
def test_members_and_new_partitions_do_not_matter_to_a_replay(hands: Hands, topics: Topics) -> None:
    """It assigns itself the partitions of the rewind, whatever the group does."""
    consumer = hands.consumer
    consumer.set(members=2)
    consumer.run()
    consumer.transform(hands.source("b"))
    rewind_id = hands.rewind(ToEarliest(), f"{hands.topic}:1", beside=True).rewind_id
    topics.grow(hands.topic, 3)
    topics.produce(hands.topic, numbers(0, 5), partition=2)
    consumer.run()
    plan = hands.catch_up_and_swap(rewind_id)
    assert [part.partition.partition for _, part in plan] == [1]
    good = [number for number in range(30) if number % 10 not in (1, 2)]
    new = [f"{number}b" for number in (0, 3, 4)]
    assert sorted(consumer.rows()) == sorted([f"{number}{word}" for number in good for word in "ab"] + new)
    hands.check()


@pytest.mark.thorough
def test_verdicts_of_the_replay_become_the_groups(hands: Hands, validated: Callable[[], list[str]]) -> None:
    """With the view of validated rows: after the swap, it shows what the replay has validated, and before it the old rows."""
    consumer = hands.consumer
    consumer.run()
    hands.validate()
    old = validated()
    assert len(old) == 48
    consumer.transform(hands.source("b"))
    rewind_id = hands.rewind(ToOffset(10), beside=True).rewind_id
    consumer.run(of_rewind=rewind_id)
    with hands.watch.cursor() as cur:
        replay = beside.find(cur, hands.group, rewind_id)
    (report,) = beside.validate_replay(hands.url, hands.spec, replay)
    assert report.verdict is Verdict.PASSED
    assert beside.validate_replay(hands.url, hands.spec, replay) == []
    assert validated() == old
    consumer.topics.produce(hands.topic, numbers(30, 36), partition=0)
    consumer.run()
    hands.catch_up_and_swap(rewind_id)
    shown = validated()
    assert len(shown) == 48
    assert sum(payload.endswith("b") for payload in shown) == 32
    assert hands.sql("SELECT validated_offset, next_offset FROM tidemark.partition_offset JOIN tidemark.consumer_group USING (group_id)"
                     " WHERE side_of IS NULL ORDER BY partition") == [(30, 36), (30, 30)]  # fmt: skip
    hands.validate()
    assert len(validated()) == 52
    hands.check()


def test_critical_rows_of_a_replay_are_judged_again_until_they_are_right(hands: Hands) -> None:
    """Otherwise a task that is cleared would find nothing to judge, and swap them."""
    consumer = hands.consumer
    consumer.run()
    rewind_id = hands.rewind(ToOffset(10), beside=True).rewind_id
    consumer.run(of_rewind=rewind_id)
    with hands.watch.cursor() as cur:
        replay = beside.find(cur, hands.group, rewind_id)
    shadow, far = replay.shadow(hands.table), 1_000_000
    hands.sql(f"UPDATE {shadow} SET kafka_offset = kafka_offset + {far} WHERE ctid = (SELECT ctid FROM {shadow} LIMIT 1)")
    for _ in range(2):
        assert [report.verdict for report in beside.validate_replay(hands.url, hands.spec, replay)] == [Verdict.CRITICAL]
    hands.sql(f"UPDATE {shadow} SET kafka_offset = kafka_offset - {far} WHERE kafka_offset >= {far}")
    assert [report.verdict for report in beside.validate_replay(hands.url, hands.spec, replay)] == [Verdict.PASSED]
    assert beside.validate_replay(hands.url, hands.spec, replay) == []


@pytest.fixture
def validated(hands: Hands, scenario: Consumer, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """Returns the rows of the view of validated rows, once the consumer has a suite."""
    expectation = {"type": "expect_column_values_to_not_be_null", "kwargs": {"column": "payload"}}
    folder = scenario.folder / "expectations"
    folder.mkdir(exist_ok=True)
    (folder / "payloads.json").write_text(json.dumps({"expectations": [expectation]}))
    monkeypatch.setenv("TIDEMARK_EXPECTATIONS", str(folder))
    scenario.set(validation={"suite": "payloads"})
    hands.sql(validated_view_ddl(hands.table, [hands.group]))
    return lambda: [payload for (payload,) in hands.sql(f"SELECT payload FROM {hands.table}_validated")]


@pytest.mark.parametrize("end", ["discard", "swap"])
def test_end_of_a_replay_waits_for_its_validation(
    hands: Hands, validated: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """The validation stores its verdict in a second session, which needs the positions that the end of the replay locks."""
    assert validated() == []
    hands.consumer.run()
    rewind_id = hands.rewind(ToOffset(10), beside=True).rewind_id
    hands.consumer.run(of_rewind=rewind_id)
    with hands.watch.cursor() as cur:
        replay = beside.find(cur, hands.group, rewind_id)
    stands, go = threading.Event(), threading.Event()

    def validate(*arguments: Any, **options: Any) -> ValidationReport:
        stands.set()
        assert go.wait(60)
        return quality.validate(*arguments, **options)

    monkeypatch.setattr(beside, "validate", validate)
    act = hands.swap if end == "swap" else functools.partial(discard, hands)
    waiting = "SELECT FROM pg_locks WHERE NOT granted AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
    with in_thread(lambda: beside.validate_replay(hands.url, hands.spec, replay)) as validation:
        assert stands.wait(60)
        with in_thread(lambda: act(rewind_id)) as ending:
            try:
                until(lambda: hands.sql(waiting) or ending.done())
            finally:
                go.set()
            (report,) = validation.result(180)
            ending.result(180)
    assert report.verdict is Verdict.PASSED
    hands.check()


def test_swap_names_the_pause_that_stops_its_replay(hands: Hands) -> None:
    """The replay pauses with its consumer, so reading on does not help."""
    hands.consumer.run()
    rewind_id = hands.rewind(ToEarliest(), beside=True).rewind_id
    with hands.watch.cursor() as cur:
        replay = beside.find(cur, hands.group, rewind_id)
        flow.pause(cur, replay.group_id, [FlowTarget(hands.topic, 1)], REASON)
    with pytest.raises(NotCaughtUp, match=rf"is paused.*tidemark resume {hands.spec.name}"):
        hands.catch_up_and_swap(rewind_id)
    with hands.watch.cursor() as cur:
        assert [part.left for part in beside.find(cur, hands.group, rewind_id).parts] == [30, 30]
        flow.resume(cur, replay.group_id, [FlowTarget()])
    assert hands.catch_up_and_swap(rewind_id).state is RewindState.APPLIED


def test_consumers_of_one_plan_are_swapped_at_once_or_not_at_all(hands: Hands, scenario: Consumer) -> None:
    other = Consumer(scenario.folder, scenario.database_url, scenario.topics)
    with contextlib.closing(Hands(other, partitions=1, retry={"delays": ["1h"]})) as others:
        consumers = (hands, others)
        for each in consumers:
            each.consumer.run()
        before = [sorted(each.consumer.rows()) for each in consumers]
        by_name = {each.spec.name: each.spec for each in consumers}
        request = PlanRequest([each.spec for each in consumers], Scope.parse(()), ToEarliest(), reason=REASON, by="ann", beside=True)
        with hands.session() as connection:
            of = (lambda _: hands.cluster, by_name.__getitem__)
            rewind_id = plan(connection, of[0], request).rewind_id
            applying.apply(connection, *of, rewind_id, by="bob")
            for each in consumers:
                each.consumer.transform(each.source("b"))
            hands.consumer.run(of_rewind=rewind_id)
            with pytest.raises(NotCaughtUp, match="30 offsets"):
                applying.catch_up_and_swap(connection, *of, rewind_id, read_on=lambda: None, by="bob")
            assert [sorted(each.consumer.rows()) for each in consumers] == before
            read_on = functools.partial(others.consumer.run, of_rewind=rewind_id)
            applying.catch_up_and_swap(connection, *of, rewind_id, read_on=read_on, by="bob")
        for each, rows in zip(consumers, before, strict=True):
            assert sorted(each.consumer.rows()) == [row.replace("a", "b") for row in rows]
            each.check()


def test_table_evolves_while_a_replay_reads(scenario: Consumer) -> None:
    """The run of the replay adds the column to the table and to its shadow."""
    with contextlib.closing(Hands(scenario, sink={"table": scenario.table, "evolve": "add"})) as hands:
        scenario.run()
        rewind_id = hands.rewind(ToOffset(10), beside=True).rewind_id
        noted = hands.source("b").replace("payload: str", "payload: str\n        note: str").replace('b")', 'b", note="new")')
        scenario.transform(noted)
        scenario.run(of_rewind=rewind_id)
        assert set(scenario.rows("note")) == {None}
        hands.swap(rewind_id)
        assert hands.sql(f"SELECT note, kafka_offset >= 10 FROM {hands.table} GROUP BY 1, 2 ORDER BY 2") == [(None, False), ("new", True)]
        hands.check()

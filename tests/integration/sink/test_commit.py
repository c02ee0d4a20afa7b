"""The commit of one slice on a real Postgres: all or nothing, only by the current owner, and never twice."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import psycopg2
import pytest
from tests.integration.sink.conftest import AtStep
from tests.support.black_hole import CommitCut
from tests.support.ledger import DDL, LAYOUT, TABLE, Group, all_loaded, in_thread, never, of_all_kinds, payloads, rows, slice_of
from tests.support.ports import closed_port
from tests.support.waiting import until

from tidemark import db
from tidemark.db import pooled, session
from tidemark.errors import DatabaseUnavailable
from tidemark.offsets import store
from tidemark.offsets.store import OffsetFenced, PositionDeleted
from tidemark.records.outcome import BadOutput, RecordCounts, TransformOutput, only
from tidemark.records.ranges import Epoch, Slice
from tidemark.sink import commit as commit_module
from tidemark.sink.commit import CommitUnknown, Receipt, Sessions, commit_slice
from tidemark.sink.hand_off import RecordsGone
from tidemark.sink.load import CopyCountWrong, SinkRejected
from tidemark.sink.steps import Step
from tidemark.sink.table import Layout
from tidemark.sink.target import Target

KINDS = RecordCounts(loaded=18, skipped=3, retried=3, failed=3, unaccounted=3, sink_rows=24)
"""The counts of `of_all_kinds` for offsets 0 to 29."""
BEFORE = (0, 0, 0, 0)
AFTER = (30, 24, 6, 1)


@pytest.fixture
def group(database_url: str) -> Iterator[Group]:
    """A group with one partition. After the test, its ledger and its sink must agree, and none of its sessions may be left."""
    with contextlib.closing(psycopg2.connect(database_url)) as watch:
        group = Group(database_url, watch)
        group.sql(DDL)
        yield group
        group.check_conserved()
        if not pooled(watch):  # a pooler's backends stay, under the name of their last client
            until(lambda: not group.sessions())


# ---- what is stored


def test_a_commit_stores_rows_offset_failed_records_and_ledger(group: Group) -> None:
    """The receipt matches the ledger, and every offset of the slice is accounted for."""
    part = group.slice()
    attempt = group.attempt()
    assert group.commit(part, attempt=attempt) == Receipt(part, KINDS)
    assert group.counted() == AFTER
    assert group.position() == (30, 1)
    assert group.sql(
        "SELECT start_offset, end_offset, owner_epoch, attempt_id, loaded, skipped, retried, failed, unaccounted, sink_rows"
        " FROM tidemark.batch"
    ) == [(0, 30, 1, attempt, 18, 3, 3, 3, 3, 24)]
    assert group.sql(f"SELECT kafka_seq, count(*) FROM {TABLE} GROUP BY 1 ORDER BY 1") == [(0, 18), (1, 3), (2, 3)]
    assert group.sql(
        "SELECT record_offset, disposition, error_type, error_text, convert_from(value, 'utf8'), encode(key, 'hex'), headers, retry_number,"
        " record_timestamp IS NULL, attempt_id FROM tidemark.failed_record WHERE record_offset < 3 ORDER BY 1"
    ) == [
        (1, "retry", "KeyError", "1", f"{part.partition} 1", None, [["h", "eA=="]], 0, False, attempt),
        (2, "fail", "KeyError", "2", f"{part.partition} 2", b"k\0".hex(), [["h", "eA=="]], 0, True, attempt),
    ]


def test_a_slice_without_any_row_still_moves_its_offset(group: Group) -> None:
    """All records were skipped or filtered away, or there are only transaction markers."""
    part = group.slice()
    assert group.commit(part, iter(())).counts == RecordCounts(0, 0, 0, 0, 30, 0)
    later = group.slice(end=40)
    assert group.commit(later, iter([TransformOutput({}, range(30, 40))])).counts == RecordCounts(0, 10, 0, 0, 0, 0)
    assert group.counted() == (40, 0, 0, 2)


def test_another_session_sees_all_of_a_commit_or_nothing(group: Group) -> None:
    """One transaction (I1): at any moment, offset, rows, failed records and ledger match."""
    claim = group.claim()
    target = group.target()
    seen: set[tuple[int, ...]] = set()
    done = threading.Event()

    def look() -> None:
        with contextlib.closing(psycopg2.connect(group.url)) as other:
            watcher = Group(group.url, other, name=group.name)
            while not done.is_set():
                seen.add(watcher.counted())
            seen.add(watcher.counted())

    with in_thread(look) as looking:
        try:
            for start in range(0, 300, 30):
                part = Slice(claim.partition, claim.topic_id, start, start + 30, claim.epoch)
                commit_slice(target, part, of_all_kinds(part), payloads)
        finally:
            done.set()
        looking.result(180)
    assert (300, 240, 60, 10) in seen
    assert all(look == (30 * batches, 24 * batches, 6 * batches, batches) for *_, batches in seen for look in seen if look[3] == batches)


# ---- who may commit


def test_a_stale_epoch_is_fenced_before_a_byte_is_sent(group: Group) -> None:
    """A later claim takes over the partition (I2); the old owner's rows are not even computed."""
    old = group.slice()
    group.claim(owner="newer")
    with pytest.raises(OffsetFenced) as raised:
        group.commit(old, never())
    assert (raised.value.held, raised.value.current, raised.value.position, raised.value.owner) == (1, 2, 0, "newer")
    assert group.counted() == BEFORE


@pytest.mark.parametrize(("start", "end"), [(0, 20), (31, 40)])
def test_a_slice_that_does_not_begin_at_the_position_is_fenced(group: Group, start: int, end: int) -> None:
    """It would leave a gap or load records twice, even under the right epoch."""
    claim = group.claim()
    group.commit(slice_of(claim, 30))
    with pytest.raises(OffsetFenced):
        group.commit(Slice(claim.partition, claim.topic_id, start, end, claim.epoch), never())
    assert group.counted() == AFTER


def test_position_deleted_beside_a_run_is_refused_by_name(group: Group) -> None:
    """By hand, or by `groups delete`: nothing is stored, and every step of the run reports the same error."""
    claim = group.claim()
    part = slice_of(claim, 30)
    group.sql("DELETE FROM tidemark.partition_offset")
    for act in (
        lambda: group.commit(part, never()),
        lambda: held(group, lambda cur: store.require_held(cur, group.group_id, [claim])),
        lambda: held(group, lambda cur: store.jump(cur, group.group_id, claim, 7)),
        lambda: group.claim(),
    ):
        with pytest.raises(PositionDeleted, match=f"The position of {part.partition} was deleted"):
            act()
    assert group.sql("SELECT count(*) FROM tidemark.batch") == [(0,)]


def held(group: Group, act: Callable[[db.Cursor], object]) -> None:
    with session(group.url) as connection, db.transaction(connection) as cur:
        act(cur)


def test_an_epoch_that_was_never_given_is_fenced(group: Group) -> None:
    """The epoch must equal the row's; a greater one does not win."""
    claim = group.claim()
    with pytest.raises(OffsetFenced):
        group.commit(Slice(claim.partition, claim.topic_id, 0, 30, Epoch(claim.epoch + 1)), never())
    assert group.counted() == BEFORE


def test_a_released_partition_may_still_be_committed_by_who_held_it(group: Group) -> None:
    """Until a new owner claims the partition, a commit in flight may finish, and the new owner starts after it."""
    claim = group.claim()
    with session(group.url) as connection, connection, connection.cursor() as cur:
        store.release(cur, group.group_id, claim)
    assert group.commit(slice_of(claim, 30)).counts == KINDS
    assert group.claim().position == 30


def test_a_twin_gets_the_receipt_of_the_first(group: Group) -> None:
    """If Spark runs a task twice, it commits once: the second run finds the ledger row of the first and reads nothing."""
    part = group.slice()
    group.commit(part)
    assert group.commit(part, never()) == Receipt(part, KINDS, twin=True)
    assert group.counted() == AFTER


def test_a_zombie_that_waits_for_the_row_while_a_newer_owner_claims_is_fenced(group: Group) -> None:
    """The commit waits for the row at ②, before it reads anything. When the row is free, it belongs to another owner."""
    old, attempt = group.slice(), group.attempt()
    with contextlib.closing(psycopg2.connect(group.url)) as newer, newer.cursor() as cur:
        store.claim(cur, group.group_id, group.topic_id, old.partition, store.Owner(store.next_generation(cur), "newer"))
        with in_thread(lambda: group.commit(old, never(), attempt=attempt)) as zombie:
            until(lambda: any(kind == "Lock" for *_, kind in group.sessions()))
            newer.commit()
            with pytest.raises(OffsetFenced):
                zombie.result(180)
    assert group.counted() == BEFORE


def test_a_newer_owner_that_waits_for_a_commit_in_flight_starts_behind_it(group: Group) -> None:
    """Nothing is lost or duplicated: the commit succeeds, and the claim gets the position after it."""
    part, attempt = group.slice(), group.attempt()
    sent, go_on = threading.Event(), threading.Event()

    def judged() -> Iterator[TransformOutput]:
        yield from of_all_kinds(part)
        sent.set()
        assert go_on.wait(60)

    with in_thread(lambda: group.commit(part, judged(), attempt=attempt)) as committing:
        assert sent.wait(60)
        with in_thread(group.claim) as claiming:
            until(lambda: group.sql("SELECT 1 FROM pg_locks WHERE NOT granted"))
            go_on.set()
            assert claiming.result(180).position == 30
        assert committing.result(180).counts == KINDS


def test_of_two_that_commit_the_same_slice_at_once_one_does(group: Group) -> None:
    """The other one waits for the row and is then a twin, so no row is stored twice."""
    for round_ in range(5):
        part = group.slice(end=30 * (round_ + 1))
        gate = threading.Barrier(2)

        def commit(target: Target, part: Slice = part, gate: threading.Barrier = gate) -> Receipt:
            gate.wait(60)
            return commit_slice(target, part, of_all_kinds(part), payloads)

        targets = [group.target(), group.target()]
        with ThreadPoolExecutor(2) as pool:
            receipts = list(pool.map(commit, targets, timeout=300))
        assert sorted(receipt.twin for receipt in receipts) == [False, True]
        assert {receipt.counts for receipt in receipts} == {KINDS}
    assert group.counted() == (150, 120, 30, 5)


def test_a_newer_attempt_ends_a_session_that_is_stuck_in_its_copy(group: Group) -> None:
    """A zombie that holds the row but sends nothing more would block the claim. Sessions that hold other partitions are left alone."""
    part = group.slice()
    stuck, let_go = threading.Event(), threading.Event()

    def judged() -> Iterator[TransformOutput]:
        yield TransformOutput(only(rows(part, range(5))))
        stuck.set()
        assert let_go.wait(60)

    def ended(topic_id: int) -> int:
        with session(group.url) as connection, connection, connection.cursor() as cur:
            return store.end_writers(cur, group.group_id, topic_id, part.partition)

    with in_thread(lambda: group.commit(part, judged())) as zombie:
        assert stuck.wait(60)
        assert ended(part.topic_id + 1) == 0
        assert ended(part.topic_id) == 1
        assert group.claim().position == 0
        let_go.set()
        with pytest.raises(DatabaseUnavailable):
            zombie.result(180)
    assert group.counted() == BEFORE


# ---- errors with the rows


class Boom(Exception):
    """An error that no code expects."""


@pytest.mark.sampled("error", "after")
@pytest.mark.parametrize(
    "error", [BadOutput(part=None, problem="x"), Boom("boom"), KeyboardInterrupt()], ids=lambda error: type(error).__name__
)  # type: ignore[arg-type]
@pytest.mark.parametrize("after", [0, 1, 3])
def test_what_the_rows_raise_comes_out_as_it_is_and_nothing_is_stored(group: Group, error: BaseException, after: int) -> None:
    """psycopg2 turns it into a cancelled statement, which would look like an outage and be retried endlessly."""
    part = group.slice()

    def judged() -> Iterator[TransformOutput]:
        for _, each in zip(range(after), of_all_kinds(part), strict=False):
            yield each
        raise error

    with pytest.raises(type(error)) as raised:
        group.commit(part, judged())
    assert raised.value is error
    assert group.counted() == BEFORE
    assert group.commit(part).counts == KINDS


def test_a_failed_record_that_cannot_be_read_again_stops_the_slice(group: Group) -> None:
    """Nothing is stored, whether the second reading raises an error or finds fewer records."""
    part = group.slice()
    with pytest.raises(Boom):
        commit_slice(group.target(), part, of_all_kinds(part), lambda part, offsets: (_ for _ in ()).throw(Boom()))
    with pytest.raises(RecordsGone) as raised:
        commit_slice(group.target(), part, of_all_kinds(part), lambda part, offsets: payloads(part, sorted(offsets)[1:]))
    assert (raised.value.expected, raised.value.read) == (6, 5)
    assert group.counted() == BEFORE


def test_a_constraint_that_fails_is_told_in_postgres_words(group: Group) -> None:
    """A retry would fail again, so it is not an outage."""
    part = group.slice()
    with pytest.raises(SinkRejected) as raised:
        group.commit(part, iter([TransformOutput(only(rows(part, range(30), lambda offset: "Atlantis" if offset == 17 else "Ulm")))]))
    assert (raised.value.error_type, raised.value.table, raised.value.of_rows) == ("CheckViolation", TABLE, True)
    assert not raised.value.retriable
    assert "violates check constraint" in raised.value.message
    assert "Atlantis" not in str(raised.value)
    assert raised.value.detail is not None
    assert "Failing row contains (Atlantis, 17" in raised.value.detail
    assert raised.value.__suppress_context__  # otherwise a traceback would quote it too
    assert group.counted() == BEFORE


def test_a_constraint_that_is_checked_at_the_end_fails_the_same_way(group: Group) -> None:
    """A deferred constraint fails at ⑥. That is an answer from Postgres, not a lost one."""
    group.sql(f"ALTER TABLE {TABLE} ADD UNIQUE (city) DEFERRABLE INITIALLY DEFERRED")
    part = group.slice()
    with pytest.raises(SinkRejected) as raised:
        group.commit(part)
    assert (raised.value.error_type, raised.value.of_rows) == ("UniqueViolation", True)
    assert group.counted() == BEFORE


def test_a_failed_record_that_postgres_refuses_names_its_own_table(group: Group) -> None:
    """The sink is not to blame."""
    part = group.slice()
    group.sql("ALTER TABLE tidemark.failed_record ADD CHECK (record_offset <> 12)")
    with pytest.raises(SinkRejected) as raised:
        group.commit(part)
    assert (raised.value.table, raised.value.of_rows) == ("tidemark.failed_record", False)
    assert group.counted() == BEFORE


def test_table_that_is_dropped_after_the_guard_refuses_the_slice(group: Group) -> None:
    """It is no outage, and with ``isolate``, it is not blamed on a row. `test_poison.py` has the values that can never be stored."""
    part = group.slice()
    target = group.target(layout=Layout("analytics.nowhere", LAYOUT.columns))
    for isolate in (False, True):
        with pytest.raises(SinkRejected, match="UndefinedTable") as raised:
            commit_slice(target, part, iter([TransformOutput(only(rows(part, [1])))]), payloads, isolate=isolate)
        assert raised.value.of_rows is not isolate
        assert group.counted() == BEFORE


def test_rows_that_a_trigger_swallows_are_noticed(group: Group) -> None:
    """A BEFORE trigger that returns NULL drops rows without an error."""
    group.sql(
        "CREATE FUNCTION swallow() RETURNS trigger LANGUAGE plpgsql"
        " AS 'BEGIN RETURN CASE WHEN NEW.kafka_offset = 5 THEN NULL ELSE NEW END; END'"
    )
    group.sql(f"CREATE TRIGGER swallow BEFORE INSERT ON {TABLE} FOR EACH ROW EXECUTE FUNCTION swallow()")
    part = group.slice()
    with pytest.raises(CopyCountWrong) as raised:
        group.commit(part)
    assert (raised.value.encoded, raised.value.stored) == (24, 23)
    assert group.counted() == BEFORE


# ---- errors with the session


@pytest.mark.parametrize("step", list(Step)[:6], ids=lambda step: step.name.lower())
def test_a_session_that_is_ended_before_a_step_leaves_nothing(group: Group, at_step: AtStep, step: Step) -> None:
    """It is an outage, and the same call succeeds later. Each of ① to ⑥ is interrupted."""
    part = group.slice()

    def kill() -> None:
        pids = [pid for pid, *_ in group.sessions()]
        assert len(pids) == 1
        group.sql("SELECT pg_terminate_backend(%s)", pids[0])
        until(lambda: not group.sessions())

    at_step(step, kill)
    with pytest.raises(DatabaseUnavailable) as raised:
        group.commit(part)
    assert raised.value.retriable
    assert group.counted() == BEFORE
    assert group.commit(part) == Receipt(part, KINDS)


@pytest.mark.parametrize("step", list(Step), ids=lambda step: step.name.lower())
def test_a_process_that_dies_before_a_step_leaves_all_or_nothing(group: Group, at_step: AtStep, step: Step) -> None:
    """Whatever is raised, the transaction ends with its session. ⑦ comes after the commit, so the next try is a twin."""
    part = group.slice()

    def die() -> None:
        raise Boom

    at_step(step, die)
    with pytest.raises(Boom):
        group.commit(part)
    until(lambda: not group.sessions())
    committed = step is Step.RECEIPT
    assert group.counted() == (AFTER if committed else BEFORE)
    assert group.commit(part) == Receipt(part, KINDS, twin=committed)


def test_a_session_that_is_ended_in_the_middle_of_its_copy_leaves_nothing(group: Group) -> None:
    """Rows that Postgres had already received are rolled back."""
    part = group.slice()

    def judged() -> Iterator[TransformOutput]:
        yield TransformOutput(only(rows(part, range(5))))
        group.sql("SELECT pg_terminate_backend(%s)", group.sessions()[0][0])
        until(lambda: not group.sessions())
        yield TransformOutput(only(rows(part, range(5, 30))))

    with pytest.raises(DatabaseUnavailable):
        group.commit(part, judged())
    assert group.counted() == BEFORE


def test_a_row_that_another_commit_does_not_let_go_in_time_is_an_outage(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    """② waits for a twin or an older owner, but not longer than `LOCK_TIMEOUT_MS`."""
    monkeypatch.setattr(commit_module, "LOCK_TIMEOUT_MS", 100)
    part = group.slice()
    with contextlib.closing(psycopg2.connect(group.url, application_name="tidemark/1/0")) as holder, holder.cursor() as cur:
        cur.execute("SELECT FROM tidemark.partition_offset FOR UPDATE")
        with pytest.raises(DatabaseUnavailable, match="lock timeout"):
            group.commit(part, never())
    assert group.commit(part).counts == KINDS


def test_a_rewind_that_holds_the_row_is_waited_for_as_long_as_it_lives(
    group: Group, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """However long it takes (I4), the commit that waits for it neither fails nor loses what it has read."""
    monkeypatch.setattr(commit_module, "LOCK_TIMEOUT_MS", 50)
    part = group.slice()
    with contextlib.closing(psycopg2.connect(group.url, application_name="tidemark rewind")) as rewind, rewind.cursor() as cur:
        cur.execute("SELECT FROM tidemark.partition_offset FOR UPDATE")
        with in_thread(lambda: group.commit(part)) as committed:
            until(lambda: [text for text in caplog.messages if "waiting for a lock" in text and "tidemark rewind" in text])
            until(lambda: len([text for text in caplog.messages if "waiting for a lock" in text]) > 1)
            rewind.rollback()
            assert committed.result(180).counts == KINDS


def test_a_database_that_is_not_there_is_an_outage(group: Group) -> None:
    """Nothing listens at its address."""
    with closed_port() as port, pytest.raises(DatabaseUnavailable):
        group.commit(group.slice(), never(), url=f"postgresql://postgres@127.0.0.1:{port}/x")


# ---- the answer to COMMIT gets lost


@pytest.fixture
def proxy(group: Group) -> Iterator[Callable[..., CommitCut]]:
    """Creates proxies in front of the group's database."""
    with contextlib.ExitStack() as stack:
        yield lambda cut, **options: stack.enter_context(contextlib.closing(CommitCut(group.url, cut, **options)))


def test_a_commit_whose_answer_was_lost_gives_its_receipt(group: Group, proxy: Callable[..., CommitCut]) -> None:
    """The row shows that the commit succeeded, so nothing is sent again."""
    part = group.slice()
    between = proxy("after")
    assert group.commit(part, url=between.url) == Receipt(part, KINDS)
    assert between.cuts == 1
    assert group.counted() == AFTER


def test_a_commit_that_did_not_arrive_is_an_outage_and_can_be_tried_again(group: Group, proxy: Callable[..., CommitCut]) -> None:
    """The row shows that the commit did not happen."""
    part = group.slice()
    between = proxy("before")
    with pytest.raises(DatabaseUnavailable, match="the session ended before the commit"):
        group.commit(part, url=between.url)
    assert between.cuts == 1
    assert group.counted() == BEFORE
    assert group.commit(part) == Receipt(part, KINDS)


def test_a_session_that_postgres_believes_alive_is_waited_for(
    group: Group, proxy: Callable[..., CommitCut], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The network drops everything: the row stays locked until Postgres ends the idle session, and only then shows what happened."""
    monkeypatch.setattr(commit_module, "IDLE_TIMEOUT_MS", 4000)
    part = group.slice()
    with pytest.raises(DatabaseUnavailable, match="the session ended before the commit"):
        group.commit(part, url=proxy("hung").url)
    assert group.counted() == BEFORE
    assert group.commit(part) == Receipt(part, KINDS)


def test_a_commit_whose_answer_was_lost_gives_its_receipt_also_when_the_partition_was_taken_since(
    group: Group, proxy: Callable[..., CommitCut], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A newer owner may have claimed the row and moved it before it is read again. The ledger still has the commit."""
    part = group.slice()
    really = commit_module._require_committed

    def later(*arguments: Any) -> Receipt:
        until(lambda: group.counted() == AFTER)
        group.commit(group.slice(end=60))
        return really(*arguments)

    monkeypatch.setattr(commit_module, "_require_committed", later)
    assert group.commit(part, url=proxy("after").url) == Receipt(part, KINDS)
    assert group.counted() == (60, 48, 12, 2)


def test_a_database_that_stays_away_leaves_the_outcome_open(
    group: Group, proxy: Callable[..., CommitCut], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error must not say that nothing was stored; the next attempt reads the row."""
    monkeypatch.setattr(commit_module, "OUTCOME_WAIT_S", 0.5)
    part = group.slice()
    with pytest.raises(CommitUnknown, match="stored whole or not at all") as raised:
        group.commit(part, url=proxy("after", closed=True).url)
    assert raised.value.retriable
    until(lambda: group.counted() == AFTER)
    assert group.commit(part, never()).twin


# ---- a session for several commits


def test_session_is_kept_from_one_commit_to_the_next(group: Group) -> None:
    claim = group.claim()
    with contextlib.closing(Sessions()) as sessions:
        seen = set()
        for start in (0, 10):
            part = Slice(claim.partition, claim.topic_id, start, start + 10, claim.epoch)
            group.commit(part, all_loaded(part), sessions=sessions)
            seen |= {pid for pid, *_ in group.sessions()}
        assert len(seen) == 1


def test_failed_commit_leaves_no_session_to_the_next(group: Group) -> None:
    """A session that was lost in between does not keep a later commit from getting one either."""
    claim = group.claim()
    first, second = (Slice(claim.partition, claim.topic_id, start, start + 10, claim.epoch) for start in (0, 10))
    with contextlib.closing(Sessions()) as sessions:
        with pytest.raises(OffsetFenced):
            group.commit(replace(first, epoch=Epoch(claim.epoch - 1)), all_loaded(first), sessions=sessions)
        until(lambda: not group.sessions())
        group.commit(first, all_loaded(first), sessions=sessions)
        ((pid, *_),) = group.sessions()
        group.sql("SELECT pg_terminate_backend(%s, 5000)", pid)
        with pytest.raises(DatabaseUnavailable):
            group.commit(second, all_loaded(second), sessions=sessions)
        group.commit(second, all_loaded(second), sessions=sessions)
    assert group.counted() == (20, 20, 0, 2)


def test_twin_leaves_its_session_outside_any_transaction(group: Group) -> None:
    part = group.slice()
    group.commit(part)
    until(lambda: not group.sessions())
    with contextlib.closing(Sessions()) as sessions:
        assert group.commit(part, sessions=sessions).twin
        assert [state for _, state, _ in group.sessions()] == ["idle"]

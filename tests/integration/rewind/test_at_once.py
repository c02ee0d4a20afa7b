"""Rewinds that race with other rewinds, with commits in progress, and with rebalances. One wins, the other gets a clear answer."""

from __future__ import annotations

import select
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg2
import pytest
from tests.integration.rewind.lab import Hanging, Lab, of_all_kinds
from tests.support.ledger import backend_of, in_thread, payloads
from tests.support.waiting import until

from tidemark.consume import claims
from tidemark.db import REWIND_LOCK, session, transaction
from tidemark.errors import DatabaseUnavailable
from tidemark.group.wake import channel_of
from tidemark.kafka.cluster import Topic
from tidemark.offsets import store
from tidemark.offsets.reset import Log
from tidemark.offsets.store import OffsetFenced
from tidemark.records.ranges import Slice, TopicPartition
from tidemark.rewind import apply as applying
from tidemark.rewind import side
from tidemark.rewind.apply import StalePlan
from tidemark.rewind.plan_model import RewindState, ShiftBy, ToCurrent, ToOffset
from tidemark.sink.commit import commit_slice


def test_two_applies_of_a_plan_at_once_do_it_once(lab: Lab) -> None:
    lab.read(50)
    planned = lab.plan(ToOffset(20), f"{lab.topic}:0")
    with ThreadPoolExecutor(4) as pool:
        done = [each.result() for each in [pool.submit(lab.apply, planned.rewind_id) for _ in range(4)]]
    assert sorted(each.already for each in done) == [False, True, True, True]
    assert len({each.plan for each in done}) == 1
    assert lab.positions() == [20, 0, 0]
    lab.check()


def test_of_two_plans_applied_at_once_one_is_stale(lab: Lab) -> None:
    lab.read(50)
    plans = [lab.plan(ToOffset(offset), f"{lab.topic}:0").rewind_id for offset in (10, 20)]

    def act(rewind_id: int) -> object:
        try:
            return lab.apply(rewind_id).plan.state
        except StalePlan as error:
            return error.changes[0]

    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(act, plans))
    assert sorted(map(str, answers)) == ["APPLIED", f"Group {lab.spec.group} has been rewound since."]
    lab.check()


def said(caplog: pytest.LogCaptureFixture, *words: str) -> None:
    """Waits until a log line contains all of these words."""
    until(lambda: [text for text in caplog.messages if all(word in text for word in words)])


@pytest.mark.parametrize(
    ("wait", "application", "hold", "what"),
    [
        ("LOCK_MS", "tidemark/1/77", f"SELECT pg_advisory_xact_lock_shared({REWIND_LOCK}, {{group_id}})", "rewinds of group {group}"),
        ("GRACE_MS", "psql", "SELECT FROM tidemark.partition_offset WHERE partition = 0 FOR UPDATE", "position of {topic}/0"),
    ],
    ids=["a drain", "an operator"],
)
def test_whoever_holds_a_rewind_up_is_waited_for_as_long_as_he_lives_and_named(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, wait: str, application: str, hold: str, what: str
) -> None:
    """A drain with a long commit, or another rewind, holds the group's lock; an operator's session, which is not terminated, a position."""
    monkeypatch.setattr(applying, wait, 100)
    names = {"group": lab.group, "group_id": lab.group_id, "topic": lab.topic}
    planned = lab.plan(ToCurrent())
    with session(lab.url, application=application) as other, transaction(other) as cur:
        cur.execute(hold.format(**names))
        with in_thread(lambda: lab.apply(planned.rewind_id)) as applied:
            said(caplog, what.format(**names), application, f"pid {backend_of(other)}")
            assert not applied.done()
            other.commit()
            assert applied.result(180).plan.state is RewindState.APPLIED


def test_a_rewind_goes_through_while_the_group_rebalances(lab: Lab) -> None:
    """The coordinator's lock on the group's row does not block a rewind."""
    lab.read(50)
    planned = lab.plan(ToOffset(20), f"{lab.topic}:0")
    with session(lab.url) as other, transaction(other) as cur:
        cur.execute("SELECT FROM tidemark.consumer_group WHERE group_id = %s FOR NO KEY UPDATE", (lab.group_id,))
        assert lab.apply(planned.rewind_id).plan.state is RewindState.APPLIED


def test_a_commit_under_way_is_waited_for_and_superseded(lab: Lab) -> None:
    """It commits within the grace period, and its rows are removed with the rest."""
    lab.read(50)
    planned = lab.plan(ToOffset(20), f"{lab.topic}:0")
    slow = Hanging(lab.slice(80))
    with in_thread(lambda: commit_slice(lab.target(), slow.part, slow.judged(), payloads)) as commit:
        assert slow.stands.wait(60)
        with in_thread(lambda: lab.apply(planned.rewind_id)) as applied:
            until(lab.waits)
            slow.go.set()
            (part,) = applied.result(180).plan.groups[0].partitions
        assert commit.result(180).part == slow.part
    assert (part.old, part.new, part.sink_rows) == (80, 20, 54)
    lab.check()


def test_a_commit_that_does_not_end_in_time_is_ended(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its session is terminated, nothing of it is stored, and the rewind of both partitions is applied."""
    monkeypatch.setattr(applying, "GRACE_MS", 300)
    lab.read(50)
    lab.read(50, 1)
    planned = lab.plan(ShiftBy(-30), f"{lab.topic}:0,1")
    slow = Hanging(lab.slice(80, 1))
    with in_thread(lambda: commit_slice(lab.target(), slow.part, slow.judged(), payloads)) as commit:
        assert slow.stands.wait(60)
        assert lab.apply(planned.rewind_id).plan.state is RewindState.APPLIED
        slow.go.set()
        with pytest.raises(DatabaseUnavailable):
            commit.result(180)
    assert lab.positions() == [20, 20, 0]
    lab.check()


def test_a_run_waits_for_a_rewind_as_long_as_it_takes_and_says_so(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A claim does not give up while a rewind moves rows (I4)."""
    monkeypatch.setattr(claims, "GRACE_MS", 100)
    lab.read(50)
    ((uuid,),) = lab.sql("SELECT kafka_uuid FROM tidemark.topic WHERE topic_id = %s", lab.topic_id)
    partition = TopicPartition(lab.topic, 0)
    log = Log(partition, 0, 100)
    found = claims.LookUp([Topic(lab.topic, uuid, 3)], {partition: log}, {partition: 100})
    with session(lab.url, application="tidemark rewind") as other, transaction(other) as cur, session(lab.url) as mine:
        cur.execute(side.SQL["lock_group"], {"class": REWIND_LOCK, "group_id": lab.group_id})
        cur.execute("SELECT FROM tidemark.partition_offset WHERE group_id = %s FOR NO KEY UPDATE", (lab.group_id,))
        with transaction(mine) as read:
            generation = store.next_generation(read)
        me = claims.Claimant(lab.spec.group, lab.group_id, 1, None, store.Owner(generation, "me"))
        with in_thread(lambda: claims.claim_all(mine, me, found, [partition], lambda _: log)) as claimed:
            said(caplog, f"position of {lab.topic}/0", "tidemark rewind", f"pid {backend_of(other)}")
            assert not claimed.done()
            other.commit()
            assert [claim.position for claim in claimed.result(180)] == [50]


def test_what_was_read_before_a_rewind_is_fenced_and_its_owner_claims_again(lab: Lab) -> None:
    """Same generation, no rebalance: the position's row tells the owner where to continue (I2)."""
    lab.read(50)
    claim = lab.claim()
    ((generation,),) = lab.sql("SELECT generation FROM tidemark.partition_offset WHERE partition = 0")
    part = Slice(claim.partition, claim.topic_id, claim.position, 80, claim.epoch)
    lab.rewind(ToOffset(20), f"{lab.topic}:0")
    with pytest.raises(OffsetFenced):
        commit_slice(lab.target(), part, of_all_kinds(part), payloads)
    with session(lab.url) as connection, transaction(connection) as cur:
        again = store.claim(cur, lab.group_id, lab.topic_id, TopicPartition(lab.topic, 0), store.Owner(generation, "me"))
    assert (again.position, again.epoch) == (20, claim.epoch + 2)
    lab.check()


def test_other_partitions_go_on_while_a_rewind_is_applied(lab: Lab) -> None:
    lab.read(50)
    planned = lab.plan(ToOffset(20), f"{lab.topic}:0")
    with session(lab.url) as other, transaction(other) as cur:
        cur.execute("SELECT FROM tidemark.partition_offset WHERE partition = 0 FOR UPDATE")
        with in_thread(lambda: lab.apply(planned.rewind_id)) as applied:
            until(lab.waits)
            lab.read(100, 1)
            cur.connection.commit()
            assert applied.result(180).plan.state is RewindState.APPLIED
    assert lab.positions() == [20, 100, 0]
    lab.check()


def test_members_are_told_when_the_rewind_commits(lab: Lab) -> None:
    """Members are notified on their group's channel, and not before the commit."""
    listening: Any = psycopg2.connect(lab.url)
    listening.autocommit = True
    listening.cursor().execute(f"LISTEN {channel_of(lab.spec.group)}")
    lab.read(50)
    planned = lab.plan(ToOffset(20), f"{lab.topic}:0")
    listening.poll()
    assert listening.notifies == []
    lab.apply(planned.rewind_id)
    assert select.select([listening], [], [], 60)[0]
    listening.poll()
    assert [said.payload for said in listening.notifies] == [f"rewind {planned.rewind_id}"]
    listening.close()

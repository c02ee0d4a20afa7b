"""A rewind beside: records are read into shadows while readers and the group notice nothing, then swapped into the sink at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from tests.integration.rewind.hands import Hands
from tests.integration.rewind.lab import Lab, lab_on, of_all_kinds, one_city
from tests.support.erasing import erase
from tests.support.kafka_topics import Topics
from tests.support.ledger import payloads
from tests.support.records import numbers
from tests.support.scenario import Scenario as Consumer

from tidemark.maintenance import maintain
from tidemark.offsets import samples, store
from tidemark.offsets.store import OffsetFenced
from tidemark.records.ranges import Epoch, Slice
from tidemark.rewind import beside
from tidemark.rewind.apply import NotCaughtUp, StalePlan
from tidemark.rewind.beside import ReplayExists
from tidemark.rewind.plan import PlanRefused
from tidemark.rewind.plan_model import RewindState, ToEarliest, ToLatest, ToOffset
from tidemark.rewind.store import AlreadyDecided
from tidemark.sink.commit import commit_slice

ENDS = (60, 45)
"""Where the group is in its two partitions."""
TARGET = 17


def keyed(partition: int, factor: int) -> Callable[[int], list[str]]:
    """Keys that repeat; other ones for each factor."""
    return lambda offset: [f"key {partition} {(offset * factor) % 11}"]


@pytest.fixture(params=["append", "upsert"])
def lab(request: pytest.FixtureRequest, scenario: Consumer, topics: Topics) -> Iterator[Lab]:
    options: dict[str, Any] = {} if request.param == "append" else {"key": ("city",)}
    with lab_on(scenario, topics, (100, 100), **options) as lab:
        yield lab


def read(lab: Lab, *ends: int) -> None:
    for partition, end in enumerate(ends):
        lab.read(end, partition, keyed(partition, 1) if lab.key else one_city, step=13)


def replay(lab: Lab, rewind_id: int) -> None:
    lab.replay(rewind_id, lambda part: of_all_kinds(part, keyed(part.partition.partition, 2) if lab.key else one_city), step=7)


def test_nothing_changes_until_the_swap(lab: Lab) -> None:
    read(lab, *ENDS)
    before = lab.image()
    plan = lab.plan(ToOffset(TARGET), beside=True)
    assert lab.apply(plan.rewind_id).plan.state is RewindState.BESIDE
    replay(lab, plan.rewind_id)
    assert lab.image() == before
    lab.check()
    swapped = lab.swap(plan.rewind_id).plan
    assert swapped.state is RewindState.APPLIED
    assert [(part.replay, part.lost) for part in swapped.groups[0].partitions] == [(end - TARGET, None) for end in ENDS]
    assert lab.positions() == list(ENDS)
    lab.check()
    assert lab.ledger()[-1][2] == ENDS[1]
    assert len(lab.rows()) > 0
    lab.undo(plan.rewind_id)
    assert lab.image() == before
    lab.check()


def test_comparison_before_the_swap_is_the_comparison_after_it(lab: Lab) -> None:
    """What `verify` reports before anything is decided is what it reports afterwards."""
    read(lab, *ENDS)
    rewind_id = lab.rewind(ToOffset(TARGET), beside=True).rewind_id
    replay(lab, rewind_id)
    before = lab.verified(rewind_id)
    lab.swap(rewind_id)
    after = lab.verified(rewind_id)
    assert replace(before, examples={}) == replace(after, examples={})
    assert before.left == 0
    assert before.examples.keys() == after.examples.keys()
    assert before.equal + before.changed + before.new > 0


def test_replay_behind_its_group_is_not_swapped(lab: Lab) -> None:
    read(lab, *ENDS)
    rewind_id = lab.rewind(ToOffset(TARGET), beside=True).rewind_id
    replay(lab, rewind_id)
    read(lab, ENDS[0] + 7)
    with lab.unchanged(NotCaughtUp, "7 offsets behind"):
        lab.swap(rewind_id)
    replay(lab, rewind_id)
    assert lab.swap(rewind_id).plan.state is RewindState.APPLIED
    assert lab.swap(rewind_id).already


def test_discarded_replay_leaves_nothing_behind(lab: Lab) -> None:
    read(lab, *ENDS)
    before, tables = lab.image(), archives(lab)
    rewind_id = lab.rewind(ToOffset(TARGET), beside=True).rewind_id
    replay(lab, rewind_id)
    with lab.session() as connection:
        assert beside.discard(connection, rewind_id, by="ann").state is RewindState.DISCARDED
        assert beside.discard(connection, rewind_id, by="ann").state is RewindState.DISCARDED
    assert (lab.image(), archives(lab)) == (before, tables)
    with pytest.raises(PlanRefused, match="is DISCARDED: it was never applied"):
        lab.undo(rewind_id)
    assert lab.sql("SELECT count(*) FROM tidemark.batch WHERE group_id <> %s", lab.group_id) == [(0,)]
    assert lab.sql("SELECT count(*) FROM tidemark.failed_record WHERE group_id <> %s", lab.group_id) == [(0,)]
    with pytest.raises(AlreadyDecided, match="discarded"):
        lab.swap(rewind_id)
    again = lab.rewind(ToOffset(TARGET), beside=True).rewind_id
    replay(lab, again)
    lab.swap(again)


def archives(lab: Lab) -> list[Any]:
    return lab.sql("SELECT relname FROM pg_class WHERE relnamespace = 'tidemark_archive'::regnamespace ORDER BY 1")


def test_only_one_replay_beside_at_a_time(lab: Lab) -> None:
    read(lab, *ENDS)
    second = lab.plan(ToOffset(TARGET + 3), beside=True).rewind_id
    with lab.unchanged(AlreadyDecided, "it is only planned"):
        lab.swap(second)
    first = lab.rewind(ToOffset(TARGET), beside=True).rewind_id
    with pytest.raises(PlanRefused, match="is BESIDE: it was never applied"):
        lab.undo(first)
    with pytest.raises(ReplayExists, match=f"tidemark rewind discard {first}"):
        lab.plan(ToEarliest(), beside=True)
    with lab.unchanged(ReplayExists, "neither swapped nor discarded"):
        lab.apply(second)


def test_swap_is_refused_after_another_rewind(lab: Lab) -> None:
    read(lab, *ENDS)
    rewind_id = lab.rewind(ToOffset(TARGET), beside=True).rewind_id
    lab.rewind(ToOffset(5), f"{lab.topic}:0")
    read(lab, *ENDS)
    replay(lab, rewind_id)
    with lab.unchanged(StalePlan, "has been rewound since"):
        lab.swap(rewind_id)


def test_rewind_that_reads_nothing_again_is_refused(lab: Lab) -> None:
    read(lab, *ENDS)
    with pytest.raises(PlanRefused, match="the target is ahead of the group"):
        lab.plan(ToLatest(), beside=True)
    with pytest.raises(PlanRefused, match=r"No partition moves back|ahead of the group"):
        lab.plan(ToLatest(), f"{lab.topic}:1", beside=True)


def test_plan_says_how_much_space_the_replay_takes_and_is_refused_above_the_limit(lab: Lab) -> None:
    read(lab, *ENDS)
    replaced = len([row for row in lab.rows() if row[1] >= TARGET])
    lab.sql(f"ANALYZE {lab.table}")
    plan = lab.plan(ToOffset(TARGET), beside=True)
    ((size,),) = lab.sql("SELECT pg_total_relation_size(%s::regclass)", lab.table)
    assert plan.groups[0].shadow_bytes == size * replaced // len(lab.rows())
    assert lab.plan(ToOffset(TARGET)).groups[0].shadow_bytes is None
    lab.consumer.set(rewind={"max_beside_rows": replaced - 1})
    with lab.unchanged(PlanRefused, f"would replace {replaced} rows.*max_beside_rows is {replaced - 1}"):
        lab.plan(ToOffset(TARGET), beside=True)


def test_swap_that_dies_after_any_statement_changes_nothing(lab: Lab) -> None:
    read(lab, *ENDS)
    rewind_id = lab.rewind(ToOffset(TARGET), beside=True).rewind_id
    replay(lab, rewind_id)
    assert lab.struck(lambda cursor: lab.swap(rewind_id, cursor=cursor)) > 20
    lab.check()


def test_start_that_dies_after_any_statement_changes_nothing(lab: Lab) -> None:
    read(lab, *ENDS)
    plan = lab.plan(ToOffset(TARGET), beside=True)
    assert lab.struck_apply(plan.rewind_id) > 10
    replay(lab, plan.rewind_id)
    lab.swap(plan.rewind_id)


@pytest.mark.parametrize("act", ["swap", "discard"])
def test_late_commit_of_a_replay_is_fenced(lab: Lab, act: str) -> None:
    read(lab, *ENDS)
    rewind_id = lab.rewind(ToOffset(TARGET), beside=True).rewind_id
    replay(lab, rewind_id)
    found = lab.side(rewind_id)
    with lab.watch.cursor() as cur:
        (position,) = [position for position in store.positions(cur, found.side) if position.partition.partition == 0]
    zombie = Slice(position.partition, position.topic_id, position.position, position.position + 5, Epoch(1))
    target = found.onto_shadows(lab.target())
    if act == "swap":
        lab.swap(rewind_id)
    else:
        with lab.session() as connection:
            beside.discard(connection, rewind_id, by="ann")
    with pytest.raises(OffsetFenced):
        commit_slice(target, zombie, of_all_kinds(zombie), payloads)
    lab.check()


# ---- by runs


def test_reader_sees_the_old_rows_until_the_swap_and_the_new_ones_after_it(hands: Hands) -> None:
    """The group's runs and the runs of the replay read the same topic. Whenever a reader looks, the rows of the range are all old, or all
    new."""
    consumer = hands.consumer
    consumer.run()
    consumer.transform(hands.source("b"))
    rewind_id = hands.rewind(ToEarliest(), beside=True).rewind_id
    old = [f"{number}a" for number in range(30) if number % 10 not in (1, 2)] * 2
    looks: list[list[str]] = []

    def look(part: Slice) -> None:
        looks.append([payload for (payload,) in hands.sql(f"SELECT payload FROM {hands.table}")])

    consumer.run(of_rewind=rewind_id, before=look)
    hands.consumer.topics.produce(hands.topic, numbers(30, 40), partition=1)
    consumer.run(before=look)
    assert len(looks) > 10
    assert all(sorted(payloads[: len(old)]) == sorted(old) for payloads in looks)
    plan = hands.catch_up_and_swap(rewind_id)
    assert plan.state is RewindState.APPLIED
    new = [f"{number}b" for number in range(30) if number % 10 not in (1, 2)] * 2
    new += [f"{number}b" for number in range(30, 40) if number % 10 not in (1, 2)]
    assert sorted(consumer.rows()) == sorted(new)
    numbers_of_rows = [number for (number,) in hands.sql(f"SELECT number FROM {hands.table}")]
    assert len(set(numbers_of_rows)) == len(numbers_of_rows)
    hands.check()


def test_lag_does_not_take_a_swap_for_a_move(hands: Hands) -> None:
    hands.consumer.run()
    hands.catch_up_and_swap(hands.rewind(ToEarliest(), beside=True).rewind_id)
    with hands.watch.cursor() as cur:
        group_id = store.require_group(cur, hands.group)
        cur.execute(samples.SQL["moves"], {"group_id": group_id, "applied_no": 2**62, "at": datetime.now(UTC)})
        assert cur.fetchall() == []


def test_failed_records_and_retries_of_the_replay_become_the_groups(hands: Hands) -> None:
    consumer = hands.consumer
    consumer.run()
    failed = hands.failed()
    consumer.transform(hands.source("b").replace("% 10 == 2", "% 10 == 3"))
    rewind_id = hands.rewind(ToEarliest(), beside=True).rewind_id
    consumer.run(of_rewind=rewind_id)
    assert hands.failed() == failed
    hands.catch_up_and_swap(rewind_id)
    topics_of = {"WAITING": f"{hands.group}.retry.1h", "FAILED": f"{hands.group}.failed"}
    assert [(row[1], row[2], row[4]) for row in hands.failed() if row[0] == 0] == [
        (offset, state, topics_of[state]) for offset in range(30) if (state := {1: "WAITING", 3: "FAILED"}.get(offset % 10))
    ]
    hands.check()
    hands.undo(rewind_id)
    assert hands.failed() == failed
    hands.check()


def test_held_group_begins_no_batch(hands: Hands) -> None:
    """So the replay reaches a group that reads all the time."""
    consumer = hands.consumer
    consumer.run()
    rewind_id = hands.rewind(ToEarliest(), beside=True).rewind_id
    hands.consumer.topics.produce(hands.topic, numbers(30, 40), partition=0)
    with hands.session() as connection:
        beside.hold(connection, rewind_id, beside.HOLD)
        assert consumer.run().records == 0
        assert consumer.run(of_rewind=rewind_id).records == 60
        beside.hold(connection, rewind_id, None)
    assert consumer.run().records == 10


def test_nobody_is_erased_while_a_replay_reads(lab: Lab) -> None:
    """The shadow would keep the rows, and the swap would bring them back."""
    read(lab, *ENDS)
    rewind_id = lab.rewind(ToOffset(TARGET), beside=True).rewind_id
    replay(lab, rewind_id)
    with lab.unchanged(ReplayExists, f"tidemark rewind swap {rewind_id}"):
        erase(lab, "population = 3")
    lab.swap(rewind_id)
    erase(lab, "population = 3")


def test_replay_that_nobody_swaps_is_discarded_in_the_end(lab: Lab) -> None:
    read(lab, *ENDS)
    before = lab.image()
    rewind_id = lab.rewind(ToOffset(TARGET), beside=True).rewind_id
    replay(lab, rewind_id)
    with lab.session() as connection:
        maintain(connection, timedelta(days=30), by="ann")
        assert lab.sql("SELECT state FROM tidemark.rewind") == [("BESIDE",)]
        lab.sql("UPDATE tidemark.rewind SET started_at = started_at - interval '7 days'")
        maintain(connection, timedelta(days=30), by="ann")
    assert lab.sql("SELECT state FROM tidemark.rewind") == [("DISCARDED",)]
    assert lab.image() == before
    events = lab.sql("SELECT claimed_by, reason FROM tidemark.audit_event WHERE kind = 'REWIND DISCARDED'")
    assert events == [("ann", "nobody has swapped it within 7d")]

"""Each scenario against a real broker, on a group that need not be stopped; Kafka's own tool refuses active groups.

The docstrings name the matching tests of Kafka's ``ResetConsumerGroupOffsetTest``. Unlike in Kafka, a target outside the log is refused,
not clamped.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta, timezone

import pytest
from confluent_kafka import Consumer as KafkaConsumer
from confluent_kafka import TopicPartition as Wire
from tests.integration.rewind.lab import Lab, lab_on
from tests.support.by_hand import REASON
from tests.support.kafka_topics import Topics
from tests.support.scenario import Scenario as Consumer
from tests.support.waiting import until

from tidemark.errors import BadInput
from tidemark.kafka.cluster import TopicsMissing
from tidemark.offsets import store
from tidemark.offsets.store import TaskIdentity
from tidemark.records.ranges import TopicPartition
from tidemark.rewind import plan_text
from tidemark.rewind.apply import StalePlan, apply
from tidemark.rewind.plan import CompactedTopics, PlanRefused, PlanRequest, plan
from tidemark.rewind.plan_model import (
    ByDuration,
    FromFile,
    FromGroup,
    Plan,
    RewindState,
    Scenario,
    ShiftBy,
    ToBatch,
    ToCurrent,
    ToDatetime,
    ToEarliest,
    ToLatest,
    ToOffset,
    ToValidated,
)
from tidemark.rewind.scenarios import scenario as words
from tidemark.sink.table import SinkMissing
from tidemark.spec.scope import Scope

NOON = datetime(2026, 3, 29, 12, 0, tzinfo=UTC)


def offsets(planned: Plan) -> dict[int, tuple[int, int]]:
    """Old and new offset by partition."""
    return {part.partition.partition: (part.old, part.new) for _, part in planned}


def all_applied(lab: Lab, scenario: Scenario, *scope: str) -> list[int]:
    """Applies the scenario and returns the positions; they are as planned, and the ledger is consistent."""
    planned = lab.plan(scenario, *scope)
    assert lab.apply(planned.rewind_id).plan.state is RewindState.APPLIED
    for partition, (_, new) in offsets(planned).items():
        assert lab.position(partition) == new
    lab.check()
    return lab.positions()


@pytest.fixture
def read(lab: Lab) -> Lab:
    """A group at offsets 50, 50 and 20, read in batches of 20; the first 10 records of each log are gone."""
    for partition, end in enumerate((50, 50, 20)):
        lab.read(end, partition, step=20)
    lab.consumer.topics.trim(lab.topic, {0: 10, 1: 10, 2: 10})
    return lab


@pytest.fixture
def timed(scenario: Consumer, topics: Topics) -> Iterator[Lab]:
    """Records one minute apart: partition 0 starts at noon, partition 1 half an hour later. All are read."""
    with lab_on(scenario, topics, (0, 0)) as lab:
        for partition, first in ((0, NOON), (1, NOON + timedelta(minutes=30))):
            for number in range(60):
                millis = int((first + timedelta(minutes=number)).timestamp() * 1000)
                topics.produce(lab.topic, [str(number)], partition=partition, timestamp=millis)
            lab.read(60, partition)
        yield lab


def test_each_partition_goes_where_the_scenario_says(read: Lab) -> None:
    """testResetOffsetsToEarliest, …OnTopics, testResetOffsetsToCurrentOffset, testResetOffsetsToSpecificOffset, testResetOffsetsShiftPlus,
    testResetOffsetsShiftMinus."""
    for scenario, new in (
        (ToEarliest(), [10, 10, 10]),
        (ToCurrent(), [50, 50, 20]),
        (ToOffset(30), [30, 30, 30]),
        (ShiftBy(10), [60, 60, 30]),
        (ShiftBy(-10), [40, 40, 10]),
    ):
        assert [after for _, after in offsets(read.plan(scenario)).values()] == new, scenario
    assert all_applied(read, ToCurrent()) == [50, 50, 20]
    assert all_applied(read, ShiftBy(10)) == [60, 60, 30]
    assert all_applied(read, ToEarliest()) == [10, 10, 10]


def test_to_latest_goes_behind_the_last_stable_record(read: Lab) -> None:
    """testResetOffsetsToLatest. The target is the last stable offset."""
    read.consumer.topics.transaction(read.topic, ["a", "b"])
    first = TopicPartition(read.topic, 0)
    until(lambda: read.cluster.stable_ends([first])[first] == 103, "the marker of the transaction's end is written")
    assert all_applied(read, ToLatest()) == [103, 100, 60]


def test_to_datetime_goes_to_the_first_record_of_that_time_or_later(timed: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """testResetOffsetsToLocalDateTime, testResetOffsetsToZonedDateTime: a moment is the same in every time zone. Behind the last record it
    is the stable end (testResetOffsetsByDurationFallbackToLatestWhenNoRecords). All partitions are looked up in one request."""
    berlin = (NOON + timedelta(minutes=40)).astimezone(timezone(timedelta(hours=2)))
    assert offsets(timed.plan(ToDatetime(berlin))) == {0: (60, 40), 1: (60, 10)}
    assert offsets(timed.plan(ToDatetime(berlin + timedelta(microseconds=1)))) == {0: (60, 41), 1: (60, 11)}
    assert offsets(timed.plan(ToDatetime(NOON - timedelta(days=60_000)))) == {0: (60, 0), 1: (60, 0)}
    assert offsets(timed.plan(ToDatetime(NOON + timedelta(minutes=75)))) == {0: (60, 60), 1: (60, 45)}
    asked = []
    look_up = timed.cluster.offsets_for_time

    def counted(partitions, timestamp_ms):  # type: ignore[no-untyped-def]
        asked.append(sorted(partitions))
        return look_up(partitions, timestamp_ms)

    monkeypatch.setattr(timed.cluster, "offsets_for_time", counted)
    planned = timed.plan(ToDatetime(berlin))
    assert asked == [[TopicPartition(timed.topic, 0), TopicPartition(timed.topic, 1)]]
    timed.apply(planned.rewind_id)
    assert timed.positions() == [40, 10]
    timed.check()


def test_by_duration_counts_from_the_databases_clock(timed: Lab) -> None:
    """testResetOffsetsByDuration, testResetOffsetsByDurationToEarliest."""
    ((now,),) = timed.sql("SELECT clock_timestamp()")
    back = now - (NOON + timedelta(minutes=40))
    assert offsets(timed.plan(ByDuration(back)))[0][1] in (40, 41)
    assert offsets(timed.plan(ByDuration(timedelta(0)))) == {0: (60, 60), 1: (60, 60)}
    assert offsets(timed.plan(ByDuration(now - NOON + timedelta(days=1)))) == {0: (60, 0), 1: (60, 0)}


def test_plan_that_was_exported_is_a_file_to_go_back_to(read: Lab) -> None:
    """testResetOffsetsExportImportPlanSingleGroupArg."""
    csv = f"{read.topic},0,30\n{read.topic},2,11\n"
    made = words.parse("from-file", contents=csv, groups=[read.spec.group])
    assert offsets(read.plan(made)) == {0: (50, 30), 2: (20, 11)}
    assert all_applied(read, made) == [30, 50, 11]
    known = {TopicPartition(read.topic, 0): 15, TopicPartition(read.topic, 1): 16}
    with pytest.raises(PlanRefused, match=f"partitions that the group does not read: b3a/7, {read.topic}/7"):
        read.plan(FromFile({**known, TopicPartition(read.topic, 7): 15, TopicPartition("b3a", 7): 15}))
    some = read.plan(FromFile(known), f"{read.topic}:0")
    assert ([part.new for _, part in some], plan_text.as_json(some)["says"]) == (
        [15],
        "Continue at the offsets in a file, for 1 partition.",
    )


def test_from_group_takes_where_another_group_is_here_or_in_kafka(read: Lab) -> None:
    """Partitions without an offset of that group stay where they are."""
    with read.session() as connection, connection, connection.cursor() as cur:
        other = store.ensure_group(cur, "other")
        store.start_partition(cur, other, read.topic_id, 1, 44)
    assert all_applied(read, FromGroup("other")) == [50, 44, 20]
    with pytest.raises(BadInput, match="group nobody-there has no position"):
        read.plan(FromGroup("nobody-there"))
    group = f"kafka-{read.spec.group}"
    settings = {"bootstrap.servers": read.consumer.topics.servers, "group.id": group, "enable.auto.commit": False}
    with contextlib.closing(KafkaConsumer(settings)) as consumer:
        consumer.commit(offsets=[Wire(read.topic, 0, 33), Wire(read.topic, 1, 77)], asynchronous=False)
    assert all_applied(read, FromGroup(group, kafka=True)) == [33, 77, 20]
    with pytest.raises(BadInput, match="nobody-there has committed no offset to Kafka"):
        read.plan(FromGroup("nobody-there", kafka=True))
    for _ in range(20):  # the admin client's own lookup crashed every few calls
        assert read.cluster.group_offsets("nobody-there", [TopicPartition(read.topic, 0)]) == {}


def test_to_validated_goes_behind_what_validation_has_passed(read: Lab) -> None:
    """It is refused where nothing was validated: otherwise the group would silently go back to the very start. A validated partition can be
    chosen alone."""
    read.validate_to(15, 1)
    with pytest.raises(PlanRefused, match=f"Nothing of {read.topic}/0, {read.topic}/2 is validated"):
        read.plan(ToValidated())
    assert [part.new for part in read.plan(ToValidated(), f"{read.topic}:1").groups[0].partitions] == [15]
    for partition in (0, 2):
        read.validate_to(15, partition)
    assert all_applied(read, ToValidated()) == [15, 15, 15]
    assert read.sql("SELECT DISTINCT validated_offset FROM tidemark.partition_offset") == [(15,)]


def test_to_batch_goes_just_before_it_or_before_all_that_a_run_has_committed(read: Lab) -> None:
    ((batch_id,),) = read.sql("SELECT batch_id FROM tidemark.batch WHERE partition = 1 AND start_offset = 20")
    run = TaskIdentity("consume__x", "run 7", "consume", 0, 1)
    read.read(90, 0, step=20, task=run)
    read.read(55, 2, task=run)
    read.read(95, 0)
    assert all_applied(read, ToBatch(dag_id="consume__x", run_id="run 7")) == [50, 50, 20]
    assert all_applied(read, ToBatch(batch_id)) == [50, 20, 20]
    with pytest.raises(BadInput, match="has nothing from batch 999999"):
        read.plan(ToBatch(999_999))
    with pytest.raises(BadInput, match="nothing from run nope of consume__x"):
        read.plan(ToBatch(dag_id="consume__x", run_id="nope"))


def test_compacted_topic_is_rewound_only_with_allow_loss(read: Lab, topics: Topics) -> None:
    """Kafka keeps only the newest record of each key, so rows would go that do not come back. What only goes forward loses nothing."""
    topics.alter(read.topic, cleanup_policy="compact,delete")
    with pytest.raises(CompactedTopics) as refused:
        read.plan(ToOffset(10))
    assert refused.value.topics == (read.topic,)
    assert read.plan(ToLatest()).groups
    assert read.plan(ToOffset(10), allow_loss=True).groups


def test_allow_loss_goes_on_at_the_start_and_stores_what_is_gone(read: Lab) -> None:
    """Rows of records that can no longer be read are taken out too, because they lie after the target; the range is stored as lost (I5)."""
    before = read.image()
    planned = read.plan(ToOffset(4), f"{read.topic}:0", allow_loss=True)
    (part,) = planned.groups[0].partitions
    assert (part.old, part.new, part.lost) == (50, 10, (4, 10))
    done = read.apply(planned.rewind_id).plan
    assert read.positions() == [10, 50, 20]
    assert read.consumer.lost() == [(0, 4, 10, "retention")]
    assert read.offsets() == [3]
    read.check()
    read.read(50)
    read.check()
    read.undo(done.rewind_id)
    assert read.image() == before
    read.check()


def test_a_plan_changes_nothing_but_its_own_rows(read: Lab) -> None:
    """testResetOffsetsExistingTopic: a plan is like Kafka's dry run, but on a running group, and with counts."""
    before, epochs = read.image(), read.epochs()
    planned = read.plan(ToOffset(25))
    assert (read.image(), read.epochs()) == (before, epochs)
    (group,) = planned.groups
    assert [(part.old, part.new, part.sink_rows, part.failed_records) for part in group.partitions] == [
        (50, 25, len([1 for row in before.sink if row[-3] == 0 and row[-2] >= 25]), 4),
        (50, 25, len([1 for row in before.sink if row[-3] == 1 and row[-2] >= 25]), 4),
        (20, 25, 0, 0),
    ]
    assert (group.lag, group.group_state, group.in_flight, group.announced_assets) == (75 + 75 + 35, "Empty", 0, ())
    assert planned.state is RewindState.PLANNED
    assert planned.expires_at > planned.planned_at


def test_duration_of_a_replay_comes_from_the_fastest_run(read: Lab) -> None:
    """A continuous run that waited for records most of the time does not make the estimate longer: its best ten minutes count."""
    (fast,) = read.plan(ToOffset(25)).groups
    assert fast.records_per_s is not None
    read.sql("UPDATE tidemark.attempt SET started_at = started_at - interval '1 day' WHERE group_id = %s", read.group_id)
    (slow,) = read.plan(ToOffset(25)).groups
    runs = read.sql("SELECT sum(end_offset - start_offset) FROM tidemark.batch WHERE group_id = %s GROUP BY attempt_id", read.group_id)
    assert slow.records_per_s == pytest.approx(max(float(offsets) for (offsets,) in runs) / 600)


def test_a_plan_says_whether_readers_were_told_of_what_goes(lab: Lab) -> None:
    """Readers are notified by the asset's event, which follows the verdict unless the verdict blocks it. A run without a verdict has no
    event yet."""
    lab.read(50, task=TaskIdentity("consume__x", "run 1", "consume", 0, 1))
    for verdict, on_failure, told in (
        (None, "block", False),
        ("passed", "block", True),
        ("warning", "block", True),
        ("critical", "block", False),
        ("critical", "report", True),
    ):
        lab.consumer.set(validation={"suite": "cities", "on_failure": on_failure})
        if verdict:
            insert = "INSERT INTO tidemark.validation (group_id, verdict, sink_rows, seconds) VALUES (%s, %s, 0, 0) RETURNING validation_id"
            ((number,),) = lab.sql(insert, lab.group_id, verdict)
            lab.sql("UPDATE tidemark.batch SET validation_id = %s WHERE group_id = %s", number, lab.group_id)
        assert lab.plan(ToEarliest()).groups[0].announced_assets == ((lab.table,) if told else ())


def test_equal_plans_of_an_equal_state_have_equal_digests(read: Lab) -> None:
    first, same, other = (read.plan(ToOffset(offset)).digest for offset in (25, 25, 26))
    assert first == same
    assert first != other
    read.rewind(ToCurrent())
    assert read.plan(ToOffset(25)).digest != first


def test_a_group_that_never_ran_and_a_reason_that_says_nothing_are_refused(lab: Lab) -> None:
    """testResetOffsetsNotExistingGroup."""
    with pytest.raises(BadInput, match="reason"):
        lab.plan(ToEarliest(), reason="too short")
    lab.consumer.set(group="never-ran")
    with pytest.raises(BadInput, match="no group 'never-ran' has ever run here"):
        lab.plan(ToEarliest())


def test_a_topic_that_is_gone_and_a_sink_that_is_gone_are_said(read: Lab) -> None:
    read.sql(f"ALTER TABLE {read.table} RENAME TO elsewhere")
    with pytest.raises(SinkMissing):
        read.plan(ToEarliest())
    read.sql(f"ALTER TABLE lake.elsewhere RENAME TO {read.consumer.name}")
    read.consumer.set(topics=["t-gone"])
    with pytest.raises(TopicsMissing, match="t-gone"):
        read.plan(ToEarliest())


def test_several_consumers_move_together_or_not_at_all(read: Lab, topics: Topics) -> None:
    """testResetOffsetsAllTopicsAllGroups, testResetOffsetsExportImportPlan. If one of them cannot be rewound, none is."""
    second = Consumer(read.consumer.folder, read.url, topics)
    with lab_on(second, topics, (40,)) as other:
        other.read(30)
        labs = {each.spec.name: each for each in (read, other)}

        def planned(scenario: Scenario) -> Plan:
            with read.session() as connection:
                specs = [each.spec for each in labs.values()]
                return plan(connection, lambda _: read.cluster, PlanRequest(specs, Scope(), scenario, reason=REASON, by="ann"))

        made = planned(ShiftBy(-10))
        other.sql(f"ALTER TABLE {other.table} ADD COLUMN more text")
        before = (read.image(), other.image())
        with read.session() as connection, pytest.raises(StalePlan, match="columns of"):
            apply(connection, lambda _: read.cluster, lambda name: labs[name].spec, made.rewind_id, by="bob")
        assert (read.image(), other.image()) == before
        made = planned(ShiftBy(-10))
        with read.session() as connection:
            done = apply(connection, lambda _: read.cluster, lambda name: labs[name].spec, made.rewind_id, by="bob").plan
        assert {group.consumer for group in done.groups} == set(labs)
        assert (read.positions(), other.positions()) == ([40, 40, 10], [20])
        read.check()
        other.check()
        with pytest.raises(PlanRefused, match="name exactly these consumers"):
            read.undo(done.rewind_id)

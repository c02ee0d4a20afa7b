"""Requests of operators: lists, descriptions, positions, and deletion of groups and of positions, as in Kafka's GroupCoordinatorTest."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import psycopg2
import pytest
from tests.integration.group.players import Scene, until_somebody_waits
from tests.support.ledger import DDL, Group, in_thread

from tidemark.group.coordinator import list_groups
from tidemark.group.errors import GroupIdNotFound, GroupSubscribedToTopic, NonEmptyGroup, OffsetHasResults, UnknownMemberId
from tidemark.group.states import GroupState
from tidemark.offsets.store import OffsetFenced
from tidemark.records.ranges import TopicPartition


@pytest.fixture
def ledger(scene: Scene) -> Iterator[Group]:
    """Two partitions with positions, for the scene's group."""
    with contextlib.closing(psycopg2.connect(scene.url)) as watch:
        watch.autocommit = True
        with watch.cursor() as cur:
            cur.execute(DDL)
        yield Group(scene.url, watch, partitions=2, name=scene.group)


def states_of(scene: Scene, *states: str) -> list[tuple[str, int]]:
    return [(each.state, each.members) for each in list_groups(scene.connection, states) if each.group == scene.group]


# ---- lists and descriptions


def test_groups_are_listed_by_name_with_their_state(scene: Scene) -> None:
    """Kafka: testListGroupsIncludesStableGroups, testListGroupsIncludesRebalancingGroups, testListGroupsWithStates."""
    a, b = scene.player("a"), scene.player("b")
    a.ask_for_id()
    assert states_of(scene) == [("Empty", 0)]
    a.join()
    assert states_of(scene, GroupState.COMPLETING_REBALANCE) == [("CompletingRebalance", 1)]
    a.assign()
    assert states_of(scene, GroupState.STABLE, GroupState.EMPTY) == [("Stable", 1)]
    assert states_of(scene, GroupState.PREPARING_REBALANCE) == []
    b.join()
    assert states_of(scene) == states_of(scene, GroupState.PREPARING_REBALANCE) == [("PreparingRebalance", 2)]
    names = [f"{scene.group}-{number}" for number in (2, 1, 3)]
    for name in names:
        Scene(scene.url, scene.connection, name).player("a").ask_for_id()
    assert [each.group for each in list_groups(scene.connection) if each.group in names] == sorted(names)


def test_a_group_that_does_not_exist_has_no_description_and_no_positions(scene: Scene) -> None:
    """Kafka: testDescribeGroupInactiveGroup (there, the group is Dead, without an error), testCommitAndFetchOffsetsWithEmptyGroup,
    testDeleteOffsetOfNonExistingGroup."""
    coordinator, flights = scene.coordinator(), TopicPartition("flights", 0)
    assert (scene.tick(), states_of(scene), coordinator.describe(), coordinator.fetch_offsets()) == (None, [], None, {})
    assert coordinator.fetch_offsets([flights]) == {flights: None}
    with pytest.raises(GroupIdNotFound):
        coordinator.delete_offsets(["flights"])


def test_a_stable_group_is_described_with_members_and_assignments(scene: Scene) -> None:
    """Kafka: testDescribeGroupStableForDynamicMember, testDescribeGroupStableForStaticMember."""
    a, b = scene.player("a"), scene.player("b", instance="i-b")
    scene.start(a, b)
    found = scene.coordinator().describe()
    assert (found.group, found.state, found.protocol, found.leader) == (scene.group, GroupState.STABLE, "range", a.member_id)
    assert found.generation == a.generation
    assert [(each.member_id, each.instance_id, each.client_id, each.pending, each.overdue) for each in found.members] == [
        (a.member_id, None, "a", False, False),
        (b.member_id, "i-b", "b", False, False),
    ]
    for player, member in zip((a, b), found.members, strict=True):
        assert member.metadata == {"topics": ["flights"]}
        assert member.assignment == {"of": player.member_id, "generation": found.generation}
        assert found.state_since.tzinfo is not None
        assert member.joined_at <= member.seen_at


def test_a_rebalancing_group_is_described_without_assignments(scene: Scene) -> None:
    """Kafka: testDescribeGroupRebalancing. Ids that were given out are shown as pending."""
    a, b, c = (scene.player(name) for name in "abc")
    scene.start(a, b)
    b.leave("gone fishing")
    a.join()
    c.ask_for_id()
    found = scene.coordinator().describe()
    assert (found.state, found.rebalance_reason) == (GroupState.COMPLETING_REBALANCE, "a member leaves: gone fishing")
    assert [(each.client_id, each.pending, each.assignment) for each in found.members] == [("a", False, None), ("c", True, None)]


def test_a_description_shows_who_is_overdue_and_changes_nothing(scene: Scene) -> None:
    """Viewing a page must not require write permission; the next call runs what is due."""
    a, b = scene.player("a"), scene.player("b")
    scene.start(a, b)
    scene.expire(b)
    for _ in range(2):
        found = scene.coordinator().describe()
        assert [each.overdue for each in found.members] == [False, True]
        assert found.state == GroupState.STABLE
    assert scene.tick() == GroupState.PREPARING_REBALANCE
    assert scene.members() == ["a"]


# ---- deletion of groups


def test_a_group_with_members_is_deleted_once_all_are_overdue(scene: Scene) -> None:
    """Kafka: testDeleteNonEmptyGroup. What is due runs first: a group whose members all disappeared without a LeaveGroup is empty."""
    a, b = scene.player("a"), scene.player("b")
    scene.start(a, b)
    scene.expire(a)
    with pytest.raises(NonEmptyGroup) as refused:
        scene.coordinator().delete_group()
    assert (refused.value.state, refused.value.members) == (GroupState.PREPARING_REBALANCE, 1)
    scene.expire(b)
    scene.coordinator().delete_group()
    assert scene.state is None


def test_an_empty_group_is_deleted_and_its_name_is_free(scene: Scene) -> None:
    """Kafka: testDeleteEmptyGroup, testClassicGroupDelete. The next group with this name does not know the old members."""
    a, pending, b = scene.player("a"), scene.player("pending"), scene.player("b")
    scene.start(a)
    pending.ask_for_id()
    a.leave()
    last = scene.generation
    scene.coordinator().delete_group()
    assert (scene.state, scene.coordinator().describe(), states_of(scene)) == (None, None, [])
    with pytest.raises(GroupIdNotFound):
        scene.coordinator().delete_group()
    for player in (a, pending):
        with pytest.raises(UnknownMemberId):
            player.join()
    joined = b.join()
    assert joined.generation > last, "a generation that was given once is never given again, whatever happens to its group"


def test_a_deleted_group_stays_as_history_and_its_partitions_are_fenced(scene: Scene, ledger: Group) -> None:
    """Kafka: testDeleteEmptyGroupWithStoredOffsets. The ledger still explains rows in a sink; the next group with this name starts over.
    Taking a partition away always raises its epoch (I2)."""
    ledger.commit(ledger.slice(20))
    zombie = ledger.slice(40)
    scene.coordinator().delete_group()
    assert scene.coordinator().fetch_offsets() == {}
    name = f"{scene.group} (deleted, group {ledger.group_id})"
    assert scene.sql("SELECT state, name FROM tidemark.consumer_group WHERE group_id = %s", ledger.group_id) == [("Dead", name)]
    assert [each.state for each in list_groups(scene.connection, [GroupState.DEAD]) if each.group == name] == [GroupState.DEAD]
    assert ledger.counted()[3] == 1
    with pytest.raises(OffsetFenced):
        ledger.commit(zombie)


def test_a_deletion_waits_for_a_commit_in_flight(scene: Scene, ledger: Group) -> None:
    """The deletion holds the group's lock while it waits, for 10 s at most."""
    with contextlib.closing(psycopg2.connect(scene.url)) as writer, writer.cursor() as cur:
        cur.execute("SELECT FROM tidemark.partition_offset WHERE group_id = %s AND partition = 1 FOR UPDATE", (ledger.group_id,))
        with in_thread(scene.coordinator().delete_group) as deleting:
            until_somebody_waits(ledger.watch)
            writer.commit()
            deleting.result(180)
    assert scene.state is None


def test_a_join_that_waits_for_a_deletion_makes_a_new_group(scene: Scene) -> None:
    """Kafka: testJoinGroupUnknownConsumerNewDeadGroup (there, COORDINATOR_NOT_AVAILABLE). Here, the name is free by then."""
    a = scene.player("a")
    scene.start(a)
    a.leave()
    old = scene.of_group("group_id")
    with contextlib.ExitStack() as ends:
        other, watch = (ends.enter_context(contextlib.closing(psycopg2.connect(scene.url))) for _ in range(2))
        other.cursor().execute("UPDATE tidemark.consumer_group SET state = 'Dead', name = name || ' (deleted)' WHERE group_id = %s", (old,))
        with in_thread(scene.player("b", instance="i-b").join) as joining:
            until_somebody_waits(watch)
            other.commit()
            assert joining.result(180) is not None
    assert scene.of_group("group_id") != old


# ---- positions


def test_positions_are_served_to_anybody(scene: Scene, ledger: Group) -> None:
    """Kafka: testFetchOffsets, testFetchAllOffsets, testFetchOffsetForUnknownPartition. No generation is required."""
    ledger.commit(ledger.slice(20))
    first, second, unknown = (TopicPartition(ledger.topic, number) for number in (0, 1, 7))
    assert scene.coordinator().fetch_offsets() == {first: 20, second: 0}
    assert scene.coordinator().fetch_offsets([first, unknown]) == {first: 20, unknown: None}


def test_only_the_newest_topic_of_a_name_has_positions(scene: Scene, ledger: Group) -> None:
    """A topic that was created again starts over (I5); the positions of the old one are history."""
    ledger.commit(ledger.slice(20))
    (topic_id,) = ledger.sql("INSERT INTO tidemark.topic (name, kafka_uuid) VALUES (%s, 'another') RETURNING topic_id", ledger.topic)[0]
    ledger.sql(
        "INSERT INTO tidemark.partition_offset (group_id, topic_id, partition, next_offset, validated_offset) VALUES (%s, %s, 0, 3, 0)",
        ledger.group_id, topic_id,
    )  # fmt: skip
    assert scene.coordinator().fetch_offsets() == {TopicPartition(ledger.topic, 0): 3}


def test_positions_of_an_empty_group_are_deleted(scene: Scene, ledger: Group) -> None:
    """Kafka: testDeleteOffsetOfEmptyConsumerGroup, for single partitions and whole topics. A missing position is not an error."""
    first, second, unknown = (TopicPartition(ledger.topic, number) for number in (0, 1, 7))
    assert scene.coordinator().delete_offsets(partitions=[first, unknown]) == {first: None, unknown: None}
    assert scene.coordinator().fetch_offsets() == {second: 0}
    assert scene.coordinator().delete_offsets([ledger.topic, "never heard of"]) == {second: None}
    assert scene.coordinator().fetch_offsets() == {}


def test_positions_of_topics_that_members_read_are_kept(scene: Scene, ledger: Group) -> None:
    """Kafka: testDeleteOffsetOfStableConsumerGroup. Each partition gets an answer, and only positions that no member uses are deleted."""
    read = TopicPartition(ledger.topic, 0)
    other = Group(scene.url, ledger.watch, partitions=1)
    other.sql("UPDATE tidemark.partition_offset SET group_id = %s WHERE group_id = %s", ledger.group_id, other.group_id)
    free = TopicPartition(other.topic, 0)
    a = scene.player("a", topics=[ledger.topic])
    scene.start(a)
    answers = scene.coordinator().delete_offsets(partitions=[read, free])
    assert isinstance(answers[read], GroupSubscribedToTopic)
    assert answers[free] is None
    whole = scene.coordinator().delete_offsets([ledger.topic])
    assert {type(answer) for answer in whole.values()} == {GroupSubscribedToTopic}
    assert set(scene.coordinator().fetch_offsets()) == {read, TopicPartition(ledger.topic, 1)}


def test_a_position_that_results_were_made_from_is_kept(scene: Scene, ledger: Group) -> None:
    """Kafka differs, because it does not know results. Without the position, the results would be created again (I1); a rewind removes
    them instead."""
    ledger.commit(ledger.slice(20))
    first, second = (TopicPartition(ledger.topic, number) for number in (0, 1))
    answers = scene.coordinator().delete_offsets([ledger.topic])
    assert answers[second] is None
    refused = answers[first]
    assert isinstance(refused, OffsetHasResults)
    assert refused.batches == 1
    assert "rewind" in str(refused)
    assert scene.coordinator().fetch_offsets() == {first: 20}
    ledger.check_conserved()

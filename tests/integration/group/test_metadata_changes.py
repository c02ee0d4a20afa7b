"""Topics and partitions come and go, and racks change, while members read: the leader notices, and the group rebalances once.

Members with their threads, on a real Postgres and a real Kafka. They get their topics and metadata in the same way as those of a run.
"""

from __future__ import annotations

import dataclasses
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from tests.support.kafka_topics import Topics
from tests.support.members import QUICK, Group, parts, wait_for
from tests.support.waiting import until

from tidemark.consume.membership import metadata_of
from tidemark.group.assignors import Metadata
from tidemark.group.coordinator import Coordinator
from tidemark.group.errors import FencedInstanceId
from tidemark.group.member import Member
from tidemark.group.requests import Joined, JoinRequest
from tidemark.kafka.cluster import Cluster

MAX_AGE_MS = 500
NEVER_MS = 300_000
NOTICED_S = MAX_AGE_MS / 1000 + QUICK["heartbeat_interval_ms"] / 1000 + 60
"""The leader checks at its first heartbeat after the metadata have become too old. The rest is slack for a busy machine."""
LOOKS = 4
"""The number of further checks, during which a second rebalance would show."""
CHANGED, TOLD = "topics or partitions changed", "the group rebalances"
EVERY = pytest.mark.parametrize("assignor", ["range", "cooperative-sticky"])


@dataclass(frozen=True, slots=True)
class Sent:
    """A JoinGroup that reached the coordinator."""

    client: str
    reason: str
    at: float


class Readers(Group):
    """Members that subscribe to a pattern, or to topics by name, in a real cluster."""

    def __init__(self, url: str, cluster: Cluster, pattern: str) -> None:
        super().__init__(url, seat={"metadata_max_age_ms": MAX_AGE_MS})
        self.cluster, self.pattern = cluster, pattern
        self.names: tuple[str, ...] = ()
        """If any, the topics to subscribe to instead of the pattern."""
        self.racks: dict[str, Sequence[Sequence[str]]] = {}
        """The racks of a topic's replicas from now on, as if its brokers had moved."""
        self.looks: Counter[str] = Counter()
        """How often each client has fetched the metadata."""
        self.still = threading.Lock()
        """Held while the metadata change, so that nobody sees half of a change."""

    def subscribed(self) -> Collection[str]:
        return self.names or self.cluster.matching(self.pattern)

    def look(self, client: str, topics: Collection[str]) -> Metadata:
        with self.still:
            found = metadata_of(self.cluster, topics)
        self.looks[client] += 1
        return Metadata(
            {name: dataclasses.replace(info, racks=self.racks.get(name, info.racks)) for name, info in found.topics.items()}
        )  # fmt: skip

    def wait_for_looks(self, member: Member, count: int = LOOKS) -> None:
        enough = self.looks[member.settings.client_id] + count
        wait_for(self, lambda: self.looks[member.settings.client_id] >= enough)

    def leader(self) -> Member:
        (found,) = [member for member in self.members if member.leads]
        return found


@pytest.fixture
def name() -> str:
    """The prefix of the names of a test's topics."""
    return f"m-{uuid.uuid4().hex[:8]}"


@pytest.fixture
def group(database_url: str, kafka_servers: str, name: str) -> Iterator[Readers]:
    with Readers(database_url, Cluster({"bootstrap.servers": kafka_servers}), f"{name}-.*") as group:
        yield group


@pytest.fixture
def joins(monkeypatch: pytest.MonkeyPatch) -> list[Sent]:
    """The JoinGroups that reach the coordinator."""
    sent: list[Sent] = []
    join = Coordinator.join

    def noted(self: Coordinator, request: JoinRequest) -> Joined | None:
        sent.append(Sent(request.client_id, request.reason, time.monotonic()))
        return join(self, request)

    monkeypatch.setattr(Coordinator, "join", noted)
    return sent


def rebalances_once(group: Readers, joins: list[Sent], change: Callable[[], object], wanted: Collection[Any]) -> None:
    """Checks that after ``change`` only the leader starts a rebalance, once and within `NOTICED_S`, and that it assigns ``wanted``."""
    group.settle()
    leader, generation = group.leader(), group.described().generation
    joins.clear()
    with group.still:
        change()
    changed = time.monotonic()
    wait_for(group, lambda: set(group.assignment()) == set(wanted))
    group.settle()
    group.wait_for_looks(leader)
    group.settle()
    assert group.described().generation == generation + 1
    assert group.described().rebalance_reason.endswith(CHANGED)
    followers = [member.settings.client_id for member in group.members if member is not leader]
    assert sorted((sent.client, sent.reason) for sent in joins) == sorted(
        [(leader.settings.client_id, CHANGED), *((client, TOLD) for client in followers)]
    )
    assert joins[0].client == leader.settings.client_id
    assert joins[0].at - changed < NOTICED_S


@pytest.mark.sampled
@EVERY
def test_new_partitions_of_a_topic_cause_one_rebalance(
    group: Readers, joins: list[Sent], topics: Topics, name: str, assignor: str
) -> None:  # fmt: skip
    """testMetadataChangeTriggersRebalance, on a topic that grows."""
    topic = topics.create(4, name=f"{name}-a")
    members = [group.join(assignor) for _ in range(2)]
    rebalances_once(group, joins, lambda: topics.grow(topic, 6), parts(*range(6), topic=topic))
    assert [len(member.assignment) for member in members] == [3, 3]


@pytest.mark.sampled
@EVERY
def test_new_topic_that_matches_the_pattern_causes_one_rebalance(
    group: Readers, joins: list[Sent], topics: Topics, name: str, assignor: str
) -> None:
    """testUpdateMetadataDuringRebalance. Members resolve the pattern again when they join, so all of them subscribe to what the leader has
    seen. A topic that does not match causes no rebalance."""
    first = topics.create(2, name=f"{name}-a")
    for _ in range(2):
        group.join(assignor)

    def change() -> None:
        topics.create(2)
        topics.create(2, name=f"{name}-b")

    rebalances_once(group, joins, change, {*parts(0, 1, topic=first), *parts(0, 1, topic=f"{name}-b")})


@pytest.mark.sampled("by_name", "assignor")
@EVERY
@pytest.mark.parametrize("by_name", [False, True], ids=["pattern", "by-name"])
def test_deleted_topic_causes_one_rebalance(
    group: Readers, joins: list[Sent], topics: Topics, name: str, assignor: str, by_name: bool
) -> None:
    """testAssignmentUpdatedForDeletedTopic, for the whole group. The members share the remaining partitions, and none of them fails."""
    kept, gone = topics.create(2, name=f"{name}-a"), topics.create(2, name=f"{name}-b")
    group.names = (kept, gone) if by_name else ()
    members = [group.join(assignor) for _ in range(2)]
    group.settle()
    assert len(group.assignment()) == 4
    rebalances_once(group, joins, lambda: topics.delete(gone), parts(0, 1, topic=kept))
    assert [len(member.assignment) for member in members] == [1, 1]


def test_changed_racks_cause_one_rebalance(group: Readers, joins: list[Sent], topics: Topics, name: str) -> None:
    """testRackAwareConsumerRebalanceWithDifferentRacks (KIP-881). Partitions go to the members that are near their replicas."""
    topic = topics.create(2, name=f"{name}-a")
    group.racks[topic] = [["east"], ["west"]]
    east, west = group.join("range", rack="east"), group.join("range", rack="west")
    group.settle()
    assert (east.assignment, west.assignment) == (parts(0, topic=topic), parts(1, topic=topic))
    rebalances_once(group, joins, lambda: group.racks.update({topic: [["west"], ["east"]]}), parts(0, 1, topic=topic))
    assert (east.assignment, west.assignment) == (parts(1, topic=topic), parts(0, topic=topic))


def test_only_the_leader_watches(group: Readers, joins: list[Sent], topics: Topics, name: str) -> None:
    """A follower does not even fetch the metadata, however old they are. It does so once it has become the leader."""
    topic = topics.create(4, name=f"{name}-a")
    leader = group.join("range", metadata_max_age_ms=NEVER_MS)
    group.settle()
    follower = group.join("range", metadata_max_age_ms=1)
    group.settle()
    generation = group.described().generation
    joins.clear()
    topics.grow(topic, 6)
    heard = {each.member_id: each.seen_at for each in group.described().members}
    wait_for(group, lambda: all((each.seen_at - heard[each.member_id]).total_seconds() > 1.5 for each in group.described().members))
    assert group.looks[follower.settings.client_id] == 0
    assert (group.described().generation, joins) == (generation, [])
    group.close(leader)
    group.settle()
    assert follower.assignment == parts(*range(6), topic=topic)
    rebalances_once(group, joins, lambda: topics.grow(topic, 8), parts(*range(8), topic=topic))


def test_next_process_of_the_leaders_seat_watches_what_the_group_reads(
    group: Readers, joins: list[Sent], topics: Topics, name: str
) -> None:  # fmt: skip
    """KIP-814: it leads without having assigned. Although it owns no partition of one topic, it sees no change; it notices later ones."""
    first, second = topics.create(1, name=f"{name}-a"), topics.create(1, name=f"{name}-b")
    old = group.join("cooperative-sticky", instance_id="dag/task/0")
    group.settle()
    group.join("cooperative-sticky", instance_id="dag/task/1")
    group.settle()
    assert [len(member.assignment) for member in group.members] == [1, 1]
    generation = group.described().generation
    new = group.join("cooperative-sticky", instance_id="dag/task/0")
    with pytest.raises(FencedInstanceId):
        until(lambda: old.poll(), "fenced")
    group.close(old)
    group.settle()
    assert new.leads
    joins.clear()
    group.wait_for_looks(new)
    group.settle()
    assert (group.described().generation, joins) == (generation, [])
    grown = {*parts(0, 1, topic=first), *parts(0, 1, topic=second)}
    rebalances_once(group, joins, lambda: (topics.grow(first, 2), topics.grow(second, 2)), grown)

"""The coordinator's error responses, under Kafka's names.

`Fenced`: the caller is no longer in the group or in this generation; it has lost its partitions and must join again. `Unavailable`: a
rebalance is in progress; join again. `Refused`: the request is invalid as it stands.
"""

from __future__ import annotations

from tidemark.errors import Fenced, Refused, TidemarkError, Unavailable
from tidemark.text.wording import counted


class GroupError(TidemarkError):
    """Base of the coordinator's error responses."""

    group: str

    def __str__(self) -> str:
        return f"Group {self.group} responded with {self.kafka_name}."


class UnknownMemberId(GroupError, Fenced):
    """The group does not have this member: it never joined, it left, or its session expired.

    The member discards its id and generation, gives up its partitions as lost, and joins as a new member.
    """

    kafka_name = "UNKNOWN_MEMBER_ID"
    member_id: str
    instance_id: str | None = None

    def __str__(self) -> str:
        static = f" (instance {self.instance_id})" if self.instance_id else ""
        return (
            f"Group {self.group} has no member {self.member_id!r}{static}: it left, or its session expired. "
            "It has lost its partitions; join again without a member id."
        )


class IllegalGeneration(GroupError, Fenced):
    """The request's generation is not the group's. The member keeps its id, discards the generation and joins again."""

    kafka_name = "ILLEGAL_GENERATION"
    member_id: str
    generation: int
    current: int

    def __str__(self) -> str:
        return (
            f"Group {self.group} is in generation {self.current}, but member {self.member_id} sent generation {self.generation}. "
            "It has lost its partitions; join again with the same member id."
        )


class FencedInstanceId(GroupError, Fenced):
    """A newer process replaced this static member; the caller must stop, not join again."""

    kafka_name = "FENCED_INSTANCE_ID"
    member_id: str
    instance_id: str
    current: str

    def __str__(self) -> str:
        return (
            f"Member {self.current} has replaced {self.member_id} as instance {self.instance_id} of group {self.group}. "
            "Stop this process: two processes with the same instance id fence each other."
        )


class RebalanceInProgress(GroupError, Unavailable):
    """The group is rebalancing; join again with the same member id."""

    kafka_name = "REBALANCE_IN_PROGRESS"
    member_id: str

    def __str__(self) -> str:
        return f"Group {self.group} is rebalancing; member {self.member_id} must join again with the same member id."


class MemberIdRequired(GroupError, Refused):
    """The response to a dynamic member's first JoinGroup: join again with this id (KIP-394).

    A client that never receives the response leaves no ghost member behind for a rebalance to wait for.
    """

    kafka_name = "MEMBER_ID_REQUIRED"
    member_id: str

    def __str__(self) -> str:
        return f"Group {self.group} assigned the member id {self.member_id}; join again with it within the session timeout."


class InconsistentGroupProtocol(GroupError, Refused):
    """The member and the group have no assignor in common, or the request names a different one."""

    kafka_name = "INCONSISTENT_GROUP_PROTOCOL"
    offered: str
    supported: str

    def __str__(self) -> str:
        return (
            f"Group {self.group} cannot use {self.offered}: its members have {self.supported} in common. Name an assignor that every "
            "member supports. To change it, first run all members with both the old and the new one, then with the new one only."
        )


class GroupMaxSizeReached(GroupError, Refused):
    """The group is full."""

    kafka_name = "GROUP_MAX_SIZE_REACHED"
    max_size: int

    def __str__(self) -> str:
        return f"Group {self.group} already has its maximum of {counted(self.max_size, 'member')}. Start fewer, or raise its max_size."


class InvalidSessionTimeout(GroupError, Refused):
    """The session timeout is outside the range that the group allows."""

    kafka_name = "INVALID_SESSION_TIMEOUT"
    session_timeout_ms: int
    min_ms: int
    max_ms: int

    def __str__(self) -> str:
        return (
            f"session_timeout_ms={self.session_timeout_ms} is not allowed in group {self.group}: "
            f"choose one from {self.min_ms} to {self.max_ms}."
        )


class NonEmptyGroup(GroupError, Refused):
    """A group that has members cannot be deleted."""

    kafka_name = "NON_EMPTY_GROUP"
    state: str
    members: int

    def __str__(self) -> str:
        members = counted(self.members, "member")
        return f"Group {self.group} is {self.state} with {members}. Stop them, or remove them from the group, then delete it."


class GroupIdNotFound(GroupError, Refused):
    """The group does not exist."""

    kafka_name = "GROUP_ID_NOT_FOUND"

    def __str__(self) -> str:
        return f"There is no group {self.group}. Check its name in the list of groups."


class GroupSubscribedToTopic(GroupError, Refused):
    """The positions of a topic that members are subscribed to cannot be deleted."""

    kafka_name = "GROUP_SUBSCRIBED_TO_TOPIC"
    topic: str

    def __str__(self) -> str:
        return f"Members of group {self.group} are subscribed to {self.topic}. Stop them, or remove the topic from their subscription."


class OffsetHasResults(GroupError, Refused):
    """A position with results in the sink cannot be deleted: its records would be read and loaded again."""

    topic: str
    partition: int
    batches: int

    def __str__(self) -> str:
        return (
            f"{self.topic}/{self.partition} of group {self.group} has {counted(self.batches, 'batch', 'batches')} in the ledger, "
            "with results in the sink. Its position was kept. To read the records again, rewind the group; that also removes the results."
        )

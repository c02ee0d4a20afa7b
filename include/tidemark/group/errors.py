"""What the coordinator answers instead of a result, under Kafka's names.

`Fenced`: the caller is out of the group, or of this generation; whatever it holds is lost, and it joins again. `Unavailable`: a
rebalance is under way; join again. `Refused`: the request cannot be answered as it stands.
"""

from __future__ import annotations

from dataclasses import dataclass

from tidemark.errors import Fenced, Refused, TidemarkError, Unavailable

__all__ = [
    "FencedInstanceId",
    "GroupError",
    "GroupIdNotFound",
    "GroupMaxSizeReached",
    "GroupSubscribedToTopic",
    "IllegalGeneration",
    "InconsistentGroupProtocol",
    "InvalidSessionTimeout",
    "MemberIdRequired",
    "NonEmptyGroup",
    "OffsetHasResults",
    "RebalanceInProgress",
    "UnknownMemberId",
]


@dataclass(kw_only=True, eq=False)
class GroupError(TidemarkError):
    """Base of the coordinator's answers that are no result."""

    group: str

    def __str__(self) -> str:
        return f"Group {self.group} answers {self.kafka_name}."


@dataclass(kw_only=True, eq=False)
class UnknownMemberId(GroupError, Fenced):
    """The group does not have this member: it never joined, left, or was not heard of for its session timeout.

    The member forgets its id and its generation, gives up its partitions as lost, and joins as a new one.
    """

    kafka_name = "UNKNOWN_MEMBER_ID"
    member_id: str
    instance_id: str | None = None

    def __str__(self) -> str:
        static = f" (instance {self.instance_id})" if self.instance_id else ""
        return (
            f"Group {self.group} has no member {self.member_id!r}{static}: it left, or was not heard of for its session timeout. "
            "Its partitions are lost to it; join again without a member id."
        )


@dataclass(kw_only=True, eq=False)
class IllegalGeneration(GroupError, Fenced):
    """The request carries a generation that is not the group's; the member keeps its id, forgets the generation and joins again."""

    kafka_name = "ILLEGAL_GENERATION"
    member_id: str
    generation: int
    current: int

    def __str__(self) -> str:
        return (
            f"Group {self.group} is in generation {self.current}; member {self.member_id} speaks of generation {self.generation}. "
            "Its partitions are lost to it; join again with the same member id."
        )


@dataclass(kw_only=True, eq=False)
class FencedInstanceId(GroupError, Fenced):
    """A newer process took this static member's place; the caller must stop, not join again."""

    kafka_name = "FENCED_INSTANCE_ID"
    member_id: str
    instance_id: str
    current: str

    def __str__(self) -> str:
        return (
            f"Instance {self.instance_id} of group {self.group} is now {self.current}, which took the place of {self.member_id}. "
            "Stop this process; two with one instance id would only fence each other."
        )


@dataclass(kw_only=True, eq=False)
class RebalanceInProgress(GroupError, Unavailable):
    """The members are joining again; join with the same member id."""

    kafka_name = "REBALANCE_IN_PROGRESS"
    member_id: str

    def __str__(self) -> str:
        return f"Group {self.group} is rebalancing; member {self.member_id} has to join again, with the id it has."


@dataclass(kw_only=True, eq=False)
class MemberIdRequired(GroupError, Refused):
    """The answer to a first JoinGroup of a dynamic member: join again with this id (KIP-394).

    A client that never gets the answer leaves no ghost behind that a rebalance would have to wait for.
    """

    kafka_name = "MEMBER_ID_REQUIRED"
    member_id: str

    def __str__(self) -> str:
        return f"Group {self.group} gave out the member id {self.member_id}; join again with it, within the session timeout."


@dataclass(kw_only=True, eq=False)
class InconsistentGroupProtocol(GroupError, Refused):
    """The member and the group have no assignor in common, or speak of different ones."""

    kafka_name = "INCONSISTENT_GROUP_PROTOCOL"
    offered: str
    supported: str

    def __str__(self) -> str:
        return (
            f"Group {self.group} cannot use {self.offered}: its members have {self.supported} in common. Name an assignor that every "
            "member has; to change it, run all members with the old and the new one first, then with the new one alone."
        )


@dataclass(kw_only=True, eq=False)
class GroupMaxSizeReached(GroupError, Refused):
    """The group has as many members as it may have."""

    kafka_name = "GROUP_MAX_SIZE_REACHED"
    max_size: int

    def __str__(self) -> str:
        return f"Group {self.group} already has the {self.max_size} members that it may have. Start fewer, or raise its max_size."


@dataclass(kw_only=True, eq=False)
class InvalidSessionTimeout(GroupError, Refused):
    """The session timeout lies outside of what the group allows."""

    kafka_name = "INVALID_SESSION_TIMEOUT"
    session_timeout_ms: int
    min_ms: int
    max_ms: int

    def __str__(self) -> str:
        return (
            f"session_timeout_ms={self.session_timeout_ms} is not allowed in group {self.group}: "
            f"choose one from {self.min_ms} to {self.max_ms}."
        )


@dataclass(kw_only=True, eq=False)
class NonEmptyGroup(GroupError, Refused):
    """A group with members is not deleted."""

    kafka_name = "NON_EMPTY_GROUP"
    state: str
    members: int

    def __str__(self) -> str:
        return f"Group {self.group} is {self.state} with {self.members} members. Stop them, or remove them from the group, then delete it."


@dataclass(kw_only=True, eq=False)
class GroupIdNotFound(GroupError, Refused):
    """There is no such group."""

    kafka_name = "GROUP_ID_NOT_FOUND"

    def __str__(self) -> str:
        return f"There is no group {self.group}. Look for its name in the list of groups."


@dataclass(kw_only=True, eq=False)
class GroupSubscribedToTopic(GroupError, Refused):
    """The positions of a topic that members read are not deleted."""

    kafka_name = "GROUP_SUBSCRIBED_TO_TOPIC"
    topic: str

    def __str__(self) -> str:
        return f"Members of group {self.group} are subscribed to {self.topic}. Stop them, or take the topic out of their subscription."


@dataclass(kw_only=True, eq=False)
class OffsetHasResults(GroupError, Refused):
    """A position from which results were made is not forgotten: the records would be read, and the results made, again."""

    topic: str
    partition: int
    batches: int

    def __str__(self) -> str:
        return (
            f"{self.topic}/{self.partition} of group {self.group} has {self.batches} batches in the ledger, whose results are in the sink. "
            "Its position was kept; rewind the group to read the records again, which takes the results back."
        )

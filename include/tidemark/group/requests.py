"""What members and operators ask of the coordinator, and what it answers: values, and the checks that need no database."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from tidemark.errors import BadInput
from tidemark.group.errors import InvalidSessionTimeout

__all__ = [
    "GroupConfig",
    "GroupDescription",
    "GroupListing",
    "JoinRequest",
    "Joined",
    "Leaving",
    "MemberDescription",
    "MemberMetadata",
    "Protocols",
    "as_json",
    "check_join",
    "normal_protocols",
    "short_reason",
]

Protocols = tuple[tuple[str, Any], ...]
"""Assignors by name, most wanted first, each with what the member tells that assignor."""

REASON_CHARS = 255
"""Kafka's limit on the reason of a JoinGroup or LeaveGroup (KIP-800); what is longer is cut off."""


@dataclass(frozen=True, slots=True)
class GroupConfig:
    """What a Kafka broker's ``group.*`` settings say, with Kafka's defaults. Give every member of a group the same."""

    initial_rebalance_delay_ms: int = 3000
    """How long the first join phase of an empty group waits for more members; every new one starts it again."""
    min_session_timeout_ms: int = 6000
    max_session_timeout_ms: int = 1_800_000
    max_size: int | None = None
    """The most members a group may have; `None`: no limit."""


@dataclass(frozen=True, slots=True)
class JoinRequest:
    """A JoinGroup. ``member_id`` is ``""`` as long as the member has none."""

    member_id: str
    instance_id: str | None
    client_id: str
    protocols: Protocols
    session_timeout_ms: int = 45_000
    rebalance_timeout_ms: int = 300_000
    reason: str = ""
    expected_members: int | None = None
    """As many members as the group will have: the initial rebalance delay ends when they are there. Nobody waits longer for them."""


@dataclass(frozen=True, slots=True)
class MemberMetadata:
    """A member as the leader sees it; ``metadata`` is that of the protocol that was voted for."""

    instance_id: str | None
    metadata: Any


@dataclass(frozen=True, slots=True)
class Joined:
    """The answer to a JoinGroup whose join phase is over."""

    generation: int
    protocol: str
    leader: str
    member_id: str
    members: Mapping[str, MemberMetadata]
    """Every member, oldest first; empty for those who do not lead."""
    skip_assignment: bool
    """The group is Stable and its assignment stands: a leader watches the metadata, but does not assign (KIP-814)."""


@dataclass(frozen=True, slots=True)
class Leaving:
    """One member of a LeaveGroup. An operator, who does not know the member id, gives ``""`` and an instance id."""

    member_id: str
    instance_id: str | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class MemberDescription:
    member_id: str
    instance_id: str | None
    client_id: str
    pending: bool
    """It was given its id, but has not joined yet."""
    metadata: Any
    """That of the group's protocol; `None` while there is none."""
    assignment: Any
    joined_at: datetime
    seen_at: datetime
    overdue: bool
    """Not heard of for its session timeout; whoever comes next removes it."""


@dataclass(frozen=True, slots=True)
class GroupDescription:
    """A group as it is stored."""

    group: str
    state: str
    state_since: datetime
    rebalance_reason: str
    """Why it last began to rebalance."""
    generation: int
    protocol: str | None
    leader: str | None
    members: tuple[MemberDescription, ...]


@dataclass(frozen=True, slots=True)
class GroupListing:
    group: str
    state: str
    generation: int
    members: int


def check_join(group: str, request: JoinRequest, config: GroupConfig) -> None:
    """Raises `InvalidSessionTimeout`, or `BadInput` for what no client of ours sends."""
    as_json([request.client_id, request.instance_id, *(name for name, _ in request.protocols)], "JoinGroup")
    if not config.min_session_timeout_ms <= request.session_timeout_ms <= config.max_session_timeout_ms:
        raise InvalidSessionTimeout(
            group=group,
            session_timeout_ms=request.session_timeout_ms,
            min_ms=config.min_session_timeout_ms,
            max_ms=config.max_session_timeout_ms,
        )
    if request.rebalance_timeout_ms <= 0:
        raise BadInput(what="rebalance_timeout_ms", found=str(request.rebalance_timeout_ms), fix="Give a number of milliseconds above 0.")
    if request.instance_id == "":
        raise BadInput(what="instance_id", found="it is empty", fix="Name the instance, or give None for a dynamic member.")
    if request.expected_members is not None and request.expected_members < 1:
        raise BadInput(what="expected_members", found=str(request.expected_members), fix="Give 1 or more, or None where it is not known.")


def normal_protocols(protocols: Protocols) -> Protocols:
    """The protocols as they come back from the database, so that those of two requests can be compared."""
    return tuple((name, json.loads(as_json(metadata, f"metadata of the protocol {name}"))) for name, metadata in protocols)


def as_json(value: Any, what: str) -> str:
    """``value`` as jsonb takes it: raises `BadInput` for what is no JSON, and for U+0000, which Postgres does not store."""
    try:
        text = json.dumps(value, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise BadInput(what=what, found=str(error), fix="Give what JSON knows: mappings, lists, texts, finite numbers.") from error
    if "\\u0000" in text:
        raise BadInput(what=what, found="it holds the character U+0000", fix="Leave it out: Postgres cannot store it.")
    return text


def short_reason(reason: str) -> str:
    """A reason as Kafka's clients send it."""
    return reason[:REASON_CHARS].replace("\0", "")

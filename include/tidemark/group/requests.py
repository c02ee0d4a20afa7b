"""The coordinator's requests and responses, and the checks that need no database."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from tidemark.errors import BadInput
from tidemark.group.errors import InvalidSessionTimeout

Protocols = tuple[tuple[str, Any], ...]
"""Assignors by name, in order of preference, each with the member's metadata for that assignor."""

REASON_CHARS = 255
"""Kafka's limit on the reason of a JoinGroup or LeaveGroup (KIP-800); longer ones are truncated."""


@dataclass(frozen=True, slots=True)
class GroupConfig:
    """A Kafka broker's ``group.*`` settings, with Kafka's defaults. Give every member of a group the same ones."""

    initial_rebalance_delay_ms: int = 3000
    """How long the first join phase of an empty group waits for more members. Each new member restarts the wait."""
    min_session_timeout_ms: int = 6000
    max_session_timeout_ms: int = 1_800_000
    max_size: int | None = None
    """Maximum number of members; `None`: no limit."""


@dataclass(frozen=True, slots=True)
class JoinRequest:
    """A JoinGroup. ``member_id`` is ``""`` until the member has one."""

    member_id: str
    instance_id: str | None
    client_id: str
    protocols: Protocols
    session_timeout_ms: int = 45_000
    rebalance_timeout_ms: int = 300_000
    reason: str = ""
    expected_members: int | None = None
    """How many members the group will have. The initial rebalance delay ends early once that many have joined; it is never extended."""


@dataclass(frozen=True, slots=True)
class MemberMetadata:
    """A member as the leader sees it. ``metadata`` is its metadata for the elected protocol."""

    instance_id: str | None
    metadata: Any


@dataclass(frozen=True, slots=True)
class Joined:
    """The response to a JoinGroup whose join phase is over."""

    generation: int
    protocol: str
    leader: str
    member_id: str
    members: Mapping[str, MemberMetadata]
    """All members, oldest first; empty unless this member is the leader."""
    skip_assignment: bool
    """The group is Stable and keeps its assignment: the leader watches the metadata but does not assign (KIP-814)."""


@dataclass(frozen=True, slots=True)
class Leaving:
    """One member of a LeaveGroup. An operator who does not know the member id passes ``""`` and an instance id."""

    member_id: str
    instance_id: str | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class MemberDescription:
    member_id: str
    instance_id: str | None
    client_id: str
    pending: bool
    """It has a member id, but has not joined yet."""
    metadata: Any
    """The member's metadata for the group's protocol; `None` while the group has no protocol."""
    assignment: Any
    joined_at: datetime
    seen_at: datetime
    overdue: bool
    """Its session has expired; the next call to the coordinator removes it."""


@dataclass(frozen=True, slots=True)
class GroupDescription:
    """A stored group."""

    group: str
    state: str
    state_since: datetime
    rebalance_reason: str
    """Why the group last started to rebalance."""
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
    """Raises `InvalidSessionTimeout`, or `BadInput` for a name that Postgres cannot store."""
    as_json([request.client_id, request.instance_id, *(name for name, _ in request.protocols)], "JoinGroup")
    if not config.min_session_timeout_ms <= request.session_timeout_ms <= config.max_session_timeout_ms:
        raise InvalidSessionTimeout(
            group=group,
            session_timeout_ms=request.session_timeout_ms,
            min_ms=config.min_session_timeout_ms,
            max_ms=config.max_session_timeout_ms,
        )


def normal_protocols(protocols: Protocols) -> Protocols:
    """The protocols as the database returns them, so that two requests can be compared."""
    return tuple((name, json.loads(as_json(metadata, f"metadata of the protocol {name}"))) for name, metadata in protocols)


def as_json(value: Any, what: str) -> str:
    """``value`` as text for jsonb. Raises `BadInput` if it is not valid JSON or contains U+0000, which Postgres cannot store."""
    try:
        text = json.dumps(value, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise BadInput(what=what, found=str(error), fix="Use JSON values only: mappings, lists, strings, finite numbers.") from error
    if "\\u0000" in text:
        raise BadInput(what=what, found="it contains the character U+0000", fix="Remove it: Postgres cannot store it.")
    return text


def short_reason(reason: str) -> str:
    """The reason, truncated as Kafka's clients do."""
    return reason[:REASON_CHARS].replace("\0", "")

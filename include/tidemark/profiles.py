"""The rights of database roles in the schemas ``tidemark``, `STAGING` and `ARCHIVE`, by profile.

`RIGHTS` is the single source: ``tidemark migrate --grant-to`` grants them, commands check them before they begin (both in
`tidemark.roles`), docs/security.md shows them. All other rights belong to the schema's owner alone. The owners of sinks grant rights on
sinks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

STAGING = "tidemark_staging"
"""The schema of staging tables (`tidemark.sink.staged`)."""
ARCHIVE = "tidemark_archive"
"""The schema of rows that rewinds remove from sinks (`tidemark.rewind.rows.archive`)."""
SCHEMAS = ("tidemark", STAGING, ARCHIVE)
"""Every profile may use these. Only the owner may create in the first one: a function there could shadow Tidemark's own."""


class Profile(StrEnum):
    """The kinds of work that a role may do. The schema's owner may do everything."""

    READER = "reader"
    RUNNER = "runner"
    STAGER = "stager"
    OPERATOR = "operator"
    REWINDER = "rewinder"


TABLES = (
    "attempt", "audit_event", "backfill", "backfill_cut", "batch", "consumer_group", "deletion", "erased", "erasure", "failed_record",
    "failed_record_edit", "flow", "group_member", "lag_group", "lag_history", "lag_partition", "lost_range", "maintenance", "migration",
    "objective", "partition_offset", "rebalance", "redrive", "redrive_record", "retry_action", "rewind",
    "rewind_archive", "rewind_group", "rewind_partition", "rewound_batch", "rewound_failed_record", "rewound_lost_range", "rewound_row",
    "role_profile", "suppressed", "suppressed_key", "topic", "undo_floor", "validation", "validation_result", "validation_row",
)  # fmt: skip
"""Every profile may read these."""
PAYLOADS: Mapping[str, Sequence[str]] = {
    "deletion": ("digest", "key", "kept"),
    "erasure": ("salt", "digest"),
    "failed_record": ("key", "value", "headers"),
    "failed_record_edit": ("key", "value", "headers"),
    "rewound_failed_record": ("key", "value", "headers"),
    "rewound_row": ("kept",),
    "suppressed_key": ("digest", "salt"),
}
"""Columns that only profiles with `Rights.payloads` may read: they hold contents of records and rows, or let them be guessed."""

ALL: Sequence[str] = ()
"""All columns."""
_RETRY = ("state", "due_at", "retry_topic", "retry_topic_id", "retry_partition", "retry_offset", "publish_error", "story", "retry_number",
          "error_type", "error_text", "ladder_at", "changed_at")  # fmt: skip
_POSITION = ("next_offset", "generation", "owner", "owner_epoch", "validated_offset", "committed_at", "instance_id", "leader_epoch")
_GROUP = ("state", "state_since", "rebalance_reason", "generation", "protocol", "leader", "initial_until", "deadline", "server_start")
_ERASURE = ("sink_rows", "archived_rows", "overwritten_rows", "failed_records", "examples", "suppressed", "not_suppressed")
_PAYLOAD = ("key", "value", "headers", "error_text", "story", "publish_error", "emptied_at", "state", "due_at", "changed_at")
_ATTEMPT_END = ("state", "error", "ended_at")


@dataclass(frozen=True, slots=True)
class Rights:
    """A profile's rights beyond reading `TABLES`. ``update`` maps a table to the columns that may change."""

    may: str
    payloads: bool = False
    insert: Sequence[str] = ()
    update: Mapping[str, Sequence[str]] = field(default_factory=dict)
    delete: Sequence[str] = ()
    sequences: Sequence[str] = ()
    functions: Sequence[str] = ()
    """Callable functions that run as the schema's owner."""
    creates_in: str | None = None
    """The schema in which it may create tables."""


RIGHTS: Mapping[Profile, Rights] = {
    Profile.READER: Rights("read positions, ledger, plans and events, but no payload"),
    Profile.RUNNER: Rights(
        "load, validate, retry and backfill",
        payloads=True,
        insert=("attempt", "batch", "consumer_group", "deletion", "failed_record", "group_member", "lag_group", "lag_history",
                "lag_partition", "lost_range", "objective", "partition_offset", "rewound_row", "topic", "validation", "validation_result",
                "validation_row"),
        update={
            "attempt": (*_ATTEMPT_END, "planned", "columns_added", "application"),
            "batch": ("whole_batch_id", "validation_id"),
            "consumer_group": _GROUP,
            "deletion": ("kept", "kept_topic_id", "kept_offset"),
            "failed_record": (*_RETRY, "attempt_id", "sink_rows", "tried_at", "tried_late"),
            "group_member": ALL,
            "lag_history": ALL,
            "lag_partition": ALL,
            "lost_range": ("start_offset",),
            "partition_offset": _POSITION,
            "topic": ("kafka_uuid",),
            "undo_floor": ("floor",),
            "validation": ("announced_at",),
        },
        delete=("group_member", "lag_group", "lag_history", "lag_partition", "lost_range", "objective"),
        sequences=("generation",),
    ),
    Profile.STAGER: Rights("what a run needs beyond `runner` if its transform shuffles: create staging tables", creates_in=STAGING),
    Profile.OPERATOR: Rights(
        "discard, edit and redrive failed records; pause consumers; remove members and groups",
        payloads=True,
        insert=("consumer_group", "failed_record_edit", "flow", "redrive", "redrive_record", "retry_action"),
        update={
            "consumer_group": (*_GROUP, "name"),
            "failed_record": (*_RETRY, "key", "value", "headers", "redrives", "action_id"),
            "flow": ("paused", "priority", "max_ahead", "reason", "changed_by", "changed_at"),
            "group_member": ALL,
            "partition_offset": ("owner", "owner_epoch", "generation"),
            "redrive": ("state", "started_at", "ended_at", "approved_by"),
            "redrive_record": ("state", "why", "action_id", "done_at"),
            "retry_action": ("records",),
        },
        delete=("group_member",),
        sequences=("generation",),
    ),
    Profile.REWINDER: Rights(
        "rewind consumers, erase a person's rows, and remove what is kept for a limited time",
        payloads=True,
        insert=("backfill", "backfill_cut", "batch", "consumer_group", "erased", "erasure", "lag_group", "lag_history",
                "lag_partition", "lost_range", "maintenance", "partition_offset",
                "rewind", "rewind_archive", "rewind_group", "rewind_partition", "rewound_row", "suppressed", "suppressed_key", "topic",
                "undo_floor"),
        update={
            "attempt": _ATTEMPT_END,
            "backfill": ("end_offset",),
            "backfill_cut": ("given_back_by",),
            "deletion": ("kept", "kept_topic_id", "kept_offset", "parked_by", "sink"),
            "erasure": ("state", "applied_by", "applied_at", *_ERASURE),
            "failed_record": _PAYLOAD,
            "failed_record_edit": ("key", "value", "headers"),
            "lag_history": ALL,
            "lag_partition": ALL,
            "lost_range": ("start_offset",),
            "maintenance": ("ended_at", "archives", "rows", "payloads"),
            "partition_offset": ("next_offset", "owner_epoch", "validated_offset", "committed_at", "leader_epoch"),
            "rewind": ("state", "decided_by", "decided_at", "started_by", "started_at", "hold_until", "applied_by", "applied_at",
                       "applied_no", "dag_id", "run_id"),
            "rewind_archive": ("put_back_at", "removed_at", "rows"),
            "rewind_group": ("announced_assets", "overwritten_removed_at", "side_id"),
            "rewind_partition": ALL,
            "rewound_failed_record": _PAYLOAD,
            "rewound_row": ("rewind_id", "parked_by"),
            "suppressed_key": ("below",),
            "topic": ("kafka_uuid",),
            "undo_floor": ("sink", "sinks", "rewind_id", "floor"),
            "validation_result": ("detail",),
        },
        delete=("deletion", "lag_group", "lag_history", "lag_partition", "lost_range", "rewound_row", "undo_floor"),
        sequences=("rewind_applied",),
        functions=("take_from_ledger", "put_back_in_ledger", "take_over_side", "discard_side"),
        creates_in=ARCHIVE,
    ),
}  # fmt: skip

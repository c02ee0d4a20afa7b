"""What each command prints with ``--output json``: `OUTPUTS`, from the classes that the commands print. ``docs/site.py`` writes the page
from it, and tests compare it with what commands print.

A shape is a class (a dataclass prints as an object of its fields), a dict with a shape for each key, or a list with the shape of its
entries. A key in angle brackets stands for any key; a key with ``?`` may be missing. `Nullable` adds null.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from enum import Enum
from typing import Any

from tidemark.author.alter import Alteration
from tidemark.author.explanation import Explanation
from tidemark.doctor.finding import Finding
from tidemark.driver.launch import Lost, PartitionResult
from tidemark.erase.erasure import Erasure
from tidemark.erase.kafka_records import InKafka
from tidemark.events import Event
from tidemark.group.coordinator import GroupDescription
from tidemark.local.airflow import AirflowStatus
from tidemark.offsets.lag import GroupLag
from tidemark.offsets.mirror import Drift
from tidemark.quality.audit import Audit
from tidemark.quality.verdict import ExpectationResult, ValidationReport
from tidemark.records.outcome import RecordCounts
from tidemark.retry.admin import Count, Summary
from tidemark.retry.pending import DueRecords, RecentTries
from tidemark.retry.redrive import Redrive
from tidemark.retry.relay import Relayed
from tidemark.rewind.archive_retention import Removed
from tidemark.rewind.verify import Verified

Shape = Any


@dataclasses.dataclass(frozen=True, slots=True)
class Nullable:
    shape: Shape


def fields(kind: type) -> dict[str, Shape]:
    """The fields of a dataclass with their types, for a command that prints more than these."""
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


PARTITION = {"topic": str, "partition": int}
TARGET = {"topic": str | None, "partition": int | None}
PROBLEM = {"file": str, "line": int, "column": int, "message": str, "fix": str}
ERROR = {"type": str, "text": str}
FAILED = {"error": ERROR}
RUN = {
    "group": str,
    "attempt": int,
    "state": str,
    "records": int,
    **fields(RecordCounts),
    "partitions": [PartitionResult],
    "lost": [Lost],
}
REWIND = {
    "rewind_id": int,
    "state": str,
    "scenario": {"<key>": object},
    "says": str,
    "reason": str,
    "planned_by": str,
    "planned_at": datetime,
    "expires_at": datetime,
    "allow_loss": bool,
    "backfill": bool,
    "beside": bool,
    "transform": str | None,
    "started_by": str | None,
    "started_at": datetime | None,
    "digest": str,
    "undo_of": int | None,
    "decided_by": str | None,
    "decided_at": datetime | None,
    "applied_by": str | None,
    "applied_at": datetime | None,
    "dag_id": str | None,
    "run_id": str | None,
    "groups": [
        {
            "consumer": str,
            "group": str,
            "table": str,
            "state": str,
            "in_flight": int,
            "lag_records": int | None,
            "records_per_s": float | None,
            "catch_up_s": float | None,
            "announced_assets": list[str],
            "shadow_bytes": int | None,
            "partitions": [
                {
                    **PARTITION,
                    "old": int,
                    "new": int,
                    "replay": int,
                    "skip": int,
                    "sink_rows": int,
                    "failed_records": int,
                    "superseded_from": int | None,
                    "lost": list[int] | None,
                    "backfill_left": int | None,
                    "rows_back": int,
                    "failed_back": int,
                }
            ],
        }
    ],
    **dict.fromkeys(("replay", "skip", "sink_rows", "failed_records", "rows_back", "failed_back"), int),
}
REDRIVE = {**fields(Redrive), "filter": {"<key>": object}, "records": int}
REDRIVE_DETAILS = {
    **REDRIVE,
    "errors": [{"error_type": str, "records": int, "example": str | None}],
    "topics": [{"topic": str, "records": int}],
    "examples": [{"number": int, **PARTITION, "offset": int, "error_type": str, "error_text": str}],
    "passed_over_because": dict[str, int],
    "waiting": int,
    "worn_out": int,
}
SERVER = {
    "name": str,
    "state": str,
    "pid": int | None,
    "address": str | None,
    "version": str | None,
    "data_bytes": int | None,
    "log": str,
}
SERVERS = [SERVER]
PAYLOAD = {"key": str | None, "value": str | None, "headers": [[str | None]]}
"""Bytes in base64. A header is its name and its value."""
ACTION = {"action_id": int, "kind": str, "filter": {"<key>": object}, "reason": str, "by": str, "at": datetime, "records": int}
RECORD = {
    **{name: kind for name, kind in fields(Summary).items() if name not in ("due", "value_bytes", "failures")},
    "disposition": str,
    "attempt_id": int,
    "sink_rows": int,
    "ladder_at": datetime,
    "tried_at": datetime | None,
    "tried_late": float | None,
    "emptied_at": datetime | None,
    **PAYLOAD,
    "tries": [{"number": int, "type": str, "text": str, "attempt_id": int, "at": datetime}],
    "edits": [{"action_id": int, "by": str, "at": datetime, "reason": str, **PAYLOAD}],
    "redrives_of_it": [
        {
            "redrive_id": int,
            "state": str,
            "why": str | None,
            "destination": str,
            "reason": str,
            "by": str,
            "at": datetime | None,
        }
    ],
    "last_action": Nullable({"action_id": int, "kind": str, "by": str, "at": datetime, "reason": str}),
    "decoded": {"<key or value>": {"json": str | None, "problem": str | None}},
}
RESULT = {name: kind for name, kind in fields(ExpectationResult).items() if name != "detail"}

OUTPUTS: Mapping[str, Shape] = {
    "init": {"folder": str, "files": [str]},
    "migrate": {"applied": [str], "granted?": {"<role>": [str]}},
    "doctor": [Finding],
    "explain": {"consumer": str, "description": str | None, "form": str | None, **fields(Explanation)},
    "try": {
        "consumer": str,
        "tables": [str],
        "records": [
            {
                **PARTITION,
                "offset": int,
                "timestamp": datetime | None,
                "disposition": str | None,
                "rows": [{"<column>": object}],
                "error_type": str | None,
                "error_text": str | None,
            }
        ],
        "rows": Nullable([{"<column>": object}]),
        "notes": [str],
    },
    "consume": RUN,
    "validate": {
        "group": str,
        "validations": [{**fields(ValidationReport), "results": [RESULT], "attempt?": int, "dag_id?": str, "run_id?": str}],
    },
    "backfill": {
        "group": str,
        "backfills": [{"rewind_id": int, "attempt": int, "records": int, **fields(RecordCounts), "left": int}],
    },
    "offsets": {
        "group": str,
        "lag_records": int | None,
        "partitions": [
            {
                **PARTITION,
                "position": int | None,
                "end": int | None,
                "lag_records": int | None,
                "validated": int | None,
                "owner": str | None,
                "epoch": int | None,
                "committed_at": datetime | None,
                "truncated": bool,
                "replaying_until": int | None,
                "seconds": float | None,
                "health": str | None,
            }
        ],
        "backfills": [{"rewind_id": int, **PARTITION, "position": int, "end": int, "left": int}],
    },
    "lag": [GroupLag],
    "assign": {
        "group": str,
        "assignor": str,
        "members": [str],
        "partitions": [{**PARTITION, "now": str | None, "then": str, "moves": bool}],
    },
    "pause": {"paused": [TARGET]},
    "resume": {"resumed": [TARGET], "paused": [TARGET]},
    "flow": {"paused": [TARGET], "priorities": dict[str, int], "max_ahead": timedelta | None},
    "audit": {**fields(Audit), "balanced": bool},
    "audit-log": [Event],
    "seek": REWIND,
    "maintain": {"removed": [Removed], "emptied": int, "ended": [int], "mirrored": {"<consumer>": Drift}},
    "consumers check": [
        {
            "consumer": str,
            "ok": bool,
            "form?": str | None,
            "sinks?": [{"table": str, "columns": [str]}],
            "topics?": [{"name": str, "partitions": int, "retention_s": timedelta | None, "compacted": bool | None}],
            "expectations?": int | None,
            "problems": [PROBLEM],
            "errors?": [ERROR],
            "notes?": [str],
            "ddl?": str | None,
        }
    ],
    "consumers new": {"consumer": str, "files": [str], "ddl": str, "left_out": [str]},
    "sink diff": [{"table": str, "evolve": str, "ok": bool, "differences": [{"change": str, "problem": str, "ddl": str | None}]}],
    "sink alter": [Alteration],
    "groups list": [
        {
            "group": str,
            "state": str,
            "generation": int,
            "members": int,
            "records": int | None,
            "seconds": float | None,
            "health": str | None,
            "why": str | None,
            "fix": str | None,
            "sampled_at": datetime | None,
        }
    ],
    "groups describe": GroupDescription,
    "groups delete": {"deleted": str},
    "groups remove-member": {"group": str, "removed": str},
    **dict.fromkeys(("groups adopt", "rewind plan", "rewind show", "rewind apply", "rewind undo", "rewind swap", "rewind discard"), REWIND),
    "rewind list": [REWIND],
    "rewind replay": [{"group": str, "attempt": int, "records": int, **fields(RecordCounts), "left": int}],
    "rewind verify": [Verified],
    "retries relay": Relayed,
    "retries drain": RUN,
    "retries topics": [{"topic": str, "partitions": int, "delay": timedelta | None, "retention_s": float | None, "created": bool}],
    "retries list": [Summary],
    "retries count": {"counts": [Count], "tried_24h": RecentTries | None, "due": DueRecords | None},
    "retries show": RECORD,
    "retries edit": {"edited": [int], "actions": [int]},
    "retries discard": {"discarded": int},
    "retries actions": [ACTION],
    "redrive list": [REDRIVE],
    **dict.fromkeys(("redrive plan", "redrive show", "redrive apply", "redrive stop"), REDRIVE_DETAILS),
    "erase plan": {**fields(Erasure), "in_kafka": [InKafka], "not_searched": int, "older_rows": int},
    "erase apply": Erasure,
    "erase list": [Erasure],
    "erase show": Erasure,
    **dict.fromkeys(("local up", "local status"), SERVERS),
    "local env": {"<variable>": str},
    "local airflow up": {"url": str, "user": str, "password": str},
    "local airflow status": AirflowStatus,
}
"""By command, without ``tidemark``."""
_BASIC = {bool: "boolean", int: "integer", float: "number", str: "text", datetime: "time", timedelta: "seconds", object: "any"}


def plain(shape: Shape) -> Shape:
    """The shape of nothing but dicts, lists, `Nullable` and names of basic types. A union of basic types is ``integer|text``."""
    if isinstance(shape, Nullable):
        return Nullable(plain(shape.shape))
    if isinstance(shape, dict):
        return {key: plain(below) for key, below in shape.items()}
    if isinstance(shape, list):
        return [plain(shape[0])]
    origin, arguments = typing.get_origin(shape), typing.get_args(shape)
    if origin in (typing.Union, types.UnionType):
        members = [plain(member) for member in arguments if member is not types.NoneType]
        merged = members[0] if len(members) == 1 else "|".join(members)
        return Nullable(merged) if types.NoneType in arguments else merged
    if origin is not None and issubclass(origin, Mapping):
        return {"<key>": plain(arguments[1])}
    if origin is not None and issubclass(origin, Sequence):
        return [plain(arguments[0])]
    if dataclasses.is_dataclass(shape):
        return plain(fields(typing.cast("type", shape)))
    if shape is Any:
        return "any"
    if issubclass(getattr(shape, "__supertype__", shape), Enum):
        return "text"
    return next(name for kind, name in _BASIC.items() if issubclass(getattr(shape, "__supertype__", shape), kind))


def rows(shape: Shape, path: str = "") -> Iterator[tuple[str, str]]:
    """The path and the type of each value below a plain shape: ``partitions[].offset``, ``integer or null``."""
    null = " or null" if isinstance(shape, Nullable) else ""
    shape = shape.shape if isinstance(shape, Nullable) else shape
    if isinstance(shape, dict):
        if null:
            yield path, f"object{null}"
        for key, below in shape.items():
            missing = " (may be missing)" if key.endswith("?") else ""
            name = key.removesuffix("?")
            yield from ((below_path, f"{kind}{missing}") for below_path, kind in rows(below, f"{path}.{name}" if path else name))
    elif isinstance(shape, list):
        if null:
            yield path, f"list{null}"
        yield from rows(shape[0], f"{path}[]")
    else:
        yield path, f"{shape.replace('|', ' or ')}{null}"


def mismatches(shape: Shape, value: object, path: str = "") -> Iterator[str]:
    """What in a printed value does not fit a plain shape."""
    if isinstance(shape, Nullable):
        if value is None:
            return
        shape = shape.shape
    if isinstance(shape, dict) and isinstance(value, dict):
        named = {key.removesuffix("?"): below for key, below in shape.items() if not key.startswith("<")}
        others = next((below for key, below in shape.items() if key.startswith("<")), None)
        yield from (f"{path}.{key} is missing" for key in named if key not in value and f"{key}?" not in shape)
        for key, member in value.items():
            if key in named or others is not None:
                yield from mismatches(named.get(key, others), member, f"{path}.{key}")
            else:
                yield f"{path}.{key} is not documented"
    elif isinstance(shape, list) and isinstance(value, list):
        for entry in value:
            yield from mismatches(shape[0], entry, f"{path}[]")
    elif not isinstance(shape, str) or not any(_fits(kind, value) for kind in shape.split("|")):
        yield f"{path} is {value!r}, not {shape}"


def _fits(kind: str, value: object) -> bool:
    if kind == "any":
        return True
    if kind == "time":
        try:
            return isinstance(value, str) and datetime.fromisoformat(value) is not None
        except ValueError:
            return False
    python = {"boolean": bool, "integer": int, "number": (int, float), "seconds": (int, float), "text": str}[kind]
    return isinstance(value, python) and (kind == "boolean" or not isinstance(value, bool))  # type: ignore[arg-type]


def page() -> Iterator[str]:
    """The lines of the reference page, below its heading. Commands with the same output share a table."""
    yield (
        "With `--output json`, a command prints one JSON document to standard output, and everything else to standard error. A `time` is "
        "text in ISO 8601, `seconds` are a number. In a path, `[]` stands for the entries of a list, and a name in angle brackets for any "
        "key. An unknown value is `null`.\n"
    )
    yield "A command that fails prints its error, and exits with 1:\n"
    yield from _table(FAILED)
    same: dict[int, list[str]] = {}
    for command, shape in OUTPUTS.items():
        same.setdefault(id(shape), []).append(command)
    for commands in same.values():
        yield f"## {', '.join(f'tidemark {command}' for command in commands)}\n"
        yield from _table(OUTPUTS[commands[0]])


def _table(shape: Shape) -> Iterator[str]:
    yield "| value | type |\n|---|---|"
    yield from (f"| `{path}` | {kind} |" for path, kind in rows(plain(shape)))
    yield ""

"""Plans and applies erasures, in one transaction each, while the group runs.

A plan and its application find rows by the same condition: in the sink, in archives of rewinds and among overwritten rows. Failed
records that were loaded later and examples of validations are found by the lineage of these rows. Applying removes them, and stores per
batch what the ledger counts and the sink lacks since.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import logging
import secrets
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import psycopg2
import psycopg2.errors

from tidemark.db import REWIND_LOCK, complaint, rows, statements, transaction
from tidemark.errors import BadInput, Refused
from tidemark.quality.conservation import group_number
from tidemark.rewind import guards
from tidemark.rewind.archive import relation_of
from tidemark.rewind.guards import RowsStay
from tidemark.sink.table import quoted_table
from tidemark.spec import ConsumerSpec

if TYPE_CHECKING:
    from tidemark.db import Connection, Cursor

log = logging.getLogger(__name__)

SQL = statements("tidemark.erase", "erasure.sql")


class ErasureState(StrEnum):
    PLANNED = "PLANNED"
    APPLIED = "APPLIED"


@dataclass(frozen=True, slots=True)
class Erasure:
    """An erasure with what its plan found; once applied, with what it removed."""

    erasure_id: int
    group_id: int
    consumer: str
    sink: str
    state: ErasureState
    sink_rows: int
    archived_rows: int
    overwritten_rows: int
    failed_records: int
    examples: int
    """Results of validations whose example rows go."""
    reason: str
    planned_by: str
    planned_at: datetime
    applied_by: str | None
    applied_at: datetime | None


@dataclass(kw_only=True, eq=False)
class OtherCondition(Refused):
    """The condition is not the one of the plan."""

    erasure_id: int

    def __str__(self) -> str:
        return (
            f"The condition is not the one that erasure {self.erasure_id} was planned with. Nothing was erased. Repeat it character by "
            "character, or make a new plan."
        )


@dataclass(kw_only=True, eq=False)
class EraseNotAllowed(Refused):
    """The role lacks a privilege, or row security would hide rows from it; ``message`` is Postgres' own."""

    message: str

    def __str__(self) -> str:
        return f"Nothing was erased: {self.message} Use the role that owns the sink and the schema tidemark, or one with BYPASSRLS."


def plan(connection: Connection, spec: ConsumerSpec, where: str, *, reason: str, by: str) -> Erasure:
    """Counts what the condition finds and stores the counts, with a salted hash of the condition. Removes nothing.

    ``where`` is SQL over the sink's columns. Raises `BadInput` if Postgres cannot evaluate it.
    """
    with _allowed(), transaction(connection) as cur:
        group_id = group_number(cur, spec.group)
        cur.execute(SQL["make_found"])
        found = _find(cur, group_id, spec.sink.table, where)
        salt = secrets.token_bytes(16)
        said = {"consumer": spec.name, "sink": spec.sink.table, "salt": salt, "digest": _digest(where, salt), "reason": reason, "by": by}
        cur.execute(SQL["add"], {**found, **said, "group_id": group_id})
        (erasure_id,) = cur.fetchone() or (0,)
        return _read(cur, erasure_id, None, 1)[0]


def apply(connection: Connection, spec_of: Callable[[str], ConsumerSpec], erasure_id: int, where: str, *, by: str) -> Erasure:
    """Removes all that the condition finds now, or nothing, and returns the erasure with the actual numbers. Safe to repeat.

    Waits a minute for rewinds of the group. Raises `OtherCondition`, `BadInput`, and `RowsStay` if the sink keeps rows.
    """
    with _allowed(), transaction(connection) as cur:
        erasure = read(cur, erasure_id)
        sink = spec_of(erasure.consumer).sink.table
        if sink != erasure.sink:
            raise BadInput(what="erasure", found=f"the sink was {erasure.sink} and is now {sink}", fix="Plan again.")
        cur.execute(SQL["begin"], {"class": REWIND_LOCK, "group_id": erasure.group_id})
        cur.execute(SQL["lock"], {"erasure_id": erasure_id})
        state, salt, digest = cur.fetchone() or (None, b"", b"")
        if not hmac.compare_digest(_digest(where, bytes(salt)), bytes(digest)):
            raise OtherCondition(erasure_id=erasure_id)
        if state == ErasureState.APPLIED:
            return read(cur, erasure_id)
        cur.execute(SQL["make_found"])
        found = _remove(cur, erasure.group_id, sink, where)
        key = {"group_id": erasure.group_id, "erasure_id": erasure_id}
        cur.execute(SQL["record"], key)
        cur.execute(SQL["applied"], {**found, **key, "by": by})
        with guards.answers(lambda message: RowsStay(table=sink, message=message)):
            cur.execute("SET CONSTRAINTS ALL IMMEDIATE")
        done = read(cur, erasure_id)
    log.info(
        "erased consumer=%s erasure=%s rows=%s archived=%s overwritten=%s failed_records=%s",
        done.consumer, erasure_id, done.sink_rows, done.archived_rows, done.overwritten_rows, done.failed_records,
    )  # fmt: skip
    return done


def read(cur: Cursor, erasure_id: int) -> Erasure:
    """A stored erasure. Raises `BadInput` if it does not exist."""
    found = _read(cur, erasure_id, None, 1)
    if not found:
        raise BadInput(
            what="erasure", found=f"there is no erasure {erasure_id} in this database", fix="List them with: tidemark erase list"
        )
    return found[0]


def history(connection: Connection, consumer: str | None = None, *, limit: int = 100) -> list[Erasure]:
    """The erasures of a consumer, or all, newest first."""
    with transaction(connection) as cur:
        return _read(cur, None, consumer, limit)


def not_searched(cur: Cursor, group_id: int) -> int:
    """How many records with payloads have no rows, so that no condition finds them."""
    cur.execute(SQL["not_searched"], {"group_id": group_id})
    (count,) = cur.fetchone() or (0,)
    return int(count)


def _read(cur: Cursor, erasure_id: int | None, consumer: str | None, limit: int) -> list[Erasure]:
    cur.execute(SQL["read"], {"erasure_id": erasure_id, "consumer": consumer, "limit": limit})
    return [Erasure(**{**row, "state": ErasureState(row["state"])}) for row in rows(cur)]


def _digest(where: str, salt: bytes) -> bytes:
    """Slow on purpose: a condition names one person, and there are not that many numbers to try."""
    return hashlib.scrypt(where.strip().encode(), salt=salt, n=2**14, r=8, p=1)


def _find(cur: Cursor, group_id: int, sink: str, where: str) -> dict[str, int]:
    for table, key in _places(cur, group_id, sink):
        with _condition_on(table):
            cur.execute(_filled("find", table, where), key)
    return _found(cur, group_id, sink, where)


def _remove(cur: Cursor, group_id: int, sink: str, where: str) -> dict[str, int]:
    for table, key in _places(cur, group_id, sink):
        with guards.answers(lambda message, table=table: RowsStay(table=table, message=message)):  # type: ignore[misc]
            cur.execute(_filled("remove", table, where), key)
        cur.execute(_filled("left", table, where), key)
        (left,) = cur.fetchone() or (0,)
        if left:
            kept_by = " and ".join(guards.hooks(cur, sink, "DELETE")) or "another session, which has added them meanwhile"
            raise RowsStay(table=table, message=f"{left:,} rows remain, because of {kept_by}.")
        cur.execute(SQL["mark_left_over"].format(table=table), key)
        if key["rewind_id"] is not None:
            cur.execute(SQL["shrink_archive"], key)
    found = _found(cur, group_id, sink, where)
    cur.execute(SQL["remove_overwritten"])
    cur.execute(SQL["empty_edits"], {"group_id": group_id})
    for records in ("failed_record", "rewound_failed_record"):
        cur.execute(SQL["empty_failed"].format(records=records), {"group_id": group_id})
    cur.execute(SQL["remove_examples"])
    return found


def _found(cur: Cursor, group_id: int, sink: str, where: str) -> dict[str, int]:
    """The counts, once the rows of the sink and the archives are found; finds the overwritten rows first."""
    with _condition_on("tidemark.rewound_row"):
        cur.execute(_filled("find_overwritten", quoted_table(sink), where), {"group_id": group_id, "sink": sink})
    cur.execute(SQL["count_found"])
    (counts,) = rows(cur)
    for name in ("failed", "examples"):
        cur.execute(SQL[f"count_{name}"], {"group_id": group_id})
        (counts["failed_records" if name == "failed" else name],) = cur.fetchone() or (0,)
    return counts


def _places(cur: Cursor, group_id: int, sink: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The sink and the archives of its rewinds, each as SQL and with the parameters of its statements."""
    key = {"group_id": group_id, "sink": sink}
    cur.execute(SQL["topics"], key)
    topic_ids = [topic_id for (topic_id,) in cur.fetchall()]
    cur.execute(SQL["archives"], key)
    archives = rows(cur)
    yield quoted_table(sink), {"place": "sink", "rewind_id": None, "topic_ids": topic_ids}
    for archive in archives:
        relation = relation_of(archive["rewind_id"], archive["number"], archive["relation"])
        yield relation, {**archive, "place": relation, "topic_ids": topic_ids}


def _filled(name: str, table: str, where: str) -> str:
    return SQL[name].format(table=table.replace("%", "%%"), where=where.replace("%", "%%"))


@contextlib.contextmanager
def _allowed() -> Iterator[None]:
    try:
        yield
    except psycopg2.errors.InsufficientPrivilege as error:
        raise EraseNotAllowed(message=complaint(error).message) from None


@contextlib.contextmanager
def _condition_on(table: str) -> Iterator[None]:
    try:
        yield
    except psycopg2.Error as error:
        if (error.pgcode or "")[:2] not in {"22", "42"} or error.pgcode == "42501":
            raise
        fix = "Write a condition over columns that the sink and the archives of its rewinds have: customer_id = 42."
        raise BadInput(what="--where", found=f"{table} cannot be searched: {complaint(error).message}", fix=fix) from None

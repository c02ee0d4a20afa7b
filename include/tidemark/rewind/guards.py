"""Guards against a sink's triggers, rules, row security and foreign keys, which may interfere when a rewind or undo moves its rows.

Either all rows of a range go, and nothing else with them, or the rewind is refused. `problems` and `trial` check at planning.
`take_out` and `put_back` in `tidemark.rewind.rows.archive` count the rows in the transaction that moves them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import psycopg2
import psycopg2.errors

from tidemark.db import data_error, in_users_function, is_outage, limit_lock_waits, rows, scalar, statements
from tidemark.errors import Refused
from tidemark.sink.table import on_table, quoted, quoted_table
from tidemark.text.wording import counted

if TYPE_CHECKING:
    from tidemark.db import Cursor

SQL = statements("tidemark.rewind", "guards.sql")

STORED = "tidemark.rewind_partition"
"""The partitions of stored rewinds; the statement `moving` in `plan.sql` replaces it for a plan that is not stored."""
TRIAL_WAIT_MS = 1_000
"""How long the trial delete waits for its row, which a commit may hold."""

_ACTIONS = {"c": "ON DELETE CASCADE", "n": "ON DELETE SET NULL", "d": "ON DELETE SET DEFAULT", "r": "ON DELETE RESTRICT", "a": "NO ACTION"}
_CASCADES = frozenset("cnd")


class RowsStay(Refused):
    """The sink does not let the rows go, or other rows would go with them."""

    table: str
    message: str

    def __str__(self) -> str:
        return f"{self.table}: {self.message} Nothing was changed."


def hooks(cur: Cursor, sink: str, event: Literal["DELETE", "INSERT"]) -> list[str]:
    """Returns the triggers and rules of a sink that fire on this event, as text."""
    cur.execute(SQL["hooks"], {"table": quoted_table(sink), "event": event})
    return [name for (name,) in cur.fetchall()]


def problems(cur: Cursor, key: Mapping[str, Any], sinks: Sequence[str], moving: str = STORED) -> list[str]:
    """Returns why the rows of a rewind (``rewind_id``, ``group_id``, ``undo_of``) cannot go, or not alone; empty if nothing was found.
    ``sinks``: the tables of the group. ``moving`` has its partitions; ``key`` has the parameters of that relation too."""
    return [problem for sink in sinks for problem in _problems(cur, key, sink, sinks, moving)]


def _problems(cur: Cursor, key: Mapping[str, Any], sink: str, sinks: Sequence[str], moving: str) -> list[str]:
    cur.execute(SQL["policies"], {"table": quoted_table(sink)})
    if hidden := cur.fetchone():
        problem = f"{sink} has row security, and the role {hidden[1]} sees only some of its rows (policies: {hidden[0]})."
        return [f"{problem} Rewind as the owner of the table, or as a role with BYPASSRLS."]
    return [text for reference in _references(cur, sink, sinks) if (text := _blocking(cur, key, sink, moving, reference)) is not None]


def stand_alone(cur: Cursor, sinks: Sequence[str]) -> bool:
    """Whether no trigger, rule, foreign key or unique index connects the rows of these tables that come or go with other rows."""
    return not any(
        hooks(cur, sink, "DELETE") or hooks(cur, sink, "INSERT") or _references(cur, sink, sinks) or _meets_others(cur, sink)
        for sink in sinks
    )


def _meets_others(cur: Cursor, sink: str) -> bool:
    cur.execute(SQL["meets_others"], {"table": quoted_table(sink)})
    return bool(scalar(cur))


def trial(cur: Cursor, key: Mapping[str, Any], sinks: Sequence[str], moving: str) -> list[str]:
    """If a sink has triggers or rules, deletes one row of the rewind, rolls that back, and returns what keeps the row. Skips sinks that
    another sink refers to, because the referring rows would have to go first. Parameters as in `problems`."""
    return [problem for sink in sinks for problem in _trial(cur, key, sink, sinks, moving)]


def _trial(cur: Cursor, key: Mapping[str, Any], sink: str, sinks: Sequence[str], moving: str) -> list[str]:
    if len(sinks) > 1 and any(reference["own"] for reference in _references(cur, sink, sinks)):
        return []
    names = hooks(cur, sink, "DELETE")
    cur.execute(SQL["may_delete"], {"table": quoted_table(sink)})
    if not names or not scalar(cur):
        return []
    cur.execute(on_table(SQL["sample_row"].replace("{moving}", moving), sink), key)
    samples = rows(cur)
    if not samples:
        return []
    cur.execute("SAVEPOINT trial")
    problems = []
    try:
        with rows_stay(sink, names):
            limit_lock_waits(cur, TRIAL_WAIT_MS)
            cur.execute(on_table(SQL["delete_one"], sink), samples[0])
            deleted = cur.rowcount
            cur.execute("SET CONSTRAINTS ALL IMMEDIATE")
        if not deleted:
            problems = [f"{sink} does not let its rows be deleted: {_listed(names)} keeps them. {_FIX}"]
    except RowsStay as error:
        problems = [f"{error.table}: {error.message}"]
    except psycopg2.errors.LockNotAvailable:
        pass  # the trial proves nothing
    cur.execute("ROLLBACK TO SAVEPOINT trial")
    return problems


def cascaded(cur: Cursor, sink: str, sinks: Sequence[str]) -> dict[str, int]:
    """Returns, for each foreign key that cascades from the sink to a table outside ``sinks``, a counter that grows with each row deleted or
    changed in the referring table."""
    references = {
        reference["relid"]: reference
        for reference in _references(cur, sink, sinks)
        if reference["action"] in _CASCADES and not reference["own"]
    }
    if not references:
        return {}
    cur.execute(SQL["cascaded"], {"relids": list(references)})
    return {
        _named(references[relid]): deleted if references[relid]["action"] == "c" else updated for relid, deleted, updated in cur.fetchall()
    }


def require_alone(sink: str, before: Mapping[str, int], now: Mapping[str, int]) -> None:
    """Raises `RowsStay` if rows of other tables were deleted or changed since `cascaded` returned ``before``."""
    if grown := [f"{counted(now[name] - before[name], 'row')} of {name}" for name in now if now[name] != before.get(name, 0)]:
        raise RowsStay(
            table=sink, message=f"{_listed(grown)} would be deleted or changed with its rows, and an undo would not restore them."
        )


def require_gone(sink: str, before: int, taken: int, left: int, names: Sequence[str]) -> None:
    """Raises `RowsStay` unless all rows that the sink had ``before`` were ``taken`` and none are ``left``."""
    if before != taken or left:
        cause = f"{_listed(names)} keeps them. {_FIX}" if names else "Another session has changed them."
        raise RowsStay(
            table=sink,
            message=f"{taken:,} of {counted(before, 'row was', 'rows were')} taken out, {counted(left, 'remains', 'remain')}: {cause}",
        )


@contextlib.contextmanager
def errors_as(as_error: Callable[[str], Refused]) -> Iterator[None]:
    """Turns errors of Postgres, the table's constraints or its triggers into this error."""
    try:
        yield
    except psycopg2.Error as error:
        if is_outage(error) or error.pgcode is None or (error.pgcode == "42501" and not in_users_function(error)):
            raise  # a missing privilege is reported elsewhere
        raise as_error(data_error(error).message) from None


def rows_stay(sink: str, hooks: Sequence[str] = ()) -> contextlib.AbstractContextManager[None]:
    """Raises `RowsStay` for an error in the block that keeps rows in the sink. ``hooks``: its triggers and rules, a possible cause."""
    cause = f" It has {_listed(hooks)}." if hooks else ""
    return errors_as(lambda message: RowsStay(table=sink, message=message + cause))


_FIX = "Let it return OLD, or disable it during the rewind."


def _references(cur: Cursor, sink: str, sinks: Sequence[str]) -> list[dict[str, Any]]:
    cur.execute(SQL["references"], {"table": quoted_table(sink), "sinks": [quoted_table(name) for name in sinks]})
    return rows(cur)


def _blocking(cur: Cursor, key: Mapping[str, Any], sink: str, moving: str, reference: Mapping[str, Any]) -> str | None:
    """Returns why a foreign key prevents the rewind; `None` if it does not."""
    cascades = reference["action"] in _CASCADES
    if reference["deferred"] and not cascades and key["undo_of"] is not None:
        return None  # the rows that come back may be the referenced ones; checked at the end
    if not reference["readable"]:
        fix = f"Grant SELECT on {reference['name']} so that the rewind can count them."
        return f"Rows of {_named(reference)} may refer to rows that would be taken out of {sink}. {fix}" if cascades else None
    join = [f"written.{quoted(to)} = child.{quoted(of)}" for of, to in zip(reference["referring"], reference["referred"], strict=True)]
    if reference["own"]:  # rows that are taken out too do not count
        join.append("NOT (child.kafka_topic_id = part.topic_id AND child.kafka_partition = part.partition AND "
                    "child.kafka_offset >= part.superseded_from)")  # fmt: skip
    child, same = (text.replace("%", "%%") for text in (reference["child"], " AND ".join(join)))
    text = SQL["referring"].replace("{moving}", moving).replace("{child}", child).replace("{same}", same)
    cur.execute(on_table(text, sink), key)
    count = scalar(cur)
    if not count:
        return None
    consequence = "They would be deleted or changed too, and an undo would not restore them." if cascades else "The constraint forbids it."
    return (
        f"{counted(count, 'row')} of {_named(reference)} {'refers' if count == 1 else 'refer'} to rows that would be "
        f"taken out of {sink}. {consequence} Delete them first, or drop the constraint."
    )


def _named(reference: Mapping[str, Any]) -> str:
    return f"{reference['name']} (constraint {reference['conname']}, {_ACTIONS[reference['action']]})"


def _listed(names: Sequence[str]) -> str:
    return " and ".join(names)

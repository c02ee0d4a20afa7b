"""Guards against a sink's triggers, rules, row security and foreign keys, which may interfere when a rewind or undo moves its rows.

Either all rows of a range go, and nothing else with them, or the rewind is refused. `problems` and `trial` find what they can when the plan
is made. `take_out` and `put_back` in `tidemark.rewind.rows.archive` count the rows in the transaction that moves them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import psycopg2
import psycopg2.errors

from tidemark.db import complaint, in_users_function, is_outage, rows, statements
from tidemark.errors import Refused
from tidemark.sink.table import quoted, quoted_table
from tidemark.text.wording import counted

if TYPE_CHECKING:
    from tidemark.db import Cursor

SQL = statements("tidemark.rewind", "guards.sql")

STORED = "tidemark.rewind_partition"
"""The partitions of stored rewinds; `tidemark.rewind.plan` has a relation like it for a plan that is not stored."""
TRIAL_WAIT_MS = 1_000
"""How long the trial delete waits for its row, which a commit may hold."""

_ACTIONS = {"c": "ON DELETE CASCADE", "n": "ON DELETE SET NULL", "d": "ON DELETE SET DEFAULT", "r": "ON DELETE RESTRICT", "a": "NO ACTION"}
_CASCADES = frozenset("cnd")


@dataclass(kw_only=True, eq=False)
class RowsStay(Refused):
    """The sink does not let the rows go, or other rows would go with them."""

    table: str
    message: str

    def __str__(self) -> str:
        return f"{self.table}: {self.message} Nothing was changed."


def hooks(cur: Cursor, sink: str, event: Literal["DELETE", "INSERT"]) -> list[str]:
    """The triggers and rules of a sink that fire on this event, as text."""
    cur.execute(SQL["hooks"], {"table": quoted_table(sink), "event": event})
    return [name for (name,) in cur.fetchall()]


def problems(cur: Cursor, key: Mapping[str, Any], sinks: Sequence[str], moving: str = STORED) -> list[str]:
    """Why the rows of a rewind (``rewind_id``, ``group_id``, ``undo_of``) cannot go, or not alone; empty if nothing was found. ``sinks``:
    the tables of the group. ``moving`` has its partitions; ``key`` has the parameters of that relation too."""
    return [problem for sink in sinks for problem in _problems(cur, key, sink, sinks, moving)]


def _problems(cur: Cursor, key: Mapping[str, Any], sink: str, sinks: Sequence[str], moving: str) -> list[str]:
    cur.execute(SQL["policies"], {"table": quoted_table(sink)})
    if hidden := cur.fetchone():
        said = f"{sink} has row security, and the role {hidden[1]} sees only some of its rows (policies: {hidden[0]})."
        return [f"{said} Rewind as the owner of the table, or as a role with BYPASSRLS."]
    return [text for reference in _references(cur, sink, sinks) if (text := _refers(cur, key, sink, moving, reference)) is not None]


def trial(cur: Cursor, key: Mapping[str, Any], sinks: Sequence[str]) -> list[str]:
    """If a sink has triggers or rules, delete one row of the rewind, roll that back, and report what keeps the row. Not if another sink
    refers to it, because the row's referring rows would have to go first."""
    return [problem for sink in sinks for problem in _trial(cur, key, sink, sinks)]


def _trial(cur: Cursor, key: Mapping[str, Any], sink: str, sinks: Sequence[str]) -> list[str]:
    if len(sinks) > 1 and any(each["own"] for each in _references(cur, sink, sinks)):
        return []
    names = hooks(cur, sink, "DELETE")
    cur.execute(SQL["may_delete"], {"table": quoted_table(sink)})
    (may,) = cur.fetchone() or (False,)
    if not names or not may:
        return []
    cur.execute(_on(SQL["one"], sink), key)
    found = rows(cur)
    if not found:
        return []
    cur.execute("SAVEPOINT trial")
    said = []
    try:
        with answers(lambda message: RowsStay(table=sink, message=f"{message} It has {_listed(names)}.")):
            cur.execute("SELECT set_config('lock_timeout', %s, true)", (str(TRIAL_WAIT_MS),))
            cur.execute(_on(SQL["delete_one"], sink), found[0])
            deleted = cur.rowcount
            cur.execute("SET CONSTRAINTS ALL IMMEDIATE")
        if not deleted:
            said = [f"{sink} does not let its rows be deleted: {_listed(names)} keeps them. {_FIX}"]
    except RowsStay as error:
        said = [f"{error.table}: {error.message}"]
    except psycopg2.errors.LockNotAvailable:
        pass  # the trial proves nothing
    cur.execute("ROLLBACK TO SAVEPOINT trial")
    return said


def cascaded(cur: Cursor, sink: str, sinks: Sequence[str]) -> dict[str, int]:
    """For each foreign key that cascades from the sink to a table that is none of ``sinks``, a counter that grows with each row deleted or
    changed in the referring table."""
    found = {each["relid"]: each for each in _references(cur, sink, sinks) if each["action"] in _CASCADES and not each["own"]}
    if not found:
        return {}
    cur.execute(SQL["cascaded"], {"relids": list(found)})
    return {_named(found[relid]): deleted if found[relid]["action"] == "c" else updated for relid, deleted, updated in cur.fetchall()}


def require_alone(sink: str, before: Mapping[str, int], now: Mapping[str, int]) -> None:
    """Raise `RowsStay` if rows of other tables were deleted or changed since `cascaded` returned ``before``."""
    if grown := [f"{counted(now[name] - before[name], 'row')} of {name}" for name in now if now[name] != before.get(name, 0)]:
        raise RowsStay(
            table=sink, message=f"{_listed(grown)} would be deleted or changed with its rows, and an undo would not restore them."
        )


def require_gone(sink: str, there: int, taken: int, left: int, names: Sequence[str]) -> None:
    """Raise `RowsStay` unless all rows that were ``there`` were ``taken`` and none are ``left``."""
    if there != taken or left:
        kept = f"{_listed(names)} keeps them. {_FIX}" if names else "Another session has changed them."
        raise RowsStay(
            table=sink,
            message=f"{taken:,} of {counted(there, 'row was', 'rows were')} taken out, {counted(left, 'remains', 'remain')}: {kept}",
        )


@contextlib.contextmanager
def answers(as_error: Callable[[str], Refused]) -> Iterator[None]:
    """Turn what Postgres, the table's constraints or its triggers raise into this error."""
    try:
        yield
    except psycopg2.Error as error:
        if is_outage(error) or error.pgcode is None or (error.pgcode == "42501" and not in_users_function(error)):
            raise  # a missing privilege is reported elsewhere
        raise as_error(complaint(error).message) from None


_FIX = "Let it return OLD, or disable it during the rewind."


def _references(cur: Cursor, sink: str, sinks: Sequence[str]) -> list[dict[str, Any]]:
    cur.execute(SQL["references"], {"table": quoted_table(sink), "sinks": [quoted_table(each) for each in sinks]})
    return rows(cur)


def _refers(cur: Cursor, key: Mapping[str, Any], sink: str, moving: str, reference: Mapping[str, Any]) -> str | None:
    """Why a foreign key prevents the rewind; `None` if nothing was found."""
    cascades = reference["action"] in _CASCADES
    if reference["deferred"] and not cascades and key["undo_of"] is not None:
        return None  # the rows that come back may be the referenced ones; checked at the end
    if not reference["readable"]:
        fix = f"Grant SELECT on {reference['name']} so that the rewind can count them."
        return f"Rows of {_named(reference)} may refer to rows that would be taken out of {sink}. {fix}" if cascades else None
    same = [f"written.{_escaped(to)} = child.{_escaped(of)}" for of, to in zip(reference["referring"], reference["referred"], strict=True)]
    if reference["own"]:  # rows that are taken out too do not count
        same.append("NOT (child.kafka_topic_id = part.topic_id AND child.kafka_partition = part.partition AND "
                    "child.kafka_offset >= part.superseded_from)")  # fmt: skip
    text = (
        SQL["referring"].replace("{moving}", moving).replace("{child}", _percent(reference["child"])).replace("{same}", " AND ".join(same))
    )
    cur.execute(_on(text, sink), key)
    (count,) = cur.fetchone() or (0,)
    if not count:
        return None
    what = "They would be deleted or changed too, and an undo would not restore them." if cascades else "The constraint forbids it."
    return (
        f"{counted(count, 'row')} of {_named(reference)} {'refers' if count == 1 else 'refer'} to rows that would be "
        f"taken out of {sink}. {what} Delete them first, or drop the constraint."
    )


def _named(reference: Mapping[str, Any]) -> str:
    return f"{reference['name']} (constraint {reference['conname']}, {_ACTIONS[reference['action']]})"


def _on(statement: str, sink: str) -> str:
    return statement.replace("{table}", _percent(quoted_table(sink)))


def _escaped(name: str) -> str:
    return _percent(quoted(name))


def _percent(name: str) -> str:
    """Escaped for a statement with parameters."""
    return name.replace("%", "%%")


def _listed(names: Sequence[str]) -> str:
    return " and ".join(names)

"""What a user's table does with rows that a rewind takes out and an undo puts back: triggers, rules, row security, foreign keys.

Either all rows of a range go, and nothing else with them, or the rewind is refused. `problems` says it in the plan, as far as it can be
proven there; `take_out` and `put_back` in `tidemark.rewind.archive` count, in the transaction that moves the rows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import psycopg2
import psycopg2.errors

from tidemark.db import is_outage, rows, statements
from tidemark.errors import Refused
from tidemark.sink.table import quoted, quoted_table

if TYPE_CHECKING:
    from tidemark.db import Cursor

SQL = statements("tidemark.rewind", "guards.sql")

TRIAL_WAIT_MS = 1_000
"""How long the trial of a plan waits for the row that it deletes; a commit may hold it."""

_ACTIONS = {"c": "ON DELETE CASCADE", "n": "ON DELETE SET NULL", "d": "ON DELETE SET DEFAULT", "r": "ON DELETE RESTRICT", "a": "NO ACTION"}
_CASCADES = frozenset("cnd")
_USERS_CLASSES = frozenset({"0A", "21", "22", "23", "27", "42", "44", "P0"})
"""Classes of SQLSTATE with which a table, its triggers or its constraints answer. A missing right (42501) is reported elsewhere."""


@dataclass(kw_only=True, eq=False)
class RowsStay(Refused):
    """The sink does not let rows go, or others would go with them."""

    table: str
    message: str

    def __str__(self) -> str:
        return f"{self.table}: {self.message} Nothing was changed."


def hooks(cur: Cursor, sink: str, event: Literal["DELETE", "INSERT"]) -> list[str]:
    """The triggers and rules of a sink that fire at this event, each as a person calls it."""
    cur.execute(SQL["hooks"], {"table": quoted_table(sink), "event": event})
    return [name for (name,) in cur.fetchall()]


def problems(cur: Cursor, key: Mapping[str, Any], sink: str) -> list[str]:
    """Why the rows of a rewind (``rewind_id``, ``group_id``, ``undo_of``) cannot go, or not alone; empty: nothing is known."""
    cur.execute(SQL["policies"], {"table": quoted_table(sink)})
    if hidden := cur.fetchone():
        said = f"{sink} has row security, and the role {hidden[1]} sees only some of its rows (policies: {hidden[0]})."
        return [f"{said} Rewind as the owner of the table, or as a role with BYPASSRLS."]
    return [text for reference in _references(cur, sink) if (text := _refers(cur, key, sink, reference)) is not None]


def trial(cur: Cursor, key: Mapping[str, Any], sink: str) -> list[str]:
    """Deletes one of the rows of a rewind and takes it back, where triggers or rules may keep it; says what keeps it."""
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
            said = [f"{sink} keeps rows that are deleted: {_listed(names)} does it. {_FIX}"]
    except RowsStay as error:
        said = [f"{error.table}: {error.message}"]
    except psycopg2.errors.LockNotAvailable:
        pass  # nothing is proven
    cur.execute("ROLLBACK TO SAVEPOINT trial")
    return said


def cascaded(cur: Cursor, sink: str) -> dict[str, int]:
    """By tables and constraints that cascade from the sink: a number that grows with each row that goes or changes there."""
    found = {each["relid"]: each for each in _references(cur, sink) if each["action"] in _CASCADES and not each["own"]}
    if not found:
        return {}
    cur.execute(SQL["cascaded"], {"relids": list(found)})
    return {_named(found[relid]): deleted if found[relid]["action"] == "c" else updated for relid, deleted, updated in cur.fetchall()}


def require_alone(sink: str, before: Mapping[str, int], now: Mapping[str, int]) -> None:
    """Raises `RowsStay` if rows of other tables have gone or changed since `cascaded` said ``before``."""
    if grown := [f"{now[name] - before[name]:,} rows of {name}" for name in now if now[name] != before.get(name, 0)]:
        raise RowsStay(
            table=sink, message=f"{_listed(grown)} would be deleted or changed with its rows, and no undo would bring them back."
        )


def require_gone(sink: str, there: int, taken: int, left: int, names: Sequence[str]) -> None:
    """Raises `RowsStay` unless all rows that were ``there`` were ``taken``, and none are ``left``."""
    if there != taken or left:
        kept = f"{_listed(names)} keeps them. {_FIX}" if names else "Somebody else has changed them."
        raise RowsStay(table=sink, message=f"of {there:,} rows {taken:,} were taken out, and {left:,} are there: {kept}")


@contextlib.contextmanager
def answers(as_error: Callable[[str], Refused]) -> Iterator[None]:
    """What Postgres, the table's constraints and its triggers say against a statement, as this error."""
    try:
        yield
    except psycopg2.Error as error:
        if is_outage(error) or error.pgcode is None or error.pgcode[:2] not in _USERS_CLASSES or error.pgcode == "42501":
            raise
        raise as_error(
            " ".join(f"{text.rstrip('.')}." for text in (error.diag.message_primary, error.diag.message_detail) if text)
        ) from error


_FIX = "Let it return OLD, or disable it for the time of the rewind."


def _references(cur: Cursor, sink: str) -> list[dict[str, Any]]:
    cur.execute(SQL["references"], {"table": quoted_table(sink)})
    return rows(cur)


def _refers(cur: Cursor, key: Mapping[str, Any], sink: str, reference: Mapping[str, Any]) -> str | None:
    """What stands against the rewind because of a foreign key; `None`: nothing is known."""
    cascades = reference["action"] in _CASCADES
    if reference["deferred"] and not cascades and key["undo_of"] is not None:
        return None  # the rows that come back may be those that are referred to; it is checked at the end
    if not reference["readable"]:
        fix = f"Grant SELECT on {reference['name']}, so that a rewind can count them."
        return f"Rows of {_named(reference)} may refer to rows that would be taken out of {sink}. {fix}" if cascades else None
    same = [f"written.{_escaped(to)} = child.{_escaped(of)}" for of, to in zip(reference["referring"], reference["referred"], strict=True)]
    if reference["own"]:  # rows that go themselves do not count
        same.append("NOT (child.kafka_topic_id = part.topic_id AND child.kafka_partition = part.partition AND "
                    "child.kafka_offset >= part.superseded_from)")  # fmt: skip
    text = SQL["referring"].replace("{child}", _percent(reference["child"])).replace("{same}", " AND ".join(same))
    cur.execute(_on(text, sink), key)
    (count,) = cur.fetchone() or (0,)
    if not count:
        return None
    what = "They would be deleted or changed too, and no undo would bring them back." if cascades else "The constraint forbids it."
    return (
        f"{count:,} {'row' if count == 1 else 'rows'} of {_named(reference)} {'refers' if count == 1 else 'refer'} to rows that would be "
        f"taken out of {sink}. {what} Delete them first, or drop the constraint."
    )


def _named(reference: Mapping[str, Any]) -> str:
    return f"{reference['name']} (constraint {reference['conname']}, {_ACTIONS[reference['action']]})"


def _on(statement: str, sink: str) -> str:
    return statement.replace("{table}", _percent(quoted_table(sink)))


def _escaped(name: str) -> str:
    return _percent(quoted(name))


def _percent(name: str) -> str:
    """For a statement that goes through parameter substitution."""
    return name.replace("%", "%%")


def _listed(names: Sequence[str]) -> str:
    return " and ".join(names)

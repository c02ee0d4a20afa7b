"""Upsert sinks: a rewind takes deletions back and puts the deleted rows back, an undo the other way.

A rewind parks the deletions by records at or after its point. Rows from before the point that only they had deleted go back into the sink
(with soft deletes: lose their mark). So the sink has what it would have if reading had stopped at the point, except for rows that were
overwritten since: those come back with the replay. An undo parks the replay's deletions likewise, and after it has put rows back, brings
back those that the undone rewind had parked. Rows before them leave the sink again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tidemark.db import statements
from tidemark.records.outcome import DELETED
from tidemark.rewind import guards
from tidemark.rewind.guards import RowsStay
from tidemark.rewind.rows.archive import changed, refusals
from tidemark.sink import deletes
from tidemark.sink.kept_rows import array, kept_columns, literal
from tidemark.sink.table import listed, quoted, quoted_table

if TYPE_CHECKING:
    from tidemark.db import Cursor

SQL = statements("tidemark.rewind.rows", "deletions.sql")

KEPT = "tidemark.deletion"


def park(cur: Cursor, key: Mapping[str, Any], sink: str) -> None:
    """Takes back the deletions at or after the point of a rewind; does not commit. ``key``: as in `tidemark.rewind.rows.overwritten`."""
    cur.execute(SQL["park"], {**key, "sink": sink})


def put_back(cur: Cursor, key: Mapping[str, Any], sink: str, columns: Sequence[str]) -> None:
    """Puts back the rows whose deletions were parked; does not commit. ``columns`` are the sink's key. Raises `RowsRefused`."""
    cur.execute(SQL["any"], {**key, "sink": sink})
    if not columns or not _one(cur)[0]:
        return
    now = kept_columns(cur, sink)
    if DELETED in now:
        cur.execute(SQL["unmark"].format(**_parts(key, sink, columns, now)))
    cur.execute(SQL["shapes"], {**key, "sink": sink})
    shapes = [shape for (shape,) in cur.fetchall()]
    hooks = guards.hooks(cur, sink, "INSERT")
    for shape in shapes:
        _put_back(cur, key, sink, columns, shape, now, hooks)


def _put_back(
    cur: Cursor,
    key: Mapping[str, Any],
    sink: str,
    columns: Sequence[str],
    shape: Sequence[str],
    now: Mapping[str, str],
    hooks: Sequence[str],
) -> None:
    still = [name for name in shape if name in now]  # a column that was dropped since is missing in every row
    values = {name: f"(newer.kept ->> {literal(name)})::{now[name]}" for name in still}
    with refusals(sink, KEPT):
        cur.execute(
            SQL["return"].format(
                rewind_id=key["rewind_id"],
                group_id=key["group_id"],
                sink=quoted_table(sink),
                sink_name=literal(sink),
                shape=array(map(literal, shape)),
                same_key=" AND ".join(f"present.{quoted(name)} = {values[name]}" for name in columns),
                first_after=deletes.first_after(sink, digest="newer.digest"),
                columns=listed(still),
                values=", ".join(values.values()),
                was=", ".join(f"{value}::text" for value in values.values()),
                came=", ".join(f"{quoted(name)}::text" for name in still),
            )
        )
    of, came, alike = _one(cur)
    if came != of or alike != of:
        raise changed(sink, KEPT, of - min(came, alike), of, hooks)


def bring_back(cur: Cursor, key: Mapping[str, Any], sink: str, columns: Sequence[str]) -> None:
    """Brings back the deletions that the undone rewind (``undo_of``) had parked, and moves the rows before them out of the sink; does not
    commit. Raises `RowsStay`."""
    cur.execute(SQL["any"], {"rewind_id": key["undo_of"], "sink": sink})
    if not columns or not _one(cur)[0]:
        return
    now = kept_columns(cur, sink)
    parts = _parts(key, sink, columns, now)
    if DELETED in now:
        cur.execute(SQL["mark"].format(**parts))
    else:
        hooks = guards.hooks(cur, sink, "DELETE")
        with guards.answers(lambda message: RowsStay(table=sink, message=message + "".join(f" It has {name}." for name in hooks))):
            cur.execute(SQL["bury"].format(**parts))
        if hooks:
            cur.execute(SQL["in_the_way"].format(**parts))
            left = int(_one(cur)[0])
            guards.require_gone(sink, left, 0, left, hooks)
    cur.execute(SQL["unpark"], {**key, "sink": sink})


def _parts(key: Mapping[str, Any], sink: str, columns: Sequence[str], now: Mapping[str, str]) -> dict[str, Any]:
    in_force = deletes.IN_FORCE if key["undo_of"] is None else f"({deletes.IN_FORCE} OR present.parked_by = {key['undo_of']})"
    return {
        "rewind_id": key["rewind_id"],
        "undo_of": key["undo_of"],
        "group_id": key["group_id"],
        "sink": quoted_table(sink),
        "sink_name": literal(sink),
        "same_key": " AND ".join(f"newer.{quoted(name)} = (gone.key ->> {literal(name)})::{now[name]}" for name in columns),
        "first_after": deletes.first_after(sink, [f"newer.{quoted(name)}" for name in columns], in_force=in_force),
        "keep": deletes.keep(list(now)),
        "names": array(map(literal, now)),
        "values": array(f"newer.{quoted(name)}::text" for name in now),
    }


def _one(cur: Cursor) -> tuple[Any, ...]:
    row = cur.fetchone()
    assert row is not None
    return row

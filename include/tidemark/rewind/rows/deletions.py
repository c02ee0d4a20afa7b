"""Upsert sinks: a rewind revokes deletions and restores the deleted rows; an undo does the reverse.

A rewind parks the deletions by records at or after its point. Rows from before the point that only these had deleted go back into the
sink (with soft deletes: lose their mark). So the sink is as if reading had stopped at the point, except for rows that were overwritten
since: the replay restores them. An undo also parks the replay's deletions, and puts back the rows before them. Then it restores the
deletions that the undone rewind had parked, and the rows before them leave the sink again. The rows of the archives come last: they may
have the same keys.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tidemark.db import scalar, single_row, statements
from tidemark.records.outcome import DELETED
from tidemark.rewind import guards
from tidemark.rewind.rows.archive import rows_changed, rows_refused
from tidemark.rewind.rows.overwritten import kept_values
from tidemark.sink import deletes
from tidemark.sink.kept_rows import array, kept_columns, literal
from tidemark.sink.table import listed, quoted, quoted_table

if TYPE_CHECKING:
    from tidemark.db import Cursor

SQL = statements("tidemark.rewind.rows", "deletions.sql")

KEPT = "tidemark.deletion"


def park(cur: Cursor, key: Mapping[str, Any], sink: str) -> None:
    """Parks the deletions at or after the point of a rewind; does not commit. ``key``: as in `tidemark.rewind.rows.overwritten`."""
    cur.execute(SQL["park"], {**key, "sink": sink})


def put_back(cur: Cursor, key: Mapping[str, Any], sink: str, columns: Sequence[str]) -> None:
    """Puts back the rows whose deletions were parked; does not commit. ``columns`` are the sink's key. Raises `RowsRefused`."""
    cur.execute(SQL["any"], {**key, "sink": sink})
    if not columns or not scalar(cur):
        return
    types = kept_columns(cur, sink)
    if DELETED in types:
        cur.execute(SQL["unmark"].format(**_parts(key, sink, columns, types)))
    cur.execute(SQL["shapes"], {**key, "sink": sink})
    shapes = [shape for (shape,) in cur.fetchall()]
    hooks = guards.hooks(cur, sink, "INSERT")
    for shape in shapes:
        _put_back(cur, key, sink, columns, shape, types, hooks)


def _put_back(
    cur: Cursor,
    key: Mapping[str, Any],
    sink: str,
    columns: Sequence[str],
    shape: Sequence[str],
    types: Mapping[str, str],
    hooks: Sequence[str],
) -> None:
    remaining = [name for name in shape if name in types]  # without columns that were dropped since
    values = kept_values(remaining, types)
    with rows_refused(sink, KEPT):
        cur.execute(
            SQL["return"].format(
                rewind_id=key["rewind_id"],
                group_id=key["group_id"],
                sink=quoted_table(sink),
                sink_name=literal(sink),
                shape=array(map(literal, shape)),
                same_key=" AND ".join(f"present.{quoted(name)} = {values[name]}" for name in columns),
                first_after=deletes.first_after(sink, digest="newer.digest"),
                columns=listed(remaining),
                values=", ".join(values.values()),
                was=", ".join(f"{value}::text" for value in values.values()),
                came=", ".join(f"{quoted(name)}::text" for name in remaining),
            )
        )
    total, inserted, unchanged = single_row(cur)
    if inserted != total or unchanged != total:
        raise rows_changed(sink, KEPT, total - min(inserted, unchanged), total, hooks)


def bring_back(cur: Cursor, key: Mapping[str, Any], sink: str, columns: Sequence[str]) -> None:
    """Restores the deletions that the undone rewind (``undo_of``) had parked, and moves the rows before them out of the sink; does not
    commit. Raises `RowsStay`."""
    cur.execute(SQL["any"], {"rewind_id": key["undo_of"], "sink": sink})
    if not columns or not scalar(cur):
        return
    types = kept_columns(cur, sink)
    parts = _parts(key, sink, columns, types)
    if DELETED in types:
        cur.execute(SQL["mark"].format(**parts))
    else:
        hooks = guards.hooks(cur, sink, "DELETE")
        with guards.rows_stay(sink, hooks):
            cur.execute(SQL["bury"].format(**parts))
        if hooks:
            cur.execute(SQL["in_the_way"].format(**parts))
            left = int(scalar(cur))
            guards.require_gone(sink, left, 0, left, hooks)
    cur.execute(SQL["unpark"], {**key, "sink": sink})


def _parts(key: Mapping[str, Any], sink: str, columns: Sequence[str], types: Mapping[str, str]) -> dict[str, Any]:
    in_force = deletes.IN_FORCE if key["undo_of"] is None else f"({deletes.IN_FORCE} OR present.parked_by = {key['undo_of']})"
    return {
        "rewind_id": key["rewind_id"],
        "undo_of": key["undo_of"],
        "group_id": key["group_id"],
        "sink": quoted_table(sink),
        "sink_name": literal(sink),
        "same_key": " AND ".join(f"newer.{quoted(name)} = (gone.key ->> {literal(name)})::{types[name]}" for name in columns),
        "first_after": deletes.first_after(sink, [f"newer.{quoted(name)}" for name in columns], in_force=in_force),
        "keep": deletes.keep(list(types)),
        "names": array(map(literal, types)),
        "values": array(f"newer.{quoted(name)}::text" for name in types),
    }

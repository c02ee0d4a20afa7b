"""Upsert sinks: an undo restores rows below the point of a rewind that were overwritten after it.

`tidemark.sink.kept_rows` copies rows below their partition's floor before they are overwritten. The copies are kept under the rewind or
undo that was then the partition's last one. Undoing a rewind does this for each of its partitions:

    ① take out the rows from its point on (`tidemark.rewind.rows.archive`)   ② of the rows overwritten since, put back the last one of
    each key below the point   ③ put back the rows that the rewind took out; rows with the same keys are kept under the undo

The undo of an undo works the same way: ① takes out the rows that the first undo put back, and ③ restores the replay's rows. The rows that
② of the first undo had put back, which the replay had overwritten, give way to them. Kept rows at or after the point were overwritten in
the period that the undo revokes. They are parked, because an undo of the undo restores that period, and with it older rewinds that need
these rows.

If several rewinds can be undone, their greatest floor counts. Keeping a row too many does no harm: only the last row below a rewind's
point comes back, and only if the sink has no later one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tidemark.db import scalar, single_row, statements
from tidemark.records.outcome import DELETED
from tidemark.rewind import guards
from tidemark.rewind.rows.archive import RowsRefused, rows_changed, rows_refused
from tidemark.sink import deletes
from tidemark.sink.kept_rows import array, kept_columns, literal, same_partition
from tidemark.sink.table import LINEAGE, listed, quoted, quoted_table

if TYPE_CHECKING:
    from tidemark.db import Cursor

SQL = statements("tidemark.rewind.rows", "overwritten.sql")


KEPT = "tidemark.rewound_row"


def problems(cur: Cursor, rewind_id: int) -> list[str]:
    """Returns why the rows overwritten since a rewind cannot be put back; empty if they can."""
    cur.execute(SQL["removed"], {"rewind_id": rewind_id})
    return [f"The rows of {sink} that were overwritten since rewind {rewind_id} are no longer kept." for (sink,) in cur.fetchall()]


def put_back(cur: Cursor, key: Mapping[str, Any], keys: Mapping[str, Sequence[str]]) -> None:
    """②: puts the rows overwritten since the undone rewind back into the group's tables; does not commit.

    ``key`` has the ids of the undo (``rewind_id``), the undone rewind (``undo_of``) and the group (``group_id``). ``keys`` are the key
    columns of each table; without a key, nothing is overwritten. Raises `RowsRefused`.
    """
    upserts = {sink: columns for sink, columns in keys.items() if columns}
    since, shown = SQL["since"], ", ".join(upserts or keys)
    if not upserts:
        cur.execute(SQL["any_since"].replace("{since}", since), key)
        if scalar(cur):
            raise _refused(shown, "the sink was an upsert sink when they were overwritten, and no longer is.")
        return
    for name in ("park", "take_over"):
        cur.execute(SQL[name].replace("{since}", since), key)
    cur.execute(SQL["other_sinks"], {**key, "sinks": list(upserts)})
    if other := cur.fetchone():
        raise _refused(shown, f"they were overwritten in {other[0]}.")
    for sink, columns in upserts.items():
        _put_back(cur, {**key, "sink": sink}, sink, columns)


def _refused(sink: str, why: str) -> RowsRefused:
    return RowsRefused(table=sink, archive=KEPT, message=why)


def _put_back(cur: Cursor, key: Mapping[str, Any], sink: str, columns: Sequence[str]) -> None:
    cur.execute(SQL["shapes"], key)
    shapes = [shape for (shape,) in cur.fetchall()]
    types, hooks = kept_columns(cur, sink), guards.hooks(cur, sink, "INSERT")
    for shape in shapes:
        if dropped := [name for name in shape if name not in types]:
            raise _refused(sink, f"the column {dropped[0]} no longer exists, and its values would be lost.")
        values = kept_values(shape, types)
        key_values = {name: values[name] for name in columns}
        first_after = deletes.first_after(sink, key_values.values())
        soft = DELETED in values
        if soft:
            values[DELETED] = f"({first_after} IS NOT NULL)"
        compared = shape if hooks else [name for name, _ in LINEAGE]
        with rows_refused(sink, KEPT):
            cur.execute(
                SQL["return"].format(
                    rewind_id=key["rewind_id"],
                    group_id=key["group_id"],
                    sink=quoted_table(sink),
                    sink_name=literal(sink),
                    key=", ".join(key_values.values()),
                    same_key=" AND ".join(f"present.{quoted(name)} = {value}" for name, value in key_values.items()),
                    same_partition=f"({same_partition('newer')})",
                    stays_out="false" if soft else f"{first_after} IS NOT NULL",
                    shape=array(map(literal, shape)),
                    columns=listed(shape),
                    values=", ".join(values.values()),
                    was=", ".join(f"{values[name]}::text" for name in compared),
                    came=", ".join(f"{quoted(name)}::text" for name in compared),
                )
            )
        total, unchanged = single_row(cur)
        if unchanged != total:
            raise rows_changed(sink, KEPT, total - unchanged, total, hooks)


def give_way(cur: Cursor, key: Mapping[str, Any], sink: str, columns: Sequence[str], archive: str) -> None:
    """Before ③: moves away the sink's rows whose keys the ``archive`` has too. Otherwise like `put_back`."""
    if not columns:
        return
    columns_now = kept_columns(cur, sink)
    names = {
        "rewind_id": key["rewind_id"],
        "group_id": key["group_id"],
        "sink": quoted_table(sink),
        "sink_name": literal(sink),
        "archive": archive,
        "same_key": " AND ".join(f"present.{name} = newer.{name}" for name in map(quoted, columns)),
        "names": array(map(literal, columns_now)),
        "values": array(f"present.{quoted(name)}::text" for name in columns_now),
    }
    hooks = guards.hooks(cur, sink, "DELETE")
    with guards.rows_stay(sink, hooks):
        cur.execute(SQL["give_way"].format(**names))
    moved = cur.rowcount
    if hooks:
        cur.execute(SQL["in_the_way"].format(**names))
        left = int(scalar(cur))
        guards.require_gone(sink, moved + left, moved, left, hooks)


def unpark(cur: Cursor, key: Mapping[str, Any]) -> None:
    """After ③, for the undo of an undo: unparks the rows that the first undo had parked."""
    cur.execute(SQL["unpark"], key)


def set_floors(cur: Cursor, key: Mapping[str, Any]) -> None:
    """Keeps rows that are overwritten below the point of this rewind from now on, as long as it can be undone; does not commit."""
    cur.execute(SQL["note_floors"], key)
    cur.execute(SQL["set_floors"], key)


def kept_values(names: Iterable[str], types: Mapping[str, str]) -> dict[str, str]:
    """Returns the SQL of the values of a kept row ``newer``, by column."""
    return {name: f"(newer.kept ->> {literal(name)})::{types[name]}" for name in names}

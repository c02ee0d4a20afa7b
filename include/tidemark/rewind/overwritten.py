"""What was written over below the point of a rewind, on upsert sinks: an undo puts it back.

`tidemark.sink.overwritten` copies rows below the floor of their partition before they are written over. They are kept under the rewind or
undo that was the last one of the partition at that time. To undo a rewind means, for each partition of it:

    ① take out what was made from its point on (`tidemark.rewind.archive`)   ② put back, of what was written over since, the last row
    below the point of each key   ③ put back what it had taken out; what stands in its place is kept under the undo

So the undo of an undo works in the same way: ① takes out what the first one put back, ③ brings the replay's rows, and what the replay had
written over, which ② of the first undo had put back, gives way to them. Kept rows that are themselves from behind the point were written
over in the time that the undo takes back; they are parked, because an undo of the undo brings that time back, and with it older rewinds
that need them.

Whichever of several rewinds can be undone, the floor is the greatest of theirs. A row too many that is kept does no harm: the last one
below a rewind's point is the one that comes back, and only if the sink has no later one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tidemark.db import rows, statements
from tidemark.rewind import guards
from tidemark.rewind.archive import RowsRefused, changed, refusals
from tidemark.rewind.guards import RowsStay
from tidemark.sink.overwritten import array, kept_columns, literal, same_partition
from tidemark.sink.table import listed, quoted, quoted_table

if TYPE_CHECKING:
    from tidemark.db import Cursor

SQL = statements("tidemark.rewind", "overwritten.sql")


KEPT = "tidemark.rewound_row"


def problems(cur: Cursor, rewind_id: int) -> list[str]:
    """Why what was written over since a rewind cannot be put back; empty: it can. Nothing is removed until the transaction ends."""
    cur.execute(SQL["removed"], {"rewind_id": rewind_id})
    return [
        f"The rows of {row['sink']} that were written over since rewind {rewind_id} are not kept any more."
        for row in rows(cur)
        if row["removed"]
    ]


def put_back(cur: Cursor, key: Mapping[str, Any], sink: str, columns: Sequence[str]) -> None:
    """②: what was written over since the rewind that is undone, into a sink with this key; does not commit.

    ``key`` are the numbers of the undo (``rewind_id``), of the rewind (``undo_of``) and of the group (``group_id``). A sink without
    ``columns``, its key, has nothing written over. Raises `RowsRefused`.
    """

    def refused(why: str) -> RowsRefused:
        return RowsRefused(table=sink, archive=KEPT, message=why)

    since = SQL["since"]
    if not columns:
        cur.execute(SQL["any_since"].replace("{since}", since), key)
        if _one(cur)[0]:
            raise refused("the consumer's sink was an upsert sink when they were written over, and is none now.")
        return
    for name in ("park", "take_over"):
        cur.execute(SQL[name].replace("{since}", since), key)
    cur.execute(SQL["other_sinks"], {**key, "sink": sink})
    if other := cur.fetchone():
        raise refused(f"they were written over in {other[0]}.")
    cur.execute(SQL["shapes"], key)
    shapes = [shape for (shape,) in cur.fetchall()]
    now, hooks = kept_columns(cur, sink), guards.hooks(cur, sink, "INSERT")
    for shape in shapes:
        if gone := [name for name in shape if name not in now]:
            raise refused(f"it has no column {gone[0]} any more, and their values would be lost.")
        as_key = {name: _typed(name, now[name]) for name in columns}
        with refusals(sink, KEPT):
            cur.execute(
                SQL["return"].format(
                    rewind_id=key["rewind_id"],
                    group_id=key["group_id"],
                    sink=quoted_table(sink),
                    key=", ".join(as_key.values()),
                    same_key=" AND ".join(f"present.{quoted(name)} = {value}" for name, value in as_key.items()),
                    same_partition=f"({same_partition('newer')})",
                    shape=array(map(literal, shape)),
                    columns=listed(shape),
                    values=", ".join(_typed(name, now[name]) for name in shape),
                    was=", ".join(f"{_typed(name, now[name])}::text" for name in shape) if hooks else "",
                    came=", ".join(f"{quoted(name)}::text" for name in shape) if hooks else "",
                )
            )
        of, came = _one(cur)
        if came != of:
            raise changed(sink, KEPT, of - came, of, hooks)


def give_way(cur: Cursor, key: Mapping[str, Any], sink: str, columns: Sequence[str], archive: str) -> None:
    """Before ③: rows of the sink in whose place the ``archive`` has others. As `put_back` otherwise."""
    if not columns:
        return
    kept = kept_columns(cur, sink)
    names = {
        "rewind_id": key["rewind_id"],
        "group_id": key["group_id"],
        "sink": quoted_table(sink),
        "sink_name": literal(sink),
        "archive": archive,
        "same_key": " AND ".join(f"present.{name} = newer.{name}" for name in map(quoted, columns)),
        "names": array(map(literal, kept)),
        "values": array(f"present.{quoted(name)}::text" for name in kept),
    }
    hooks = guards.hooks(cur, sink, "DELETE")
    with guards.answers(lambda message: RowsStay(table=sink, message=message + "".join(f" It has {name}." for name in hooks))):
        cur.execute(SQL["give_way"].format(**names))
    moved = cur.rowcount
    if hooks:
        cur.execute(SQL["in_the_way"].format(**names))
        left = int(_one(cur)[0])
        guards.require_gone(sink, moved + left, moved, left, hooks)


def unpark(cur: Cursor, key: Mapping[str, Any]) -> None:
    """After ③, of the undo of an undo: kept rows that belong to what that one had taken back."""
    cur.execute(SQL["unpark"], key)


def set_floors(cur: Cursor, key: Mapping[str, Any]) -> None:
    """From now on what is written over below the point of this rewind is kept, until it cannot be undone any more; does not commit."""
    cur.execute(SQL["note_floors"], key)
    cur.execute(SQL["set_floors"], key)


def _typed(name: str, kind: str) -> str:
    return f"(newer.kept ->> {literal(name)})::{kind}"


def _one(cur: Cursor) -> tuple[Any, ...]:
    row = cur.fetchone()
    assert row is not None
    return row

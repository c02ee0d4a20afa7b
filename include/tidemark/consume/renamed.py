"""Refuses to load records that another group has already loaded into the table, as after renaming a consumer's file: each would fail."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from tidemark.db import statements
from tidemark.errors import Refused
from tidemark.records.ranges import Epoch, Slice, TopicPartition
from tidemark.sink.table import quoted_table
from tidemark.spec import ConsumerSpec

if TYPE_CHECKING:
    from tidemark.db import Cursor

SQL = statements("tidemark.consume", "renamed.sql")


class LoadedByAnother(Refused):
    """A group without a position is about to read records whose rows are in its table. ``other``: the group that loaded them, if known."""

    group: str
    other: str | None
    table: str
    topic: str

    def __str__(self) -> str:
        loader = "" if self.other is None else f", loaded by the group {self.other}"
        exists = self.other is not None and " (deleted, " not in self.other
        fix = f"If the consumer's file was renamed, write group: {self.other}. Otherwise load" if exists else "Load"
        return (
            f"The group {self.group} has no position in {self.topic}, but {self.table} already has rows of its records{loader}. Nothing "
            f"was read. {fix} another table, remove the rows, or start with offset_reset: latest."
        )


def append_tables(spec: ConsumerSpec) -> tuple[str, ...]:
    """The tables in which a record can occur only once."""
    return tuple(sink.table for sink in spec.sinks.values() if not sink.key)


def require_unread(cur: Cursor, group: str, group_id: int, tables: Sequence[str], part: Slice) -> None:
    """Raises `LoadedByAnother` if one of the tables has rows of these records."""
    key = {"group_id": group_id, "topic_id": part.topic_id, "partition": part.partition.partition, "start": part.start, "end": part.end}
    for table in tables:
        if _has_rows(cur, table, key):
            cur.execute(SQL["loader"], key)
            (other,) = cur.fetchone() or (None,)
            raise LoadedByAnother(group=group, other=other, table=table, topic=part.partition.topic)


def _has_rows(cur: Cursor, table: str, key: Mapping[str, int]) -> bool:
    cur.execute(SQL["readable"], {"table": table})
    if cur.fetchone() != (True,):
        return False
    cur.execute(SQL["has_rows"].replace("{table}", quoted_table(table).replace("%", "%%")), key)
    return cur.fetchone() == (True,)


def require_own_rows(cur: Cursor, spec: ConsumerSpec, topics: Sequence[str]) -> None:
    """Checks each partition before a run, as the run would. Raises `LoadedByAnother`."""
    cur.execute(SQL["unread_partitions"], {"group": spec.group, "topics": list(topics)})
    for group_id, topic_id, topic, partition in cur.fetchall():
        whole = Slice(TopicPartition(topic, partition), topic_id, 0, 2**62, Epoch(0))
        require_unread(cur, spec.group, group_id, append_tables(spec), whole)

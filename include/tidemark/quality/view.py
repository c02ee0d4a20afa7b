"""The view of a sink's validated rows. Readers select from the table for fresh rows, from the view for validated ones."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from tidemark.errors import BadInput
from tidemark.sink.table import quoted_table
from tidemark.spec.checks import POSTGRES_NAME_LIMIT

if TYPE_CHECKING:
    from tidemark.db import Cursor

SUFFIX = "_validated"


def validated_view(table: str) -> str:
    """Returns the name of the view beside ``schema.table``: ``schema.table_validated``.

    A name too long for Postgres is truncated and gets eight digits of the full name's hash, so that long names stay distinct.
    """
    schema, name = _split(table)
    if len((name + SUFFIX).encode()) > POSTGRES_NAME_LIMIT:
        tail = f"_{hashlib.sha256(name.encode()).hexdigest()[:8]}{SUFFIX}"
        name = name.encode()[: POSTGRES_NAME_LIMIT - len(tail)].decode(errors="ignore") + tail
    else:
        name += SUFFIX
    return f"{schema}.{name}"


def validated_view_ddl(table: str, groups: Sequence[str]) -> str:
    """Returns ``CREATE OR REPLACE VIEW schema.table_validated``: the sink's rows below the validated offset of one of these groups.

    A row appears once its Kafka partition is validated up to it. Readers of the view need no rights on the schema
    ``tidemark``: the view uses its owner's. Run the statement again after adding columns at the end of the table. If a column changed or
    was dropped, ``DROP VIEW`` first, as for any view.
    """
    if not groups:
        raise BadInput(what=f"the validated view of {table}", found="no group writes into it", fix="Name at least one group.")
    names = ", ".join(_literal(group) for group in groups)
    return (
        f"CREATE OR REPLACE VIEW {quoted_table(validated_view(table))} AS\n"
        f"SELECT sink.* FROM {quoted_table(table)} sink\n"
        " WHERE EXISTS (SELECT FROM tidemark.partition_offset pos\n"
        "                 JOIN tidemark.consumer_group USING (group_id)\n"
        f"                WHERE consumer_group.name IN ({names})\n"
        "                  AND pos.topic_id = sink.kafka_topic_id AND pos.partition = sink.kafka_partition\n"
        "                  AND sink.kafka_offset < pos.validated_offset);"
    )


def hidden_groups(cur: Cursor, table: str, groups: Collection[str]) -> list[str]:
    """Returns the groups whose rows the table's view hides, because it was created for others. Empty if there is no such view."""
    cur.execute("SELECT pg_get_viewdef(to_regclass(%s))", (quoted_table(validated_view(table)),))
    ((definition,),) = cur.fetchall()
    if definition is None:
        return []
    literals = {text.replace("''", "'") for text in re.findall(r"'((?:[^']|'')*)'::text", definition)}
    return sorted(set(groups) - literals)


def _split(table: str) -> tuple[str, str]:
    schema, dot, name = table.partition(".")
    too_long = max(len(schema.encode()), len(name.encode())) > POSTGRES_NAME_LIMIT
    if not (schema and dot and name) or "." in name or "\0" in table or too_long:
        raise BadInput(what="sink table", found=repr(table), fix="Write schema.table, each part at most 63 bytes long.")
    return schema, name


def _literal(text: str) -> str:
    if "\0" in text:
        raise BadInput(what="group", found=repr(text), fix="Postgres cannot store a NUL byte in a name.")
    return ("E" if "\\" in text else "") + "'" + text.replace("\\", "\\\\").replace("'", "''") + "'"

"""The view of a sink's validated rows. Readers select from the table for fresh rows, from the view for validated ones."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import psycopg2.errors

from tidemark.db import rows, statements
from tidemark.errors import BadInput
from tidemark.sink.table import quoted, quoted_table
from tidemark.spec.checks import POSTGRES_NAME_LIMIT

if TYPE_CHECKING:
    from tidemark.db import Cursor

SQL = statements("tidemark.quality", "view.sql")
SUFFIX = "_validated"
_COMPARED = "tidemark_compared"
_FROM = "\n   FROM "


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
    return f"CREATE OR REPLACE VIEW {quoted_table(validated_view(table))} AS\n{_query(table, groups)};"


def _query(table: str, groups: Sequence[str]) -> str:
    names = ", ".join(_literal(group) for group in groups)
    return (
        f"SELECT sink.* FROM {quoted_table(table)} sink\n"  # noqa: S608 - quoted names and literals
        " WHERE EXISTS (SELECT FROM tidemark.partition_offset pos\n"
        "                 JOIN tidemark.consumer_group USING (group_id)\n"
        f"                WHERE consumer_group.name IN ({names})\n"
        "                  AND pos.topic_id = sink.kafka_topic_id AND pos.partition = sink.kafka_partition\n"
        "                  AND sink.kafka_offset < pos.validated_offset)"
    )


@dataclass(frozen=True, slots=True)
class ExistingView:
    """The view of a table's validated rows. ``groups``: those whose rows it shows. ``standard``: its definition is that of
    `validated_view_ddl`, perhaps without the table's last columns, so that the statement replaces it without a loss. ``mine``: this role
    may replace it. ``extras``: the statements that give a new view its owner, rights and comment."""

    groups: Sequence[str]
    standard: bool
    mine: bool
    extras: Sequence[str]


def existing_view(cur: Cursor, table: str) -> ExistingView | None:
    """Returns the table's view, `None` if there is none. Creates a temporary view for a moment, to compare the definitions."""
    view = quoted_table(validated_view(table))
    cur.execute(SQL["view"], {"view": view})
    row = next(iter(rows(cur)), None)
    if row is None:
        return None
    groups = _groups_in(row["definition"])
    cur.execute(SQL["grants"], {"view": view})
    extras = [statement for (statement,) in cur.fetchall()]
    if row["comment"] is not None:
        extras.append(f"COMMENT ON VIEW {view} IS {_literal(row['comment'])};")
    if row["other_owner"] is not None:
        extras.append(f"ALTER VIEW {view} OWNER TO {quoted(row['other_owner'])};")
    standard = row["plain"] and bool(groups) and _begins(_standard_definition(cur, table, groups), row["definition"])
    return ExistingView(groups, standard, row["mine"], extras)


def _standard_definition(cur: Cursor, table: str, groups: Sequence[str]) -> str:
    """The definition of a new view, as Postgres shows it. Empty if this role may not create a temporary view."""
    cur.execute("SAVEPOINT compared")
    try:
        cur.execute(f"CREATE TEMPORARY VIEW {_COMPARED} AS\n{_query(table, groups).replace('%', '%%')}", {})
        cur.execute("SELECT pg_get_viewdef(to_regclass(%s))", (f"pg_temp.{_COMPARED}",))
        ((definition,),) = cur.fetchall()
    except psycopg2.errors.InsufficientPrivilege:
        definition = ""
    cur.execute("ROLLBACK TO SAVEPOINT compared")
    return str(definition)


def _begins(standard: str, definition: str) -> bool:
    """Whether a definition is the standard one, perhaps without its last columns."""
    columns, _, source = definition.partition(_FROM)
    standard_columns, _, standard_source = standard.partition(_FROM)
    return source == standard_source and f"{standard_columns},".startswith(f"{columns},")


def _groups_in(definition: str) -> list[str]:
    return [text.replace("''", "'") for text in re.findall(r"'((?:[^']|'')*)'::text", definition)]


def hidden_groups(cur: Cursor, table: str, groups: Collection[str]) -> list[str]:
    """Returns the groups whose rows the table's view hides, because it was created for others. Empty if there is no such view."""
    cur.execute("SELECT pg_get_viewdef(to_regclass(%s))", (quoted_table(validated_view(table)),))
    ((definition,),) = cur.fetchall()
    return [] if definition is None else sorted(set(groups) - set(_groups_in(definition)))


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

"""The statements that fit a consumer's tables to its rows, with the views of validated rows.

Postgres refuses to change the type of a column that a view shows. So the view is dropped first and created again, with its owner, its
rights and its comment. Otherwise it is replaced, which keeps them, and gets the new columns.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import psycopg2

from tidemark.author.check import TableDiff
from tidemark.connections import database_url
from tidemark.consume.evolve import LOCK_MS
from tidemark.db import data_error, is_outage, limit_lock_waits, session, transaction
from tidemark.errors import Refused
from tidemark.quality.view import ExistingView, existing_view, validated_view, validated_view_ddl
from tidemark.sink.fit import REWRITES, VIEWS_FIRST
from tidemark.sink.table import quoted_table, read_columns
from tidemark.spec import ConsumerSpec
from tidemark.spec.files import groups_into


class ViewChanged(Refused):
    """The view is not the one that Tidemark would create."""

    view: str

    def __str__(self) -> str:
        return (
            f"{self.view} is not the view that `tidemark sink ddl` creates, or its columns have rights or it has options of its own. They "
            "would be lost. Drop it, run the command again, and create it again yourself."
        )


class AlterRefused(Refused):
    """Postgres refused a statement."""

    statement: str
    message: str

    def __str__(self) -> str:
        return f"Postgres refused {self.statement}: {self.message} No table and no view was changed."


@dataclass(frozen=True, slots=True)
class Alteration:
    """``statements``: in order, each with its semicolon. ``remaining``: differences that no statement fixes."""

    table: str
    statements: Sequence[str]
    remaining: Sequence[str]


def alterations_of(spec: ConsumerSpec, diffs: Iterable[TableDiff]) -> list[Alteration]:
    """The statements for each table of a consumer. Changes nothing. Raises `ViewChanged`."""
    alterations = []
    with session(database_url()) as connection:
        for diff in diffs:
            table = diff.sink.table
            changes = [_without_remark(each.ddl) for each in diff.differences if each.ddl]
            remaining = [each.problem for each in diff.differences if not each.ddl]
            with transaction(connection) as cur:
                view = existing_view(cur, table)
                lacks = view is not None and len(read_columns(cur, validated_view(table))) < len(read_columns(cur, table))
            changes_types = any(each.ddl and VIEWS_FIRST in each.ddl for each in diff.differences)
            if view is not None and (changes or lacks):
                changes = _with_view(table, view, changes, groups_into(table, spec), anew=changes_types)
            alterations.append(Alteration(table, changes, remaining))
    return alterations


def _with_view(table: str, view: ExistingView, changes: Sequence[str], groups: Sequence[str], *, anew: bool) -> list[str]:
    if not view.standard:
        raise ViewChanged(view=validated_view(table))
    create = validated_view_ddl(table, list(dict.fromkeys((*view.groups, *groups))))
    if not anew:
        return [*changes, create]
    return [f"DROP VIEW {quoted_table(validated_view(table))};", *changes, create, *view.extras]


def _without_remark(ddl: str) -> str:
    """A statement without the remark on views: `alterations_of` handles these."""
    bare = ddl.removesuffix(REWRITES).removesuffix(VIEWS_FIRST)
    return f"{bare} --{REWRITES[1:]}" if ddl.endswith(REWRITES) else bare


def run(alterations: Iterable[Alteration]) -> None:
    """Runs the statements in one transaction. Raises `AlterRefused`, and `LockTimeout` if another session uses a table for too long."""
    with session(database_url()) as connection, transaction(connection) as cur:
        limit_lock_waits(cur, LOCK_MS)
        for statement in (statement for alteration in alterations for statement in alteration.statements):
            try:
                cur.execute(statement)
            except psycopg2.Error as error:
                if is_outage(error):
                    raise
                raise AlterRefused(statement=statement, message=data_error(error).message) from None

"""Compares the rows that a rewind took out with the rows of the replay, to show what a fix has changed.

For a replay beside, before its swap: compares the rows of the sink that the swap would take out with those that it would put in.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from tidemark.db import rows, statements, transaction
from tidemark.errors import Refused
from tidemark.rewind import beside
from tidemark.rewind.plan_model import GroupPlan, RewindState, Undo
from tidemark.rewind.rows.archive import archives_of, open_archive
from tidemark.rewind.rows.overwritten import kept_values
from tidemark.rewind.store import read_plan
from tidemark.sink.kept_rows import kept_columns, literal
from tidemark.sink.table import LINEAGE, on_table, quoted, quoted_table, read_columns

if TYPE_CHECKING:
    from tidemark.db import Connection, Cursor

SQL = statements("tidemark.rewind", "verify.sql")

EXAMPLES = 5
"""Maximum number of example rows for each verdict except ``equal``."""
_LINEAGE = tuple(name for name, _ in LINEAGE)


@dataclass(frozen=True, slots=True)
class Example:
    """A row before the rewind and now, as JSON. ``now`` is `None` if the row is gone, ``was`` if it is new."""

    was: Mapping[str, Any] | None
    now: Mapping[str, Any] | None


@dataclass(frozen=True, slots=True)
class Verified:
    """The result of one consumer's replay into one table so far. Rows count only if their offsets have been read again."""

    consumer: str
    group: str
    table: str
    by: tuple[str, ...]
    """The columns that identify a row: its lineage, or the key of an upsert sink."""
    replayed: int
    """Offsets that have been read again."""
    left: int
    """Offsets still to be read again."""
    equal: int
    changed: int
    gone: int
    new: int
    examples: Mapping[str, tuple[Example, ...]]
    """By ``changed``, ``gone`` and ``new``."""


class NotVerifiable(Refused):
    """The rewind has nothing to compare."""

    rewind_id: int
    reason: str

    def __str__(self) -> str:
        return f"Rewind {self.rewind_id} cannot be verified: {self.reason}"


def verify(connection: Connection, rewind_id: int, tables: Mapping[str, Mapping[str, Sequence[str]]]) -> list[Verified]:
    """Compares the archive of an applied rewind with the current rows of the tables, consumer by consumer and table by table; or the tables
    with the shadows of a replay beside. Changes nothing.

    ``tables`` are the key columns of each consumer's tables, none for an append sink. Raises `NotVerifiable` if the rewind is not applied,
    is an undo, names a table that is not in ``tables``, or no longer has its archive; `BadInput` if it does not exist.
    """
    with transaction(connection) as cur:
        plan = read_plan(cur, rewind_id)
        if plan.state not in (RewindState.APPLIED, RewindState.BESIDE):
            raise NotVerifiable(rewind_id=rewind_id, reason=f"it is {plan.state.lower()}: nothing was read again.")
        if isinstance(plan.scenario, Undo):
            raise NotVerifiable(rewind_id=rewind_id, reason="an undo puts rows back as they were; nothing is read again.")
        for group in plan.groups:  # a role that may rewind can store any table, and a query would run the functions of a view
            if unknown := [table for table in group.tables if table not in tables.get(group.consumer, {})]:
                raise NotVerifiable(rewind_id=rewind_id, reason=f"{unknown[0]} is not a table of {group.consumer}, by the consumer's file.")
        compare = _verified_beside if plan.state is RewindState.BESIDE else _verified
        return [
            compare(cur, rewind_id, replace(group, tables=(table,)), tuple(tables[group.consumer][table]))
            for group in plan.groups
            for table in group.tables
        ]


def _verified(cur: Cursor, rewind_id: int, group: GroupPlan, key: tuple[str, ...]) -> Verified:
    """Compares the archives of a rewind with the rows of the group's only table."""
    cur.execute(SQL["spans"], {"rewind_id": rewind_id, "group_id": group.group_id})
    spans = rows(cur)
    if not spans:
        return _result(group, key, spans, Comparison())
    archives = _archives(cur, rewind_id, group)
    current_columns = [column.name for column in read_columns(cur, group.table)]
    kinds = kept_columns(cur, group.table) if key else {}
    hidden = [name for name in current_columns if key and name not in kinds]  # generated columns, not kept of overwritten rows
    names = [name for name in current_columns if name not in hidden and all(name in columns for columns in archives.values())]
    overwritten = _overwritten(rewind_id, group, key, names, kinds) if key else None
    counts = Comparison()
    counts.judge(cur, _comparison(group.table, archives, key or _LINEAGE, names, overwritten), {"hidden": hidden, **_parameters(spans)})
    if key:
        named = {**_parameters(spans), "sink": group.table, "rewind_id": rewind_id}
        counts.add_deletions(cur, _deletions(group.table, archives, key, kinds), named)
    return _result(group, key, spans, counts)


def _verified_beside(cur: Cursor, rewind_id: int, group: GroupPlan, key: tuple[str, ...]) -> Verified:
    """Compares the rows of the group's only table with those of its shadow. The shadow may also overwrite or delete older rows."""
    replay = beside.find(cur, group.group, rewind_id)
    beside.open_shadows(replay, cur)
    shadow = replay.shadow(group.table)
    kinds = kept_columns(cur, shadow)
    names = [column.name for column in read_columns(cur, group.table) if column.name in kinds]
    spans = [
        {"topic_id": part.topic_id, "partition": part.partition.partition, "start": part.start, "until": part.position, "goal": part.end}
        for part in replay.parts
    ]
    live = quoted_table(group.table)
    others = SQL["outside"].format(columns=", ".join(map(quoted, names)), relation=live).replace("%", "%%") if key else None
    counts = Comparison()
    comparison = _comparison(shadow, {live: set(names)}, key or _LINEAGE, names, others)
    counts.judge(cur, comparison, {"hidden": [], **_parameters(spans)})
    if key:
        values = {name: f"(coalesce(was.key, now.key) ->> {literal(name)})::{kinds[name]}".replace("%", "%%") for name in key}
        statement = SQL["deletions_beside"].replace("{shadow}", shadow).replace("{live}", live.replace("%", "%%"))
        for relation in ("present", "replayed"):
            same = " AND ".join(f"{relation}.{_escaped(name)} = {value}" for name, value in values.items())
            statement = statement.replace(f"{{{relation}_key}}", same)
        counts.add_deletions(cur, statement, {**_parameters(spans), "sink": group.table, "shadow": shadow})
    return _result(group, key, spans, counts)


@dataclass
class Comparison:
    """The verdicts on rows, with examples."""

    numbers: dict[str, int] = field(default_factory=lambda: dict.fromkeys(("equal", "changed", "gone", "new"), 0))
    examples: dict[str, tuple[Example, ...]] = field(default_factory=dict)

    def judge(self, cur: Cursor, judged: str, parameters: Mapping[str, Any]) -> None:
        cur.execute(f"{judged}\n{SQL['counts']}", parameters)
        self.numbers |= dict(cur.fetchall())
        for verdict in ("changed", "gone", "new"):
            if self.numbers[verdict]:
                cur.execute(f"{judged}\n{SQL['examples']}", {**parameters, "verdict": verdict, "limit": EXAMPLES})
                self.examples[verdict] = tuple(Example(*row) for row in cur.fetchall())

    def add_deletions(self, cur: Cursor, statement: str, parameters: Mapping[str, Any]) -> None:
        cur.execute(statement, {**parameters, "limit": EXAMPLES})
        for verdict, count, keys in cur.fetchall():
            self.numbers[verdict] += count
            deleted = tuple(Example(None, row) if verdict == "new" else Example(row, None) for row in keys if verdict != "equal")
            if deleted:
                self.examples[verdict] = (*self.examples.get(verdict, ()), *deleted)[:EXAMPLES]


def _parameters(spans: Sequence[Mapping[str, int]]) -> dict[str, list[int]]:
    names = {"topic_ids": "topic_id", "partitions": "partition", "starts": "start", "untils": "until"}
    return {plural: [span[name] for span in spans] for plural, name in names.items()}


def _result(group: GroupPlan, key: tuple[str, ...], spans: Sequence[Mapping[str, int]], comparison: Comparison) -> Verified:
    replayed = sum(span["until"] - span["start"] for span in spans)
    left = sum(max(0, span["goal"] - span["until"]) for span in spans)
    equal, changed, gone, new = (comparison.numbers[name] for name in ("equal", "changed", "gone", "new"))
    return Verified(
        group.consumer, group.group, group.table, key or _LINEAGE, replayed, left, equal, changed, gone, new, examples=comparison.examples
    )


def _archives(cur: Cursor, rewind_id: int, group: GroupPlan) -> dict[str, set[str]]:
    """Returns the columns of each of the rewind's archives of this table. Raises `NotVerifiable` unless it still has all of them."""
    archives: dict[str, set[str]] = {}
    for archive in archives_of(cur, rewind_id):
        if (archive["group_id"], archive["sink"]) != (group.group_id, group.table):
            continue
        relation = None if archive["removed"] else open_archive(cur, archive)
        if relation is None:
            raise NotVerifiable(rewind_id=rewind_id, reason=f"the rows that it took out of {group.table} are no longer kept.")
        archives[relation] = {column.name for column in read_columns(cur, relation)}
    return archives


def _kept(archives: Iterable[str], names: Sequence[str]) -> str:
    """Returns the SQL that selects these columns from the archives."""
    columns = ", ".join(map(_escaped, names))
    sources = [SQL["kept"].format(columns=columns, relation=relation) for relation in archives]
    return " UNION ALL ".join(sources or [SQL["nothing"].replace("{columns}", columns)])


def _comparison(table: str, archives: Mapping[str, set[str]], by: Sequence[str], names: Sequence[str], overwritten: str | None) -> str:
    """Returns the SQL that compares these columns of the archives. ``overwritten``: see `_overwritten`; `None` for an append sink."""
    compared = [_escaped(name) for name in names if name not in (*by, *_LINEAGE)]
    return on_table(
        SQL["judged"]
        .replace("{archives}", _kept(archives, names))
        .replace("{written_over}", overwritten or _kept((), names))
        .replace("{by_key}", "false" if overwritten is None else "true")
        .replace("{was}", ", ".join(f"was.{name}" for name in compared) or "NULL")
        .replace("{now}", ", ".join(f"now.{name}" for name in compared) or "NULL")
        .replace("{same}", " AND ".join(f"was.{name} = now.{name}" for name in map(_escaped, by))),
        table,
    )


def _deletions(table: str, archives: Iterable[str], key: Sequence[str], kinds: Mapping[str, str]) -> str:
    """Returns the SQL that compares deletions."""
    typed = {name: f"(coalesce(was.key, now.key) ->> {literal(name)})::{kinds[name]}".replace("%", "%%") for name in key}
    return on_table(
        SQL["deletions"]
        .replace("{archives}", _kept(archives, key))
        .replace("{present_key}", " AND ".join(f"present.{_escaped(name)} = {value}" for name, value in typed.items()))
        .replace("{taken_key}", " AND ".join(f"taken.{_escaped(name)} = {value}" for name, value in typed.items())),
        table,
    )


def _overwritten(rewind_id: int, group: GroupPlan, key: Sequence[str], names: Sequence[str], kinds: Mapping[str, str]) -> str:
    """Returns the SQL that selects, with these columns, the kept rows from before the rewind's point that the replay has overwritten."""
    values = kept_values(names, kinds)
    text = SQL["written_over"].format(
        key=", ".join(values[name] for name in key),
        columns=", ".join(f"{value} AS {quoted(name)}" for name, value in values.items()),
        rewind_id=rewind_id,
        group_id=group.group_id,
        sink_name=literal(group.table),
    )
    return text.replace("%", "%%")


def _escaped(column: str) -> str:
    """Escapes a name for a statement with parameters."""
    return quoted(column).replace("%", "%%")

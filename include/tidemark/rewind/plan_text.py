"""Formats a plan: as a table for a terminal, as JSON for programs, as Markdown for Airflow's approval page."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from datetime import datetime
from itertools import groupby
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Group, RenderableType
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from tidemark.rewind.plan_model import GroupPlan, PartitionPlan, Plan, RewindState
from tidemark.rewind.scenarios.scenario import describe, to_json
from tidemark.text.moment import iso
from tidemark.text.wording import about, counted, escaped

if TYPE_CHECKING:
    from tidemark.rewind.verify import Example, Verified

WITH_COMMAS, WITH_MOVES = 10**12, 10**15
"""To fit a terminal, offsets from the first number on are shown without commas, and from the second on without the difference."""
MARKDOWN_ROWS = 200
"""Maximum number of a group's partitions on an approval page; the others are summed up."""
NOTED = 20
"""Maximum number of partitions with losses that are named."""

SUMMED = ("replay", "skip", "sink_rows", "failed_records", "rows_back", "failed_back")
"""Numbers of a partition that are added up; the last two only of an undo."""
_BACK = ["rows back", "failed back"]


def table(plan: Plan) -> RenderableType:
    """Formats the plan for a terminal of 80 columns: a heading, a table for each topic of each group, notes."""
    parts: list[RenderableType] = [_line(text) for text in _heading(plan)]
    for group in plan.groups:
        parts += [Text(), _line(_about_group(group), "bold")]
        for topic, partitions in groupby(group.partitions, key=lambda part: part.partition.topic):
            parts += [_line(f"topic {topic}"), _topic_table(list(partitions), undo=plan.undo_of is not None)]
        parts += [_line(text) for text in _notes(plan, group)]
    return Group(*parts, Text(), *(_line(text) for text in _closing(plan)))


def markdown(plan: Plan) -> str:
    """Formats the plan as GitHub Markdown, for Airflow's approval page. User text is escaped and shown literally."""
    blocks = ["  \n".join(map(escaped, _heading(plan)))]
    for group in plan.groups:
        blocks.append(f"**{escaped(_about_group(group))}**")
        undo = plan.undo_of is not None
        rows = [_markdown_row(part, undo=undo) for part in group.partitions[:MARKDOWN_ROWS]]
        if rest := group.partitions[MARKDOWN_ROWS:]:
            rows.append(_row([f"{len(rest):,} more", "", "", "", *_numbers(_sums(rest), undo=undo)]))
        heads = ["topic", "partition", "now", "new", "read again", "skipped", "rows out", "failed out", *(_BACK if undo else [])]
        blocks.append("\n".join([_row(heads), "|---|" + "---:|" * (len(heads) - 1), *rows]))
        if notes := _notes(plan, group):
            blocks.append("\n".join(f"- {escaped(text)}" for text in notes))
    return "\n\n".join([*blocks, "  \n".join(map(escaped, _closing(plan)))]) + "\n"


def as_json(plan: Plan) -> dict[str, Any]:
    """Returns the plan as plain values."""
    return summary_as_json(plan) | groups_as_json(plan.groups)


def summary_as_json(plan: Plan) -> dict[str, Any]:
    """Returns the plan without its groups."""
    values = {field.name: getattr(plan, field.name) for field in fields(plan) if field.name != "groups"}
    times = {name: iso(value) for name, value in values.items() if isinstance(value, datetime)}
    return values | times | {"scenario": to_json(plan.scenario), "says": describe(plan.scenario)}


def groups_as_json(groups: Sequence[GroupPlan]) -> dict[str, Any]:
    """Returns the groups of a plan as plain values, and their sums."""
    return {"groups": [_group_json(group) for group in groups], **totals(groups)}


def totals(groups: Sequence[GroupPlan]) -> dict[str, int]:
    """Returns sums over all partitions: offsets read again and skipped, rows and failed records taken out and, for an undo, put back."""
    return _sums(part for group in groups for part in group.partitions)


def _sums(partitions: Iterable[PartitionPlan]) -> dict[str, int]:
    parts = list(partitions)
    return {name: sum(getattr(part, name) for part in parts) for name in SUMMED}


def compared_markdown(results: Sequence[Verified]) -> str:
    """Formats what a swap would change, for Airflow's approval page."""
    rows = [_row([escaped(result.table), *(f"{number:,}" for number in (result.equal, result.changed, result.gone, result.new))])
            for result in results]  # fmt: skip
    heads = _row(["what a swap changes in", "equal", "changed", "gone", "new"])
    left = sum(result.left for result in results)
    note = f"\n\n- {counted(left, 'offset')} still to be read beside; the swap reads them first" if left else ""
    return "\n".join([heads, "|---|" + "---:|" * 4, *rows]) + note


def verified_table(results: Sequence[Verified]) -> RenderableType:
    """Formats what a replay has changed: for each consumer a table and some example rows."""
    parts: list[RenderableType] = []
    for result in results:
        progress = f", {counted(result.left, 'offset')} still to read again" if result.left else ""
        parts.append(_line(f"{result.consumer}, table {result.table}: {counted(result.replayed, 'offset')} read again{progress}", "bold"))
        counts = Table("equal", "changed", "gone", "new", box=box.SIMPLE, show_edge=False, padding=(0, 0, 0, 1), pad_edge=False)
        for column in counts.columns:
            column.justify = "right"
        counts.add_row(*(f"{number:,}" for number in (result.equal, result.changed, result.gone, result.new)))
        parts.append(counts)
        for verdict, examples in result.examples.items():
            for example in examples:
                parts += [_line(f"{verdict}: {_difference(example, result.by)}")]
    return Group(*parts)


def _difference(example: Example, by: Sequence[str]) -> str:
    """Formats the row's key and its values; for a changed row only the values that differ."""
    row = example.now or example.was or {}
    key = " ".join(f"{name}={row.get(name)}" for name in by)
    was, now = example.was, example.now
    others = [name for name in row if name not in by and not name.startswith("kafka_")]
    if was is None or now is None:
        return f"{key}: {' '.join(f'{name}={row.get(name)}' for name in others)}"
    return f"{key}: " + ", ".join(f"{name} {was.get(name)} is now {now.get(name)}" for name in others if was.get(name) != now.get(name))


# ---- Texts of all formats


def _heading(plan: Plan) -> list[str]:
    until = f"; can be applied until {_second(plan.expires_at)}" if plan.state is RewindState.PLANNED else ""
    begun = [f"Read beside the live rows since {_second(plan.started_at)}, begun by {plan.started_by}."] if plan.started_at else []
    rehearsed = [f"Rehearses the transform {plan.transform}; the rows stay as they are."] if plan.transform else []
    decided = f"{'Rejected' if plan.state is RewindState.REJECTED else 'Approved'} by {plan.decided_by} at {_second(plan.decided_at)}."
    loss = ["Records that Kafka no longer has are given up and stored as lost."] if plan.allow_loss else []
    return [
        f"Rewind {plan.rewind_id} ({plan.state}): {describe(plan.scenario)}",
        f"Reason: {plan.reason}",
        f"Planned by {plan.planned_by} at {_second(plan.planned_at)}{until}.",
        *([decided] if plan.decided_by else []),
        *rehearsed,
        *begun,
        *([f"{'Swapped' if plan.beside else 'Applied'} by {plan.applied_by} at {_second(plan.applied_at)}."] if plan.applied_by else []),
        *loss,
    ]


def _second(moment: datetime | None) -> str:
    return iso(moment.replace(microsecond=0)) if moment else "?"


def _about_group(group: GroupPlan) -> str:
    activity = "nobody is reading" if not group.in_flight else f"{counted(group.in_flight, 'attempt')} in flight"
    return f"{group.consumer} (group {group.group}, {group.group_state}, {activity}), table {group.table}"


def _notes(plan: Plan, group: GroupPlan) -> list[str]:
    lost = [(part.partition, part.lost) for part in group.partitions if part.lost]
    notes = [
        f"{partition}: offsets {start:,} to {end - 1:,} are gone from the log; they will be stored as lost"
        for partition, (start, end) in lost[:NOTED]
    ]
    if len(lost) > NOTED:
        notes.append(f"offsets of {counted(len(lost) - NOTED, 'more partition')} are gone from the log too")
    if any(part.backfill_left is not None for part in group.partitions):
        left = sum(part.backfill_left or 0 for part in group.partitions)
        notes.append(
            f"backfill: {counted(left, 'offset')} still to read; tidemark backfill {group.consumer} {plan.rewind_id} reads them"
            if left
            else "backfill: nothing left to read"
        )
    if plan.state is RewindState.PLANNED:
        if not group.partitions:
            notes.append("no partition moves")
        unknown = "how long that takes is unknown, because the group has not read yet"
        time = unknown if group.catch_up_s is None else f"about {about(group.catch_up_s)} at {_rate(group.records_per_s or 0)} records/s"
        later = "read beside" if plan.beside else "lag afterwards"
        notes.append(f"{later}: {counted(group.lag, 'offset')}; {time}" if group.lag else "nothing left to read afterwards")
    if plan.beside and group.shadow_bytes is not None and plan.state in (RewindState.PLANNED, RewindState.BESIDE):
        notes.append(f"until the swap, the replay takes about {decimal(group.shadow_bytes)} beside {group.table}")
    return [*notes, *(f"asset events for {asset} already announced rows that are taken out" for asset in group.announced_assets)]


def _rate(per_second: float) -> str:
    return f"{per_second:,.0f}" if per_second >= 10 else f"{per_second:.1f}"


def _closing(plan: Plan) -> list[str]:
    sums = totals(plan.groups)
    may_grow = sums["replay"] if plan.undo_of is None else sums["sink_rows"]
    least = ("At least " if plan.undo_of is None else "at least ") if plan.state is RewindState.PLANNED and may_grow else ""
    skipped = "" if not sums["skip"] else ", to be read by the backfill" if plan.backfill else " permanently"
    where = " beside the live rows" if plan.beside else f", {sums['skip']:,} skipped{skipped}"
    read = f"{least}{counted(sums['replay'], 'offset')} read again{where}"
    rows, failed = counted(sums["sink_rows"], "row"), counted(sums["failed_records"], "failed record")
    if plan.transform:
        return [f"{read}. A rehearsal is compared and discarded, never swapped."]
    if plan.beside and plan.state is not RewindState.APPLIED:
        return [f"{read}. The swap takes {rows} and {failed} out, and keeps them for an undo."]
    if plan.undo_of is None:
        stayed = "; the positions stayed" if plan.beside else ""
        return [f"{read}{stayed}; {rows} and {failed} taken out and kept for an undo."]
    back = f"{counted(sums['rows_back'], 'row')} and {counted(sums['failed_back'], 'failed record')} of rewind {plan.undo_of} come back"
    return [
        f"{back}; {least}{rows} and {failed} taken out and kept in case the undo is undone; {counted(sums['replay'], 'offset')} read again."
    ]


# ---- Parts of single formats


def _line(text: str, style: str = "") -> Text:
    """Returns one paragraph, folded if too long, even within a word. Shows markup literally."""
    return Text("".join(char if char.isprintable() else " " for char in text), style=style, overflow="fold")


def _topic_table(partitions: Sequence[PartitionPlan], *, undo: bool) -> Table:
    greatest = max(max(part.old, part.new) for part in partitions)
    commas = "," if greatest < WITH_COMMAS else ""
    moves = ["moves"] if greatest < WITH_MOVES else []
    back = _BACK if undo else []
    grid = Table(
        "part", "now", "new", *moves, "rows", "failed", *back, box=box.SIMPLE, show_edge=False, padding=(0, 0, 0, 1), pad_edge=False
    )
    for column in grid.columns:
        column.no_wrap, column.justify = True, "right"
    for part in partitions:
        numbers = [f"{part.old:{commas}}", f"{part.new:{commas}}", *([f"{part.new - part.old:+{commas}}"] if moves else [])]
        returns = [f"{part.rows_back:,}", f"{part.failed_back:,}"] if undo else []
        grid.add_row(str(part.partition.partition), *numbers, f"{part.sink_rows:,}", f"{part.failed_records:,}", *returns)
    return grid


def _markdown_row(part: PartitionPlan, *, undo: bool) -> str:
    place = [escaped(part.partition.topic), str(part.partition.partition), f"{part.old:,}", f"{part.new:,}"]
    return _row([*place, *_numbers(_sums([part]), undo=undo)])


def _numbers(sums: Mapping[str, int], *, undo: bool) -> list[str]:
    return [f"{sums[name]:,}" for name in (SUMMED if undo else SUMMED[:-2])]


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _group_json(group: GroupPlan) -> dict[str, Any]:
    return {
        "consumer": group.consumer,
        "group": group.group,
        "table": group.table,
        "state": group.group_state,
        "in_flight": group.in_flight,
        "lag_records": group.lag,
        "records_per_s": group.records_per_s,
        "catch_up_s": group.catch_up_s,
        "announced_assets": list(group.announced_assets),
        "shadow_bytes": group.shadow_bytes,
        "partitions": [
            {"topic": part.partition.topic, "partition": part.partition.partition}
            | {name: getattr(part, name) for name in ("old", "new", "superseded_from", "lost", "backfill_left", *SUMMED)}
            for part in group.partitions
        ],
    }

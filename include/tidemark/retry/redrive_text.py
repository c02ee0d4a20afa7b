"""Displays a redrive, or what a discard would settle: as text lines for logs, as Markdown for an approval."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tidemark.records.outcome import DETAIL
from tidemark.text.moment import iso
from tidemark.text.wording import counted, escaped

if TYPE_CHECKING:
    from tidemark.retry.admin import Selection
    from tidemark.retry.filter import Filter
    from tidemark.retry.redrive import Preview

TEXT_CHARACTERS = 200
"""Maximum length of an error text."""


def heading(made: Preview) -> list[str]:
    """Summary and progress of a redrive."""
    one = made.redrive
    where = "to the first delay" if one.destination == "ladder" else "for one immediate try"
    cap = "" if one.per_second is None else f", at most {one.per_second:,} per second"
    said = [
        f"Redrive {one.redrive_id} ({one.state}): {counted(one.records, 'record')} of {one.consumer} {where}{cap}",
        f"Which: {one.filter}",
        f"Reason: {one.reason}",
        f"Planned by {one.planned_by} at {iso(one.planned_at.replace(microsecond=0))}",
    ]
    if one.approved_by is not None:
        said.append(f"Approved by {one.approved_by}")
    if one.started_at is not None:
        said.append(f"{one.redriven:,} redriven, {one.passed_over:,} passed over, {one.planned:,} left")
    said += [f"Passed over, {why}: {records:,}" for why, records in made.passed_over.items()]
    if made.waiting:
        said.append(f"Not included: {counted(made.waiting, 'that already waits', 'that already wait')} for a retry")
    if made.worn_out:
        said.append(f"Not included: {counted(made.worn_out, 'that was', 'that were')} redriven {counted(one.max_redrives, 'time')}")
    return said


def lines(made: Preview) -> list[str]:
    """The full text: summary, counts by error and by topic, and, before it starts, examples."""
    said = heading(made)
    said += [f"{error['records']:>9,}  {error['error_type']}: {_cut(error['example'])}" for error in made.errors]
    said += [f"{topic['records']:>9,}  of topic {topic['topic']}" for topic in made.topics]
    return said + ([_example(each) for each in made.examples] if made.redrive.started_at is None else [])


def markdown(made: Preview) -> str:
    """GitHub Markdown for Airflow's approval page. Users' texts are escaped."""
    blocks = ["  \n".join(map(escaped, heading(made)))]
    for column, counts in (
        ("error", [(error["records"], f"{error['error_type']}: {_cut(error['example'])}") for error in made.errors]),
        ("topic", [(topic["records"], topic["topic"]) for topic in made.topics]),
    ):
        rows = [f"| {escaped(text)} | {records:,} |" for records, text in counts]
        blocks.append("\n".join([f"| {column} | records |", "|---|---:|", *rows]))
    blocks += ["Examples:", "\n".join(f"- {escaped(_example(each))}" for each in made.examples)] if made.examples else []
    return "\n\n".join(blocks) + "\n"


def selection_lines(consumer: str, wanted: Filter, reason: str, found: Selection) -> list[str]:
    """What a discard would settle: counts by state and error, and examples."""
    return [
        f"Discard {counted(found.records, 'record')} of {consumer}",
        f"Which: {wanted}",
        f"Reason: {reason}",
        *(f"{each.records:>9,}  {each.state} {each.error_type}: {_cut(each.example)}" for each in found.counts),
        *(_example({name: getattr(each, name) for name in each.__slots__}) for each in found.examples),
    ]


def _example(row: Mapping[str, Any]) -> str:
    where = f"{row['topic']}/{row['partition']}@{row['offset']}"
    return f"{row['number']}: {where} {row['error_type']}: {_cut(row['error_text'])}"


def _cut(text: object) -> str:
    """Short, and without what quotes values: Airflow logs it."""
    said = " ".join(str(text or "").partition(DETAIL)[0].split())
    return said if len(said) <= TEXT_CHARACTERS else f"{said[: TEXT_CHARACTERS - 1]}…"

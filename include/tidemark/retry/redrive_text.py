"""Formats a redrive, or the records that a discard would settle: as text lines for logs, as Markdown for an approval."""

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


def heading(preview: Preview) -> list[str]:
    """Returns summary and progress of a redrive."""
    redrive = preview.redrive
    destination = "to the first delay" if redrive.destination == "ladder" else "for one immediate try"
    cap = "" if redrive.per_second is None else f", at most {redrive.per_second:,} per second"
    text = [
        f"Redrive {redrive.redrive_id} ({redrive.state}): {counted(redrive.records, 'record')} of {redrive.consumer} {destination}{cap}",
        f"Which: {redrive.filter}",
        f"Reason: {redrive.reason}",
        f"Planned by {redrive.planned_by} at {iso(redrive.planned_at.replace(microsecond=0))}",
    ]
    if redrive.approved_by is not None:
        text.append(f"Approved by {redrive.approved_by}")
    if redrive.started_at is not None:
        text.append(f"{redrive.redriven:,} redriven, {redrive.passed_over:,} passed over, {redrive.planned:,} left")
    text += [f"Passed over, {why}: {records:,}" for why, records in preview.passed_over.items()]
    if preview.waiting:
        text.append(f"Not included: {counted(preview.waiting, 'that already waits', 'that already wait')} for a retry")
    if preview.worn_out:
        text.append(f"Not included: {counted(preview.worn_out, 'that was', 'that were')} redriven {counted(redrive.max_redrives, 'time')}")
    return text


def lines(preview: Preview) -> list[str]:
    """Returns the full text: summary, counts by error and topic, and before the start, examples."""
    text = heading(preview)
    text += [f"{error['records']:>9,}  {error['error_type']}: {_shortened(error['example'])}" for error in preview.errors]
    text += [f"{topic['records']:>9,}  of topic {topic['topic']}" for topic in preview.topics]
    return text + ([_example(each) for each in preview.examples] if preview.redrive.started_at is None else [])


def markdown(preview: Preview) -> str:
    """Returns GitHub Markdown for Airflow's approval page. Escapes users' texts."""
    blocks = ["  \n".join(map(escaped, heading(preview)))]
    for column, counts in (
        ("error", [(error["records"], f"{error['error_type']}: {_shortened(error['example'])}") for error in preview.errors]),
        ("topic", [(topic["records"], topic["topic"]) for topic in preview.topics]),
    ):
        rows = [f"| {escaped(text)} | {records:,} |" for records, text in counts]
        blocks.append("\n".join([f"| {column} | records |", "|---|---:|", *rows]))
    blocks += ["Examples:", "\n".join(f"- {escaped(_example(each))}" for each in preview.examples)] if preview.examples else []
    return "\n\n".join(blocks) + "\n"


def selection_lines(consumer: str, filter_: Filter, reason: str, selection: Selection) -> list[str]:
    """Returns the records that a discard would settle: counts by state and error, and examples."""
    return [
        f"Discard {counted(selection.records, 'record')} of {consumer}",
        f"Which: {filter_}",
        f"Reason: {reason}",
        *(f"{each.records:>9,}  {each.state} {each.error_type}: {_shortened(each.example)}" for each in selection.counts),
        *(_example({name: getattr(each, name) for name in each.__slots__}) for each in selection.examples),
    ]


def _example(row: Mapping[str, Any]) -> str:
    place = f"{row['topic']}/{row['partition']}@{row['offset']}"
    return f"{row['number']}: {place} {row['error_type']}: {_shortened(row['error_text'])}"


def _shortened(text: object) -> str:
    """Shortens an error text and removes the part that quotes values, because Airflow logs it."""
    shortened = " ".join(str(text or "").partition(DETAIL)[0].split())
    return shortened if len(shortened) <= TEXT_CHARACTERS else f"{shortened[: TEXT_CHARACTERS - 1]}…"

"""A redrive for people: as lines of a log, as Markdown for an approval."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tidemark.text.wording import counted, escaped

if TYPE_CHECKING:
    from tidemark.retry.redrive import Preview

TEXT_CHARACTERS = 200
"""Of an error's text."""


def heading(made: Preview) -> list[str]:
    """What a redrive is, and how far it has come."""
    one = made.redrive
    where = "to the first delay" if one.destination == "ladder" else "for one try at once"
    cap = "" if one.per_second is None else f", {one.per_second:,} a second at most"
    said = [
        f"Redrive {one.redrive_id} ({one.state}): {counted(one.records, 'record')} of {one.consumer} {where}{cap}",
        f"Which: {one.filter}",
        f"Reason: {one.reason}",
    ]
    if one.approved_by is not None:
        said.append(f"Approved by {one.approved_by}")
    if one.started_at is not None:
        said.append(f"{one.redriven:,} sent round, {one.passed_over:,} passed over, {one.planned:,} left")
    said += [f"Passed over, {why}: {records:,}" for why, records in made.passed_over.items()]
    if made.waiting:
        said.append(f"Not part of it: {made.waiting:,} that wait for a retry already")
    if made.worn_out:
        said.append(f"Not part of it: {made.worn_out:,} that were sent round {one.max_redrives} times")
    return said


def lines(made: Preview) -> list[str]:
    """All of it: counts by error and by topic, and examples of what is still to be sent."""
    said = heading(made)
    said += [f"{error['records']:>9,}  {error['error_type']}: {_cut(error['example'])}" for error in made.errors]
    said += [f"{topic['records']:>9,}  of topic {topic['topic']}" for topic in made.topics]
    return said + ([_example(each) for each in made.examples] if made.redrive.started_at is None else [])


def markdown(made: Preview) -> str:
    """As GitHub's Markdown, for Airflow's approval page. What users wrote is shown letter by letter: no mark of it counts."""
    blocks = ["  \n".join(map(escaped, heading(made)))]
    for column, counts in (
        ("error", [(error["records"], f"{error['error_type']}: {_cut(error['example'])}") for error in made.errors]),
        ("topic", [(topic["records"], topic["topic"]) for topic in made.topics]),
    ):
        rows = [f"| {escaped(text)} | {records:,} |" for records, text in counts]
        blocks.append("\n".join([f"| {column} | records |", "|---|---:|", *rows]))
    blocks += ["Examples:", "\n".join(f"- {escaped(_example(each))}" for each in made.examples)] if made.examples else []
    return "\n\n".join(blocks) + "\n"


def _example(row: Mapping[str, Any]) -> str:
    where = f"{row['topic']}/{row['partition']}@{row['offset']}"
    return f"{row['number']}: {where} {row['error_type']}: {_cut(row['error_text'])}"


def _cut(text: object) -> str:
    said = " ".join(str(text or "").split())
    return said if len(said) <= TEXT_CHARACTERS else f"{said[: TEXT_CHARACTERS - 1]}…"

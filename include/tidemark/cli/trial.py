"""``tidemark try``: shows which rows a consumer would write for the latest records."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing
from datetime import timedelta
from decimal import Decimal
from typing import Annotated, Any

import typer

from tidemark import project
from tidemark.author.try_records import Trial, TriedRecord, try_latest
from tidemark.cli.common import Name, Output, OutputFormat, print_json, print_text
from tidemark.cli.spark import SmallSpark
from tidemark.records.outcome import Disposition
from tidemark.spec import find_consumer
from tidemark.text.wording import counted
from tidemark.values.json_text import json_text
from tidemark.worker.batches import UNIX_EPOCH

STYLES = {Disposition.SKIP: "dim", Disposition.RETRY: "yellow", Disposition.FAIL: "red"}
SUMS = {Disposition.LOAD: "loaded", Disposition.SKIP: "skipped", Disposition.RETRY: "retried", Disposition.FAIL: "failed"}


def try_(
    name: Name,
    records: Annotated[int, typer.Option(min=1, max=1000, help="Number of records, over all partitions.")] = 20,
    output: Output = OutputFormat.TABLE,
) -> None:
    """Prints each record with its outcome, oldest first. Raises as `try_latest` does."""
    spec, folders = find_consumer(name), [project.transforms()]
    with closing(SmallSpark()) as spark:
        trial = try_latest(spec, folders, records, spark)
    if output is OutputFormat.JSON:
        rows = None if trial.rows is None else [_with_exact_decimals(row) for row in trial.rows]
        outcomes = [_as_json(tried) for tried in trial.records]
        notes = trial.notes + trial.noticed
        print_json({"consumer": spec.name, "tables": spec.table_names, "records": outcomes, "rows": rows, "notes": notes})
    else:
        _print(trial)


def _print(trial: Trial) -> None:
    for note in (*trial.notes, *trial.noticed):
        _print_line(f"note: {note}", "yellow")
    for tried in trial.records:
        position = f"{tried.partition} offset {tried.offset}"
        if tried.rows:
            _print_line(position, "bold")
        elif tried.error_type is not None:
            _print_line(
                f"{position}: {_disposition(tried)}, {tried.error_type}: {tried.error_text}",
                STYLES.get(tried.disposition or Disposition.FAIL, ""),
            )
        else:
            _print_line(f"{position}: {_disposition(tried) or 'no row'}", STYLES[Disposition.SKIP])
        _print_rows(tried.rows)
    if trial.rows is not None:
        _print_line("rows of the whole batch", "bold")
        _print_rows(trial.rows)
    counts = Counter("without a row" if tried.disposition is None else SUMS[tried.disposition] for tried in trial.records)
    outcomes = ", ".join(f"{number:,} {outcome}" for outcome, number in counts.items())
    rows = sum(len(tried.rows) for tried in trial.records) + len(trial.rows or ())
    _print_line(
        f"{counted(len(trial.records), 'record')}: {outcomes}; {counted(rows, 'row')}" if trial.records else "the topics have no records",
        "",
    )


def _print_rows(rows: Sequence[Mapping[str, Any]]) -> None:
    for row in rows:
        _print_line("    " + " ".join(f"{name}={json_text(value)}" for name, value in row.items()), "")


def _disposition(tried: TriedRecord) -> str | None:
    return None if tried.disposition is None else tried.disposition.name.lower()


def _print_line(text: str, style: str) -> None:
    print_text("".join(char if char.isprintable() else " " for char in text), style=style)


def _as_json(tried: TriedRecord) -> dict[str, Any]:
    return {
        "topic": tried.partition.topic,
        "partition": tried.partition.partition,
        "offset": tried.offset,
        "timestamp": None if tried.timestamp_ms is None else UNIX_EPOCH + timedelta(milliseconds=tried.timestamp_ms),
        "disposition": _disposition(tried),
        "rows": [_with_exact_decimals(row) for row in tried.rows],
        "error_type": tried.error_type,
        "error_text": tried.error_text,
    }


def _with_exact_decimals(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row with decimals as text, because JSON readers would round them."""
    return {name: str(value) if isinstance(value, Decimal) else value for name, value in row.items()}

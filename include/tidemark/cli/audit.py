"""``tidemark audit``: shows where every record of a consumer is, and whether all records are accounted for."""

from __future__ import annotations

import dataclasses
from collections import Counter

import typer

from tidemark.cli.common import Name, Output, OutputFormat, plain_table, print_json, print_note, print_text, stdout
from tidemark.cli.servers import connected, kafka_cluster
from tidemark.quality.audit import Audit
from tidemark.quality.audit import audit as read_audit
from tidemark.spec import find_consumer

COLUMNS = {
    "read": "read",
    "loaded_at_once": "at once",
    "loaded_later": "later",
    "skipped": "skipped",
    "failed": "failed",
    "discarded": "discarded",
    "unaccounted": "other",
}
"""Column headings, short enough for a terminal. "at once" and "later" are loaded records; "other" is gaps in the log and filtered rows."""


def audit(name: Name, output: Output = OutputFormat.TABLE) -> None:
    spec = find_consumer(name)
    with connected("tidemark audit") as connection:
        report = read_audit(connection, kafka_cluster(), spec)
    if output is OutputFormat.JSON:
        print_json({**dataclasses.asdict(report), "balanced": report.balanced})
    else:
        _print(report)
    if not report.balanced:
        raise typer.Exit(1)


def _print(report: Audit) -> None:
    table = plain_table(report.group, "partition", *COLUMNS.values(), "waiting")
    for account in report.accounts:
        counts = [f"{getattr(account, name):,}" for name in COLUMNS]
        table.add_row(str(account.partition), *counts, f"{sum(account.waiting.values()):,}")
    stdout.print(table)
    tiers: Counter[str] = Counter()
    for account in report.accounts:
        tiers.update(account.waiting)
    for topic, records in sorted(tiers.items()):
        print_text(f"{records:,} wait in {topic}")
    for line in report.astray:
        print_note(f"astray: {line} The next drain publishes them again.", style="yellow")
    for line in report.differences:
        print_note(line, style="red")
    if report.balanced:
        stdout.print("every record read is accounted for exactly once")

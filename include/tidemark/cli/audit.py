"""``tidemark audit``: shows where every record of a consumer is, and whether all records are accounted for."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from tidemark.cli.common import OutputFormat, connected, kafka_cluster, plain_table, print_json, spec_of, stderr, stdout
from tidemark.quality.audit import Audit, audit

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


def show_audit(name: str, consumers: Path | None, output: OutputFormat) -> bool:
    """Prints the audit of a consumer's partitions. Returns whether all records are accounted for."""
    spec = spec_of(name, consumers)
    with connected("tidemark audit") as connection:
        report = audit(connection, kafka_cluster(), spec)
    if output is OutputFormat.JSON:
        print_json({**dataclasses.asdict(report), "balanced": report.balanced})
    else:
        _print(report)
    return report.balanced


def _print(report: Audit) -> None:
    table = plain_table(report.group, "partition", *COLUMNS.values(), "waiting")
    for account in report.accounts:
        counts = [f"{getattr(account, name):,}" for name in COLUMNS]
        table.add_row(str(account.partition), *counts, f"{sum(account.waiting.values()):,}")
    stdout.print(table)
    tiers: dict[str, int] = {}
    for account in report.accounts:
        for topic, records in account.waiting.items():
            tiers[topic] = tiers.get(topic, 0) + records
    for topic, records in sorted(tiers.items()):
        stdout.print(f"{records:,} wait in {topic}", markup=False)
    for line in report.astray:
        stderr.print(f"astray: {line} The next drain publishes them again.", style="yellow", markup=False)
    for line in report.differences:
        stderr.print(line, style="red", markup=False)
    if report.balanced:
        stdout.print("every record read is accounted for exactly once")

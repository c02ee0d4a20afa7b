"""``tidemark audit-log``: shows who did what."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
from enum import StrEnum
from typing import Annotated

import typer

from tidemark import events
from tidemark.cli.common import json_value, print_json, print_lines, print_raw
from tidemark.cli.servers import connected
from tidemark.text.moment import iso, parse_moment
from tidemark.text.storable import BIGINT
from tidemark.text.wording import spreadsheet_cell


class EventFormat(StrEnum):
    TABLE = "table"
    JSON = "json"
    CSV = "csv"


def audit_log(
    since: Annotated[
        str | None, typer.Option(metavar="MOMENT", help="Only events from then on, such as 2026-03-24T14:00:00Z (default: all).")
    ] = None,
    after: Annotated[
        int | None,
        typer.Option(
            metavar="EVENT_ID",
            min=0,
            max=BIGINT,
            help="Only later events; waits for unfinished ones, so that none is missed (default: all).",
        ),
    ] = None,
    group: Annotated[str | None, typer.Option(help="Only events of this group.")] = None,
    output: Annotated[EventFormat, typer.Option("--output", "-o", help="Output format.")] = EventFormat.TABLE,
) -> None:
    moment = None if since is None else parse_moment(since)
    with connected("tidemark audit-log") as connection:
        entries = events.read(connection, since=moment, after=after, group=group)
    if output is EventFormat.JSON:
        print_json(entries)
    elif output is EventFormat.CSV:
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow([field.name for field in dataclasses.fields(events.Event)])
        for entry in entries:
            cells = dataclasses.asdict(entry) | {"at": entry.at.isoformat(), "details": json.dumps(entry.details, default=json_value)}
            writer.writerow(map(spreadsheet_cell, cells.values()))
        print_raw(text.getvalue(), end="")
    else:
        lines = [
            [iso(entry.at)[:19], entry.kind, entry.group or "-", str(entry.plan or "-"), entry.database_role, entry.claimed_by or "-",
             entry.reason or json.dumps(entry.details)]
            for entry in entries
        ]  # fmt: skip
        print_lines(["at (UTC)", "event", "group", "plan", "role", "claimed by", "reason"], lines, left=(0, 1, 2, 4, 5))

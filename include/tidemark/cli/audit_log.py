"""``tidemark audit-log``: shows who did what."""

from __future__ import annotations

import csv
import dataclasses
import io
import json

from tidemark import events
from tidemark.cli.common import EventFormat, connected, json_value, print_json, print_lines, print_raw
from tidemark.text.moment import iso, parse_moment
from tidemark.text.wording import spreadsheet_cell


def show_events(since: str | None, after: int | None, group: str | None, output: EventFormat) -> None:
    moment = None if since is None else parse_moment(since)
    with connected("tidemark audit-log") as connection:
        found = events.read(connection, since=moment, after=after, group=group)
    if output is EventFormat.JSON:
        print_json(found)
    elif output is EventFormat.CSV:
        lines = io.StringIO()
        writer = csv.writer(lines, lineterminator="\n")
        writer.writerow([field.name for field in dataclasses.fields(events.Event)])
        for one in found:
            cells = dataclasses.asdict(one) | {"at": one.at.isoformat(), "details": json.dumps(one.details, default=json_value)}
            writer.writerow(map(spreadsheet_cell, cells.values()))
        print_raw(lines.getvalue(), end="")
    else:
        shown = [
            [iso(one.at)[:19], one.kind, one.group or "-", str(one.plan or "-"), one.database_role, one.claimed_by or "-",
             one.reason or json.dumps(one.details)]
            for one in found
        ]  # fmt: skip
        print_lines(["at (UTC)", "event", "group", "plan", "role", "claimed by", "reason"], shown, left=(0, 1, 2, 4, 5))

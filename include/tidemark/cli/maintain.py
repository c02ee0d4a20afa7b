"""``tidemark maintain``: removes old archives and payloads."""

from __future__ import annotations

import dataclasses

from tidemark import maintenance
from tidemark.cli.common import OutputFormat, connected, print_json, stdout, who
from tidemark.keep import default_keep, parse_keep
from tidemark.profiles import Profile
from tidemark.rewind.overwritten import KEPT
from tidemark.text.wording import counted


def maintain(keep: str | None, output: OutputFormat) -> None:
    """Removes the rows archived by rewinds older than ``keep``, and the payloads of failed records settled before that. Closes attempts
    whose drivers are gone."""
    length = parse_keep(default_keep() if keep is None else keep)
    with connected(needs=Profile.REWINDER) as connection:
        done = maintenance.maintain(connection, length, by=who())
    removed, emptied, ended = done.removed, done.emptied, done.ended
    if output is OutputFormat.JSON:
        print_json({"removed": [dataclasses.asdict(one) for one in removed], "emptied": emptied, "ended": ended})
        return
    for one in removed:
        what = "overwritten after" if one.relation == KEPT else "taken out by"
        stdout.print(f"removed {counted(one.rows, 'row')} {what} rewind {one.rewind_id}", highlight=False)
    if emptied:
        stdout.print(f"removed the payloads of {counted(emptied, 'settled failed record')}", highlight=False)
    for attempt_id in ended:
        stdout.print(f"closed attempt {attempt_id}, whose driver is gone", highlight=False)
    if not removed and not emptied and not ended:
        stdout.print("nothing to do")

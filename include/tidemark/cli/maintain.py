"""``tidemark maintain``: what has to be tidied up now and then."""

from __future__ import annotations

import dataclasses

from tidemark import maintenance, schema
from tidemark.cli.options import OutputFormat, print_json, stdout
from tidemark.cli.rewind import _who
from tidemark.connections import database_url
from tidemark.db import session
from tidemark.keep import default_keep, parse_keep
from tidemark.rewind.overwritten import KEPT


def maintain(keep: str | None, output: OutputFormat) -> None:
    """Removes what rewinds that are older than ``keep`` have left for an undo, and the payloads of failed records that were settled before;
    ends attempts whose drivers are gone."""
    length = parse_keep(default_keep() if keep is None else keep)
    with session(database_url()) as connection:
        schema.require_current(connection)
        done = maintenance.maintain(connection, length, by=_who())
    removed, emptied, ended = done.removed, done.emptied, done.ended
    if output is OutputFormat.JSON:
        print_json({"removed": [dataclasses.asdict(one) for one in removed], "emptied": emptied, "ended": ended})
        return
    for one in removed:
        what = "were written over after" if one.relation == KEPT else "were taken out by"
        stdout.print(f"removed {one.rows:,} rows that {what} rewind {one.rewind_id}", highlight=False)
    if emptied:
        stdout.print(f"emptied {emptied:,} failed records that were settled", highlight=False)
    for attempt_id in ended:
        stdout.print(f"ended attempt {attempt_id}, whose driver is gone", highlight=False)
    if not removed and not emptied and not ended:
        stdout.print("nothing to do")

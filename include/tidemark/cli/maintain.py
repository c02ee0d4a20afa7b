"""``tidemark maintain``: what has to be tidied up now and then."""

from __future__ import annotations

import dataclasses

from tidemark import schema
from tidemark.cli.options import OutputFormat, print_json, stdout
from tidemark.connections import database_url
from tidemark.db import session
from tidemark.rewind.retention import KEEP, remove_archives
from tidemark.spec import parse_duration


def maintain(keep: str | None, output: OutputFormat) -> None:
    """Removes archives of rewinds that are older than ``keep``."""
    length = KEEP if keep is None else parse_duration(keep)
    with session(database_url()) as connection:
        schema.require_current(connection)
        removed = remove_archives(connection, length)
    if output is OutputFormat.JSON:
        print_json({"removed": [dataclasses.asdict(one) for one in removed]})
        return
    for one in removed:
        stdout.print(f"removed the {one.rows:,} rows that rewind {one.rewind_id} had taken out", highlight=False)
    if not removed:
        stdout.print("nothing to remove")

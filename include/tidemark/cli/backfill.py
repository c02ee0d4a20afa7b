"""``tidemark backfill``: reads the records that rewinds skipped, in one bounded run per rewind."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tidemark.cli.common import OutputFormat, connected, plain_table, print_json, spec_of, stdout
from tidemark.cli.consume import headings, run_shown
from tidemark.connections import from_env
from tidemark.db import session, transaction
from tidemark.profiles import Profile
from tidemark.rewind import backfill


def backfill_all(name: str, rewind_id: int | None, consumers: Path | None, transforms: Sequence[Path], output: OutputFormat) -> None:
    """Reads what is left to backfill of one rewind, or of all, oldest first. Prints what was read.

    Raises what `run_shown` raises. What a failed run had committed stays, and the next call continues from there.
    """
    spec = spec_of(name, consumers)
    connections = from_env()
    with connected(needs=Profile.RUNNER) as connection, transaction(connection) as cur:
        asked = backfill.unfinished(cur, spec.group) if rewind_id is None else [backfill.find(cur, spec.group, rewind_id).rewind_id]
    told = []
    for one in asked:
        done = run_shown(spec, connections, consumers, transforms, backfill_of=one)
        with session(connections.database_url) as connection, transaction(connection) as cur:
            left = backfill.find(cur, spec.group, one).left
        told.append({"rewind_id": one, "attempt": done.attempt_id, "records": done.records, **done.counts, "left": left})
    if output is OutputFormat.JSON:
        print_json({"group": spec.group, "backfills": told})
    elif told:
        _print(spec.group, told)
    else:
        stdout.print(f"{spec.group}: nothing to backfill")


def _print(group: str, told: Sequence[dict[str, Any]]) -> None:
    shown = headings(deletes=any(one["deleted"] for one in told))
    table = plain_table(f"{group}, backfills", "rewind", "attempt", "offsets", *shown.values(), "left")
    for one in told:
        table.add_row(str(one["rewind_id"]), str(one["attempt"]), *(f"{one[name]:,}" for name in ("records", *shown, "left")))
    stdout.print(table)

"""``tidemark backfill``: reads the records that rewinds skipped, in one bounded run per rewind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import typer

from tidemark.cli.common import Name, Output, OutputFormat, plain_table, print_json, stdout
from tidemark.cli.consume import headings, run_with_progress
from tidemark.cli.servers import connected
from tidemark.connections import from_env
from tidemark.db import session, transaction
from tidemark.profiles import Profile
from tidemark.rewind.backfill import find, unfinished
from tidemark.spec import find_consumer
from tidemark.text.storable import BIGINT


def backfill(
    name: Name,
    rewind_id: Annotated[
        int | None, typer.Argument(metavar="[REWIND_ID]", min=1, max=BIGINT, help="The rewind (default: all that have records left).")
    ] = None,
    output: Output = OutputFormat.TABLE,
) -> None:
    """Raises as `run_with_progress` does. Records that a failed run committed stay; the next call continues after them."""
    spec = find_consumer(name)
    connections = from_env()
    with connected(needs=Profile.RUNNER) as connection, transaction(connection) as cur:
        rewind_ids = unfinished(cur, spec.group) if rewind_id is None else [find(cur, spec.group, rewind_id).rewind_id]
    summaries = []
    for unfinished_id in rewind_ids:
        result = run_with_progress(spec, connections, of_rewind=unfinished_id)
        with session(connections.database_url) as connection, transaction(connection) as cur:
            left = find(cur, spec.group, unfinished_id).left
        summaries.append(
            {"rewind_id": unfinished_id, "attempt": result.attempt_id, "records": result.records, **result.counts, "left": left}
        )
    if output is OutputFormat.JSON:
        print_json({"group": spec.group, "backfills": summaries})
    elif summaries:
        _print(spec.group, summaries)
    else:
        stdout.print(f"{spec.group}: nothing to backfill")


def _print(group: str, summaries: Sequence[dict[str, Any]]) -> None:
    columns = headings(deletes=any(summary["deleted"] for summary in summaries))
    table = plain_table(f"{group}, backfills", "rewind", "attempt", "offsets", *columns.values(), "left")
    for summary in summaries:
        table.add_row(str(summary["rewind_id"]), str(summary["attempt"]), *(f"{summary[name]:,}" for name in ("records", *columns, "left")))
    stdout.print(table)

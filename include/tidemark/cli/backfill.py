"""``tidemark backfill``: what rewinds have skipped, a bounded run each."""

from __future__ import annotations

import collections
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tidemark import project, schema
from tidemark.cli.consume import COUNTS, HEADINGS, LOG_TAIL
from tidemark.cli.options import OutputFormat, plain_table, print_json, stderr, stdout
from tidemark.connections import Connections, from_env
from tidemark.consume import launch
from tidemark.consume.run import open_attempt
from tidemark.db import session, transaction
from tidemark.errors import TidemarkError
from tidemark.offsets.store import TaskIdentity
from tidemark.rewind import backfill
from tidemark.spec import ConsumerSpec, find_consumer

SAID_EVERY_S = 5.0


def backfill_all(name: str, rewind_id: int | None, consumers: Path | None, transforms: Sequence[Path], output: OutputFormat) -> None:
    """Reads what is left, of one rewind or of all, the oldest first; prints what was read.

    Raises what made a run fail, after the driver's last lines on stderr; what it had committed stays, and the next call goes on from there.
    """
    spec = find_consumer(name, consumers or project.consumers())
    connections = from_env()
    folders = {"consumers": [consumers.resolve()] if consumers else [], "transforms": [folder.resolve() for folder in transforms]}
    with session(connections.database_url) as connection:
        schema.require_current(connection)
        with transaction(connection) as cur:
            asked = backfill.unfinished(cur, spec.group) if rewind_id is None else [backfill.find(cur, spec.group, rewind_id).rewind_id]
    told = [_run(spec, connections, one, folders) for one in asked]
    if output is OutputFormat.JSON:
        print_json({"group": spec.group, "backfills": told})
    elif told:
        _print(spec.group, told)
    else:
        stdout.print(f"{spec.group}: nothing to backfill")


def _run(spec: ConsumerSpec, connections: Connections, rewind_id: int, folders: dict[str, list[Path]]) -> dict[str, Any]:
    attempt_id = open_attempt(connections.database_url, spec.group, TaskIdentity(), backfill_of=rewind_id)
    lines: collections.deque[str] = collections.deque(maxlen=LOG_TAIL)
    said = time.monotonic()

    def show(seen: launch.Progress) -> None:
        nonlocal said
        if seen.planned and time.monotonic() - said >= SAID_EVERY_S:
            said = time.monotonic()
            stderr.print(f"{spec.name}, rewind {rewind_id}: {seen.records:,} of {seen.total:,} offsets", markup=False, highlight=False)

    try:
        done = launch.run_attempt(spec.name, connections, attempt_id, folders=folders, on_log=lines.append, on_progress=show)
    except TidemarkError:
        for line in lines:
            stderr.print(line, style="dim", markup=False, highlight=False, soft_wrap=True)
        raise
    for lost in done.lost:
        where = f"{lost.topic}/{lost.partition} [{lost.start}, {lost.end})"
        stderr.print(f"lost: {where} ({lost.reason})", style="yellow", markup=False, highlight=False)
    with session(connections.database_url) as connection, transaction(connection) as cur:
        left = backfill.find(cur, spec.group, rewind_id).left
    counts = {name: sum(getattr(part, name) for part in done.partitions) for name in COUNTS}
    return {"rewind_id": rewind_id, "attempt": done.attempt_id, "records": done.records, **counts, "left": left}


def _print(group: str, told: Sequence[dict[str, Any]]) -> None:
    table = plain_table(f"{group}, backfills", "rewind", "attempt", "offsets", *HEADINGS, "left")
    for one in told:
        table.add_row(str(one["rewind_id"]), str(one["attempt"]), *(f"{one[name]:,}" for name in ("records", *COUNTS, "left")))
    stdout.print(table)

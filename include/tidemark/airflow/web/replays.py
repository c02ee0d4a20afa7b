"""The replays beside that are neither swapped nor discarded: how far each has read, and what its validations found."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from tidemark.airflow.web.retries import open_errors
from tidemark.db import Connection, rows, statements, transaction
from tidemark.quality import stored_verdicts as verdicts
from tidemark.rewind import beside
from tidemark.rewind.beside import SideReplay
from tidemark.rewind.side import SidePart

SQL = statements("tidemark.airflow.web", "replays.sql")

VERDICTS = 3
"""The newest validations of a replay that are shown."""


def of_group(connection: Connection, group: str) -> dict[str, Any] | None:
    """Returns the replay beside of a group, without partitions; `None` if it has none."""
    with transaction(connection) as cur:
        running = beside.replays(cur, group)
    if not running:
        return None
    described = describe(connection, running[0].rewind_id, [running[0].consumer])
    return described and {**described, "groups": [{**each, "partitions": []} for each in described["groups"]]}


def describe(connection: Connection, rewind_id: int, consumers: Collection[str]) -> dict[str, Any] | None:
    """Returns who began the replay beside of a rewind, until when it is kept and until when it holds its groups, and the progress of these
    consumers. `None` if the rewind has no replay beside."""
    with transaction(connection) as cur:
        running = beside.replays(cur, rewind_id=rewind_id)
        if not running:
            return None
        cur.execute(SQL["rewind"], {"rewind_id": rewind_id, "keep": beside.KEEP})
        (rewind,) = rows(cur)
    shown = [replay for replay in running if replay.consumer in consumers]
    sides = [replay.side for replay in shown]
    validations = verdicts.newest(connection, sides, of_each=VERDICTS, most=VERDICTS * len(sides))
    with transaction(connection) as cur:
        cur.execute(SQL["failing"], {"validation_ids": [row["validation_id"] for row in validations]})
        failing = {row["validation_id"]: row["texts"] for row in rows(cur)}
    errors = open_errors(connection, sides)
    of_side: dict[str, list[dict[str, Any]]] = {}
    for row in validations:
        judged = {name: row[name] for name in ("validation_id", "verdict", "validated_at", "sink_rows")}
        of_side.setdefault(row["group"], []).append({**judged, "failing": failing.get(row["validation_id"], [])})
    return {
        **rewind,
        "groups": [
            {**_progress(replay), "validations": of_side.get(replay.side, []), "errors": errors.get(replay.side, [])} for replay in shown
        ],
    }


def _progress(replay: SideReplay) -> dict[str, Any]:
    partitions = [_part(part) for part in replay.parts]
    return {
        "consumer": replay.consumer,
        "read": sum(part["read"] for part in partitions),
        "left": replay.left,
        "partitions": partitions,
    }


def _part(part: SidePart) -> dict[str, Any]:
    numbers = {name: getattr(part, name) for name in ("start", "position", "end", "left")}
    return {"topic": part.partition.topic, "partition": part.partition.partition, "read": part.position - part.start, **numbers}

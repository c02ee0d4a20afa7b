"""Starts a drain as soon as a retry is due, instead of at the next scheduled run: an asset, and the trigger that watches it.

The trigger asks Postgres, because due times follow the database's clock. An event carries no data: the drain run finds out for itself
what is due. A lost or needless event does no harm, because the drains also have a schedule.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from airflow.sdk import Asset, AssetWatcher
from airflow.triggers.base import BaseEventTrigger, TriggerEvent

from tidemark import project
from tidemark.airflow.triggers.polling import Poll, cursor
from tidemark.spec import ConsumerSpec, read_folder

ASK_EVERY_S = 15.0
"""Poll interval, shortened if something is due earlier. A redriven or released record is noticed within this time."""
ASK_AT_MOST_EVERY_S = 1.0
QUIET_S = 60.0
"""Minimum time between events, so that records which become due in this time share one drain."""
log = logging.getLogger(__name__)

Group = tuple[str, str]
"""The id of the group's Postgres connection, and the group's name."""


@dataclass(frozen=True, slots=True)
class Waits:
    """When a group's first and last due records became due, and in how many seconds the next record is due."""

    first: datetime | None
    last: datetime | None
    next_s: float | None


class Bell:
    """Decides when to fire an event. It fires once for the records that are due, and again only after a drain has processed those.

    So a consumer whose drains fail is left to their schedule. A restarted triggerer fires at most one event too many.
    """

    def __init__(self) -> None:
        self._rung: dict[Group, datetime] = {}

    def rings(self, seen: Mapping[Group, Waits]) -> list[str]:
        """The names of the groups to fire for. Empty if none."""
        due = {group: (one.first, one.last) for group, one in seen.items() if one.first is not None and one.last is not None}
        fresh = {group: last for group, (first, last) in due.items() if group not in self._rung or first > self._rung[group]}
        self._rung = {group: at for group, at in self._rung.items() if group in due} | fresh
        return sorted(name for _, name in fresh)


def pause_s(seen: Iterable[Waits]) -> float:
    """Seconds until the next poll."""
    return max(ASK_AT_MOST_EVERY_S, min([ASK_EVERY_S, *(one.next_s for one in seen if one.next_s is not None)]))


class DueTrigger(BaseEventTrigger):
    """Fires when retries of any consumer are due. Never ends.

    It takes no arguments: it reads the consumers' files and Airflow's connections again on every poll.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._poll = Poll(log, "what is due")

    def serialize(self) -> tuple[str, dict[str, Any]]:
        return f"{type(self).__module__}.{type(self).__qualname__}", {}

    async def run(self) -> AsyncIterator[TriggerEvent]:
        bell = Bell()
        while True:
            seen = await self.look()
            groups = bell.rings(seen)
            if groups:
                log.info("due groups=%s", ",".join(groups))
                yield TriggerEvent("look")  # type: ignore[no-untyped-call]
            await asyncio.sleep(QUIET_S if groups else pause_s(seen.values()))

    async def look(self) -> dict[Group, Waits]:
        """What waits in each group with a ladder, in all databases that answer. Groups without waiting records are omitted."""
        found = await self._poll.ask(_databases, _ask) or {}
        return {(name, group): waits for name, groups in found.items() for group, waits in groups.items()}


DUE = Asset(name="tidemark_retries_due", watchers=[AssetWatcher(name="tidemark_retries_due", trigger=DueTrigger())])
"""Gets an event when retries are due."""


def _databases() -> dict[str, list[str]]:
    """The groups with a ladder, by Postgres connection."""
    good, _ = read_folder(project.consumers())
    laddered: dict[str, list[ConsumerSpec]] = {}
    for spec in good.values():
        if spec.retry.delays:
            laddered.setdefault(spec.connections.postgres, []).append(spec)
    return {name: [spec.group for spec in specs] for name, specs in laddered.items()}


def _ask(connection: Any, groups: Sequence[str]) -> dict[str, Waits]:
    """Looks up what waits, in a new database session. Raises `TidemarkError`."""
    from tidemark.db import rows, statements

    with cursor(connection, "tidemark due") as cur:
        cur.execute(statements("tidemark.airflow.triggers", "due.sql")["due"], {"groups": list(groups)})
        return {row["name"]: Waits(row["first"], row["last"], row["next_s"]) for row in rows(cur)}

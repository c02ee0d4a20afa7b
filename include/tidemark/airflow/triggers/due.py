"""Starts a drain as soon as a retry is due, instead of at the next scheduled run: an asset, and the trigger that watches it.

The trigger asks Postgres, because due times follow the database's clock. An event carries no data: the drain run finds the due
records itself. A lost or needless event does no harm, because the drains also have a schedule.
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

from tidemark.airflow.operators import by_database, valid_consumers
from tidemark.airflow.triggers.polling import Poll, cursor

ASK_EVERY_S = 15.0
"""Poll interval, shortened if something is due earlier. A redriven or released record is noticed within this time."""
ASK_AT_MOST_EVERY_S = 1.0
QUIET_S = 60.0
"""Minimum time between events, so that records which become due in this time share one drain."""
log = logging.getLogger(__name__)

Group = tuple[str, str]
"""The id of the group's Postgres connection, and the group's name."""


@dataclass(frozen=True, slots=True)
class DueTimes:
    """When a group's first and last due records became due, and in how many seconds the next record is due."""

    first: datetime | None
    last: datetime | None
    next_s: float | None


class Bell:
    """Decides when to fire an event. It fires once for the records that are due, and again only after a drain has processed those.

    So a consumer whose drains fail is left to their schedule. A restarted triggerer fires at most one event too many.
    """

    def __init__(self) -> None:
        self._fired_for: dict[Group, datetime] = {}

    def rings(self, waiting: Mapping[Group, DueTimes]) -> list[str]:
        """The names of the groups to fire for. Empty if none."""
        due = {
            group: (due_times.first, due_times.last)
            for group, due_times in waiting.items()
            if due_times.first is not None and due_times.last is not None
        }
        fresh = {group: last for group, (first, last) in due.items() if group not in self._fired_for or first > self._fired_for[group]}
        self._fired_for = {group: last for group, last in self._fired_for.items() if group in due} | fresh
        return sorted(name for _, name in fresh)


def pause_s(waiting: Iterable[DueTimes]) -> float:
    """Seconds until the next poll."""
    return max(ASK_AT_MOST_EVERY_S, min([ASK_EVERY_S, *(due_times.next_s for due_times in waiting if due_times.next_s is not None)]))


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
            waiting = await self.look()
            groups = bell.rings(waiting)
            if groups:
                log.info("due groups=%s", ",".join(groups))
                yield TriggerEvent("look")  # type: ignore[no-untyped-call]
            await asyncio.sleep(QUIET_S if groups else pause_s(waiting.values()))

    async def look(self) -> dict[Group, DueTimes]:
        """Returns the due times of each group with a ladder, in all databases that answer. Omits groups without waiting records."""
        answers = await self._poll.ask(_databases, _read_due_times)
        return {(name, group): due_times for name, groups in answers.items() for group, due_times in groups.items()}


DUE = Asset(name="tidemark_retries_due", watchers=[AssetWatcher(name="tidemark_retries_due", trigger=DueTrigger())])
"""Gets an event when retries are due."""


def _databases() -> dict[str, list[str]]:
    """The groups with a ladder, by Postgres connection."""
    databases = by_database(spec for spec in valid_consumers() if spec.retry.delays)
    return {name: [spec.group for spec in specs] for name, specs in databases.items()}


def _read_due_times(connection: Any, groups: Sequence[str]) -> dict[str, DueTimes]:
    """Reads the due times of waiting records in a new database session. Raises `TidemarkError`."""
    from tidemark.db import rows, statements

    with cursor(connection, "tidemark due") as cur:
        cur.execute(statements("tidemark.airflow.triggers", "due.sql")["due"], {"groups": list(groups)})
        return {row["name"]: DueTimes(row["first"], row["last"], row["next_s"]) for row in rows(cur)}

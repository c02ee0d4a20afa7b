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

from airflow.sdk import Asset, AssetWatcher, BaseHook
from airflow.triggers.base import BaseEventTrigger, TriggerEvent

from tidemark import project
from tidemark.errors import TidemarkError
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

    It takes no arguments: it reads the consumers' files and Airflow's connections again on every poll. Between polls it holds no database
    session, and it uses at most one thread. A database that does not answer is logged once and polled again.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._away: dict[str, str] = {}

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
        seen: dict[Group, Waits] = {}
        try:
            databases = await asyncio.to_thread(_databases)
        except (TidemarkError, OSError) as error:
            self._tell("the consumers' files", str(error))
            return seen
        self._tell("the consumers' files")
        for name, groups in databases.items():
            try:
                connection = await BaseHook.aget_connection(name)
                found = await asyncio.to_thread(_ask, connection, groups)
            except Exception as error:  # noqa: BLE001 - no error of one database may block the others
                self._tell(name, str(error).strip() or type(error).__name__)
                continue
            self._tell(name)
            seen |= {(name, group): waits for group, waits in found.items()}
        return seen

    def _tell(self, what: str, problem: str | None = None) -> None:
        if problem is not None and what not in self._away:
            log.warning("cannot look up what is due of=%s cause=%s", what, problem)
        elif problem is None and what in self._away:
            log.info("can look up again what is due of=%s", what)
        self._away = {name: text for name, text in self._away.items() if name != what} | ({what: problem} if problem is not None else {})


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
    import psycopg2

    from tidemark.airflow.connections import postgres_url
    from tidemark.db import rows, session, statements, transaction
    from tidemark.errors import DatabaseUnavailable

    statement = statements("tidemark.airflow", "due.sql")["due"]
    try:
        with session(postgres_url(connection), application="tidemark due") as opened, transaction(opened) as cur:
            cur.execute(statement, {"groups": list(groups)})
            return {row["name"]: Waits(row["first"], row["last"], row["next_s"]) for row in rows(cur)}
    except psycopg2.Error as error:  # schema or privileges missing
        raise DatabaseUnavailable(cause=str(error).strip()) from error

"""What starts the drains when something is due, and not only every few minutes: an asset, and the trigger that watches it.

Postgres knows what is due, by its own clock, so Postgres is asked, and no message of anybody's is believed. An event carries no data:
whoever is woken looks for itself. One that is lost, or rings for nothing, does no harm: the drains' schedule goes on beside it.
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
"""Sooner if something is due sooner. What is redriven or released meanwhile is noticed after this."""
ASK_AT_MOST_EVERY_S = 1.0
QUIET_S = 60.0
"""From an event to the next at least: what becomes due meanwhile goes with one drain, and not with one each."""
log = logging.getLogger(__name__)

Group = tuple[str, str]
"""Its database's connection, and its name."""


@dataclass(frozen=True, slots=True)
class Waits:
    """Of a group's waiting records: since when the first is due and since when the last that is; in how many seconds the next one."""

    first: datetime | None
    last: datetime | None
    next_s: float | None


class Bell:
    """Decides when to ring. It rings for what is due once: what lies behind that, it rings for when the drains have taken that up.

    So a consumer whose drains fail is left to their schedule, and an event more than needed at the most is lost with a triggerer's memory.
    """

    def __init__(self) -> None:
        self._rung: dict[Group, datetime] = {}

    def rings(self, seen: Mapping[Group, Waits]) -> list[str]:
        """The groups to ring for, by name; none: not now."""
        due = {group: (one.first, one.last) for group, one in seen.items() if one.first is not None and one.last is not None}
        fresh = {group: last for group, (first, last) in due.items() if group not in self._rung or first > self._rung[group]}
        self._rung = {group: at for group, at in self._rung.items() if group in due} | fresh
        return sorted(name for _, name in fresh)


def pause_s(seen: Iterable[Waits]) -> float:
    """For how long nobody needs to ask again."""
    return max(ASK_AT_MOST_EVERY_S, min([ASK_EVERY_S, *(one.next_s for one in seen if one.next_s is not None)]))


class DueTrigger(BaseEventTrigger):
    """Fires when records of a consumer with a ladder are due. Never ends, and takes no arguments: what it needs, consumers' files and
    Airflow's connections say, each time anew.

    It holds no session, and one thread at most, while it asks. A database that does not answer is told of once, and asked again.
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
        """Of every group with a ladder of which a record waits, in all databases that answer."""
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
            except Exception as error:  # noqa: BLE001 - whatever it is, it keeps no other database's drains from being woken
                self._tell(name, str(error).strip() or type(error).__name__)
                continue
            self._tell(name)
            seen |= {(name, group): waits for group, waits in found.items()}
        return seen

    def _tell(self, what: str, problem: str | None = None) -> None:
        if problem is not None and what not in self._away:
            log.warning("cannot ask what is due of=%s cause=%s", what, problem)
        elif problem is None and what in self._away:
            log.info("can ask again what is due of=%s", what)
        self._away = {name: text for name, text in self._away.items() if name != what} | ({what: problem} if problem is not None else {})


DUE = Asset(name="tidemark_retries_due", watchers=[AssetWatcher(name="tidemark_retries_due", trigger=DueTrigger())])
"""Has an event when something is due."""


def _databases() -> dict[str, list[str]]:
    """The groups with a ladder, by their database's connection."""
    good, _ = read_folder(project.consumers())
    laddered: dict[str, list[ConsumerSpec]] = {}
    for spec in good.values():
        if spec.retry.delays:
            laddered.setdefault(spec.connections.postgres, []).append(spec)
    return {name: [spec.group for spec in specs] for name, specs in laddered.items()}


def _ask(connection: Any, groups: Sequence[str]) -> dict[str, Waits]:
    """In a session of its own. Raises `TidemarkError`."""
    import psycopg2

    from tidemark.airflow.connections import postgres_url
    from tidemark.db import rows, session, statements, transaction
    from tidemark.errors import DatabaseUnavailable

    statement = statements("tidemark.airflow", "due.sql")["due"]
    try:
        with session(postgres_url(connection), application="tidemark due") as opened, transaction(opened) as cur:
            cur.execute(statement, {"groups": list(groups)})
            return {row["name"]: Waits(row["first"], row["last"], row["next_s"]) for row in rows(cur)}
    except psycopg2.Error as error:  # no schema yet, or no rights
        raise DatabaseUnavailable(cause=str(error).strip()) from error

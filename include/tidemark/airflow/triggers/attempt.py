"""Follows an attempt whose driver is on a cluster, for a task that has given its slot back.

The trigger reads the attempt's row only: it starts no JVM. It wakes the task when the attempt has ended, when its driver has had no
database session for some time, so that the task asks the cluster manager, and when the task's time is up.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any

from airflow.sdk import BaseHook, timezone
from airflow.triggers.base import BaseTrigger, TriggerEvent

from tidemark.airflow.triggers.polling import Poll, cursor
from tidemark.driver.on_cluster import FIRST_LOOK_S

ASK_EVERY_S = 2.0
log = logging.getLogger(__name__)


class WakeReason(StrEnum):
    """What makes the trigger fire."""

    ENDED = "ended"
    UNSEEN = "unseen"
    TIMEOUT = "timeout"


@dataclass(frozen=True, slots=True)
class Fired:
    """The trigger's event. ``unseen_s``: for how long the driver has had no session."""

    why: WakeReason
    unseen_s: float = 0.0

    @classmethod
    def of(cls, payload: dict[str, Any]) -> Fired:
        return cls(WakeReason(payload["why"]), payload["unseen_s"])


class AttemptTrigger(BaseTrigger):
    """Fires once, with a `Fired`.

    ``postgres``: the id of the Postgres connection. ``look_after_s``: for how long the driver may have no session; it has had none for
    ``unseen_s``. ``deadline``: when the task's time is up. If a user ends the task, the driver is killed.
    """

    def __init__(self, postgres: str, attempt_id: int, look_after_s: float, unseen_s: float, deadline: str | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.postgres, self.attempt_id = postgres, attempt_id
        self.look_after_s, self.unseen_s, self.deadline = look_after_s, unseen_s, deadline
        self._poll = Poll(log, "an attempt")

    def serialize(self) -> tuple[str, dict[str, Any]]:
        names = ("postgres", "attempt_id", "look_after_s", "unseen_s", "deadline")
        return f"{type(self).__module__}.{type(self).__qualname__}", {name: getattr(self, name) for name in names}

    async def run(self) -> AsyncIterator[TriggerEvent]:
        yield TriggerEvent(asdict(await self.fired()))  # type: ignore[no-untyped-call]

    async def fired(self) -> Fired:
        """Waits for the event."""
        deadline = None if self.deadline is None else datetime.fromisoformat(self.deadline)
        unseen_since, look_after_s = time.monotonic() - self.unseen_s, self.look_after_s
        while True:
            answers = await self._poll.ask(lambda: {self.postgres: self.attempt_id}, _read)
            if self.postgres in answers:
                row = answers[self.postgres]
                if row is None or row["state"] != "RUNNING":
                    return Fired(WakeReason.ENDED)
                unseen_s = time.monotonic() - unseen_since
                if row["driver_alive"]:
                    unseen_since, look_after_s = time.monotonic(), FIRST_LOOK_S
                elif unseen_s >= look_after_s:
                    return Fired(WakeReason.UNSEEN, unseen_s)
            if deadline is not None and timezone.utcnow() >= deadline:
                return Fired(WakeReason.TIMEOUT)
            await asyncio.sleep(ASK_EVERY_S)

    async def on_kill(self) -> None:
        connection = await BaseHook.aget_connection(self.postgres)
        await asyncio.to_thread(_stop, connection, self.attempt_id)


def _read(connection: Any, attempt_id: int) -> dict[str, Any] | None:
    from tidemark.offsets.store import read_attempt

    with cursor(connection, "tidemark follow") as cur:
        return read_attempt(cur, attempt_id)


def _stop(connection: Any, attempt_id: int) -> None:
    from tidemark.airflow.connections import postgres_url
    from tidemark.driver.on_cluster import DriverStopped, stop

    stop(postgres_url(connection), attempt_id, DriverStopped(attempt_id=attempt_id))

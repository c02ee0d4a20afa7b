"""Members of a group in separate processes, as drivers are. In `benchmarks.group`, a few processes share the members.

Each member has the threads and the two database sessions of a driver's member. This module imports little: every process imports it.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from unittest import mock

from tidemark.db import Connection, Cursor, connect
from tidemark.group import member as member_module
from tidemark.group.assignors import Metadata, find_assignor
from tidemark.group.listener import RebalanceListener
from tidemark.group.member import Member, MemberSettings, WokenUp

if TYPE_CHECKING:
    from multiprocessing.connection import Connection as Pipe

    from tidemark.records.ranges import TopicPartition

TOPIC = "events"
_SPAWN = multiprocessing.get_context("spawn")  # a fork would copy the threads' locks in whatever state they are


@dataclass(frozen=True, slots=True)
class Sight:
    """The state of the members of one process, or of all processes."""

    generations: frozenset[int]
    settled: bool
    told_at: float
    """When the last of them last received an assignment, by the monotonic clock, which all processes share."""
    assigned: int

    def __add__(self, other: Sight) -> Sight:
        return Sight(
            self.generations | other.generations,
            self.settled and other.settled,
            max(self.told_at, other.told_at),
            self.assigned + other.assigned,
        )


NOBODY = Sight(frozenset(), settled=True, told_at=0.0, assigned=0)


class Crew:
    """A process with some of a group's members. Not thread-safe."""

    def __init__(self, url: str, assignor: str, partitions: int) -> None:
        self._pipe, theirs = _SPAWN.Pipe()
        self._process = _SPAWN.Process(target=_serve, args=(theirs, url, assignor, partitions), daemon=True)
        self._process.start()

    def join(self, name: str, expected: int | None) -> float:
        """Starts a member; returns when it began."""
        return float(self._asked("join", name, expected))

    def leave(self, name: str) -> float:
        """Closes a member; returns when it began to."""
        return float(self._asked("leave", name))

    def look(self) -> Sight:
        found = self._asked("look")
        assert isinstance(found, Sight)
        return found

    def statements(self) -> Counter[str]:
        """The statements that each member's protocol thread has sent since the last call."""
        return Counter(self._asked("statements"))

    def close(self) -> None:
        """Lets its members leave and ends the process."""
        with contextlib.suppress(OSError, EOFError):
            self._asked("close")
        self._process.join()

    def _asked(self, *question: Any) -> Any:
        self._pipe.send(question)
        answer = self._pipe.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer


def counted(connection: Connection, by_thread: list[int]) -> Connection:
    """Returns the connection. Its cursors note which thread sent each statement."""

    class Counting(Cursor):
        def execute(self, *args: Any, **named: Any) -> None:
            by_thread.append(threading.get_ident())
            super().execute(*args, **named)

        def copy_expert(self, *args: Any, **named: Any) -> None:
            by_thread.append(threading.get_ident())
            super().copy_expert(*args, **named)

    connection.cursor_factory = Counting
    return connection


class _Sailor(RebalanceListener):
    """A member with its polling thread, as in a driver. Notes when it last received an assignment."""

    def __init__(self, url: str, name: str, assignor: str, metadata: Metadata, expected: int | None) -> None:
        self.told_at = 0.0
        seat = MemberSettings(group="bench", client_id=name, expected_members=expected)
        self.member = Member(url, seat, [find_assignor(assignor)], lambda: (TOPIC,), lambda _: metadata, [self])
        self._poller = threading.Thread(target=self._poll, daemon=True)
        self._poller.start()

    def on_partitions_assigned(self, partitions: Sequence[TopicPartition]) -> None:
        self.told_at = time.perf_counter()

    def _poll(self) -> None:
        with contextlib.suppress(WokenUp):
            while True:
                self.member.poll(1.0)

    @property
    def thread_id(self) -> int:
        """The statements of the thread that talks to the coordinator."""
        return self.member._thread.ident or 0  # noqa: SLF001 - the session is this thread's alone

    def look(self) -> Sight:
        member = self.member
        return Sight(frozenset({member.generation}), member.settled, self.told_at, len(member.assignment))

    def stop_polling(self) -> None:
        self.member.wakeup()
        self._poller.join()


class _Watch:
    """The requests that a process answers."""

    def __init__(self, url: str, assignor: str, partitions: int) -> None:
        self._url, self._assignor = url, assignor
        self._metadata = Metadata.of(**{TOPIC: partitions})
        self._sailors: dict[str, _Sailor] = {}
        self.sent: list[int] = []

    def join(self, name: str, expected: int | None) -> float:
        began = time.perf_counter()
        self._sailors[name] = _Sailor(self._url, name, self._assignor, self._metadata, expected)
        return began

    def leave(self, name: str) -> float:
        sailor = self._sailors.pop(name)
        sailor.stop_polling()
        began = time.perf_counter()
        sailor.member.close()
        return began

    def look(self) -> Sight:
        return sum((sailor.look() for sailor in self._sailors.values()), NOBODY)

    def statements(self) -> dict[str, int]:
        sent, self.sent[:] = Counter(self.sent), []
        return {name: sent[sailor.thread_id] for name, sailor in self._sailors.items()}

    def close(self) -> None:
        for sailor in self._sailors.values():
            sailor.stop_polling()
        for sailor in self._sailors.values():
            sailor.member.close()


def _serve(pipe: Pipe, url: str, assignor: str, partitions: int) -> None:
    watch = _Watch(url, assignor, partitions)
    noted = mock.patch.object(member_module, "connect", lambda *args, **named: counted(connect(*args, **named), watch.sent))
    with noted, contextlib.suppress(EOFError):
        while True:
            what, *args = pipe.recv()
            try:
                pipe.send(getattr(watch, what)(*args))
            except Exception as error:  # noqa: BLE001 - raised again where it was asked
                pipe.send(RuntimeError(f"{what}: {error!r}"))
            if what == "close":
                return

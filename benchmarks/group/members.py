"""Members of a group in processes of their own, as drivers are: each has the threads and the two database sessions of a driver's member.

This module imports little: every process imports it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from tidemark.group.assignors import Metadata, find_assignor
from tidemark.group.listener import RebalanceListener
from tidemark.group.member import Member, MemberSettings
from tidemark.records.ranges import TopicPartition

TOPIC = "events"


@dataclass(frozen=True, slots=True)
class State:
    """The state of the members of one process, or of all processes."""

    generations: frozenset[int] = frozenset()
    settled: bool = True
    assigned_at: float = 0.0
    """When the last of them last received an assignment, by the monotonic clock, which all processes share."""
    assigned: int = 0

    def __add__(self, other: State) -> State:
        last = max(self.assigned_at, other.assigned_at)
        return State(self.generations | other.generations, self.settled and other.settled, last, self.assigned + other.assigned)


class _Polled(RebalanceListener):
    """A member with its polling thread, as in a driver. Notes when it last received an assignment."""

    def __init__(self, url: str, name: str, assignor: str, partitions: int, expected: int | None) -> None:
        self.assigned_at = 0.0
        seat, metadata = MemberSettings(group="bench", client_id=name, expected_members=expected), Metadata.of(**{TOPIC: partitions})
        self.member = Member(url, seat, [find_assignor(assignor)], lambda: (TOPIC,), lambda _: metadata, [self])
        self._stopping = False
        self._poller = threading.Thread(target=self._poll, daemon=True)
        self._poller.start()

    def on_partitions_assigned(self, partitions: Sequence[TopicPartition]) -> None:
        self.assigned_at = time.perf_counter()

    def _poll(self) -> None:
        while not self._stopping:
            self.member.poll(0.1)

    def state(self) -> State:
        member = self.member
        return State(frozenset({member.generation}), member.settled, self.assigned_at, len(member.assignment))

    def stop_polling(self) -> None:
        self._stopping = True
        self._poller.join()


class Members:
    """Some members of a group, which share a process."""

    def __init__(self, url: str, assignor: str, partitions: int) -> None:
        self._url, self._assignor, self._partitions = url, assignor, partitions
        self._members: dict[str, _Polled] = {}

    def join(self, name: str, expected: int | None) -> float:
        """Starts a member; returns when it began."""
        began = time.perf_counter()
        self._members[name] = _Polled(self._url, name, self._assignor, self._partitions, expected)
        return began

    def leave(self, name: str) -> float:
        """Closes a member; returns when it began to."""
        one = self._members.pop(name)
        one.stop_polling()
        began = time.perf_counter()
        one.member.close()
        return began

    def state(self) -> State:
        return sum((one.state() for one in self._members.values()), State())

    def leave_all(self) -> None:
        for one in self._members.values():
            one.stop_polling()
        for one in self._members.values():
            one.member.close()

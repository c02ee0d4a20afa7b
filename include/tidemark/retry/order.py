"""Order by key: while a record waits for a retry, later ones of its key, of the same Kafka partition, are held and not tried.

A slice asks about its records in the order in which it reads them: `Order.behind` says which record must be settled first, `Order.tried`
is told what came of one. `KeyOrder` is of a consumer's own slices and goes by the key; `TurnOrder` is of slices of retry topics, whose
records know the one before them. Records without a key have no order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from tidemark.errors import Refused, Unavailable
from tidemark.records.outcome import Disposition, Reject, TransformOutput, without
from tidemark.records.ranges import Slice

if TYPE_CHECKING:
    from tidemark.retry.store import Blocked, Waiting

HELD_BACK = "HeldBack"
"""The ``error_type`` of a record that is held."""
EXAMPLES = 3


class HasOffset(Protocol):
    def offset(self) -> int | None: ...


class HasKey(HasOffset, Protocol):
    """A message of Kafka's, of the consumer's own topic."""

    def key(self) -> Any: ...


class HasTurn(HasOffset, Protocol):
    """A message of a retry topic, which stands for a record that waits."""

    @property
    def record(self) -> Waiting: ...


M = TypeVar("M", bound=HasOffset)
T = TypeVar("T", bound=HasTurn)


@dataclass(kw_only=True, eq=False)
class HeldTooMany(Refused):
    """More records of a partition would be held than the spec lets be."""

    part: Slice
    held: int
    more: int
    limit: int
    keys: int
    examples: tuple[bytes, ...]

    def __str__(self) -> str:
        named = ", ".join(f'"{key[:50].decode(errors="backslashreplace")}"' for key in self.examples)
        return (
            f"{self.part}: {self.more} records would be held, behind {self.keys} keys of which one waits for a retry: {named}"
            f"{', ...' if self.keys > len(self.examples) else ''}. With the {self.held} of this partition that are held already these are "
            f"more than retry.max_held, {self.limit}. Nothing of this slice was stored and no offset was moved; what was committed before "
            "stays. Drain or discard what they wait for (tidemark retries list --state WAITING), and run again; or raise retry.max_held."
        )


@dataclass(kw_only=True, eq=False)
class KeysBlocked(Unavailable):
    """A slice was judged before its transaction, and other keys are blocked now."""

    part: Slice
    keys: int

    def __str__(self) -> str:
        return (
            f"{self.part}: while the transform ran, records of {self.keys} more keys came to wait for a retry. Nothing of this slice was "
            "stored; read it again."
        )


class Order(ABC, Generic[M]):
    """What is asked of while a slice is read, record by record, in the order of the log."""

    @abstractmethod
    def behind(self, message: M) -> int | None:
        """The offset of the record of its key that must be settled first; `None`: it may be tried."""

    @abstractmethod
    def tried(self, message: M, *, again: bool) -> None:
        """What came of one. ``again``: it is to be retried, so that what follows of its key is held."""

    @abstractmethod
    def split(self, messages: Sequence[M]) -> tuple[Sequence[M], list[tuple[M, int]]]:
        """For a transform that takes them all at once: those that may be tried as far as is known, and those that are held, with the offset
        that they are behind. `sift` its answer."""

    def sift(self, part: Slice, messages: Sequence[M], judged: TransformOutput) -> TransformOutput:
        """The answer to ``messages`` without what was said of records behind one of their key that is to be retried: they are held."""
        again = {reject.offset for reject in judged.rejects if reject.disposition in (Disposition.RETRY, Disposition.HELD)}
        back = []
        for message in messages:
            first = self.behind(message)
            if first is None:
                self.tried(message, again=message.offset() in again)
            else:
                back.append(held(message, first))
        if not back:
            return judged
        rest = without(judged, {reject.offset for reject in back}, part)
        return replace(rest, rejects=[*rest.rejects, *back])


class KeyOrder(Order[HasKey]):
    """Of a consumer's own slice. Knows nothing until `begin`; ``limit``: how many records of a partition may be held."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._first: dict[bytes, int] = {}
        self._began: dict[bytes, int] = {}
        self._held = 0
        self._keys: set[bytes] = set()

    def begin(self, blocked: Sequence[Blocked]) -> None:
        """The keys of the partition that are blocked now. From here on nobody else may commit records of it, or `confirm` is asked."""
        self._began = {one.key: one.first for one in blocked}
        self._first = dict(self._began)
        self._held = sum(one.held for one in blocked)

    def confirm(self, part: Slice, blocked: Sequence[Blocked]) -> None:
        """The keys that are blocked when the slice is committed, after it was judged. One that is settled since holds what it holds until
        the next release. Raises `KeysBlocked` where a record of the slice may have been tried that is behind another one now."""
        more = [one for one in blocked if one.first < min(part.end, self._began.get(one.key, part.end))]
        if more:
            raise KeysBlocked(part=part, keys=len(more))
        self._held = sum(one.held for one in blocked)

    def behind(self, message: HasKey) -> int | None:
        if not self._first or (key := message.key()) is None:
            return None
        first = self._first.get(key)
        if first is None or first >= _offset(message):  # a backfill reads what lies before
            return None
        self._keys.add(key)
        return first

    def tried(self, message: HasKey, *, again: bool) -> None:
        if again and (key := message.key()) is not None:
            self._first[key] = min(_offset(message), self._first.get(key, _offset(message)))

    def split(self, messages: Sequence[HasKey]) -> tuple[Sequence[HasKey], list[tuple[HasKey, int]]]:
        if not self._first:
            return messages, []
        free: list[HasKey] = []
        blocked: list[tuple[HasKey, int]] = []
        for message in messages:
            behind = self.behind(message)
            if behind is None:
                free.append(message)
            else:
                blocked.append((message, behind))
        return free, blocked

    def sift(self, part: Slice, messages: Sequence[HasKey], judged: TransformOutput) -> TransformOutput:
        """As `Order.sift`; costs nothing where nothing is to be retried."""
        again = any(reject.disposition is Disposition.RETRY for reject in judged.rejects)
        return super().sift(part, messages, judged) if again else judged

    def check(self, part: Slice, more: int) -> None:
        """Raises `HeldTooMany` if the partition would have too many held records with ``more``."""
        if more and self._held + more > self._limit:
            examples = tuple(sorted(self._keys)[:EXAMPLES])
            raise HeldTooMany(part=part, held=self._held, more=more, limit=self._limit, keys=len(self._keys), examples=examples)


class TurnOrder(Order[T]):
    """Of the records of one origin in a slice of a retry topic: each comes behind the one before it, once that is settled.

    What several relays have published out of order is not sorted: it is held once more, and its turn comes with a later drain.
    """

    def __init__(self) -> None:
        self._settled: set[int] = set()

    def behind(self, message: T) -> int | None:
        before = message.record.before
        return None if before in self._settled else before

    def tried(self, message: T, *, again: bool) -> None:
        if not again:
            self._settled.add(_offset(message))

    def split(self, messages: Sequence[T]) -> tuple[Sequence[T], list[tuple[T, int]]]:
        passing = set(self._settled)
        free: list[T] = []
        blocked: list[tuple[T, int]] = []
        for message in messages:
            before = message.record.before
            if before is None or before in passing:
                free.append(message)
                passing.add(_offset(message))
            else:
                blocked.append((message, before))
        return free, blocked


def held(message: HasOffset, behind: int) -> Reject:
    """What becomes of a record that is not tried, because one of its key waits."""
    return Reject(_offset(message), Disposition.HELD, HELD_BACK, f"behind offset {behind}, which has the same key and is to be retried")


def _offset(message: HasOffset) -> int:
    offset = message.offset()
    assert offset is not None
    return offset

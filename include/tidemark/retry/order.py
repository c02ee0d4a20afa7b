"""Order by key: while a record waits for a retry, later records of its key in the same Kafka partition are held.

A slice asks about its records, by offset and key, in the order in which it reads them. `Order.behind` returns the record that must be
settled first; `Order.tried` takes the outcome of a try. `KeyOrder` is for slices of the consumer's own topics and compares keys.
`TurnOrder` is for slices of retry topics, whose records know their predecessor. Records without a key have no order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tidemark.errors import Refused, Unavailable
from tidemark.records.outcome import Disposition, Reject, TransformOutput, without
from tidemark.records.ranges import Slice
from tidemark.text.wording import counted

if TYPE_CHECKING:
    from tidemark.retry.store import Blocked

HELD_BACK = "HeldBack"
"""The ``error_type`` of a record that is held."""
EXAMPLES = 3


Keyed = tuple[int, bytes | None]
"""The offset and the key of a record."""


@dataclass(kw_only=True, eq=False)
class HeldTooMany(Refused):
    """The slice would exceed the spec's limit of held records per partition."""

    part: Slice
    held: int
    more: int
    limit: int
    keys: int
    examples: tuple[bytes, ...]

    def __str__(self) -> str:
        named = ", ".join(f'"{key[:50].decode(errors="backslashreplace")}"' for key in self.examples)
        return (
            f"{self.part}: {counted(self.more, 'record')} would be held, because earlier records of {counted(self.keys, 'key')} wait for a "
            f"retry: {named}{', ...' if self.keys > len(self.examples) else ''}. With the {self.held} already held in this partition, that "
            f"is more than retry.max_held ({self.limit}). Nothing of this slice was stored and no offset was moved; earlier commits stay. "
            "Drain or discard the records they wait for (tidemark retries list --state WAITING) and run again, or raise retry.max_held."
        )


@dataclass(kw_only=True, eq=False)
class KeysBlocked(Unavailable):
    """More keys were blocked between the slice's transform and its transaction."""

    part: Slice
    keys: int

    def __str__(self) -> str:
        return (
            f"{self.part}: while the transform ran, records of {self.keys} more keys began to wait for a retry. Nothing of this slice was "
            "stored; read it again."
        )


class Order(ABC):
    """Decides which records of a slice may be tried. Call it for each record, in log order."""

    @abstractmethod
    def behind(self, offset: int, key: bytes | None) -> int | None:
        """The offset of the earlier record of its key that must be settled first. `None`: it may be tried."""

    @abstractmethod
    def tried(self, offset: int, key: bytes | None, *, again: bool) -> None:
        """Takes the outcome of a try. ``again``: it will be retried, so later records of its key are held."""

    @abstractmethod
    def split(self, records: Iterable[Keyed]) -> dict[int, int]:
        """For a transform that takes all records at once: those to hold as far as is known, each with the offset that blocks it. Pass the
        transform's output for the others to `sift`."""

    def sift(self, part: Slice, records: Iterable[Keyed], judged: TransformOutput) -> TransformOutput:
        """Holds each record whose key has an earlier record to be retried, and drops the transform's output for it."""
        again = {reject.offset for reject in judged.rejects if reject.disposition in (Disposition.RETRY, Disposition.HELD)}
        back = []
        for offset, key in records:
            first = self.behind(offset, key)
            if first is None:
                self.tried(offset, key, again=offset in again)
            else:
                back.append(held(offset, first))
        if not back:
            return judged
        rest = without(judged, {reject.offset for reject in back}, part)
        return replace(rest, rejects=[*rest.rejects, *back])


class KeyOrder(Order):
    """The order within a slice of the consumer's own topic. Call `begin` first. ``limit``: maximum number of held records per partition."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._first: dict[bytes, int] = {}
        self._began: dict[bytes, int] = {}
        self._held = 0
        self._keys: set[bytes] = set()

    def begin(self, blocked: Sequence[Blocked]) -> None:
        """Starts with the keys of the partition that are blocked now. If others may commit its records from now on, `confirm` later."""
        self._began = {one.key: one.first for one in blocked}
        self._first = dict(self._began)
        self._held = sum(one.held for one in blocked)

    def confirm(self, part: Slice, blocked: Sequence[Blocked]) -> None:
        """Checks the keys that are blocked at commit. A key settled since `begin` holds its records until the next release.

        Raises `KeysBlocked` if a record of the slice may have been tried although an earlier record of its key waits now.
        """
        more = [one for one in blocked if one.first < min(part.end, self._began.get(one.key, part.end))]
        if more:
            raise KeysBlocked(part=part, keys=len(more))
        self._held = sum(one.held for one in blocked)

    def behind(self, offset: int, key: bytes | None) -> int | None:
        if not self._first or key is None:
            return None
        first = self._first.get(key)
        if first is None or first >= offset:  # a backfill reads earlier offsets
            return None
        self._keys.add(key)
        return first

    def tried(self, offset: int, key: bytes | None, *, again: bool) -> None:
        if again and key is not None:
            self._first[key] = min(offset, self._first.get(key, offset))

    def split(self, records: Iterable[Keyed]) -> dict[int, int]:
        """Like `Order.split`. Does not iterate if no key is blocked."""
        if not self._first:
            return {}
        return {offset: behind for offset, key in records if (behind := self.behind(offset, key)) is not None}

    def sift(self, part: Slice, records: Iterable[Keyed], judged: TransformOutput) -> TransformOutput:
        """Like `Order.sift`. Does not iterate if nothing is to be retried."""
        again = any(reject.disposition is Disposition.RETRY for reject in judged.rejects)
        return super().sift(part, records, judged) if again else judged

    def check(self, part: Slice, more: int) -> None:
        """Raises `HeldTooMany` if ``more`` held records would exceed the limit."""
        if more and self._held + more > self._limit:
            examples = tuple(sorted(self._keys)[:EXAMPLES])
            raise HeldTooMany(part=part, held=self._held, more=more, limit=self._limit, keys=len(self._keys), examples=examples)


class TurnOrder(Order):
    """The order within a slice of a retry topic: a record may be tried once its predecessor is settled. ``before``: each record's.

    Records that several relays published out of order are not sorted. They are held again and tried by a later drain.
    """

    def __init__(self, before: Mapping[int, int | None]) -> None:
        self._before = before
        self._settled: set[int] = set()

    def behind(self, offset: int, key: bytes | None) -> int | None:
        before = self._before[offset]
        return None if before in self._settled else before

    def tried(self, offset: int, key: bytes | None, *, again: bool) -> None:
        if not again:
            self._settled.add(offset)

    def split(self, records: Iterable[Keyed]) -> dict[int, int]:
        passing = set(self._settled)
        blocked: dict[int, int] = {}
        for offset, _ in records:
            before = self._before[offset]
            if before is None or before in passing:
                passing.add(offset)
            else:
                blocked[offset] = before
        return blocked


def held(offset: int, behind: int) -> Reject:
    """The outcome of a record that is not tried because an earlier record of its key is waiting."""
    return Reject(offset, Disposition.HELD, HELD_BACK, f"behind offset {behind}, which has the same key and is to be retried")

"""Order by key: while a record waits for a retry, later records of its key in the same Kafka partition are held.

A slice checks its records, by offset and key, in the order in which it reads them. `Order.behind` returns the record that must be settled
first; `Order.tried` stores the outcome of a try. `KeyOrder` is for slices of the consumer's own topics and compares keys. `TurnOrder` is
for slices of retry topics, whose records store their predecessors. Records without a key have no order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from tidemark.errors import Refused, Unavailable
from tidemark.records.outcome import Disposition, Reject, TransformOutput, without
from tidemark.records.ranges import Slice
from tidemark.text.wording import counted

if TYPE_CHECKING:
    from tidemark.retry.store import Blocked

HELD_BACK = "HeldBack"
"""``error_type`` of held records."""
EXAMPLES = 3


Keyed = tuple[int, bytes | None]
"""The offset and the key of a record."""


class HeldTooMany(Refused):
    """The slice would exceed the spec's limit of held records per partition."""

    part: Slice
    held: int
    more: int
    limit: int
    keys: int
    examples: tuple[bytes, ...]

    def __str__(self) -> str:
        keys = ", ".join(f'"{key[:50].decode(errors="backslashreplace")}"' for key in self.examples)
        return (
            f"{self.part}: {counted(self.more, 'record')} would be held, because earlier records of {counted(self.keys, 'key')} wait for a "
            f"retry: {keys}{', ...' if self.keys > len(self.examples) else ''}. With the {self.held} already held in this partition, that "
            f"is more than retry.max_held ({self.limit}). Nothing of this slice was stored and no offset was moved; earlier commits stay. "
            "Drain or discard the records they wait for (tidemark retries list --state WAITING) and run again, or raise retry.max_held."
        )


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
        """Returns the offset of the earlier record of the key that must be settled first. `None`: the record may be tried."""

    @abstractmethod
    def tried(self, offset: int, key: bytes | None, *, again: bool) -> None:
        """Stores the outcome of a try. ``again``: the record will be retried, so later records of its key are held."""

    @abstractmethod
    def split(self, records: Iterable[Keyed]) -> dict[int, int]:
        """Returns the records to hold, with the offsets that block them, before a transform of all others at once. Pass its output to
        `sift`."""

    def sift(self, part: Slice, records: Iterable[Keyed], output: TransformOutput) -> TransformOutput:
        """Holds records behind an earlier record of their key that will be retried, and drops the transform's output for them."""
        again = {reject.offset for reject in output.rejects if reject.disposition in (Disposition.RETRY, Disposition.HELD)}
        held_records = []
        for offset, key in records:
            first = self.behind(offset, key)
            if first is None:
                self.tried(offset, key, again=offset in again)
            else:
                held_records.append(held(offset, first))
        if not held_records:
            return output
        remaining = without(output, {reject.offset for reject in held_records}, part)
        return replace(remaining, rejects=[*remaining.rejects, *held_records])


class KeyOrder(Order):
    """The order within a slice of the consumer's own topic. Call `begin` first. ``limit``: maximum number of held records per partition."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._first: dict[bytes, int] = {}
        self._blocked_at_begin: dict[bytes, int] = {}
        self._held = 0
        self._keys: set[bytes] = set()

    def begin(self, blocked: Sequence[Blocked]) -> None:
        """Starts with the partition's currently blocked keys. If other commits may follow before this one, call `confirm` later."""
        self._blocked_at_begin = {each.key: each.first for each in blocked}
        self._first = dict(self._blocked_at_begin)
        self._held = sum(each.held for each in blocked)

    def confirm(self, part: Slice, blocked: Sequence[Blocked]) -> None:
        """Checks the keys that are blocked at commit. A key settled since `begin` holds its records until the next release.

        Raises `KeysBlocked` if a record of the slice may have been tried although an earlier record of its key is waiting now.
        """
        new = [each for each in blocked if each.first < min(part.end, self._blocked_at_begin.get(each.key, part.end))]
        if new:
            raise KeysBlocked(part=part, keys=len(new))
        self._held = sum(each.held for each in blocked)

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

    def sift(self, part: Slice, records: Iterable[Keyed], output: TransformOutput) -> TransformOutput:
        """Like `Order.sift`. Does not iterate without retries."""
        again = any(reject.disposition is Disposition.RETRY for reject in output.rejects)
        return super().sift(part, records, output) if again else output

    def check(self, part: Slice, more: int) -> None:
        """Raises `HeldTooMany` if ``more`` held records would exceed the limit."""
        if more and self._held + more > self._limit:
            examples = tuple(sorted(self._keys)[:EXAMPLES])
            raise HeldTooMany(part=part, held=self._held, more=more, limit=self._limit, keys=len(self._keys), examples=examples)


class TurnOrder(Order):
    """The order within a slice of a retry topic: a record may be tried once its predecessor is settled. ``before``: predecessors by offset.

    Records that several relays published out of order are not sorted: they are held again, and a later drain tries them.
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
    """Returns the reject of a record that is held because an earlier record of its key is waiting."""
    return Reject(offset, Disposition.HELD, HELD_BACK, f"behind offset {behind}, which has the same key and is to be retried")

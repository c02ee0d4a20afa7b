"""The circuit breaker: if too many records of a slice fail, the slice fails and hands off nothing (I1)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tidemark.errors import Refused
from tidemark.records.outcome import DETAIL
from tidemark.records.ranges import Slice
from tidemark.text.wording import counted

if TYPE_CHECKING:
    from tidemark.records.outcome import RecordCounts, Reject
    from tidemark.spec import ConsumerSpec


@dataclass(kw_only=True, eq=False)
class BreakerTripped(Refused):
    """More records of a slice failed than the spec's breaker allows."""

    part: Slice
    judged: int
    failed: int
    in_a_row: int
    ratio: float | None
    consecutive: int | None
    commonest: str

    def __str__(self) -> str:
        if self.ratio is None:
            failures, key = f"{counted(self.in_a_row, 'record')} in a row failed", "consecutive"
            allowed = str(self.consecutive)
        else:
            failures, key = f"{self.failed:,} of {counted(self.judged, 'record')} failed ({self.failed / self.judged:.1%})", "ratio"
            allowed = f"{self.ratio:g}"
        return (
            f"{self.part}: {failures}, retry.breaker.{key} is {allowed}. Most common error: {self.commonest}. Nothing of this slice was "
            f"stored and no offset was moved; earlier commits stay. Fix the common cause and run again. If so many failures are expected, "
            f"raise retry.breaker.{key} for this run, or remove it."
        )


@dataclass(frozen=True, slots=True)
class Breaker:
    """Limits of failures. ``ratio``: share of a slice's records that may fail, checked only if the slice has at least ``minimum`` records.
    ``consecutive``: number of records in a row that may fail. `None`: no limit."""

    ratio: float | None
    consecutive: int | None
    minimum: int

    @classmethod
    def of(cls, spec: ConsumerSpec) -> Breaker | None:
        config = spec.retry.breaker
        return None if config is None else cls(config.ratio, config.consecutive, config.minimum)

    def check(self, part: Slice, counts: RecordCounts, in_a_row: int, rejects: Collection[Reject]) -> None:
        """Raises `BreakerTripped`. ``in_a_row``: the longest run of consecutive failures."""
        failed = counts.retried + counts.failed
        judged = failed + counts.loaded + counts.skipped
        by_ratio = self.ratio is not None and judged >= self.minimum and failed > self.ratio * judged
        if not by_ratio and (self.consecutive is None or in_a_row <= self.consecutive):
            return
        texts = (f"{reject.error_type}: {reject.error_text.partition(DETAIL)[0]}" for reject in rejects)
        ((commonest, _),) = Counter(text[:300] for text in texts).most_common(1)
        raise BreakerTripped(
            part=part,
            judged=judged,
            failed=failed,
            in_a_row=in_a_row,
            ratio=self.ratio if by_ratio else None,
            consecutive=self.consecutive,
            commonest=commonest,
        )

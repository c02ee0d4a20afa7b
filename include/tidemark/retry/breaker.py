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


class BreakerTripped(Refused):
    """More records of a slice failed than the spec's breaker allows."""

    part: Slice
    judged: int
    failed: int
    ratio: float
    commonest: str

    def __str__(self) -> str:
        failures = f"{self.failed:,} of {counted(self.judged, 'record')} failed ({self.failed / self.judged:.1%})"
        return (
            f"{self.part}: {failures}, retry.breaker.ratio is {self.ratio:g}. Most common error: {self.commonest}. Nothing of this slice "
            "was stored and no offset was moved; earlier commits stay. Fix the common cause and run again. If so many failures are "
            "expected, raise retry.breaker.ratio for this run, or remove retry.breaker."
        )


@dataclass(frozen=True, slots=True)
class Breaker:
    """``ratio``: share of a slice's records that may fail, checked only if the slice has at least ``minimum`` records."""

    ratio: float
    minimum: int

    @classmethod
    def of(cls, spec: ConsumerSpec) -> Breaker | None:
        config = spec.retry.breaker
        return None if config is None else cls(config.ratio, config.minimum)

    def check(self, part: Slice, counts: RecordCounts, rejects: Collection[Reject]) -> None:
        """Raises `BreakerTripped`."""
        failed = counts.retried + counts.failed
        judged = failed + counts.loaded + counts.skipped
        if judged < self.minimum or failed <= self.ratio * judged:
            return
        texts = (f"{reject.error_type}: {reject.error_text.partition(DETAIL)[0]}" for reject in rejects)
        ((commonest, _),) = Counter(text[:300] for text in texts).most_common(1)
        raise BreakerTripped(part=part, judged=judged, failed=failed, ratio=self.ratio, commonest=commonest)

"""Finds anomalies in a history, and names them in the terms of Jepsen's Kafka workload. Pure: values in, anomalies out.

A record is identified by its value: no two records have the same. `compare` judges a snapshot by itself and against the one before it,
`judge` the tables at the end. `Kind` defines each term; the definitions exclude each other, so one fault has one name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from tests.soak.history import Batch, Fate, Int64s, Log, Outcome, Stored, View, Where, fates, places_of

EXAMPLES = 5
Flags = npt.NDArray[np.bool_]


class Kind(StrEnum):
    """The kinds of anomalies. Nothing is rewound in a soak, so nothing may ever go back."""

    LOST_WRITE = "lost-write"
    """A committed record that the group has passed (below its position and inside a ledger row), that its transform does not skip, and
    that is in no row of the sink and in no failed record. Records that no ledger row covers are a poll-skip, and do not count here."""
    DUPLICATE = "duplicate"
    """A committed record that is in more than one place: its value is in two rows, whatever their lineage, in two failed records, or in a
    row and a failed record."""
    ABORTED_READ = "aborted-read"
    """A row or a failed record that comes from a record whose transaction was aborted."""
    POLL_SKIP = "poll-skip"
    """Consecutive ledger rows with a gap between them, or a ledger that does not begin where the group began: the group moved over
    offsets that no batch read."""
    NONMONOTONIC = "nonmonotonic"
    """Something went back. Between snapshots: a position, an epoch, or the number of ledger rows. In one ledger: a row that begins before
    its predecessor ends, so that offsets were read twice."""
    INCONSISTENT_OFFSETS = "inconsistent-offsets"
    """Two places disagree about an offset. The position is not the end of the ledger; rows or failed records lie at or above the
    position; the number of new rows or failed records differs from the ledger's; a row has an offset other than its record's, or a value
    that was never sent."""


@dataclass(frozen=True, slots=True)
class Anomaly:
    """``count`` anomalies of one kind, between offsets ``start`` and ``end`` of one partition of one group."""

    kind: Kind
    where: Where
    start: int
    end: int
    count: int
    text: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.where} [{self.start}, {self.end}): {self.text}"


def counted(anomalies: Iterable[Anomaly]) -> dict[Kind, int]:
    """The number of anomalies of each kind, including kinds without any."""
    counts: Counter[Kind] = Counter()
    for anomaly in anomalies:
        counts[anomaly.kind] += anomaly.count
    return {kind: counts[kind] for kind in Kind}


def compare(before: View | None, now: View) -> list[Anomaly]:
    """The anomalies of a partition in a snapshot: by itself, and compared with the one before, from whose position ``now`` counts."""
    return [*_went_back(before, now), *_chain(now.where, now.since, now.batches), *_disagreements(now)]


def _went_back(before: View | None, now: View) -> Iterator[Anomaly]:
    if before is not None:
        pairs = {
            "the position": (before.position, now.position),
            "the epoch": (before.epoch, now.epoch),
            "the number of ledger rows": (before.ledger_rows, now.ledger_rows),
        }
        fallen = [f"{name} fell from {then} to {this}" for name, (then, this) in pairs.items() if this < then]
        if fallen:
            low, high = sorted((before.position, now.position))
            yield Anomaly(Kind.NONMONOTONIC, now.where, low, high, len(fallen), ", ".join(fallen))


def _disagreements(now: View) -> Iterator[Anomaly]:
    wrong = []
    if now.position != now.ledger_end:
        wrong.append(f"the position is {now.position}, the ledger ends at {now.ledger_end}")
    if now.last_row is not None and now.last_row >= now.position:
        wrong.append(f"a row lies at {now.last_row}, the position is {now.position}")
    for what, in_ledger, stored in (
        ("rows", sum(batch.sink_rows for batch in now.batches), now.rows),
        ("failed records", sum(batch.rejected for batch in now.batches), now.rejected),
    ):
        if in_ledger != stored:
            wrong.append(f"since {now.since} the ledger counts {in_ledger} {what}, there are {stored}")
    if wrong:
        low, high = sorted((now.since, max(now.position, now.ledger_end)))
        yield Anomaly(Kind.INCONSISTENT_OFFSETS, now.where, low, high, len(wrong), "; ".join(wrong))


def _chain(where: Where, first: int, batches: Iterable[Batch]) -> Iterator[Anomaly]:
    """Gaps and overlaps of ledger rows, which are sorted by start and should continue from ``first``."""
    reach = first
    for batch in batches:
        if batch.start > reach:
            yield Anomaly(Kind.POLL_SKIP, where, reach, batch.start, 1, f"no batch has read {batch.start - reach} offsets")
        elif batch.start < reach:
            text = f"the batch [{batch.start}, {batch.end}) begins below {reach}, where another had ended"
            yield Anomaly(Kind.NONMONOTONIC, where, batch.start, reach, 1, text)
        reach = max(reach, batch.end)


def judge(where: Where, log: Log, stored: Stored) -> list[Anomaly]:
    """The anomalies in a partition's tables at the end. ``log`` may still have unknown outcomes: those records may be stored or not."""
    ledger = stored.ledger[np.lexsort((stored.ledger[:, 1], stored.ledger[:, 0]))]
    anomalies = list(_chain(where, 0, (Batch(int(start), int(end), 0, 0) for start, end in ledger)))
    end = int(ledger[:, 1].max()) if len(ledger) else 0
    if end != stored.position:
        low, high = sorted((end, stored.position))
        text = f"the position is {stored.position}, the ledger ends at {end}"
        anomalies.append(Anomaly(Kind.INCONSISTENT_OFFSETS, where, low, high, 1, text))
    return [*anomalies, *_records(where, log, stored, ledger)]


def _records(where: Where, log: Log, stored: Stored, ledger: Int64s) -> Iterator[Anomaly]:
    """Checks each record by its value: how often and where it is stored, and whether it may be."""
    sent, outcomes, offsets = log.values, log.outcomes, log.offsets
    values = np.concatenate([stored.row_values, stored.reject_values])
    at_offsets = np.concatenate([stored.row_offsets, stored.reject_offsets])
    at, known = places_of(values, sent)
    times = np.bincount(at[known], minlength=len(sent))
    places = offsets.copy()
    homeless = known.copy()
    homeless[known] = offsets[at[known]] < 0
    places[at[homeless]] = at_offsets[homeless]

    def anomaly(kind: Kind, at_which: Int64s, which: Flags, text: str) -> Iterator[Anomaly]:
        picked = at_which[which]
        if len(picked):
            examples = ", ".join(str(offset) for offset in np.sort(picked)[:EXAMPLES])
            yield Anomaly(kind, where, int(picked.min()), int(picked.max()) + 1, len(picked), f"{text}: offsets {examples}")

    aborted = outcomes == Outcome.ABORTED
    passed = (offsets >= 0) & (offsets < stored.position) & _covered(offsets, ledger)
    lost = (outcomes == Outcome.COMMITTED) & passed & (times == 0) & (fates(sent) != Fate.SKIP)
    yield from anomaly(Kind.LOST_WRITE, places, lost, "committed, passed, and stored nowhere")
    yield from anomaly(Kind.DUPLICATE, places, ~aborted & (times > 1), "stored more than once")
    yield from anomaly(Kind.ABORTED_READ, places, aborted & (times > 0), "aborted, and stored")

    once = np.zeros(len(values), bool)
    once[known] = (times[at[known]] == 1) & ~aborted[at[known]]
    moved = np.zeros(len(values), bool)
    moved[once] = (offsets[at[once]] >= 0) & (offsets[at[once]] != at_offsets[once])
    yield from anomaly(Kind.INCONSISTENT_OFFSETS, at_offsets, moved, "not the offset of the record that is stored here")
    yield from anomaly(Kind.INCONSISTENT_OFFSETS, at_offsets, ~known, "a value that nobody has sent")
    ahead = once & ~moved & (at_offsets >= stored.position)
    yield from anomaly(Kind.INCONSISTENT_OFFSETS, at_offsets, ahead, f"stored, and the position is {stored.position}")


def _covered(offsets: Int64s, ledger: Int64s) -> Flags:
    """Which offsets lie inside a ledger row. ``ledger`` is sorted by start."""
    if not len(ledger):
        return np.zeros(len(offsets), bool)
    reach = np.maximum.accumulate(ledger[:, 1])
    behind = np.searchsorted(ledger[:, 0], offsets, side="right") - 1
    return np.asarray((behind >= 0) & (offsets < reach[np.maximum(behind, 0)]), bool)

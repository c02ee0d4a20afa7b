"""What is known about a soak: what producers did to each partition, what snapshots saw, and what the tables hold. Needs no service."""

from __future__ import annotations

import threading
from array import array
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Int64s = npt.NDArray[np.int64]
Int8s = npt.NDArray[np.int8]


class Outcome(IntEnum):
    """What happened to a record, as far as its producer knows."""

    COMMITTED = 1
    """Acknowledged: outside a transaction, or in one whose commit was acknowledged."""
    ABORTED = 2
    """Its transaction was aborted, or its producer died before it asked for the commit."""
    UNKNOWN = 3
    """The producer died, or gave up, after its request and before the answer."""


class Fate(IntEnum):
    """What the consumers' transforms do with a record. It depends only on the record's value."""

    LOAD = 1
    """One row, with the value."""
    SKIP = 2
    RETRY = 3
    FAIL = 4


FATE_PERIOD = 50
FATE_OF_REMAINDER: Mapping[int, Fate] = {7: Fate.SKIP, 11: Fate.RETRY, 13: Fate.FAIL}
"""The fate of a value by its remainder modulo `FATE_PERIOD`; all others are loaded."""


def fates(values: Int64s) -> Int8s:
    """The `Fate` of each value."""
    table = np.full(FATE_PERIOD, Fate.LOAD, dtype=np.int8)
    table[list(FATE_OF_REMAINDER)] = list(FATE_OF_REMAINDER.values())
    return table[values % FATE_PERIOD]


class Source(NamedTuple):
    """A Kafka partition."""

    topic: str
    partition: int

    def __str__(self) -> str:
        return f"{self.topic}/{self.partition}"


class Where(NamedTuple):
    """A partition as a group reads it."""

    group: str
    source: Source

    def __str__(self) -> str:
        return f"{self.group} {self.source}"


@dataclass(frozen=True, slots=True)
class Log:
    """A partition's records, as their producers know them, in the order of their values. Each value occurs once.

    ``offsets``: -1 for records that were sent, but whose producers never learned their offsets. They may not be in the log at all.
    """

    values: Int64s
    outcomes: Int8s
    offsets: Int64s


class Recorder:
    """Collects what producers know, in 17 bytes per record. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sent: dict[Source, tuple[array[int], array[int], array[int]]] = defaultdict(lambda: (array("q"), array("b"), array("q")))
        self.records: Counter[Outcome] = Counter()

    def placed(self, source: Source, offsets: Sequence[int], values: Sequence[int], outcome: Outcome) -> None:
        """Adds records whose offsets the broker has reported."""
        with self._lock:
            for column, more in zip(self._sent[source], (values, [outcome] * len(values), offsets), strict=True):
                column.extend(more)
            self.records[outcome] += len(values)

    def unplaced(self, source: Source, values: Sequence[int], outcome: Outcome) -> None:
        """Adds records that were sent but not acknowledged."""
        self.placed(source, [-1] * len(values), values, outcome)

    def log(self, source: Source) -> Log:
        with self._lock:
            values, outcomes, offsets = (np.array(column) for column in self._sent[source])
        order = np.argsort(values, kind="stable")
        return Log(values[order], outcomes[order], offsets[order])


def settled(log: Log, offsets: Int64s, values: Int64s) -> tuple[Log, list[str]]:
    """Decides every outcome in ``log`` by what a read_committed reader found in the partition. Returns that log and the contradictions.

    A contradiction is not an anomaly of a consumer: Kafka, a producer or this harness is wrong, and the soak says nothing about consumers.
    """
    sent, outcomes, place = log.values, log.outcomes, log.offsets
    at, known = places_of(values, sent)
    found = np.full(len(sent), -1, np.int64)
    found[at[known]] = offsets[known]
    seen = found >= 0

    problems = [
        *_named("a producer sent a value twice", sent[:-1][np.diff(sent) == 0]),
        *_named("the log holds a value that nobody sent", values[~known]),
        *_named("the log holds a value twice", values[known][np.bincount(at[known], minlength=len(sent))[at[known]] > 1]),
        *_named("acknowledged as committed, and not to be read", sent[(outcomes == Outcome.COMMITTED) & ~seen]),
        *_named("aborted, and to be read all the same", sent[(outcomes == Outcome.ABORTED) & seen]),
        *_named("to be read at another offset than the producer was told", sent[seen & (place >= 0) & (found != place)]),
    ]
    now = np.where(seen, Outcome.COMMITTED, Outcome.ABORTED).astype(np.int8)
    return Log(sent, now, np.where(seen, found, place)), problems


def places_of(values: Int64s, ascending: Int64s) -> tuple[Int64s, npt.NDArray[np.bool_]]:
    """Where each value is in ``ascending``, and whether it is there at all."""
    at = np.searchsorted(ascending, values)
    known = np.zeros(len(values), bool)
    inside = at < len(ascending)
    known[inside] = ascending[at[inside]] == values[inside]
    return at, known


def _named(problem: str, values: Int64s) -> list[str]:
    return [f"{problem}: {len(values)} values, the first {int(values[0])}"] if len(values) else []


@dataclass(frozen=True, slots=True)
class Batch:
    """A ledger row: the offsets ``[start, end)``, how many rows it stored in the sink, and how many records it sent to retry or failed."""

    start: int
    end: int
    sink_rows: int
    rejected: int


@dataclass(frozen=True, slots=True)
class View:
    """One partition of one group, as one snapshot shows it.

    ``since`` is the position in the previous snapshot, or 0 in the first: topics are new, and every group starts at 0. ``batches`` are the
    ledger rows that end after ``since``, ordered by start. ``ledger_rows`` is the number of rows in the whole ledger, ``ledger_end`` is its
    end (0 if it is empty). ``rows``, ``last_row`` and ``rejected`` describe the sink's rows and the failed records at or after ``since``.
    """

    where: Where
    since: int
    position: int
    epoch: int
    batches: tuple[Batch, ...]
    ledger_rows: int
    ledger_end: int
    rows: int
    last_row: int | None
    rejected: int


@dataclass(frozen=True, slots=True)
class Stored:
    """One partition of one group at the end of a soak. ``ledger`` has rows of ``start, end``. All arrays are unordered."""

    position: int
    ledger: Int64s
    row_offsets: Int64s
    row_values: Int64s
    reject_offsets: Int64s
    reject_values: Int64s

"""A task's work on a slice: read, transform and commit it. Runs in a Python worker of Spark."""

from __future__ import annotations

import functools
import gc
from collections.abc import Iterator
from dataclasses import replace

from tenacity import Retrying, retry_if_exception_type, stop_after_attempt

from tidemark.formats.decoder import SchemasMissing
from tidemark.kafka.reader import Reader
from tidemark.records.outcome import TransformOutput
from tidemark.records.ranges import Slice
from tidemark.retry.order import KeyOrder, KeysBlocked
from tidemark.sink.commit import Receipt, Sessions, commit_slice
from tidemark.worker.batches import HandOffBuffer
from tidemark.worker.call_transform import Work, transform_chunk
from tidemark.worker.retry_slice import drain_slice

MAX_TRIES = 3
"""Maximum number of tries of a slice whose keys become blocked while it runs."""


class SliceWorker:
    """Consumes slice after slice with one Kafka client and one database session, as long as none fails.

    Connecting takes longer than a small slice. Not thread-safe.
    """

    def __init__(self, work: Work) -> None:
        self._work = work
        self._reader = Reader(work.kafka)
        self._sessions = Sessions()

    def close(self) -> None:
        self._reader.close()
        self._sessions.close()

    def consume(self, part: Slice, *, then: Slice | None = None, isolate: bool = False) -> Receipt:
        """Reads ``part`` with librdkafka, transforms it in the Arrow or function form, and commits it. See `commit_slice`.

        ``then``: the next slice. Its records are fetched during the commit.
        """
        try:
            if part.drained:
                return drain_slice(self._work, part, isolate=isolate)
            retrying = Retrying(retry=retry_if_exception_type(KeysBlocked), stop=stop_after_attempt(MAX_TRIES), reraise=True)
            return retrying(self._try_slice, part, then, isolate)
        except SchemasMissing as error:
            raise replace(error, part=part) from None

    def _try_slice(self, part: Slice, then: Slice | None, isolate: bool) -> Receipt:
        target = self._work.target
        order = None if target.max_held is None else KeyOrder(target.max_held)
        buffer = HandOffBuffer(self._work.kafka)
        outputs = self._transform(part, then, order, buffer)
        return commit_slice(target, part, outputs, buffer.payloads, isolate=isolate, order=order, sessions=self._sessions)

    def _transform(self, part: Slice, then: Slice | None, order: KeyOrder | None, buffer: HandOffBuffer) -> Iterator[TransformOutput]:
        ahead = None if then is None or then.drained else (then.partition, then.start, then.leader_epoch)
        for chunk in self._reader.read(part.partition, part.start, part.end, part.leader_epoch, then=ahead):
            output = transform_chunk(self._work, part, chunk, order)
            buffer.add(chunk, output.rejects)
            yield output


@functools.cache
def collect_less_garbage() -> None:
    """Permanently excludes a worker's imported modules from garbage collection, and makes collections rare.

    Python collects after every 700 new objects, while 10,000 messages are alive at a time: that took half of a reader's CPU time. Spark
    also runs a full collection in the worker after each task, which took 50 ms.
    """
    import pyarrow as pa

    gc.set_threshold(100_000, 20, 100)
    pa.array([0])  # its first list imports pandas, if installed
    gc.freeze()

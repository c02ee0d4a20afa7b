"""The CPU time of the Python worker, stage by stage, for a slice in the Arrow form.

Calls the product's own functions, batch after batch as in a run. Each stage is timed by the CPU clock of its thread. The rest of the
process's CPU time is that of librdkafka's threads, which fetch and decompress. The last stage sends the finished bytes to Postgres and
rolls back.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import psycopg2

from benchmarks.limit import _layout
from benchmarks.site import COLUMNS, TABLE, Site, Topic
from benchmarks.stage import Stage
from benchmarks.transforms.bench_arrow import transform
from tidemark.kafka.reader import read
from tidemark.records.ranges import Epoch, Slice, TopicPartition
from tidemark.sink.encode import COPY_BUFFER_BYTES, CopyStream
from tidemark.sink.table import LINEAGE, Layout
from tidemark.sink.tally import Tally, split_output
from tidemark.worker.batches import records
from tidemark.worker.slice_worker import collect_less_garbage

FETCH = "fetch: librdkafka's threads"
READ = "read: messages to Arrow columns"
RECORDS = "records: the transform's batch"
TRANSFORM = "transform: JSON to columns (the user's)"
TALLY = "judge and tally: account for every record, types, lineage"
ENCODE = "encode: Arrow to binary COPY"
SEND = "send: to Postgres"
STAGES = (FETCH, READ, RECORDS, TRANSFORM, TALLY, ENCODE, SEND)


def measure(stage: Stage, site: Site, topic: Topic, rounds: int, report: Callable[[str], None]) -> list[dict[str, Any]]:
    """A row per stage: CPU time in microseconds per record, median of the rounds."""
    stage.empty()
    collect_less_garbage()
    layout = _layout(site)
    part = Slice(TopicPartition(topic.name, 0), topic.topic_id, 0, topic.each, Epoch(0))
    rounds_of = [_round(site, layout, part) for _ in range(rounds + 1)][1:]
    taken = {name: [one[name] / part.span * 1e6 for one in rounds_of] for name in STAGES}
    found = [
        {"stage": name, "cpu_us_per_row": statistics.median(times), "min": min(times), "max": max(times)} for name, times in taken.items()
    ]
    for one in found:
        report(f"{one['stage']:<62} {one['cpu_us_per_row']:.3f} µs a row")
    return found


def _round(site: Site, layout: Layout, part: Slice) -> dict[str, float]:
    """CPU seconds of each stage for one slice."""
    used = dict.fromkeys(STAGES, 0.0)

    def timed(name: str, act: Callable[[], Any]) -> Any:
        before = time.thread_time()
        result = act()
        used[name] += time.thread_time() - before
        return result

    tally, columns, chunks = Tally(part), [*COLUMNS, *LINEAGE], []
    before = time.process_time()
    batches = read({"bootstrap.servers": site.servers}, part.partition, part.start, part.end)
    while (chunk := timed(READ, lambda: next(batches, None))) is not None:
        given, _ = timed(RECORDS, partial(records, part, chunk))
        answer = timed(TRANSFORM, partial(transform, given))
        rows = timed(TALLY, lambda answer=answer: tally.take(split_output(answer, part), layout))
        chunks.append(timed(ENCODE, lambda rows=rows: list(iter(CopyStream(columns, iter([rows])).read, b""))))
    used[FETCH] = time.process_time() - before - sum(used.values())
    timed(SEND, lambda: _send(site, columns, chunks))
    return used


def _send(site: Site, columns: list[tuple[str, str]], batches: list[list[bytes]]) -> None:
    """Sends each batch as a separate COPY, because each was encoded as one."""
    names = ", ".join(name for name, _ in columns)
    with contextlib.closing(psycopg2.connect(site.database_url)) as connection, connection.cursor() as cur:
        for chunks in batches:
            left = iter(chunks)

            class Source:
                def read(self, _size: int = -1) -> bytes:
                    return next(left, b"")  # noqa: B023 - used before the next batch

            cur.copy_expert(f"COPY {TABLE} ({names}) FROM STDIN (FORMAT binary)", Source(), size=COPY_BUFFER_BYTES)
        connection.rollback()

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
from benchmarks.harness.site import COLUMNS, Site
from benchmarks.measurement import Bench, Figures, Measurement, Table
from benchmarks.throughput.in_memory import copy, layout_of, slice_of
from benchmarks.transforms.bench_arrow import transform

from tidemark.kafka.reader import read
from tidemark.records.ranges import Epoch, Slice
from tidemark.sink.encode import CopyStream
from tidemark.sink.table import LINEAGE, Layout
from tidemark.sink.tally import Tally, split_output
from tidemark.worker.batches import records
from tidemark.worker.slice_worker import collect_less_garbage

STAGES = (
    "fetch: librdkafka's threads",
    "read: messages to Arrow columns",
    "records: the transform's batch",
    "transform: JSON to columns (the user's)",
    "judge and tally: account for every record, types, lineage",
    "encode: Arrow to binary COPY",
    "send: to Postgres",
)
FETCH, READ, RECORDS, TRANSFORM, TALLY, ENCODE, SEND = STAGES


def measure(bench: Bench, rounds: int) -> Figures:
    """A row per stage: CPU time in microseconds per record."""
    topic = bench.events()
    collect_less_garbage()
    layout, part = layout_of(bench.site), slice_of(topic, 0, Epoch(0))
    seconds = [_round(bench.site, layout, part) for _ in range(rounds + 1)][1:]
    rows = []
    for stage in STAGES:
        taken = [one[stage] / part.span * 1e6 for one in seconds]
        rows.append({"stage": stage, "cpu_us_per_row": statistics.median(taken), "min": min(taken), "max": max(taken)})
        bench.report(f"{stage:<62} {rows[-1]['cpu_us_per_row']:.3f} µs a row")
    return {"rows": rows}


def _round(site: Site, layout: Layout, part: Slice) -> dict[str, float]:
    """CPU seconds of each stage for one slice."""
    used = dict.fromkeys(STAGES, 0.0)

    def timed(name: str, act: Callable[[], Any]) -> Any:
        before = time.thread_time()
        result = act()
        used[name] += time.thread_time() - before
        return result

    tally, columns, copies = Tally(part), [*COLUMNS, *LINEAGE], []
    before = time.process_time()
    batches = read({"bootstrap.servers": site.servers}, part.partition, part.start, part.end)
    while (chunk := timed(READ, lambda: next(batches, None))) is not None:
        given, _ = timed(RECORDS, partial(records, part, chunk))
        answer = timed(TRANSFORM, partial(transform, given))
        rows = timed(TALLY, lambda answer=answer: tally.take(split_output(answer, part), layout))
        copies.append(timed(ENCODE, lambda rows=rows: list(iter(CopyStream(columns, iter([rows])).read, b""))))
    used[FETCH] = time.process_time() - before - sum(used.values())
    timed(SEND, lambda: _send(site, copies))
    return used


def _send(site: Site, copies: list[list[bytes]]) -> None:
    """Sends each batch as a separate COPY, because each was encoded as one."""
    with contextlib.closing(psycopg2.connect(site.database_url)) as connection, connection.cursor() as cur:
        for chunks in copies:
            copy(cur, chunks)
        connection.rollback()


MEASUREMENT = Measurement(
    "where",
    measure,
    Table(
        "The Python worker's path, Arrow form: CPU in µs a row",
        "stage | median | min | max",
        "{stage} | {cpu_us_per_row:.2f} | {min:.2f} | {max:.2f}",
    ),
    full={"rounds": 5},
    quick={"rounds": 1},
)

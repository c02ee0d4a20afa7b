"""Arrow to rows of a binary COPY, compared with pgpq, which does the same in Rust, in the same process.

The table has a column of most kinds, with nulls. The figure is the CPU time of this process; the values are in memory beforehand, in the
types that both take.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
import unittest.mock
from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import Any

from benchmarks.measurement import Bar, Bench, Figures, Measurement, Table
from benchmarks.throughput.peers.packages import Unobtainable, pgpq_packages

from tidemark import native
from tidemark.sink.encode import CopyStream

ROWS_A_BATCH, ROWS_A_CALL = 10_000, 8_192
"""Rows per batch, as the reader returns them, and rows per call of pgpq at which it is fastest."""
OURS, PGPQ = "Tidemark, compiled", "pgpq"
TYPES = {
    "id": "bigint",
    "quantity": "integer",
    "price": "double precision",
    "amount": "numeric(12,2)",
    "happened_at": "timestamp with time zone",
    "day": "date",
    "is_new": "boolean",
    "kind": "text",
    "note": "text",
    "tags": "text[]",
    "counts": "integer[]",
}


def measure(bench: Bench, rows: int, rounds: int) -> Figures:
    """CPU seconds a million rows, medians; ``ratio``: pgpq's divided by ours, `None` if it could not be installed."""
    batches = list(_batches(rows))
    encoders: dict[str, Callable[[], int]] = {OURS: lambda: _ours(batches), "Tidemark, in Python": lambda: _python(batches)}
    try:
        sys.path.append(str(pgpq_packages(bench.report)))
    except Unobtainable as error:
        bench.report(f"pgpq is skipped: {error}")
    else:
        encoders[PGPQ] = lambda: _pgpq(batches)
    seconds: dict[str, float] = {}
    for encoder, call in encoders.items():
        seconds[encoder] = statistics.median(_cpu_s(call) for _ in range(rounds)) / rows * 1e6
        bench.report(f"{encoder}: {seconds[encoder]:.3f} CPU s a million rows")
    ratio = seconds[PGPQ] / seconds[OURS] if PGPQ in seconds else None
    return {"columns": len(TYPES), "rows": [{"encoder": encoder, "seconds": taken} for encoder, taken in seconds.items()], "ratio": ratio}


def _cpu_s(call: Callable[[], int]) -> float:
    start = time.process_time()
    if call() == 0:
        raise RuntimeError("nothing was encoded")
    return time.process_time() - start


def _ours(batches: list[Any]) -> int:
    return sum(map(len, iter(CopyStream(list(TYPES.items()), iter(batches)).read, b"")))


def _python(batches: list[Any]) -> int:
    with unittest.mock.patch.object(native, "library", return_value=None):
        return _ours(batches)


def _pgpq(batches: list[Any]) -> int:
    from pgpq import ArrowToPostgresBinaryEncoder

    schema = batches[0].schema
    encoders = {field.name: ArrowToPostgresBinaryEncoder.infer_encoder(field) for field in schema}
    encoder = ArrowToPostgresBinaryEncoder.new_with_encoders(schema, encoders)
    size = len(encoder.write_header())
    for batch in batches:
        for start in range(0, batch.num_rows, ROWS_A_CALL):
            size += len(encoder.write_batch(batch.slice(start, ROWS_A_CALL)))
    return size + len(encoder.finish())


def _batches(rows: int) -> Iterator[Any]:
    import pyarrow as pa

    draw = random.Random(1)
    for start in range(0, rows, ROWS_A_BATCH):
        numbers = range(start, min(start + ROWS_A_BATCH, rows))
        micros = pa.array([draw.randrange(2 * 10**15) for _ in numbers])
        days = pa.array([draw.randrange(30_000) for _ in numbers], pa.int32())
        amounts = [Decimal(draw.randrange(10**9)).scaleb(-2) for _ in numbers]
        arrays = [
            pa.array(numbers, pa.int64()),
            pa.array([draw.randrange(10_000) for _ in numbers], pa.int32()),
            pa.array([draw.random() for _ in numbers]),
            pa.array([None if number % 20 == 0 else amount for number, amount in zip(numbers, amounts, strict=True)], pa.decimal128(12, 2)),
            micros.cast(pa.timestamp("us", "UTC")),
            days.cast(pa.date32()),
            pa.array([number % 3 == 0 for number in numbers]),
            pa.array([draw.choice(["click", "view", "order"]) for _ in numbers]),
            pa.array([None if number % 10 == 0 else "x" * draw.randrange(40) for number in numbers]),
            pa.array([["tag"] * draw.randrange(4) for _ in numbers], pa.list_(pa.string())),
            pa.array([list(range(draw.randrange(5))) for _ in numbers], pa.list_(pa.int32())),
        ]
        yield pa.RecordBatch.from_arrays(arrays, names=list(TYPES))


MEASUREMENT = Measurement(
    "encoders",
    measure,
    Table("Rows of {columns} columns to binary COPY: CPU seconds a million rows", "encoder | CPU s", "{encoder} | {seconds:.2f}"),
    bars=[Bar("CPU of pgpq's encoder / of ours", lambda of: of["ratio"], at_least=1.0)],
    full={"rows": 200_000, "rounds": 5},
    quick={"rows": 20_000, "rounds": 1},
)

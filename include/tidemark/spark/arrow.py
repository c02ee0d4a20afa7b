"""Limits the bytes that the JVM passes to a Python worker at a time, at almost no cost.

Spark limits its batches in rows and in bytes. To count bytes it queries every column after each row, a tenth of the total time, and small
rows do not need that limit. So byte counting is off. Instead the plan compares the size of each row's strings and binaries with `LARGE_B`,
and marks and empties larger rows. The worker refuses a slice with such a row, and another job reads the slice again with byte counting.
Before 4.1, Spark cannot count bytes; the other job then has fewer rows in a batch (`tidemark.spark.releases.few_records`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from tidemark.errors import Refused
from tidemark.records.ranges import Slice
from tidemark.spark.releases import MAX_RECORDS

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

MAX_BYTES = "spark.sql.execution.arrow.maxBytesPerBatch"
NO_BYTE_COUNT = str(2**31 - 1)
"""The only byte limit for which Spark does not query the columns."""
LARGE_B = 6_500
"""Maximum size of a small row. Spark's default limits are 10,000 rows and 64 MB; 10,000 rows of this size stay below both."""
FIXED_B = 16
"""The fixed part of a row's size per column: a number, a time, or the offset of a string."""
LARGE = "tidemark_large"
"""The column that marks large rows."""


class LargeRows(Refused):
    """A slice has a row larger than `LARGE_B`, and its job does not count bytes."""

    part: Slice

    def __str__(self) -> str:
        return f"{self.part}: a row is larger than {LARGE_B} bytes."


def user_limits_batches(spark: SparkSession) -> bool:
    """Whether the user has set one of the limits. Then Tidemark changes neither."""
    conf = spark.sparkContext.getConf()
    return conf.contains(MAX_BYTES) or conf.contains(MAX_RECORDS)


def mark_large_rows(rows: DataFrame) -> DataFrame | None:
    """``rows`` with the column `LARGE`; unchanged if all columns have a fixed size; `None` if a column's size is expensive to compute."""
    from pyspark.sql import functions as F
    from pyspark.sql.types import BinaryType, BooleanType, DateType, NumericType, StringType, TimestampNTZType, TimestampType

    fixed = (NumericType, BooleanType, DateType, TimestampType, TimestampNTZType)
    varying = {field.name: F.col(_quoted(field.name)) for field in rows.schema if isinstance(field.dataType, StringType | BinaryType)}
    left_b = LARGE_B - FIXED_B * len(rows.schema)
    if left_b < 0 or not all(field.name in varying or isinstance(field.dataType, fixed) for field in rows.schema):
        return None
    if not varying:
        return rows
    sizes = [F.coalesce(F.octet_length(column), F.lit(0)) for column in varying.values()]
    large = sum(sizes[1:], sizes[0]) > left_b
    return rows.withColumns({**{name: F.when(~large, column) for name, column in varying.items()}, LARGE: large})


@contextlib.contextmanager
def without_byte_count(spark: SparkSession) -> Iterator[None]:
    """Jobs that start within this context limit batches only by the number of rows."""
    spark.conf.set(MAX_BYTES, NO_BYTE_COUNT)
    try:
        yield
    finally:
        spark.conf.unset(MAX_BYTES)


def drop_mark(batch: pa.RecordBatch, part: Slice) -> pa.RecordBatch:
    """``batch`` without the mark. Raises `LargeRows`."""
    if LARGE not in batch.schema.names:
        return batch
    if batch[LARGE].true_count:
        raise LargeRows(part=part)
    return batch.drop_columns([LARGE])


def _quoted(name: str) -> str:
    return f"`{name.replace('`', '``')}`"

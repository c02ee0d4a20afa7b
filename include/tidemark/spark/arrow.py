"""How many bytes the JVM hands to a Python worker at a time, at the cost of as good as nothing.

Spark gathers rows up to a number of them and up to a number of bytes, and to know the bytes it asks all columns after each row: a tenth of
the whole way. Rows that are small need no second limit. So the plan looks at each row's texts and bytes, which costs a comparison, marks
one that is not small and empties it; the bytes are not counted. A slice with such a row is refused by its worker, and read again by a job
in which Spark counts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tidemark.errors import Refused
from tidemark.records.ranges import Slice

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

MAX_BYTES, MAX_RECORDS = "spark.sql.execution.arrow.maxBytesPerBatch", "spark.sql.execution.arrow.maxRecordsPerBatch"
NOT_COUNTED = str(2**31 - 1)
"""The one limit of bytes that Spark does not hold the columns to."""
LARGE_B = 6_500
"""Spark's own limits are 10,000 rows and 64 MB: as many rows of this size stay below both."""
FIXED_B = 16
"""A column's share of that, be it a number, a time, or where a text begins."""
LARGE = "tidemark_large"
"""The column with the mark."""


@dataclass(kw_only=True, eq=False)
class LargeRows(Refused):
    """A slice has a row of more than `LARGE_B`, and its job did not count bytes."""

    part: Slice

    def __str__(self) -> str:
        return f"{self.part}: a row has more than {LARGE_B} bytes."


def chosen_by_user(spark: SparkSession) -> bool:
    """Has somebody set one of the limits? Then both are left alone."""
    conf = spark.sparkContext.getConf()
    return conf.contains(MAX_BYTES) or conf.contains(MAX_RECORDS)


def marked(rows: DataFrame) -> DataFrame | None:
    """``rows`` with the column `LARGE`, or without it if they are of fixed size; `None` if one has no size that is cheaply told."""
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
def not_counted(spark: SparkSession) -> Iterator[None]:
    """Jobs that begin within it gather rows up to their number alone."""
    spark.conf.set(MAX_BYTES, NOT_COUNTED)
    try:
        yield
    finally:
        spark.conf.unset(MAX_BYTES)


def unmarked(batch: pa.RecordBatch, part: Slice) -> pa.RecordBatch:
    """``batch`` without the mark. Raises `LargeRows`."""
    if LARGE not in batch.schema.names:
        return batch
    if batch[LARGE].true_count:
        raise LargeRows(part=part)
    return batch.drop_columns([LARGE])


def _quoted(name: str) -> str:
    return f"`{name.replace('`', '``')}`"

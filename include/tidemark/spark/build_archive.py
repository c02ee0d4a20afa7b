"""Builds the class-data archive of `tidemark.spark.class_archive` if there is none: ``python -m tidemark.spark.build_archive``."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from tidemark.jvm.java import find_java
from tidemark.spark.class_archive import Archive
from tidemark.spark.releases import has_spark_form
from tidemark.spark.session import archived_session, local_archive

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

NO_BROKER = {
    "kafka.bootstrap.servers": "127.0.0.1:1",
    "kafka.request.timeout.ms": "200",
    "kafka.default.api.timeout.ms": "200",
    "fetchOffset.numRetries": "1",
    "assign": '{"t": [0]}',
    "includeHeaders": "true",
}
"""A Kafka source that refuses connections: enough to load most of the connector and its client."""


def build(archive: Archive) -> Path:
    """Builds the archive with a JVM that starts and reads like a local driver's. Returns the file."""
    archive.folder.mkdir(parents=True, exist_ok=True)
    archive.tidy()
    fresh = archive.folder / f".{archive.key}-{os.getpid()}"
    try:
        with archived_session(fresh) as spark:
            _exercise(spark)
        with fresh.open("rb") as file:
            os.fsync(file.fileno())
        for older in archive.folder.glob(f"{archive.key}-*.jsa"):  # must be truncated, or this build would not run
            older.unlink(missing_ok=True)
        built = fresh.rename(archive.folder / archive.name(fresh.stat().st_size))
    finally:
        fresh.unlink(missing_ok=True)
    archive.log.unlink(missing_ok=True)
    return built


def _exercise(spark: SparkSession) -> None:
    """Reads in both ways and runs common functions of transforms. Only a broker's answers are missing."""
    from py4j.protocol import Py4JJavaError

    spark.sparkContext.parallelize([1], 1).mapPartitions(list).collect()
    if not has_spark_form():
        return
    names = ("topic", "partition", "offset", "timestamp", "key", "value", "headers")
    columns = [*names, *(f"{name} AS kafka_{name}" for name in names[:3])]
    records = spark.read.format("kafka").options(**NO_BROKER).load().selectExpr(*columns)
    with contextlib.suppress(Py4JJavaError):
        _transform(records)._jdf.queryExecution().executedPlan()  # noqa: SLF001 - as in `tidemark.spark.query_plan`
    record = ("t", 0, 0, datetime.now(UTC), b"key", b'{"id": 1, "name": "one"}', [("name", b"value")], "t", 0, 0)
    rows = _transform(spark.createDataFrame([record], records.schema))
    for result in (rows, rows.groupBy("kafka_partition").count()):
        result.mapInArrow(_count_rows, "rows bigint").collect()


def _transform(records: DataFrame) -> DataFrame:
    from pyspark.sql import functions as F

    text = F.col("value").cast("string")
    event = F.from_json(text, "id bigint, name string, amount double, happened_at timestamp, tags array<string>")
    columns = ("event.*", "timestamp", "kafka_topic", "kafka_partition", "kafka_offset")
    return records.withColumn("event", event).where(F.length(text) > 0).select(*columns).withColumn("day", F.to_date("timestamp"))


def _count_rows(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    import pyarrow as pa

    yield pa.RecordBatch.from_pydict({"rows": [sum(batch.num_rows for batch in batches)]})


def main() -> None:
    archive = local_archive(find_java())
    sys.stdout.write(f"{archive.find() or build(archive)}\n")


if __name__ == "__main__":
    main()

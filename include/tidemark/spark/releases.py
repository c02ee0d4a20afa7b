"""What differs between the releases of PySpark that Tidemark runs with: 3.5, for the Arrow and the function form, and 4.0 to 4.3.

Nothing else in this package depends on a release; `tidemark.jvm.jars` has the connector for each. In the Spark form, Spark's own connector
reads Kafka, and records come and go as Arrow tables, which needs PySpark 4.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tidemark.errors import Refused
from tidemark.jvm.jars import spark_jars

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import SparkSession

MAX_RECORDS = "spark.sql.execution.arrow.maxRecordsPerBatch"
FEW_RECORDS = "100"
"""With records of 1 MB, Kafka's default maximum, such a batch has 100 MB. Where Spark counts bytes, it limits a batch to 64 MB."""


class NoSparkForm(Refused):
    """The installed PySpark is too old for the Spark form."""

    version: str

    def __str__(self) -> str:
        return (
            f"The Spark form needs PySpark 4.0 or newer, and {self.version} is installed. Upgrade PySpark, or write the transform in the "
            "Arrow or the function form."
        )


def release() -> tuple[int, int]:
    """The release of the installed PySpark, such as ``(4, 1)``."""
    from pyspark import __version__

    major, minor = __version__.split(".")[:2]
    return int(major), int(minor)


def has_spark_form() -> bool:
    return release() >= (4, 0)


def require_spark_form() -> None:
    """Raises `NoSparkForm`."""
    if not has_spark_form():
        from pyspark import __version__

        raise NoSparkForm(version=__version__)


def connector_jars() -> list[Path]:
    """The jars of Spark's Kafka connector; empty if only the forms that do without it run."""
    return spark_jars() if has_spark_form() else []


def sessions_of(jvm: Any) -> Any:
    """The class of the sessions in the JVM."""
    package = jvm.org.apache.spark.sql
    return package.classic.SparkSession if has_spark_form() else package.SparkSession


def cancel_jobs(context: Any, group: str) -> None:
    """Cancels a group's jobs in the JVM. With PySpark 3.5, one that starts later runs until its worker ends with its driver."""
    if has_spark_form():
        context.cancelJobGroupAndFutureJobs(group)
    else:
        context.cancelJobGroup(group)


def arrow_schema() -> Callable[[Any], pa.Schema]:
    """A function that converts a schema of Spark, with times in UTC."""
    from pyspark.sql.pandas.types import to_arrow_schema

    if "timezone" in signature(to_arrow_schema).parameters:  # before 4.2 there is no parameter, and times are in UTC
        return partial(to_arrow_schema, timezone="UTC")
    return to_arrow_schema


@contextlib.contextmanager
def few_records(spark: SparkSession) -> Iterator[None]:
    """Limits the records in a batch for jobs that start within this context, if Spark cannot limit its bytes (before 4.1)."""
    if release() >= (4, 1) or spark.sparkContext.getConf().contains(MAX_RECORDS):
        yield
        return
    spark.conf.set(MAX_RECORDS, FEW_RECORDS)
    try:
        yield
    finally:
        spark.conf.unset(MAX_RECORDS)

"""Translates Spark's errors into Tidemark's, by the classes of their causes and the messages of Kafka's client."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

from tidemark.errors import BrokerUnavailable, Refused, Unavailable
from tidemark.kafka.failures import NotAllowed
from tidemark.kafka.reader import BatchDamaged
from tidemark.worker.call_transform import TransformFailed

DAMAGED = (
    re.compile(
        r"Record batch for partition (?P<topic>\S+)-(?P<partition>\d+) at offset (?P<offset>\d+) is invalid, cause: (?P<cause>[^\n]+)"
    ),
    re.compile(r"(?P<cause>Encountered corrupt message) when fetching offset \d+ for topic-partition (?P<topic>\S+)-(?P<partition>\d+)"),
)
"""Messages of Kafka's Java client for a damaged record batch (``CompletedFetch``, ``FetchCollector``). A task's error is only text."""
DENIED = re.compile(r"Not authorized to access topics: \[(?P<topics>[^\]]+)\]")


class SparkFailed(Unavailable):
    """Spark could not run a batch. ``cause`` is its message."""

    cause: str

    def __str__(self) -> str:
        return f"Spark could not finish the batch: {self.cause} Commits of its tasks stay; the next attempt continues from there."


class DataLoss(Refused):
    """Part of a planned range is missing from the log."""

    kafka_name = "OFFSET_OUT_OF_RANGE"
    cause: str

    def __str__(self) -> str:
        return f"Part of the planned range is no longer in the log: {self.cause} The next run reports what is lost."


class NotATime(Refused):
    """Spark's connector fails on a record's timestamp. ``place``: the partition and offset, if known."""

    place: str | None = None

    def __str__(self) -> str:
        where = "a record's timestamp" if self.place is None else f"the timestamp of {self.place}"
        return (
            f"Spark's Kafka connector cannot read {where}: it is not a time (nanoseconds written as milliseconds?). The function form "
            "fails only this record, and the Arrow form loads it with a null timestamp."
        )


@contextlib.contextmanager
def lost_jvm() -> Iterator[None]:
    """Raises `SparkFailed` if the JVM dies during any call. Exceptions from a running JVM pass unchanged."""
    from py4j.protocol import Py4JError, Py4JJavaError

    try:
        yield
    except Py4JJavaError:
        raise
    except (Py4JError, ConnectionError) as error:
        raise SparkFailed(cause=" ".join(str(error).split())[:2000]) from error


class translated:
    """Context manager that translates Spark's errors into Tidemark's."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, _type: object, error: BaseException | None, _traceback: object) -> None:
        from py4j.protocol import Py4JError, Py4JJavaError
        from pyspark.errors import PySparkException

        if not isinstance(error, PySparkException | Py4JError | ConnectionError):  # py4j raises ConnectionError if the JVM is gone
            return
        names, text = [], str(error).strip().splitlines()
        if isinstance(error, Py4JJavaError):
            cause = error.java_exception
            while cause is not None:
                names.append(str(cause.getClass().getName()))
                text = [str(cause.getMessage())] if cause.getMessage() else text
                cause = cause.getCause()
        message = " ".join(text)[:2000]
        if damaged := next((match for pattern in DAMAGED if (match := pattern.search(str(error)))), None):
            groups = damaged.groupdict()
            offset = int(groups["offset"]) if "offset" in groups else None  # the second message has only the fetch offset
            raise BatchDamaged(
                partition=f"{groups['topic']}/{groups['partition']}", offset=offset, cause=groups["cause"].strip()
            ) from error
        if "long overflow" in message and "KafkaRecordToRowConverter" in str(error):
            raise NotATime from error
        if denied := DENIED.search(str(error)):
            raise NotAllowed(topics=denied["topics"].split(", "), operation="READ", servers="Kafka") from error
        if any(name.startswith("org.apache.kafka.common.errors.") for name in names):
            raise BrokerUnavailable(cause=message) from error
        if "KAFKA_DATA_LOSS" in str(error) or "failOnDataLoss" in str(error):
            raise DataLoss(cause=message) from error
        if "PythonException" in str(error) or isinstance(error, PySparkException):
            raise TransformFailed(where="the executors", problem=_worker_error("\n".join(text))) from error
        raise SparkFailed(cause=message) from error


def _worker_error(message: str) -> str:
    """The useful part of a Python worker's traceback: the error and the last line of code."""
    lines = message.rstrip().splitlines()
    frames = [number for number, line in enumerate(lines) if line.startswith('  File "')]
    if not frames:
        return " ".join(lines)[:2000]
    error = [line for line in lines[frames[-1] :] if not line.startswith("  ")]
    return f"{' '.join(error)[:2000]} ({lines[frames[-1]].strip()})."

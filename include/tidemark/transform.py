"""How to write a transform: what turns Kafka records into rows of your table.

A transform is one function. Put it into a module below ``spark_jobs/transforms/`` and name it in the consumer's file::

    transform: departures:transform        # module:function

It may be written in three forms. Tidemark tells them apart by the type of the first parameter (or of what is returned); without types,
by the first parameter's name. Only the first parameter is given; others need defaults.

The short form: a plain function of one record
----------------------------------------------
Parameter ``record: Record``. Return one row as a mapping of column to value, several rows as an iterable of mappings, or None to skip
the record. The lineage columns of your table are filled in for you.

    >>> from tidemark.transform import Fail, Record, Skip
    >>>
    >>> def transform(record: Record) -> dict:
    ...     flight = record.json()
    ...     if flight is None:
    ...         raise Skip("tombstone")
    ...     if "carrier" not in flight:
    ...         raise Fail("no carrier")
    ...     return {"carrier": flight["carrier"], "delay_min": flight.get("delay")}

It needs no Kafka and no Spark to be tried:

    >>> from datetime import UTC, datetime
    >>> record = Record("flights", 0, 7, datetime(2026, 1, 1, tzinfo=UTC), key=None, value=b'{"carrier": "UA", "delay": 4}', headers=[])
    >>> transform(record)
    {'carrier': 'UA', 'delay_min': 4}

What becomes of a record that makes no row:

=======================  =============================================================================================
what the function does   what happens to the record
=======================  =============================================================================================
returns None or no row   counted as skipped
raises `Skip`            counted as skipped
raises `Fail`            failed for good: kept with the reason, not tried again
raises `Retry`           to be tried again: kept with the reason
raises anything else     as `Retry`, or as `Fail` if the consumer's file lists the exception under ``retry.permanent``
=======================  =============================================================================================

The other records of the batch are loaded all the same. No record is dropped without being counted.

The fast form: Arrow
--------------------
Parameter ``batch: pyarrow.RecordBatch``, and a record batch is returned: whole columns at once, with no Python object for each record.
The batch has the columns ``topic, partition, offset, timestamp, key, value, headers`` (key and value are binary), and the lineage columns
``kafka_topic, kafka_partition, kafka_offset``. The returned batch has your table's columns and, in each row, the lineage of the record that
it was made of: pass those three columns on. A record may have no row, one, or several. ::

    import pyarrow as pa

    def transform(batch: pa.RecordBatch) -> pa.RecordBatch:
        return pa.RecordBatch.from_pydict({
            "kafka_topic": batch["kafka_topic"],
            "kafka_partition": batch["kafka_partition"],
            "kafka_offset": batch["kafka_offset"],
            "payload": batch["value"].cast(pa.string()),
        })

The open form: Spark
--------------------
Parameter ``records: pyspark.sql.DataFrame``, and a DataFrame is returned: SQL, joins, windows, whatever Spark can do. Columns in and out
as in the Arrow form. ::

    from pyspark.sql import DataFrame
    from pyspark.sql import functions as F

    def transform(records: DataFrame) -> DataFrame:
        return records.select(
            "kafka_topic",
            "kafka_partition",
            "kafka_offset",
            F.get_json_object(F.col("value").cast("string"), "$.carrier").alias("carrier"),
        )

In the Arrow and the Spark form a row says what becomes of its record with a column ``disposition``: ``load`` (the same as null or no such
column), ``skip``, ``retry`` or ``fail``, and a column ``error`` for the reason.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

__all__ = ["Fail", "Record", "Retry", "Skip", "Verdict"]


@dataclass(frozen=True, slots=True)
class Record:
    """One Kafka record, as a plain-function transform gets it."""

    topic: str
    partition: int
    offset: int
    timestamp: datetime
    """Aware, in UTC. Set by the producer or by the broker, as the topic is configured."""
    key: bytes | None
    value: bytes | None
    """None is a tombstone."""
    headers: list[tuple[str, bytes | None]] = field(default_factory=list)
    """In the producer's order; a name may come several times."""

    def text(self) -> str | None:
        """The value as UTF-8 text, None for a tombstone. Raises `UnicodeDecodeError` (a `ValueError`) for other bytes."""
        return None if self.value is None else self.value.decode("utf-8")

    def json(self) -> Any:
        """The value read as JSON, None for a tombstone. Raises `ValueError` for a value that is not JSON."""
        return None if self.value is None else json.loads(self.value)


class Verdict(Exception):
    """What a plain function says of a record that makes no row; raise one of `Skip`, `Fail`, `Retry`.

    The reason is stored and shown to people: no payload, no secret.
    """

    def __init__(self, reason: str = "") -> None:
        super().__init__(reason)

    @property
    def reason(self) -> str:
        return str(self.args[0])


class Skip(Verdict):
    """The record is meant to make no row; it is counted as skipped."""


class Fail(Verdict):
    """The record cannot be loaded, now or later; it is kept as failed and not tried again."""


class Retry(Verdict):
    """The record cannot be loaded now but may be later; it is kept to be tried again."""

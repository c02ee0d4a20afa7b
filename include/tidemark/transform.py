"""How to write a transform: the function that turns Kafka records into rows of your table.

Put it into a module under ``spark_jobs/transforms/`` and name it in the consumer's file::

    transform: departures:transform        # module:function

A transform has one of three forms. Tidemark recognizes the form by the type of the first parameter (or of the return value), or, without
types, by the first parameter's name. It passes only the first argument; other parameters need defaults.

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

You can try it without Kafka or Spark:

    >>> from datetime import UTC, datetime
    >>> record = Record("flights", 0, 7, datetime(2026, 1, 1, tzinfo=UTC), key=None, value=b'{"carrier": "UA", "delay": 4}', headers=[])
    >>> transform(record)
    {'carrier': 'UA', 'delay_min': 4}

What happens to a record that produces no row:

=======================  =============================================================================================
what the function does   what happens to the record
=======================  =============================================================================================
returns None or no row   counted as skipped
raises `Skip`            counted as skipped
raises `Fail`            failed permanently: kept with the reason, not retried
raises `Retry`           kept with the reason, to be retried
returns `Delete`         loaded: the row with this key is removed; see ``sink.deletes``
raises anything else     like `Retry`, or `Fail` if the consumer's file lists the exception under ``retry.permanent``
=======================  =============================================================================================

The other records of the batch are still loaded. No record is dropped without being counted.

The fast form: Arrow
--------------------
Parameter ``batch: pyarrow.RecordBatch``. Return a record batch. It works on whole columns at once, without a Python object for each record.
The batch has the columns ``topic, partition, offset, timestamp, key, value, headers`` (key and value are binary) and the lineage columns
``kafka_topic, kafka_partition, kafka_offset``. Return your table's columns, and pass these three on, so that each row has the lineage of
its record. A record may produce no row, one, or several. ::

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
Parameter ``records: pyspark.sql.DataFrame``. Return a DataFrame. You can use SQL, joins, windows, anything that Spark can do. The columns
in and out are those of the Arrow form. ::

    from pyspark.sql import DataFrame
    from pyspark.sql import functions as F

    def transform(records: DataFrame) -> DataFrame:
        return records.select(
            "kafka_topic",
            "kafka_partition",
            "kafka_offset",
            F.get_json_object(F.col("value").cast("string"), "$.carrier").alias("carrier"),
        )

In the Arrow and Spark forms, the column ``disposition`` of a row determines what happens to its record: ``load`` (default, also if null),
``delete`` (the row only needs values in the key's columns), ``skip``, ``retry`` or ``fail``. The column ``error`` holds the reason.

Several tables
--------------
If the consumer's file has ``sinks``, a plain function names the sink of each row, and the Arrow and Spark forms return a dict with one
result for each sink. ::

    from tidemark.transform import Record, to

    def transform(record: Record):
        order = record.json()
        yield to("orders", {"order_id": order["id"], "customer": order["customer"]})
        for number, line in enumerate(order["lines"]):
            yield to("lines", {"order_id": order["id"], "line": number, "article": line["article"]})

All rows of a record are loaded together. If one table refuses a row, the record fails, and none of its rows is loaded.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

__all__ = ["Delete", "Fail", "NoRow", "Record", "Retry", "Skip", "To", "to"]


@dataclass(frozen=True, slots=True)
class Record:
    """One Kafka record, the argument of a plain-function transform."""

    topic: str
    partition: int
    offset: int
    timestamp: datetime
    """Timezone-aware, in UTC. Set by the producer or the broker, depending on the topic's configuration."""
    key: bytes | None
    value: bytes | None
    """None is a tombstone."""
    headers: list[tuple[str, bytes | None]] = field(default_factory=list)
    """In the producer's order; a name may occur several times."""
    data: Any = None
    """The decoded value, if the consumer's file has ``format``: text, parsed JSON, or a dict for an Avro record."""
    key_data: Any = None
    """The decoded key."""

    def text(self) -> str | None:
        """The value as UTF-8 text, None for a tombstone. Raises `UnicodeDecodeError` (a `ValueError`) for other bytes."""
        return None if self.value is None else self.value.decode("utf-8")

    def json(self) -> Any:
        """The value parsed as JSON, None for a tombstone. Raises `ValueError` for a value that is not JSON."""
        return None if self.value is None else json.loads(self.value)


class Delete(dict[str, Any]):
    """The key of a row to delete, as a mapping of column to value. A plain function returns or yields it like a row.

        >>> Delete(order_id=7)
        Delete({'order_id': 7})

    Needs an upsert sink whose ``deletes`` are ``hard`` or ``soft``; otherwise the record fails.
    """

    def __repr__(self) -> str:
        return f"Delete({super().__repr__()})"


@dataclass(frozen=True, slots=True)
class To:
    """A row, or a `Delete`, for one of several sinks: see `to`."""

    sink: str
    row: Mapping[str, Any]


def to(sink: str, row: Mapping[str, Any]) -> To:
    """A row for the sink of this name. With ``sinks``, a plain function returns or yields its rows this way.

    >>> to("lines", {"order_id": 7, "line": 1})
    To(sink='lines', row={'order_id': 7, 'line': 1})
    """
    return To(sink, row)


class NoRow(Exception):
    """Base of `Skip`, `Fail` and `Retry`, which a plain function raises for a record that produces no row.

    The reason is stored and displayed: put no payload or secret into it.
    """

    def __init__(self, reason: str = "") -> None:
        super().__init__(reason)

    @property
    def reason(self) -> str:
        return str(self.args[0])


class Skip(NoRow):
    """The record is not meant to produce a row; it is counted as skipped."""


class Fail(NoRow):
    """The record can never be loaded; it is kept as failed and not retried."""


class Retry(NoRow):
    """The record cannot be loaded now but may be later; it is kept for a retry."""

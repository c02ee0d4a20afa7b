"""Kafka Connect's types, Debezium's among them: what a number or a text stands for, by the name that its schema gives it.

In Avro the name is the attribute ``connect.name``, in JSON it is in the schema that precedes the payload. Debezium's names:
https://debezium.io/documentation/reference/stable/connectors/postgresql.html#postgresql-data-types
"""

from __future__ import annotations

import base64
import binascii
import datetime as dt
from collections.abc import Mapping
from decimal import Decimal
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa

NAME = "connect.name"
"""The attribute of an Avro schema."""
DATE = "io.debezium.time.Date"
TIME, MICRO_TIME, NANO_TIME = (f"io.debezium.time.{unit}Time" for unit in ("", "Micro", "Nano"))
TIMESTAMP, MICRO_TIMESTAMP, NANO_TIMESTAMP = (f"io.debezium.time.{unit}Timestamp" for unit in ("", "Micro", "Nano"))
ZONED_TIMESTAMP = "io.debezium.time.ZonedTimestamp"
DURATION = "io.debezium.time.MicroDuration"
VARIABLE_DECIMAL = "io.debezium.data.VariableScaleDecimal"
JSON = "io.debezium.data.Json"
UUID = "io.debezium.data.Uuid"
_CONNECT = "org.apache.kafka.connect.data"
DECIMAL, CONNECT_DATE, CONNECT_TIME, CONNECT_TIMESTAMP = (f"{_CONNECT}.{name}" for name in ("Decimal", "Date", "Time", "Timestamp"))
EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
_UNITS = {
    TIME: 1_000,
    MICRO_TIME: 1,
    TIMESTAMP: 1_000,
    MICRO_TIMESTAMP: 1,
    DURATION: 1,
    CONNECT_TIME: 1_000,
    CONNECT_TIMESTAMP: 1_000,
}
"""Microseconds in one."""
NAMES = frozenset((*_UNITS, DATE, CONNECT_DATE, NANO_TIME, NANO_TIMESTAMP, ZONED_TIMESTAMP, DECIMAL, VARIABLE_DECIMAL))
"""Those that stand for something else than the value."""
_INFINITE = (9_223_372_036_825_200_000, -9_223_372_036_832_400_000)
"""What Debezium writes for the timestamps infinity and -infinity, in microseconds: some moments of the years 294247 and -290308."""


def arrow_type(name: str) -> pa.DataType | None:
    """The type of Avro data with this ``connect.name``. `None`: the type that it has without the name."""
    import pyarrow as pa

    return {
        DATE: pa.date32(),
        TIME: pa.time64("us"),
        MICRO_TIME: pa.time64("us"),
        NANO_TIME: pa.time64("us"),
        TIMESTAMP: pa.timestamp("us"),
        MICRO_TIMESTAMP: pa.timestamp("us"),
        NANO_TIMESTAMP: pa.timestamp("us"),
        ZONED_TIMESTAMP: pa.timestamp("us", "UTC"),
        DURATION: pa.duration("us"),
        VARIABLE_DECIMAL: pa.string(),
    }.get(name)


def postgres_type(name: str) -> str | None:
    """The column for data of this name, if its Arrow type does not say it."""
    return {JSON: "jsonb", UUID: "uuid", VARIABLE_DECIMAL: "numeric"}.get(name)


TOO_FINE = "has more than 6 digits after the second, which Postgres does not store"


def has_nanoseconds(array: pa.Array) -> bool:
    """Whether a time in nanoseconds is no whole number of microseconds."""
    import pyarrow as pa
    import pyarrow.compute as pc

    nanos = array.cast(pa.int64())
    return bool(pc.any(pc.not_equal(nanos, pc.multiply(pc.divide(nanos, 1_000), 1_000))).as_py())


class NoValue(ValueError):
    """Data that stands for no value of its type. The text says of which field and does not quote the data."""


class NotOfSchema(ValueError):
    """A value of JSON is not what its schema says. The text continues "the value ..." and does not quote it."""


def converted(array: pa.Array, name: str, path: str = "") -> pa.Array:
    """Decoded Avro data as the `arrow_type` of its name. Raises `NoValue`. ``path``: the field."""
    import pyarrow as pa

    try:
        return _converted(array, name, path or "it")
    except NoValue:
        raise
    except (pa.ArrowException, ValueError):
        raise NoValue(f"{path or 'it'} is out of range for {name}") from None


def _converted(array: pa.Array, name: str, path: str) -> pa.Array:
    import pyarrow as pa
    import pyarrow.compute as pc

    target = arrow_type(name)
    if target is None or array.type == target:
        return array
    if name == VARIABLE_DECIMAL:
        return pa.array([None if each is None else _digits(each["value"], each["scale"]) for each in array.to_pylist()], target)
    if name in (NANO_TIME, NANO_TIMESTAMP):
        if has_nanoseconds(array):
            raise NoValue(f"{path} {TOO_FINE}")
        array = pc.divide(array.cast(pa.int64()), 1_000)
    if _UNITS.get(name) == 1_000:
        array = pc.multiply_checked(array.cast(pa.int64()), 1_000)
    if name in (TIMESTAMP, MICRO_TIMESTAMP) and pc.any(pc.is_in(array, pa.array(_INFINITE))).as_py():
        raise NoValue(f"{path} is an infinite timestamp")
    return array.cast(target)


def value_of(value: Any, schema: Mapping[str, Any]) -> Any:
    """What a value of JSON stands for, as a Python object. ``schema``: as Kafka Connect's JsonConverter writes it.

    Raises ValueError, TypeError, KeyError or OverflowError for a value that is not of the schema.
    """
    name = schema.get("name")
    if value is None:
        return None
    if isinstance(value, bool) and name in NAMES:
        raise NoValue("is a boolean")
    if name in (DATE, CONNECT_DATE):
        return (EPOCH + dt.timedelta(days=value)).date()
    if name in (NANO_TIME, NANO_TIMESTAMP):
        if value % 1_000:
            raise NoValue(TOO_FINE)
        return _moment(dt.timedelta(microseconds=value // 1_000), name)
    if name in _UNITS:
        return _moment(dt.timedelta(microseconds=value * _UNITS[name]), name)
    if name == DECIMAL:
        return Decimal(_digits(_bytes(value), int(schema["parameters"]["scale"])))
    if name == VARIABLE_DECIMAL:
        return Decimal(_digits(_bytes(value["value"]), value["scale"]))
    if schema.get("type") == "bytes":
        return _bytes(value)
    if schema.get("type") == "array":
        return [value_of(each, schema["items"]) for each in value]
    return value


def _moment(since: dt.timedelta, name: str) -> dt.timedelta | dt.time | dt.datetime:
    if name == DURATION:
        return since
    at = EPOCH + since
    if not name.endswith("Time"):
        return at if name == CONNECT_TIMESTAMP else at.replace(tzinfo=None)
    if at.date() != EPOCH.date():
        raise NotOfSchema("is not a time of a day")
    return at.time()


def _bytes(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, TypeError) as error:
        raise NotOfSchema("is not bytes in base64") from error


MOST_BYTES = 65_536
"""Of the digits of a decimal. Postgres' ``numeric`` takes fewer."""


def _digits(unscaled: bytes | None, scale: int | None) -> str:
    """The number as text, in a size that does not depend on the scale."""
    if unscaled is None or scale is None:
        raise NoValue("has no value or no scale")
    if len(unscaled) > MOST_BYTES:
        raise NoValue(f"has more than {MOST_BYTES:,} bytes of digits")
    number = Decimal(int.from_bytes(unscaled, "big", signed=True))
    sign, digits, _ = number.as_tuple()
    number = Decimal((sign, digits, -scale))
    return f"{number:f}" if 0 <= scale <= _MOST_ZEROS else str(number)  # without zeros that nobody sent


_MOST_ZEROS = 100

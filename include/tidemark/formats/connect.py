"""Kafka Connect's types, including Debezium's: the meaning of a number or a text, by its schema's name.

Avro has the name in the attribute ``connect.name``, JSON in the schema before the payload. Debezium's names:
https://debezium.io/documentation/reference/stable/connectors/postgresql.html#postgresql-data-types
"""

from __future__ import annotations

import base64
import datetime as dt
from collections.abc import Mapping
from decimal import Decimal
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa

NAME = "connect.name"
"""The attribute of an Avro schema that holds the name."""
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
"""Microseconds per unit."""
NAMES = frozenset((*_UNITS, DATE, CONNECT_DATE, NANO_TIME, NANO_TIMESTAMP, ZONED_TIMESTAMP, DECIMAL, VARIABLE_DECIMAL))
"""Names of types whose values need conversion."""
_INFINITE = (9_223_372_036_825_200_000, -9_223_372_036_832_400_000)
"""Debezium's values for the timestamps infinity and -infinity, in microseconds: moments of the years 294247 and -290308."""


def arrow_type(name: str) -> pa.DataType | None:
    """The type of Avro data with this ``connect.name``. `None` if the name does not change the type."""
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
    """The column type for data of this name, if the Arrow type does not imply it."""
    return {JSON: "jsonb", UUID: "uuid", VARIABLE_DECIMAL: "numeric"}.get(name)


TOO_FINE = "has more than 6 digits after the second, which Postgres does not store"


def has_nanoseconds(array: pa.Array) -> bool:
    """Whether a time in nanoseconds is not a whole number of microseconds."""
    import pyarrow as pa
    import pyarrow.compute as pc

    nanos = array.cast(pa.int64())
    return bool(pc.any(pc.not_equal(nanos, pc.multiply(pc.divide(nanos, 1_000), 1_000))).as_py())


class Misfit(ValueError):
    """A value does not fit its type or its column. The text continues "the value ..." and does not quote it."""


class InvalidConnectValue(ValueError):
    """A value invalid for its Connect type. The text names the field and does not quote the data."""


def converted(array: pa.Array, name: str, path: str = "") -> pa.Array:
    """Decoded Avro data, converted to the `arrow_type` of its name. Raises `InvalidConnectValue`. ``path``: the field."""
    import pyarrow as pa

    try:
        return _converted(array, name)
    except (pa.ArrowException, ValueError) as error:
        problem = error if isinstance(error, Misfit) else f"is out of range for {name}"
        raise InvalidConnectValue(f"{path or 'it'} {problem}") from None


def _converted(array: pa.Array, name: str) -> pa.Array:
    import pyarrow as pa
    import pyarrow.compute as pc

    target = arrow_type(name)
    if target is None or array.type == target:
        return array
    if name == VARIABLE_DECIMAL:
        return pa.array(
            [None if decimal is None else _decimal_text(decimal["value"], decimal["scale"]) for decimal in array.to_pylist()], target
        )
    if name in (NANO_TIME, NANO_TIMESTAMP):
        if has_nanoseconds(array):
            raise Misfit(TOO_FINE)
        array = pc.divide(array.cast(pa.int64()), 1_000)
    if _UNITS.get(name) == 1_000:
        array = pc.multiply_checked(array.cast(pa.int64()), 1_000)
    if name in (TIMESTAMP, MICRO_TIMESTAMP) and pc.any(pc.is_in(array, pa.array(_INFINITE))).as_py():
        raise Misfit("is an infinite timestamp")
    return array.cast(target)


def value_of(value: Any, schema: Mapping[str, Any]) -> Any:
    """The Python object for a JSON value. ``schema``: as Kafka Connect's JsonConverter writes it.

    Raises `Misfit`, TypeError, KeyError or OverflowError for a value that does not match the schema.
    """
    name = schema.get("name")
    if value is None:
        return None
    if isinstance(value, bool) and name in NAMES:
        raise Misfit("is a boolean")
    if name in (DATE, CONNECT_DATE):
        return (EPOCH + dt.timedelta(days=value)).date()
    if name in (NANO_TIME, NANO_TIMESTAMP):
        if value % 1_000:
            raise Misfit(TOO_FINE)
        return _moment(dt.timedelta(microseconds=value // 1_000), name)
    if name in _UNITS:
        return _moment(dt.timedelta(microseconds=value * _UNITS[name]), name)
    if name == DECIMAL:
        return Decimal(_decimal_text(from_base64(value), int(schema["parameters"]["scale"])))
    if name == VARIABLE_DECIMAL:
        return Decimal(_decimal_text(from_base64(value["value"]), value["scale"]))
    if schema.get("type") == "bytes":
        return from_base64(value)
    if schema.get("type") == "array":
        return [value_of(item, schema["items"]) for item in value]
    return value


def _moment(since: dt.timedelta, name: str) -> dt.timedelta | dt.time | dt.datetime:
    if name == DURATION:
        return since
    at = EPOCH + since
    if not name.endswith("Time"):
        return at if name == CONNECT_TIMESTAMP else at.replace(tzinfo=None)
    if at.date() != EPOCH.date():
        raise Misfit("is not a time of a day")
    return at.time()


def from_base64(text: str) -> bytes:
    """Decodes base64. Raises `Misfit`."""
    try:
        return base64.b64decode(text, validate=True)
    except (TypeError, ValueError):
        raise Misfit("is not bytes in base64") from None


MAX_DIGITS_BYTES = 65_536
"""Maximum size of a decimal's digits, above that of Postgres' ``numeric``."""


def _decimal_text(unscaled: bytes | None, scale: int | None) -> str:
    """The number as text, in a size that does not depend on the scale."""
    if unscaled is None or scale is None:
        raise Misfit("has no value or no scale")
    if len(unscaled) > MAX_DIGITS_BYTES:
        raise Misfit(f"has more than {MAX_DIGITS_BYTES:,} bytes of digits")
    number = Decimal(int.from_bytes(unscaled, "big", signed=True))
    sign, digits, _ = number.as_tuple()
    number = Decimal((sign, digits, -scale))
    return f"{number:f}" if 0 <= scale <= _MAX_ZEROS else str(number)  # without adding zeros


_MAX_ZEROS = 100

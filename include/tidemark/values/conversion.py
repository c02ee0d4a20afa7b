"""The conversion table: which kinds of values each column type accepts, and how it converts them. All formats, change data, consumers
without code and the function form of a transform use it.

A cell is `Rule.ALWAYS` if every value of the kind is stored unchanged, `Rule.CHECKED` if that depends on the value. A kind without a cell
is refused. A value that does not fit its column fails only its own record.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import enum
import functools
import math
import re
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import msgspec

from tidemark.formats.connect import Misfit
from tidemark.sink import numeric
from tidemark.sink.encode import is_encodable
from tidemark.sink.types import arrow_type, base_of, conformed, cut, fits, is_bytes, is_text, uuid_bytes
from tidemark.values.arrow_values import TOO_FINE, python_values
from tidemark.values.json_text import json_text
from tidemark.values.plain import plain

if TYPE_CHECKING:
    import pyarrow as pa


class Kind(enum.Enum):
    """Kinds of values, by their names in `docs/formats.md`."""

    BOOLEAN = "boolean"
    INTEGER = "integer"
    DECIMAL = "decimal number"
    FLOAT = "floating-point number"
    TEXT = "text"
    BYTES = "bytes"
    UUID = "uuid"
    DATE = "date"
    TIME = "time"
    TIMESTAMP = "timestamp without zone"
    TIMESTAMPTZ = "timestamp with zone"
    INTERVAL = "interval"
    RECORD = "record or map"
    LIST = "list"


class Rule(enum.Enum):
    ALWAYS = "always"
    CHECKED = "checked"


@dataclass(frozen=True, slots=True)
class Cell:
    """``convert`` gets a value and the column's type. It returns a value for the column's `arrow_type`, or raises `Misfit`."""

    rule: Rule
    convert: Callable[[Any, str], Any]


INTEGERS = {"smallint": 2**15, "integer": 2**31, "bigint": 2**63}
_FLOATS = ("real", "double precision")
TEXTS = ("text", "character varying", "character", "name")
JSONS = ("json", "jsonb")
_EXACT_DIGITS = {"real": (6, 2.0**-126), "double precision": (15, 2.0**-1022)}
"""Decimal digits that a float always keeps, and the smallest magnitude at which it does."""
_MAX_DIGITS = 1_100
"""A double has at most 767 significant digits."""
_DATE = r"\d{4}-\d\d-\d\d"
_TIME = r"\d\d:\d\d(?::\d\d(?:[.,]\d+)?)?"
_TIMESTAMP = rf"{_DATE}[T ]{_TIME}"
_ZONE = r"(?:Z|z|[+-]\d\d(?::?[0-5]\d(?::?[0-5]\d)?)?)"
_DAY = r"^(?:000[1-9]|00[1-9]|0[1-9]|[1-9])\d*-\d\d-\d\d"
_INNER_DAY = r"^(?:000[2-9]|00[1-9]\d|0[1-9]\d\d|[1-8]\d\d\d|9[0-8]\d\d|99[0-8]\d|999[0-8])-\d\d-\d\d"
_CLOCK = r"[T ]\d\d:\d\d:\d\d(?:\.\d{1,6})?"
_ISO = {
    "date": rf"{_DAY}$",
    "timestamp without time zone": rf"{_DAY}{_CLOCK}$",
    "timestamp with time zone": rf"{_INNER_DAY}{_CLOCK}(?:Z|[+-]\d\d:[0-5]\d)$",
}
"""Texts that Arrow and Python parse alike."""
_BEYOND_MICROS = re.compile(r"[.,]\d{6}\d*[1-9]")
_FRACTION = re.compile(r"([.,]\d{6})\d+")


def _same(value: Any, _: str) -> Any:
    return value


def _integer(value: int, postgres: str) -> int:
    limit = INTEGERS[base_of(postgres)]
    if not -limit <= value < limit:
        raise Misfit("is out of range")
    return int(value)


def _whole(value: Decimal | float, postgres: str) -> int:
    number = value if isinstance(value, Decimal) else Decimal(value)
    if not number.is_finite():
        raise Misfit("is not a finite number")
    if not number:  # a zero with any exponent
        return 0
    if number.adjusted() > 20:  # checked first: expanding a large exponent takes minutes
        raise Misfit("is out of range")
    if number != number.to_integral_value():
        raise Misfit("is not a whole number")
    return _integer(int(number), postgres)


def _float_of_decimal(value: Decimal, postgres: str) -> float:
    """The nearest float, if it keeps all digits of the value."""
    base = base_of(postgres)
    if not value.is_finite():
        return float(_special(value))
    if base == "double precision" and repr(float(value)) == str(value):
        return float(value)
    digits = len("".join(map(str, value.as_tuple().digits)).rstrip("0")) or 1
    if digits > _MAX_DIGITS:
        raise Misfit(f"has more digits than {base} keeps")
    nearest = _float32(float(value)) if base == "real" else float(value)
    if math.isinf(nearest) or (nearest == 0) is not (value == 0):
        raise Misfit("is out of range")
    most, least = _EXACT_DIGITS[base]
    if (digits > most or abs(nearest) < least) and Decimal(f"{nearest:.{digits - 1}e}") != value:
        raise Misfit(f"has more digits than {base} keeps")
    return nearest


def _special(value: Decimal) -> Decimal:
    """A non-finite number. A NaN loses its sign and payload, which Postgres does not support."""
    if value.is_snan():
        raise Misfit("is a signaling NaN")
    return Decimal("NaN") if value.is_nan() else value


def _real_of_float(value: float, postgres: str) -> float:
    """A double for a ``real`` column, if that keeps the digits of its ``repr``."""
    if not math.isfinite(value) or _float32(value) == value:
        return value
    return _float_of_decimal(Decimal(repr(value)), postgres)


def _float32(value: float) -> float:
    import numpy as np

    with np.errstate(over="ignore"):
        return float(np.float32(value))


def _numeric(value: Decimal | int, postgres: str) -> str:
    number = value if isinstance(value, Decimal) else Decimal(value)
    number = number if number.is_finite() else _special(number)
    numeric.require_fits(number, postgres)
    return str(number)


def _parsed_uuid(text: str, _: str) -> bytes:
    if (octets := uuid_bytes(text)) is None:
        raise Misfit("is not a uuid")
    return octets


def _uuid_bytes(value: bytes, _: str) -> bytes:
    if len(value) != 16:
        raise Misfit("does not have 16 bytes")
    return value


def _utf8(value: bytes, _: str) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise Misfit("is not UTF-8 text") from None


def _iso(form: str, parse: Callable[[str], Any], what: str) -> Callable[[str, str], Any]:
    """The conversion of text in ISO 8601."""
    pattern = re.compile(form, re.ASCII)

    def convert(text: str, _: str) -> Any:
        if not pattern.fullmatch(text):
            raise Misfit(f"is not {what} in ISO 8601")
        _require_micros(text)
        try:
            return parse(_FRACTION.sub(r"\1", text))
        except ValueError:
            raise Misfit(f"is not {what} that exists") from None

    return convert


def _require_micros(text: str) -> None:
    if _BEYOND_MICROS.search(text):
        raise Misfit("has more than 6 digits after the second")


def _in_utc(text: str) -> dt.datetime:
    try:
        return dt.datetime.fromisoformat(text.upper()).astimezone(dt.UTC)
    except OverflowError as error:
        raise ValueError from error


def _parsed_interval(text: str, _: str) -> dt.timedelta:
    _require_micros(text)
    try:
        return msgspec.convert(text, dt.timedelta)
    except (msgspec.ValidationError, OverflowError):
        raise Misfit("is not a time of days, hours, minutes and seconds in ISO 8601") from None


def _micros_of_millis(milliseconds: int, _: str) -> int:
    """Microseconds, which Arrow accepts for a timestamp."""
    if not -(2**63) <= milliseconds * 1_000 < 2**63:
        raise Misfit("is out of range for milliseconds since 1970")
    return int(milliseconds) * 1_000


def _decimal_text(value: Decimal, _: str) -> str:
    """Without an exponent, unless most digits would be zeros."""
    exponent = value.as_tuple().exponent
    if not isinstance(exponent, int):
        return str(_special(value))
    return f"{value:f}" if -100 <= exponent <= 0 else str(value)


def _integer_text(value: int, _: str) -> str:
    try:
        return str(value)
    except ValueError:  # Python writes 4,300 digits at most
        return str(Decimal(value))


def _float_text(value: float, _: str) -> str:
    return _SPECIAL_TEXT.get(text := repr(float(value)), text)


_SPECIAL_TEXT = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}


def _json(value: Any, _: str) -> str:
    return json_text(value, strict=True)


def _unquoted(value: Any, _: str) -> str:
    return json_text(value).strip('"')


_ALWAYS, _CHECKED = Rule.ALWAYS, Rule.CHECKED


def _cells() -> Mapping[Kind, Mapping[str, Cell]]:
    """The table: by kind of value, then by column type without modifier."""

    def row(*cells: tuple[Iterable[str] | str, Rule, Callable[[Any, str], Any]]) -> Mapping[str, Cell]:
        return {
            column: Cell(rule, convert)
            for columns, rule, convert in cells
            for column in ([columns] if isinstance(columns, str) else columns)
        }

    as_text = (TEXTS, _ALWAYS, _unquoted), (JSONS, _ALWAYS, _json)
    return {
        Kind.BOOLEAN: row(("boolean", _ALWAYS, _same), *as_text),
        Kind.INTEGER: row(
            (INTEGERS, _CHECKED, _integer),
            (_FLOATS, _CHECKED, lambda value, postgres: _float_of_decimal(Decimal(value), postgres)),
            ("numeric", _CHECKED, _numeric),
            ((*TEXTS, *JSONS), _ALWAYS, _integer_text),
            ("timestamp with time zone", _CHECKED, _micros_of_millis),
        ),
        Kind.DECIMAL: row(
            (INTEGERS, _CHECKED, _whole),
            (_FLOATS, _CHECKED, _float_of_decimal),
            ("numeric", _CHECKED, _numeric),
            (TEXTS, _ALWAYS, _decimal_text),
            ("timestamp with time zone", _CHECKED, lambda value, postgres: _micros_of_millis(_whole(value, "bigint"), postgres)),
            (JSONS, _CHECKED, _json),
        ),
        Kind.FLOAT: row(
            (INTEGERS, _CHECKED, _whole),
            ("real", _CHECKED, _real_of_float),
            ("double precision", _ALWAYS, _same),
            (TEXTS, _ALWAYS, _float_text),
            (JSONS, _CHECKED, _json),
        ),
        Kind.TEXT: row(
            (INTEGERS, _CHECKED, lambda text, postgres: _whole(numeric.number_of(text), postgres)),
            (_FLOATS, _CHECKED, lambda text, postgres: _float_of_decimal(numeric.number_of(text), postgres)),
            ("numeric", _CHECKED, lambda text, postgres: _numeric(numeric.number_of(text), postgres)),
            ((*TEXTS, "enum", *JSONS), _ALWAYS, _same),
            ("uuid", _CHECKED, _parsed_uuid),
            ("date", _CHECKED, _iso(_DATE, dt.date.fromisoformat, "a date")),
            ("time without time zone", _CHECKED, _iso(_TIME, dt.time.fromisoformat, "a time without zone")),
            ("timestamp without time zone", _CHECKED, _iso(_TIMESTAMP, dt.datetime.fromisoformat, "a timestamp without zone")),
            ("timestamp with time zone", _CHECKED, _iso(_TIMESTAMP + _ZONE, _in_utc, "a timestamp with zone")),
            ("interval", _CHECKED, _parsed_interval),
        ),
        Kind.BYTES: row(("bytea", _ALWAYS, _same), (TEXTS, _CHECKED, _utf8), ("uuid", _CHECKED, _uuid_bytes), (JSONS, _ALWAYS, _json)),
        Kind.UUID: row(("uuid", _ALWAYS, lambda value, _: value.bytes), *as_text),
        Kind.DATE: row(("date", _ALWAYS, _same), *as_text),
        Kind.TIME: row(("time without time zone", _ALWAYS, _same), *as_text),
        Kind.TIMESTAMP: row(("timestamp without time zone", _ALWAYS, _same), *as_text),
        Kind.TIMESTAMPTZ: row(("timestamp with time zone", _ALWAYS, _same), *as_text),
        Kind.INTERVAL: row(("interval", _CHECKED, _same), *as_text),
        Kind.RECORD: row((TEXTS, _CHECKED, _json), (JSONS, _CHECKED, _json)),
        Kind.LIST: row((TEXTS, _CHECKED, _json), (JSONS, _CHECKED, _json)),
    }


CELLS = _cells()


def cell(kind: Kind, postgres: str) -> Cell | None:
    """The table's cell. `None` if a column of this type, as ``format_type`` spells it, does not accept the kind, or only lists of it."""
    return CELLS[kind].get(base_of(postgres))


def converts(source: pa.DataType, postgres: str) -> bool:
    """Whether a column of this type accepts values of the Arrow type; under `Rule.CHECKED`, it may still refuse some of them."""
    import pyarrow as pa

    if arrow_type(postgres) is None:
        return False
    if pa.types.is_null(source):
        return True
    if postgres.endswith("[]"):
        return bool(pa.types.is_list(source) or pa.types.is_large_list(source)) and converts(source.value_type, postgres[:-2])
    kind = kind_of(source)
    return kind is not None and cell(kind, postgres) is not None


def kind_of(source: pa.DataType) -> Kind | None:
    """The kind of values of an Arrow type."""
    import pyarrow as pa

    if pa.types.is_dictionary(source):
        return kind_of(source.value_type)
    if pa.types.is_timestamp(source):
        return Kind.TIMESTAMPTZ if source.tz else Kind.TIMESTAMP
    predicates = {
        Kind.BOOLEAN: pa.types.is_boolean,
        Kind.INTEGER: pa.types.is_integer,
        Kind.DECIMAL: pa.types.is_decimal,
        Kind.FLOAT: pa.types.is_floating,
        Kind.TEXT: is_text,
        Kind.BYTES: is_bytes,
        Kind.DATE: pa.types.is_date,
        Kind.TIME: pa.types.is_time,
        Kind.INTERVAL: pa.types.is_duration,
        Kind.LIST: lambda kind: pa.types.is_list(kind) or pa.types.is_large_list(kind),
        Kind.RECORD: lambda kind: pa.types.is_struct(kind) or pa.types.is_map(kind),
    }
    return next((kind for kind, is_kind in predicates.items() if is_kind(source)), None)


_KINDS: Mapping[type, Kind] = {
    bool: Kind.BOOLEAN,
    int: Kind.INTEGER,
    Decimal: Kind.DECIMAL,
    float: Kind.FLOAT,
    str: Kind.TEXT,
    bytes: Kind.BYTES,
    uuid.UUID: Kind.UUID,
    dt.date: Kind.DATE,
    dt.timedelta: Kind.INTERVAL,
    dict: Kind.RECORD,
    list: Kind.LIST,
}


def _kind(value: Any) -> Kind:
    """The kind of a plain value."""
    if (kind := _KINDS.get(type(value))) is not None:
        return kind
    if isinstance(value, dt.datetime):
        return Kind.TIMESTAMP if value.tzinfo is None else Kind.TIMESTAMPTZ
    assert isinstance(value, dt.time)
    return Kind.TIME


@functools.lru_cache(maxsize=1024)
def _converter(kind: type, postgres: str) -> Callable[[Any, str], Any]:
    """The conversion for values of exactly this Python type."""
    is_plain = kind in _KINDS and kind not in (dict, list) and not postgres.endswith("[]")
    conversion = cell(_KINDS[kind], postgres) if is_plain else None
    return conversion.convert if conversion is not None else lambda value, postgres: _converted(plain(value), postgres)


def _converted(value: Any, postgres: str) -> Any:
    if value is None:
        return None
    kind = _kind(value)
    if postgres.endswith("[]"):
        if kind is not Kind.LIST:
            raise Misfit(f"is {_WITH_ARTICLE[kind]}, not a list")
        return [_converted(item, postgres[:-2]) for item in value]
    conversion = cell(kind, postgres)
    if conversion is None:
        raise Misfit(f"is {_WITH_ARTICLE[kind]}")
    return conversion.convert(value, postgres)


_WITH_ARTICLE = {
    kind: kind.value if kind in (Kind.TEXT, Kind.BYTES) else f"{'an' if kind.value[0] in 'aeio' else 'a'} {kind.value}" for kind in Kind
}


_NATIVE: Mapping[str, type] = {
    "boolean": bool,
    **dict.fromkeys(INTEGERS, int),
    "double precision": float,
    **dict.fromkeys((*TEXTS, "enum", *JSONS), str),
    "bytea": bytes,
    "date": dt.date,
    "time without time zone": dt.time,
    "timestamp without time zone": dt.datetime,
    "timestamp with time zone": dt.datetime,
    "interval": dt.timedelta,
}


def _are_native(values: list[Any], postgres: str) -> bool:
    """Whether the values need no conversion: Arrow stores them unchanged, or refuses them."""
    base = base_of(postgres)
    native = _NATIVE.get(base)
    if native is None or not {*map(type, values)} <= {native, type(None)}:
        return False
    if base == "timestamp with time zone":
        return all(value is None or value.tzinfo is dt.UTC for value in values)
    return native not in (dt.datetime, dt.time) or all(value is None or value.tzinfo is None for value in values)


def from_python(values: list[Any], postgres: str) -> tuple[pa.Array, dict[int, str]]:
    """Python values as an array for a column of this type, and the reason for each that does not fit, by index. Misfits are null."""
    converted, misfits = _convert_all(values, postgres)
    return _with_nulls(converted, misfits, cut(converted, postgres))


def _with_nulls(array: pa.Array, misfits: dict[int, str], cut_off: Mapping[int, str]) -> tuple[pa.Array, dict[int, str]]:
    import pyarrow as pa

    if cut_off:
        array = array.take(pa.array([None if at in cut_off else at for at in range(len(array))], pa.int64()))
    return array, {**cut_off, **misfits}


def _convert_all(values: list[Any], postgres: str) -> tuple[pa.Array, dict[int, str]]:
    import pyarrow as pa

    base = base_of(postgres)
    target = {"numeric": pa.string(), "numeric[]": pa.list_(pa.string())}.get(base) or arrow_type(postgres)
    try:
        array = pa.array(values, target) if _are_native(values, postgres) else _convert_together(values, base, postgres)
    except MemoryError:
        raise
    except Exception:  # noqa: BLE001 - the loop below finds the values at fault
        array = None
    if array is not None:
        return array, {}
    misfits: dict[int, str] = {}
    converted: list[Any] = []
    for at, value in enumerate(values):
        try:
            kind: Any = type(value)
            convert = _converter(kind, postgres)
            converted.append(convert(value, postgres))
        except MemoryError:
            raise
        except Exception as error:  # noqa: BLE001 - any error is the value's fault
            misfits[at] = _reason(error)
            converted.append(None)
    try:
        return pa.array(converted, target), misfits
    except (pa.ArrowException, TypeError, ValueError, OverflowError):  # a time beyond Arrow's range, text that is not Unicode
        parts = []
        for at, value in enumerate(converted):
            try:
                parts.append(pa.array([value], target))
            except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
                misfits[at] = "is not Unicode text" if isinstance(error, UnicodeError) else "is out of range"
                parts.append(pa.nulls(1, target))
        return pa.concat_arrays(parts), misfits


def _reason(error: Exception) -> str:
    if isinstance(error, Misfit):
        return str(error)
    return "is nested too deeply" if isinstance(error, RecursionError) else f"cannot be converted: {type(error).__name__}"


def _convert_together(values: list[Any], base: str, postgres: str) -> pa.Array | None:
    """Converts numbers and times in text, the usual values of JSON, in one pass. `None` if some may be of another kind, or may not fit."""
    import pyarrow as pa
    import pyarrow.compute as pc

    kinds = {*map(type, values)} - {type(None)}
    if Decimal in kinds and not all(value.is_finite() for value in values if type(value) is Decimal):
        return None
    if base == "numeric" and kinds <= {Decimal, int}:
        texts = pa.array([None if value is None else str(Decimal(value)) for value in values], pa.string())
        return texts if is_encodable(texts, postgres) else None
    if base == "double precision" and kinds == {Decimal}:
        floats = [None if value is None else float(value) for value in values]
        same = list(map(repr, floats)) == list(map(str, values))
        return pa.array(floats, pa.float64()) if same else None
    if base in _ISO and kinds == {str}:
        texts = pa.array(values, pa.string())
        if pc.all(pc.match_substring_regex(texts, _ISO[base])).as_py() in (True, None):
            with contextlib.suppress(pa.ArrowInvalid):
                return texts.cast(arrow_type(postgres))
    return None


def as_column(array: pa.Array, postgres: str) -> tuple[pa.Array, dict[int, str]]:
    """Like `from_python`, for an array of a type that `converts`."""
    import pyarrow as pa

    target = arrow_type(postgres)
    assert target is not None
    source = array.type
    if base_of(postgres).removesuffix("[]") == "numeric":
        inner = source if not postgres.endswith("[]") or pa.types.is_null(source) else source.value_type
        if pa.types.is_decimal(inner) and fits(source, postgres):
            return array, {}
    elif fits(source, postgres):
        misfits: dict[int, str] = {}
        try:
            converted = conformed(array, postgres)
        except pa.ArrowException:
            converted, misfits = _conform_each(array, postgres)
        return _with_nulls(converted, misfits, cut(converted, postgres))
    with contextlib.suppress(pa.ArrowException):  # out of range
        if pa.types.is_integer(source) and pa.types.is_integer(target):
            return array.cast(target), {}
        if pa.types.is_int64(source) and pa.types.is_timestamp(target):
            return array.cast(pa.timestamp("ms", target.tz)).cast(target), {}
    values, unreadable = python_values(array)
    converted, misfits = from_python(values, postgres)
    return converted, misfits | unreadable


def _conform_each(array: pa.Array, postgres: str) -> tuple[pa.Array, dict[int, str]]:
    import pyarrow as pa

    target = arrow_type(postgres)
    parts, misfits = [], {}
    for at in range(len(array)):
        single = array.slice(at, 1)
        try:
            parts.append(conformed(single, postgres).cast(target))
        except pa.ArrowException:
            misfits[at] = "is not a uuid" if base_of(postgres).startswith("uuid") else TOO_FINE
            parts.append(pa.nulls(1, target))
    return pa.concat_arrays(parts), misfits

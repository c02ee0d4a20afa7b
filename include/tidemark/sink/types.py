"""Maps Arrow types to the Postgres types that they can be written to.

Postgres does not type check binary COPY: an int64 sent to a float8 column is stored as garbage, without an error. So the match is exact
and is checked before the first byte. Other representations of the same values (string_view, dictionaries, coarser time units) are
converted to the one form that the encoder accepts; nothing is rounded, widened or parsed.
"""

from __future__ import annotations

import functools
import re
from typing import TYPE_CHECKING

from tidemark.sink.numeric import limits

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa

ELEMENT_OIDS = {
    "boolean": 16,
    "bytea": 17,
    "bigint": 20,
    "smallint": 21,
    "integer": 23,
    "text": 25,
    "real": 700,
    "double precision": 701,
    "date": 1082,
    "time without time zone": 1083,
    "timestamp without time zone": 1114,
    "timestamp with time zone": 1184,
    "interval": 1186,
    "numeric": 1700,
}
"""The element types of the arrays that can be written. Binary COPY names the element type by its OID, and Postgres rejects a mismatch."""
_DECIMAL128 = 38
"""Maximum digits of a decimal128."""
_MICROS = 6
"""Maximum fractional digits of a second in Postgres."""
_TEXT = {"text", "character varying", "character", "json", "jsonb", "name"}


def postgres_type(arrow: pa.DataType) -> str | None:
    """Returns the column type for values of this Arrow type, or `None` if Postgres has no counterpart."""
    import pyarrow as pa

    simple: list[tuple[bool, str]] = [
        (pa.types.is_boolean(arrow), "boolean"),
        (pa.types.is_int8(arrow) or pa.types.is_uint8(arrow) or pa.types.is_int16(arrow), "smallint"),
        (pa.types.is_uint16(arrow) or pa.types.is_int32(arrow), "integer"),
        (pa.types.is_uint32(arrow) or pa.types.is_int64(arrow), "bigint"),
        (pa.types.is_float16(arrow) or pa.types.is_float32(arrow), "real"),
        (pa.types.is_float64(arrow), "double precision"),
        (is_text(arrow), "text"),
        (is_bytes(arrow), "bytea"),
        (pa.types.is_date(arrow), "date"),
        (pa.types.is_time(arrow), "time without time zone"),
        (pa.types.is_duration(arrow), "interval"),
    ]
    for matches, name in simple:
        if matches:
            return name
    if pa.types.is_timestamp(arrow):
        return "timestamp with time zone" if arrow.tz else "timestamp without time zone"
    if pa.types.is_decimal(arrow) and arrow.scale >= 0:
        return f"numeric({arrow.precision},{arrow.scale})"
    if pa.types.is_list(arrow) or pa.types.is_large_list(arrow):
        element = postgres_type(arrow.value_type)
        return f"{element}[]" if element is not None and base_of(element) in ELEMENT_OIDS else None
    if pa.types.is_dictionary(arrow):
        return postgres_type(arrow.value_type)
    return None


def fits(arrow: pa.DataType, postgres: str) -> bool:
    """Whether values of this Arrow type can be sent to a column of this type, spelled as by ``format_type``."""
    import pyarrow as pa

    if pa.types.is_null(arrow):
        return arrow_type(postgres) is not None
    if pa.types.is_dictionary(arrow):
        return fits(arrow.value_type, postgres)
    base = base_of(postgres)
    if base in _TEXT or base == "enum":
        return is_text(arrow)
    if base == "uuid":
        return is_text(arrow) or arrow == pa.binary(16)
    if base == "numeric":
        if is_text(arrow):
            return True
        if not (pa.types.is_decimal(arrow) and arrow.scale >= 0):
            return False
        precision, scale = limits(postgres)
        return precision is None or bool(arrow.scale <= scale and arrow.precision - arrow.scale <= precision - scale)
    if postgres.endswith("[]"):
        is_list = pa.types.is_list(arrow) or pa.types.is_large_list(arrow)
        return is_list and base_of(postgres[:-2]) in ELEMENT_OIDS and fits(arrow.value_type, postgres[:-2])
    if base == "interval":
        return bool(pa.types.is_duration(arrow))
    own_type = postgres_type(arrow)
    return own_type is not None and base_of(own_type) == base


def arrow_type(postgres: str) -> pa.DataType | None:
    """Returns the Arrow type for the values of such a column. A ``numeric`` column also accepts text, for NaN and for more digits than
    Arrow's decimals have. `None`: Tidemark cannot write such a column."""
    import pyarrow as pa

    if postgres.endswith("[]"):
        return pa.list_(arrow_type(postgres[:-2])) if base_of(postgres[:-2]) in ELEMENT_OIDS else None
    base = base_of(postgres)
    if base in _TEXT or base == "enum":
        return pa.string()
    if base == "numeric":
        precision, scale = limits(postgres)
        is_small = precision is not None and precision <= _DECIMAL128 and 0 <= scale <= _DECIMAL128
        return pa.decimal128(precision, scale) if is_small else pa.string()
    return {
        "boolean": pa.bool_(),
        "smallint": pa.int16(),
        "integer": pa.int32(),
        "bigint": pa.int64(),
        "real": pa.float32(),
        "double precision": pa.float64(),
        "bytea": pa.binary(),
        "uuid": pa.binary(16),
        "date": pa.date32(),
        "time without time zone": pa.time64("us"),
        "timestamp without time zone": pa.timestamp("us"),
        "timestamp with time zone": pa.timestamp("us", "UTC"),
        "interval": pa.duration("us"),
    }.get(base)


def widened(column: str, needed: str) -> str | None:
    """Returns the narrowest type that holds all values of both types. `None` if ``column`` already does, or if there is no such type."""
    base, needed_base, digits, needed_digits = base_of(column), base_of(needed), digits_of(column), digits_of(needed)
    if base in ("numeric", "character varying") and digits is None:
        return None
    if base == needed_base == "numeric" and digits and needed_digits:
        scale = max(digits[1], needed_digits[1])
        both = f"numeric({max(digits[0] - digits[1], needed_digits[0] - needed_digits[1]) + scale},{scale})"
        return None if both == column else both
    if base == needed_base and digits:
        return needed if needed_digits is None or needed_digits > digits else None
    for chain in (("smallint", "integer", "bigint"), ("real", "double precision")):
        if base in chain and needed_base in chain[chain.index(base) + 1 :]:
            return needed_base
    return "text" if needed_base == "text" and base not in ("text", "enum", "uuid", "json", "jsonb", "name") else None


def rewrites(column: str, wider: str) -> bool:
    """Whether Postgres rewrites the whole table for a change to a type that `widened` returned."""
    base = base_of(column)
    if base == "character varying":
        return False
    digits, wider_digits = digits_of(column), digits_of(wider)
    return (
        base != "numeric"
        or base_of(wider) != "numeric"
        or (wider_digits is not None and digits is not None and digits[1] != wider_digits[1])
    )


def conform(column: pa.Array, postgres: str) -> pa.Array:
    """Converts a column's values to the encoder's form for this Postgres type. Requires `fits`.

    Raises ``pyarrow.ArrowInvalid`` if a value cannot be stored (a timestamp finer than a microsecond, an invalid uuid), or if Postgres
    would truncate or round it.
    """
    import pyarrow as pa

    values = conformed(column, postgres)
    if cut(values, postgres):
        raise pa.ArrowInvalid(f"a value is longer or finer than {postgres}")
    return values


def cut(column: pa.Array, postgres: str) -> dict[int, str]:
    """Finds values that Postgres would silently truncate or round, by index, with the reason: trailing spaces beyond a ``varchar(3)``,
    fractional digits beyond a ``timestamp(3)``."""
    import pyarrow as pa
    import pyarrow.compute as pc

    digits = digits_of(postgres)
    if not digits or pa.types.is_null(column.type):
        return {}
    is_list = pa.types.is_list(column.type)
    flat = column.flatten() if is_list else column
    if pa.types.is_string(flat.type) and base_of(postgres) in ("character varying", "character"):
        too_long = pc.indices_nonzero(pc.greater(pc.binary_length(flat), digits[0]).fill_null(False)).to_pylist()
        indexes = [at for at in too_long if _has_spaces_after(flat[at].as_buffer().to_pybytes(), digits[0])]
        reason = f"has spaces after its {digits[0]} characters, which Postgres would cut"
    elif pa.types.is_temporal(flat.type) and digits[0] < _MICROS:
        unit, whole = 10 ** (_MICROS - digits[0]), flat.cast(pa.int64())
        lossy, reason = pc.not_equal(whole, pc.multiply(pc.divide(whole, unit), unit)), f"has more than {digits[0]} digits after the second"
        indexes = pc.indices_nonzero(lossy.fill_null(False)).to_pylist()
    else:
        return {}
    return dict.fromkeys(parents(column)[indexes].tolist() if is_list else indexes, reason)


def parents(lists: pa.Array) -> np.ndarray:
    """Returns, for each value of ``lists.flatten()``, the index of its list."""
    import numpy as np
    import pyarrow.compute as pc

    indexes: np.ndarray = np.repeat(np.arange(len(lists)), pc.list_value_length(lists).fill_null(0).to_numpy())
    return indexes


def _has_spaces_after(text: bytes, length: int) -> bool:
    try:
        beyond = text.decode()[length:]
    except UnicodeDecodeError:  # Postgres reports it
        return False
    return bool(beyond) and not beyond.strip(" ")


def conformed(column: pa.Array, postgres: str) -> pa.Array:
    """Like `conform`, but keeps the values that Postgres would truncate."""
    import pyarrow as pa

    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    target = arrow_type(postgres)
    assert target is not None
    inner = column.type.value_type if pa.types.is_list(column.type) or pa.types.is_large_list(column.type) else column.type
    if base_of(postgres).removesuffix("[]") == "numeric":
        number = inner if pa.types.is_decimal(inner) else pa.string()
        target = pa.list_(number) if postgres.endswith("[]") else number
    if base_of(postgres) == "uuid" and is_text(column.type):
        uuids = [None if text is None else uuid_bytes(text.decode(errors="replace")) for text in column.cast(pa.binary()).to_pylist()]
        if uuids.count(None) > column.null_count:
            raise pa.ArrowInvalid("a value is not a uuid")
        return pa.array(uuids, target)
    return column if column.type == target else column.cast(target)


def is_text(arrow: pa.DataType) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_string(arrow) or pa.types.is_large_string(arrow) or pa.types.is_string_view(arrow))


def is_bytes(arrow: pa.DataType) -> bool:
    import pyarrow as pa

    kinds = (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_fixed_size_binary, pa.types.is_binary_view)
    return any(kind(arrow) for kind in kinds)


@functools.lru_cache(maxsize=1024)
def base_of(postgres: str) -> str:
    """Returns the type name without its modifier: ``numeric(10,2)`` -> ``numeric``, ``timestamp(3) with time zone`` -> without the 3."""
    return re.sub(r"\s*\([^)]*\)", "", postgres)


@functools.lru_cache(maxsize=1024)
def digits_of(postgres: str) -> tuple[int, ...] | None:
    """Returns the numbers in a type name: ``numeric(10,2)`` -> ``(10, 2)``."""
    modifier = re.search(r"\(([\d,-]+)\)", postgres)
    return tuple(int(number) for number in modifier[1].split(",")) if modifier else None


_UUID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}|[0-9a-f]{32}", re.IGNORECASE | re.ASCII)


def uuid_bytes(text: str) -> bytes | None:
    """Parses a uuid with or without hyphens and braces. `None` for other text."""
    bare = text[1:-1] if text[:1] == "{" and text[-1:] == "}" else text
    return bytes.fromhex(bare.replace("-", "")) if _UUID.fullmatch(bare) else None

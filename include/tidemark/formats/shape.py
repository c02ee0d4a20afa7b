"""Converts decoded Avro to types that Spark, Python and Postgres share, and from the writer's schema to the reader's."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tidemark.formats import avro, connect
from tidemark.formats.schema import NO_DEFAULT, Field, Node, to_json

if TYPE_CHECKING:
    import pyarrow as pa


class Unresolvable(ValueError):
    """Data of the writer's schema cannot be read with the reader's. The text names the field."""


def type_of(node: Node) -> pa.DataType:
    """The Arrow type of a schema's values, as in ``docs/formats.md``."""
    import pyarrow as pa

    if node.kind == "union":
        if len(node.branches) > 1:
            return pa.struct([(branch.label, type_of(branch)) for branch in node.branches])
        return type_of(node.branches[0])
    if (named := connect.arrow_type(node.details.get(connect.NAME, ""))) is not None:
        return named
    if node.kind == "record":
        return pa.struct([_typed(child.name, child.type) for child in node.fields])
    if node.kind == "array":
        return pa.list_(type_of(node.inner[0]))
    if node.kind == "map":
        return pa.map_(pa.string(), type_of(node.inner[0]))
    return (
        _logical(node)
        or {
            "boolean": pa.bool_(),
            "int": pa.int32(),
            "long": pa.int64(),
            "float": pa.float32(),
            "double": pa.float64(),
            "bytes": pa.binary(),
            "fixed": pa.binary(),
            "string": pa.string(),
            "enum": pa.string(),
        }[node.kind]
    )


def _typed(name: str, node: Node) -> pa.Field:
    """The field, with its column's Postgres type as metadata if the Arrow type does not imply it."""
    import pyarrow as pa

    column = connect.postgres_type(node.branches[0].details.get(connect.NAME, ""))
    return pa.field(name, type_of(node), metadata=None if column is None else {"postgres": column})


def _logical(node: Node) -> pa.DataType | None:
    import pyarrow as pa

    name = node.details.get("logicalType", "")
    if name == "decimal":
        precision = node.details["precision"]
        return (pa.decimal128 if precision <= 38 else pa.decimal256)(precision, node.details.get("scale", 0))
    if name.startswith("timestamp-"):
        return pa.timestamp("us", "UTC")
    if name.startswith("local-timestamp-"):
        return pa.timestamp("us")
    if name == "duration":
        return pa.struct([("months", pa.int64()), ("days", pa.int64()), ("milliseconds", pa.int64())])
    return {"date": pa.date32(), "time-millis": pa.time64("us"), "time-micros": pa.time64("us")}.get(name)


def plain(array: pa.Array, node: Node, path: str = "") -> pa.Array:
    """A decoded array in the types that ``docs/formats.md`` lists. Raises `connect.InvalidConnectValue`, which names the field.

    Enums become text, nanoseconds become microseconds if nothing is lost, a duration becomes a struct of months, days and milliseconds. A
    union of several types becomes a struct with a field for each of them, of which one is not null.
    """

    if node.kind == "union" and len(node.branches) > 1:
        return _union(array, node, path)
    (node,) = node.branches
    if node.details.get("logicalType", "").endswith("timestamp-nanos") and connect.has_nanoseconds(array):
        raise connect.InvalidConnectValue(f"{path or 'it'} {connect.TOO_FINE}")
    return connect.converted(_by_kind(array, node, path), node.details.get(connect.NAME, ""), path)


def _by_kind(array: pa.Array, node: Node, path: str) -> pa.Array:
    import pyarrow as pa

    kind = array.type
    if pa.types.is_struct(kind):
        columns = [plain(array.field(at), child.type, _below(path, child.name)) for at, child in enumerate(node.fields)]
        return struct_of(columns, [child.name for child in node.fields], array.is_valid())
    if pa.types.is_list(kind):
        return pa.ListArray.from_arrays(array.offsets, plain(array.values, node.inner[0], f"{path}[]"), mask=array.is_null())
    if pa.types.is_map(kind):
        return pa.MapArray.from_arrays(array.offsets, array.keys, plain(array.items, node.inner[0], f"{path}[]"), mask=array.is_null())
    return _simple(array)


def resolved(array: pa.Array, target: pa.DataType, reader: Node, path: str = "") -> pa.Array:
    """A `plain` array of the writer's schema as one of the reader's, by Avro's rules. Raises `Unresolvable`.

    Fields match by name, or by the reader's aliases. Fields that the reader lacks are dropped; fields that the writer lacks get
    their default. Numbers are widened, text and bytes convert to each other.
    """
    import pyarrow as pa

    source = array.type
    if source == target:
        return array
    if reader.kind == "union" and len(reader.branches) > 1:
        return _as_union(array, target, reader, path)
    (node,) = reader.branches
    if pa.types.is_struct(source) and pa.types.is_struct(target):
        columns = [_field(array, target.field(child.name).type, child, path) for child in node.fields]
        return struct_of(columns, [child.name for child in node.fields], array.is_valid())
    if pa.types.is_list(source) and pa.types.is_list(target):
        values = resolved(array.values, target.value_type, node.inner[0], f"{path}[]")
        return pa.ListArray.from_arrays(array.offsets, values, mask=array.is_null())
    if pa.types.is_map(source) and pa.types.is_map(target):
        items = resolved(array.items, target.item_type, node.inner[0], f"{path}[]")
        return pa.MapArray.from_arrays(array.offsets, array.keys, items, mask=array.is_null())
    if not _promotes(source, target):
        raise Unresolvable(f"{path or 'it'} has type {source} in its own schema and {target} in the newest")
    return array.cast(target, safe=not pa.types.is_floating(target))  # Avro rounds a long to a float


def _below(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _field(array: pa.StructArray, target: pa.DataType, reader: Field, path: str) -> pa.Array:
    place = _below(path, reader.name)
    for name in (reader.name, *reader.aliases):
        if (at := array.type.get_field_index(name)) >= 0:
            return resolved(array.field(at), target, reader.type, place)
    if reader.default is NO_DEFAULT:
        raise Unresolvable(f"{place} is missing in its own schema and has no default in the newest")
    try:
        return _defaults(reader, target, len(array))
    except Exception as error:  # any error is the default's fault
        raise Unresolvable(f"the default of {place} does not fit its type {target}") from error


def _defaults(field: Field, target: pa.DataType, count: int) -> pa.Array:
    """The field's default, ``count`` times. It is encoded and decoded, because it has the type below a logical type."""
    import fastavro
    import numpy as np
    import pyarrow as pa

    if field.default is None:
        return pa.nulls(count, target)
    datum = io.BytesIO()
    fastavro.schemaless_writer(datum, fastavro.parse_schema(to_json(field.type)), _default(field.default, field.type))
    array = plain(avro.decode(pa.array([datum.getvalue()], pa.binary()), field.type), field.type)
    return array.take(pa.array(np.zeros(count, np.int64)))


def _default(default: Any, node: Node) -> Any:
    """A default from JSON as a Python value. In a union it belongs to the first branch."""
    if node.kind == "union":
        return _default(default, node.inner[0])
    if node.kind in ("bytes", "fixed"):
        return default.encode("latin-1")
    if node.kind == "record":
        return {field.name: _default(default.get(field.name, field.default), field.type) for field in node.fields}
    if node.kind == "array":
        return [_default(item, node.inner[0]) for item in default]
    if node.kind == "map":
        return {key: _default(value, node.inner[0]) for key, value in default.items()}
    return default


def _promotes(source: pa.DataType, target: pa.DataType) -> bool:
    import pyarrow as pa

    families = pa.types.is_integer, pa.types.is_floating
    if any(kind(source) for kind in families) and any(kind(target) for kind in families):
        widths = (source.bit_width, target.bit_width)
        same_kind = pa.types.is_integer(source) == pa.types.is_integer(target)
        return bool(widths[0] <= widths[1] if same_kind else pa.types.is_floating(target))
    if pa.types.is_decimal(source) and pa.types.is_decimal(target):
        return bool(source.scale <= target.scale and source.precision - source.scale <= target.precision - target.scale)
    text = {pa.string(), pa.binary()}
    return source in text and target in text


def _union(array: pa.Array, node: Node, path: str) -> pa.Array:
    """A dense union as a struct with one field for each branch."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc

    codes, offsets = array.type_codes.to_numpy(), array.offsets.to_numpy()
    columns = []
    labels = []
    for at, branch in enumerate(node.inner):
        if branch.kind != "null":
            places = pa.array(offsets, pa.int32(), mask=codes != array.type.type_codes[at])
            columns.append(pc.take(plain(array.field(at), branch, path), places))
            labels.append(branch.label)
    nulls = [at for at, branch in enumerate(node.inner) if branch.kind == "null"]
    mask = pa.array(np.isin(codes, [array.type.type_codes[at] for at in nulls]))
    return pa.StructArray.from_arrays(columns, fields=_fields(columns, labels), mask=mask)


def _as_union(array: pa.Array, target: pa.DataType, reader: Node, path: str) -> pa.Array:
    """Converts data of one type, or of a union with other branches, to a reader's union of several types."""
    import pyarrow as pa

    labels = [branch.label for branch in reader.branches]
    source = {field.name: array.field(at) for at, field in enumerate(array.type)} if pa.types.is_struct(array.type) else {}
    if not source or not set(source) <= set(labels):
        candidates = [branch for branch in reader.branches if _resolves(array, target.field(branch.label).type, branch)]
        if not candidates:
            raise Unresolvable(f"{path or 'it'} has type {array.type} in its own schema, which is no branch of the union in the newest")
        source = {candidates[0].label: array}
    columns = [
        resolved(source[branch.label], target.field(branch.label).type, branch, f"{path}.{branch.label}")
        if branch.label in source
        else pa.nulls(len(array), target.field(branch.label).type)
        for branch in reader.branches
    ]
    return struct_of(columns, labels, array.is_valid())


def _resolves(array: pa.Array, target: pa.DataType, reader: Node) -> bool:
    try:
        resolved(array.slice(0, 0), target, reader)
    except Unresolvable:
        return False
    return True


def _simple(array: pa.Array) -> pa.Array:
    import numpy as np
    import pyarrow as pa

    kind = array.type
    if pa.types.is_dictionary(kind):
        return array.dictionary_decode().cast(pa.string())
    if pa.types.is_timestamp(kind):
        return array.cast(pa.timestamp("us", "UTC" if kind.tz else None), safe=kind.unit != "ns")
    if pa.types.is_time(kind):
        return array.cast(pa.time64("us"), safe=False)
    if kind == pa.month_day_nano_interval():
        return _duration(array)
    if pa.types.is_fixed_size_binary(kind):
        valid = array.is_valid().to_numpy(zero_copy_only=False)
        return array.drop_null().cast(pa.binary()).take(pa.array(np.cumsum(valid) - 1, mask=~valid))  # a null takes no bytes
    return array


def _duration(array: pa.Array) -> pa.Array:
    import numpy as np
    import pyarrow as pa

    parts = np.dtype([("months", np.int32), ("days", np.int32), ("nanos", np.int64)])
    intervals = np.frombuffer(array.buffers()[1], parts, count=len(array), offset=array.offset * parts.itemsize)
    unsigned = [intervals[name].view(np.uint32).astype(np.int64) for name in ("months", "days")]
    columns = [*map(pa.array, unsigned), pa.array(intervals["nanos"] // 1_000_000)]
    return struct_of(columns, ["months", "days", "milliseconds"], array.is_valid())


def struct_of(columns: Sequence[pa.Array], names: Sequence[str], valid: pa.Array) -> pa.Array:
    """A struct that is null where ``valid`` is false. All its fields are nullable."""
    import pyarrow as pa
    import pyarrow.compute as pc

    return pa.StructArray.from_arrays(columns, fields=_fields(columns, names), mask=pc.invert(valid))


def _fields(columns: Sequence[pa.Array], names: Sequence[str]) -> list[pa.Field]:
    import pyarrow as pa

    return [pa.field(name, column.type) for name, column in zip(names, columns, strict=True)]

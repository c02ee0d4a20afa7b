"""Protobuf data as Arrow arrays, decoded by ptars.

All data is read with the newest schema, as Protobuf intends: fields are known by their numbers. So the schema that wrote a record is not
needed, only its message type.
"""

from __future__ import annotations

import base64
import functools
import importlib
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tidemark.formats.schema import BadSchema
from tidemark.formats.shape import struct_of

if TYPE_CHECKING:
    import pyarrow as pa
    from google.protobuf.descriptor import Descriptor, FieldDescriptor
    from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet

MAIN = "schema.proto"
COMPILE_LIMIT_S = 60
AS_JSON = frozenset({"google.protobuf.Struct", "google.protobuf.Value", "google.protobuf.ListValue"})
"""Messages that stand for JSON. They are recursive, so they are read as bytes, and parsed one by one."""
AS_THEY_ARE = frozenset({"google.protobuf.Timestamp", "google.protobuf.Duration"})
_WRONG_FORM = "it does not have the form that its Protobuf schema says"


class BadMessage(ValueError):
    """The bytes are not a message of the type. The text does not quote them."""


@dataclass(frozen=True, slots=True)
class Message:
    """A message type. ``files``: a serialized ``FileDescriptorSet``. ``indexes``: where the schema defines it, as in Confluent's format."""

    files: bytes
    name: str
    indexes: tuple[int, ...]

    def decode(self, data: pa.Array) -> pa.Array:
        """The messages, none of which is null, as structs. Raises `BadMessage` if one of them is not of this type."""

        descriptor, handler = _handler(self)
        try:
            rows = handler.array_to_record_batch(data)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            raise BadMessage(_WRONG_FORM) from error  # also of a panic, which is no Exception
        columns = [_column(rows.column(at), field) for at, field in enumerate(descriptor.fields)]
        return struct_of(columns, [field.name for field in descriptor.fields], data.is_valid())

    def type(self) -> pa.DataType:
        """The Arrow type of the values, as in ``docs/formats.md``."""
        import pyarrow as pa

        return self.decode(pa.array([], pa.binary())).type


def compiled(text: str, references: Mapping[str, str], name: str | None = None) -> Message:
    """The message type of this name, by default the first one of the schema. ``references``: imported schemas by the names of their files.

    A schema is text, or a serialized ``FileDescriptorProto`` in base64, as confluent-kafka's Python client registers it. Raises
    `BadSchema`, with the compiler's text.
    """
    described = {file: _described(content) for file, content in {**references, MAIN: text}.items()}
    if described[MAIN] is not None:
        return _message(_linked({file: each for file, each in described.items() if each is not None}), name)
    from google.protobuf.descriptor_pb2 import FileDescriptorSet

    with tempfile.TemporaryDirectory(prefix="tidemark-proto-") as folder:
        for file, content in {**references, MAIN: text}.items():
            path = Path(folder, file)
            if not path.resolve().is_relative_to(Path(folder).resolve()):
                raise BadSchema(problem=f"imports {file}, which is not below its own folder")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)
        command = [sys.executable, "-m", "grpc_tools.protoc", "-I.", "--include_imports", "--descriptor_set_out=schema.bin", MAIN]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=COMPILE_LIMIT_S, check=False)
        if done.returncode != 0:
            said = [line for line in done.stderr.splitlines() if ".proto:" in line and "syntax specified" not in line]
            raise BadSchema(problem=f"cannot be compiled: {' '.join(said).rstrip('.')[:500]}")
        return _message(FileDescriptorSet.FromString(Path(folder, "schema.bin").read_bytes()), name)


def _described(text: str) -> FileDescriptorProto | None:
    """A schema that is a descriptor; None if it is text."""
    from google.protobuf.descriptor_pb2 import FileDescriptorProto
    from google.protobuf.message import DecodeError

    try:
        return FileDescriptorProto.FromString(base64.b64decode(text, validate=True))
    except (ValueError, DecodeError):
        return None


def _linked(files: Mapping[str, FileDescriptorProto]) -> FileDescriptorSet:
    """The main file with all that it imports, which are known or Google's own."""
    from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet

    linked: dict[str, FileDescriptorProto] = {}

    def link(name: str) -> None:
        if name in linked:
            return
        file = FileDescriptorProto()
        if name in files:
            file.CopyFrom(files[name])
        else:
            if not name.startswith("google/protobuf/"):
                raise BadSchema(problem=f"imports {name}, which it does not refer to")
            importlib.import_module(name.removesuffix(".proto").replace("/", ".") + "_pb2").DESCRIPTOR.CopyToProto(file)
        file.name = name
        for each in file.dependency:
            link(each)
        linked[name] = file

    link(MAIN)
    return FileDescriptorSet(file=linked.values())


def _message(files: FileDescriptorSet, name: str | None) -> Message:
    main = next(file for file in files.file if file.name == MAIN)
    prefix = f"{main.package}." if main.package else ""
    found = {f"{prefix}{path}": indexes for path, indexes in _types(main.message_type)}
    if not found:
        raise BadSchema(problem="defines no message")
    chosen = name or next(iter(found))
    if chosen not in found:
        raise BadSchema(problem=f"has no message {chosen}; it has {', '.join(found)}")
    made = Message(files.SerializeToString(), chosen, found[chosen])
    _refuse_unreadable(_pool(made.files).FindMessageTypeByName(chosen), ())
    return made


def _types(messages: Any, above: str = "", indexes: tuple[int, ...] = ()) -> list[tuple[str, tuple[int, ...]]]:
    """Messages with their indexes. The compiler's own messages, the entries of maps, do not count."""
    found = []
    for at, each in enumerate(each for each in messages if not each.options.map_entry):
        found.append((f"{above}{each.name}", (*indexes, at)))
        found += _types(each.nested_type, f"{above}{each.name}.", (*indexes, at))
    return found


def _refuse_unreadable(descriptor: Descriptor, within: tuple[str, ...]) -> None:
    if descriptor.full_name in within:
        raise BadSchema(problem=f"is recursive: {descriptor.full_name} contains itself, which no table can hold")
    if not descriptor.fields:
        raise BadSchema(problem=f"has the message {descriptor.full_name}, which has no fields")
    for field in descriptor.fields:
        inner = field.message_type
        if field.type == field.TYPE_GROUP:
            raise BadSchema(problem=f"has the group {field.name}, which is not supported")
        if inner is not None and inner.full_name not in AS_JSON:
            _refuse_unreadable(inner, (*within, descriptor.full_name))


@functools.lru_cache(maxsize=32)
def _pool(files: bytes) -> Any:
    from google.protobuf.descriptor_pb2 import FileDescriptorSet
    from google.protobuf.descriptor_pool import DescriptorPool

    pool = DescriptorPool()
    for file in FileDescriptorSet.FromString(files).file:
        pool.Add(file)
    return pool


@functools.lru_cache(maxsize=32)
def _handler(message: Message) -> tuple[Descriptor, Any]:
    """The message as its schema has it, and ptars' handler of a schema that has bytes in place of `AS_JSON`."""
    from google.protobuf.descriptor_pb2 import FileDescriptorSet
    from ptars import HandlerPool, PtarsConfig

    files = FileDescriptorSet.FromString(message.files)
    for file in files.file:
        for each in file.message_type if not file.name.startswith("google/protobuf/") else ():
            _read_as_bytes(each)
    pool = _pool(files.SerializeToString())
    config = PtarsConfig(timestamp_unit="us", time_unit="us", duration_unit="us", enum_repr="string")
    handlers = HandlerPool([pool.FindFileByName(MAIN)], config=config)
    return _pool(message.files).FindMessageTypeByName(message.name), handlers.get_for_message(pool.FindMessageTypeByName(message.name))


def _read_as_bytes(message: Any) -> None:
    for field in message.field:
        if field.type_name.lstrip(".") in AS_JSON:
            field.type = field.TYPE_BYTES
            field.ClearField("type_name")
            if field.label != field.LABEL_REPEATED and not field.HasField("oneof_index") and not message.options.map_entry:
                field.oneof_index = len(message.oneof_decl)  # as `optional` does it, so that an absent one is null
                message.oneof_decl.add(name=f"_{field.name}")
                field.proto3_optional = True
    for each in message.nested_type:
        _read_as_bytes(each)


def _column(array: pa.Array, field: FieldDescriptor) -> pa.Array:
    """A field's values in types that Spark, Python and Postgres have too."""
    import pyarrow as pa

    inner = field.message_type
    if inner is not None and inner.GetOptions().map_entry:
        value = inner.fields_by_name["value"]
        keys, items = array.keys.cast(pa.string()), _single(array.items, value)
        return pa.MapArray.from_arrays(array.offsets, keys, items)
    if pa.types.is_list(array.type):
        return pa.ListArray.from_arrays(array.offsets, _single(array.values, field))
    return _single(array, field)


def _single(array: pa.Array, field: FieldDescriptor) -> pa.Array:
    import pyarrow as pa

    inner = field.message_type
    if inner is not None and inner.full_name in AS_JSON:
        return _json(array, inner)
    if inner is not None and inner.full_name not in AS_THEY_ARE and pa.types.is_struct(array.type):
        columns = [_column(array.field(at), each) for at, each in enumerate(inner.fields)]
        return struct_of(columns, [each.name for each in inner.fields], array.is_valid())
    if pa.types.is_unsigned_integer(array.type):
        return array.cast(pa.decimal128(20, 0) if array.type.bit_width == 64 else pa.int64())
    return array


def _json(array: pa.Array, kind: Descriptor) -> pa.Array:
    import pyarrow as pa
    from google.protobuf.json_format import MessageToJson
    from google.protobuf.message import DecodeError
    from google.protobuf.message_factory import GetMessageClass

    make: Callable[[bytes], Any] = GetMessageClass(kind).FromString
    try:
        texts = [None if data is None else MessageToJson(make(data), indent=None) for data in array.to_pylist()]
    except (DecodeError, ValueError) as error:
        raise BadMessage(_WRONG_FORM) from error
    return pa.array(texts, pa.string())

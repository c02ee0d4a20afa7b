"""Protobuf data as Arrow arrays, decoded by ptars.

All data is read with the newest schema, as Protobuf intends: numbers identify fields. So the writer's schema is not needed, only the
message type.
"""

from __future__ import annotations

import base64
import functools
import importlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tidemark.formats.connect import InvalidConnectValue
from tidemark.formats.schema import MAX_DEPTH, MAX_FIELDS, MAX_NAME, BadSchema, require_small
from tidemark.formats.shape import struct_of
from tidemark.text.wording import quoted

if TYPE_CHECKING:
    import pyarrow as pa
    from google.protobuf.descriptor import Descriptor, FieldDescriptor
    from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet

MAIN = "tidemark.main.proto"
COMPILE_LIMIT_S = 20
_FILE = re.compile(r"(?=.{1,200}$)(?:[A-Za-z0-9_][A-Za-z0-9_.-]*/)*[A-Za-z0-9_][A-Za-z0-9_.-]*\.proto")
_COMPILER = """
import os, resource, sys
for limit, size in ((resource.RLIMIT_AS, 2 << 30), (resource.RLIMIT_FSIZE, 32 << 20), (resource.RLIMIT_CPU, 20)):
    resource.setrlimit(limit, (size, size))
from pathlib import Path
from grpc_tools import protoc
source, output, main = sys.argv[1:]
google = Path(protoc.__file__).resolve().parent / "_proto"
os.chdir(source)
sys.exit(protoc.main(["protoc", "-I.", f"-I{google}", "--include_imports", f"--descriptor_set_out={output}", main]))
"""
"""The compiler with its own limits, for an isolated Python."""
GOOGLE = "google/protobuf/"
WELL_KNOWN = frozenset(
    ("any", "api", "descriptor", "duration", "empty", "field_mask", "source_context", "struct", "timestamp", "type", "wrappers")
)
"""Google's own files, which every schema may import."""
AS_JSON = frozenset({"google.protobuf.Struct", "google.protobuf.Value", "google.protobuf.ListValue"})
"""Messages that hold JSON. They are recursive, so they are read as bytes, and parsed one by one."""
TIMES = frozenset({"google.protobuf.Timestamp", "google.protobuf.Duration"})
"""Messages of seconds and nanoseconds. The decoder would cut the nanoseconds, so it gets them as ordinary messages."""
_TIME_FILE, _TIME_PACKAGE = "tidemark_internal_seconds.proto", "tidemark_internal_seconds"
_WRONG_FORM = "it does not have the form of its Protobuf schema"


class BadMessage(ValueError):
    """The bytes are not a message of the type. The text does not quote them."""


@dataclass(frozen=True, slots=True)
class Message:
    """A message type. ``files``: a serialized ``FileDescriptorSet``. ``indexes``: where the schema defines it, as in Confluent's format."""

    files: bytes
    name: str
    indexes: tuple[int, ...]

    def decode(self, data: pa.Array) -> pa.Array:
        """Decodes messages, none of which is null, into structs. Raises `BadMessage` if one is not of this type, and `InvalidConnectValue`
        for a time that cannot be stored."""

        try:
            descriptor, handler = _handler(self)
            rows = handler.array_to_record_batch(data)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            raise BadMessage(_WRONG_FORM) from error  # also for a panic, which is not an Exception
        columns = [_column(rows.column(at), field) for at, field in enumerate(descriptor.fields)]
        return struct_of(columns, [field.name for field in descriptor.fields], data.is_valid())

    def type(self) -> pa.DataType:
        """The Arrow type of the values, as in ``docs/formats.md``."""
        import pyarrow as pa

        return self.decode(pa.array([], pa.binary())).type


def compiled(text: str, references: Mapping[str, str], name: str | None = None) -> Message:
    """The message type of this name, by default the schema's first. ``references``: imported schemas by file name.

    A schema is text, or a serialized ``FileDescriptorProto`` in base64, as confluent-kafka's Python client registers it. Raises
    `BadSchema`, with the compiler's message.
    """
    _check_files(references, text)
    described = {file: _descriptor_of(content) for file, content in {**references, MAIN: text}.items()}
    if described[MAIN] is not None:
        return _message(_link({file: descriptor for file, descriptor in described.items() if descriptor is not None}), name)
    return _message(_compile({**references, MAIN: text}), name)


def _check_files(references: Mapping[str, str], text: str) -> None:
    """The names come from the schema's author. They become files in a temporary folder, so they must be plain paths within it."""
    for file in references:
        if not _FILE.fullmatch(file) or file == MAIN:
            raise BadSchema(problem=f"imports {quoted(file)}, which is not a .proto file below its own folder")
    require_small((text, *references.values()))


def _compile(files: Mapping[str, str]) -> FileDescriptorSet:
    """Compiles the main file and its imports.

    The compiler runs as a separate process, with limits on time, memory and output. It gets neither this process's environment nor an
    import folder of the schema's author.
    """
    from google.protobuf.descriptor_pb2 import FileDescriptorSet

    with tempfile.TemporaryDirectory(prefix="tidemark-proto-") as top:
        source, output, log = Path(top, "source"), Path(top, "schema.bin"), Path(top, "log")
        try:
            for file, content in files.items():
                path = source / file
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(content, encoding="utf-8")
        except (OSError, UnicodeEncodeError) as error:
            raise BadSchema(problem=f"cannot be written to files: {error.__class__.__name__}") from error
        command = [sys.executable, "-I", "-c", _COMPILER, str(source), str(output), MAIN]
        with log.open("wb") as stderr:
            try:
                done = subprocess.run(
                    command,
                    cwd="/",
                    env={},
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=stderr,
                    timeout=COMPILE_LIMIT_S,
                    check=False,
                )
            except subprocess.TimeoutExpired:
                raise BadSchema(problem=f"cannot be compiled within {COMPILE_LIMIT_S} s") from None
        if done.returncode != 0:
            lines = log.read_text(errors="replace").replace(MAIN, "schema.proto").splitlines()
            reasons = " ".join(line for line in lines if ".proto:" in line and "syntax specified" not in line).rstrip(".")
            raise BadSchema(problem=f"cannot be compiled: {reasons[:500] or f'the compiler ended with {done.returncode}'}")
        return FileDescriptorSet.FromString(output.read_bytes())


def _descriptor_of(text: str) -> FileDescriptorProto | None:
    """The descriptor that the text holds in base64; None if it is a .proto text."""
    from google.protobuf.descriptor_pb2 import FileDescriptorProto
    from google.protobuf.message import DecodeError

    try:
        return FileDescriptorProto.FromString(base64.b64decode(text, validate=True))
    except (ValueError, DecodeError):
        return None


def _link(files: Mapping[str, FileDescriptorProto]) -> FileDescriptorSet:
    """The main file with its imports: the references or Google's own files."""
    from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet

    linked: dict[str, FileDescriptorProto] = {}

    def link(name: str, importers: tuple[str, ...]) -> None:
        if name in linked:
            return
        if name in importers or len(importers) > MAX_DEPTH:
            raise BadSchema(problem=f"imports {quoted(name)} in a circle, or through more than {MAX_DEPTH} files")
        file = FileDescriptorProto()
        file.CopyFrom(files[name] if name in files else _google_file(name))
        file.name = name
        for imported in file.dependency:
            link(imported, (*importers, name))
        linked[name] = file

    link(MAIN, ())
    return FileDescriptorSet(file=linked.values())


def _google_file(name: str) -> FileDescriptorProto:
    """One of Google's own files. Only names in `WELL_KNOWN` are imported as modules, never the schema's own."""
    from google.protobuf.descriptor_pb2 import FileDescriptorProto

    module = name.removeprefix(GOOGLE).removesuffix(".proto")
    if module not in WELL_KNOWN or name != f"{GOOGLE}{module}.proto":
        raise BadSchema(problem=f"imports {quoted(name)}, which it does not refer to")
    file = FileDescriptorProto()
    importlib.import_module(f"google.protobuf.{module}_pb2").DESCRIPTOR.CopyToProto(file)
    return file


def _message(files: FileDescriptorSet, name: str | None) -> Message:
    for file in files.file:
        _require_names(file)
    main = next(file for file in files.file if file.name == MAIN)
    if any(file.syntax == "editions" for file in files.file):
        raise BadSchema(problem='uses an edition of Protobuf, which is not supported: write syntax = "proto3" or "proto2"')
    prefix = f"{main.package}." if main.package else ""
    messages = {f"{prefix}{path}": indexes for path, indexes in _message_types(main.message_type)}
    if not messages:
        raise BadSchema(problem="defines no message")
    chosen = name or next(iter(messages))
    if chosen not in messages:
        raise BadSchema(problem=f"has no message {chosen}; it has {', '.join(messages)}")
    message = Message(files.SerializeToString(), chosen, messages[chosen])
    try:
        descriptor = _pool(message.files).FindMessageTypeByName(chosen)
    except (TypeError, KeyError) as error:
        raise BadSchema(problem=f"is not valid: {str(error)[:500]}") from error
    _refuse_unreadable(descriptor, ())
    try:
        message.type()
    except Exception as error:
        raise BadSchema(problem=f"cannot be read by the decoder: {str(error.__cause__ or error)[:500]}") from error
    return message


def _require_names(file: FileDescriptorProto) -> None:
    """Limits the names, because each field's full name repeats those of its package and messages. The compiler has these limits too."""
    messages, count = [(message, 0) for message in file.message_type], 0
    names = [file.package]
    while messages:
        message, depth = messages.pop()
        count += 1 + len(message.field)
        if count > MAX_FIELDS or depth > MAX_DEPTH:
            raise BadSchema(problem=f"defines more than {MAX_FIELDS:,} messages and fields, or nests messages more than {MAX_DEPTH} deep")
        names += [message.name, *(field.name for field in message.field)]
        messages += [(nested, depth + 1) for nested in message.nested_type]
    if not all(len(name) <= MAX_NAME for name in names):
        raise BadSchema(problem=f"has a name of more than {MAX_NAME} characters")


def _message_types(messages: Any, above: str = "", indexes: tuple[int, ...] = ()) -> list[tuple[str, tuple[int, ...]]]:
    """Message types with their indexes. Map entries, which the compiler generates, do not count."""
    types = []
    for at, message in enumerate(message for message in messages if not message.options.map_entry):
        types.append((f"{above}{message.name}", (*indexes, at)))
        types += _message_types(message.nested_type, f"{above}{message.name}.", (*indexes, at))
    return types


def _refuse_unreadable(descriptor: Descriptor, within: tuple[str, ...]) -> int:
    """Returns the number of fields, including those of nested messages."""
    if descriptor.full_name in within:
        raise BadSchema(problem=f"is recursive: {descriptor.full_name} contains itself, which no table can hold")
    if not descriptor.fields:
        raise BadSchema(problem=f"has the message {descriptor.full_name}, which has no fields")
    if len(within) >= MAX_DEPTH:
        raise BadSchema(problem=f"nests messages more than {MAX_DEPTH} deep")
    fields = 0
    for field in descriptor.fields:
        inner = field.message_type
        if field.type == field.TYPE_GROUP:
            raise BadSchema(problem=f"has the group {field.name}, which is not supported")
        fields += 1
        if inner is not None and inner.full_name not in AS_JSON:
            fields += _refuse_unreadable(inner, (*within, descriptor.full_name))
        if fields > MAX_FIELDS:
            raise BadSchema(problem=f"has a message with more than {MAX_FIELDS:,} fields, including those of nested messages")
    return fields


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
    """The message's descriptor, and ptars' handler for a copy of the schema: bytes in place of `AS_JSON`, our own message in place of
    `TIMES`."""
    from google.protobuf.descriptor_pb2 import FileDescriptorSet
    from ptars import HandlerPool, PtarsConfig

    files, whole = FileDescriptorSet(file=[_time_file()]), _pool(message.files)
    for name in [file.name for file in FileDescriptorSet.FromString(message.files).file]:
        file = files.file.add()
        whole.FindFileByName(name).CopyToProto(file)  # with full names of types
        if name not in (f"{GOOGLE}{well_known}.proto" for well_known in WELL_KNOWN):
            times = sum(_replace_types(message_type) for message_type in file.message_type)
            file.dependency.extend([_TIME_FILE] * bool(times))
    pool = _pool(files.SerializeToString())
    handlers = HandlerPool([pool.FindFileByName(MAIN)], config=PtarsConfig(enum_repr="string"))
    return _pool(message.files).FindMessageTypeByName(message.name), handlers.get_for_message(pool.FindMessageTypeByName(message.name))


def _time_file() -> FileDescriptorProto:
    from google.protobuf.descriptor_pb2 import FieldDescriptorProto as Field
    from google.protobuf.descriptor_pb2 import FileDescriptorProto

    file = FileDescriptorProto(name=_TIME_FILE, package=_TIME_PACKAGE, syntax="proto3")
    message = file.message_type.add(name="Time")
    message.field.add(name="seconds", number=1, type=Field.TYPE_INT64, label=Field.LABEL_OPTIONAL)
    message.field.add(name="nanos", number=2, type=Field.TYPE_INT32, label=Field.LABEL_OPTIONAL)
    return file


def _replace_types(message: Any) -> int:
    """Replaces `AS_JSON` and `TIMES`. Returns the number of fields that now have our own message type."""
    times = 0
    for field in message.field:
        if field.type_name.lstrip(".") in TIMES:
            field.type_name, times = f".{_TIME_PACKAGE}.Time", times + 1
        if field.type_name.lstrip(".") in AS_JSON:
            field.type = field.TYPE_BYTES
            field.ClearField("type_name")
            if field.label == field.LABEL_REQUIRED:
                field.label = field.LABEL_OPTIONAL
            if field.label != field.LABEL_REPEATED and not field.HasField("oneof_index") and not message.options.map_entry:
                field.oneof_index = len(message.oneof_decl)  # like `optional`, so that an absent field is null
                message.oneof_decl.add(name=f"_{field.name}")
                field.proto3_optional = True
    return times + sum(_replace_types(nested) for nested in message.nested_type)


def _column(array: pa.Array, field: FieldDescriptor) -> pa.Array:
    """A field's values in types that Spark, Python and Postgres share."""
    import pyarrow as pa

    inner = field.message_type
    if inner is not None and inner.GetOptions().map_entry:
        value = inner.fields_by_name["value"]
        keys, items = array.keys.cast(pa.string()), _values(array.items, value)
        return pa.MapArray.from_arrays(array.offsets, keys, items)
    if pa.types.is_list(array.type):
        return pa.ListArray.from_arrays(array.offsets, _values(array.values, field))
    return _values(array, field)


def _values(array: pa.Array, field: FieldDescriptor) -> pa.Array:
    import pyarrow as pa

    inner = field.message_type
    if inner is not None and inner.full_name in AS_JSON:
        return _json(array, inner)
    if inner is not None and inner.full_name in TIMES:
        return _time(array, field.name, pa.timestamp("us", "UTC") if inner.full_name.endswith("Timestamp") else pa.duration("us"))
    if inner is not None and pa.types.is_struct(array.type):
        columns = [_column(array.field(at), child) for at, child in enumerate(inner.fields)]
        return struct_of(columns, [child.name for child in inner.fields], array.is_valid())
    if pa.types.is_unsigned_integer(array.type):
        return array.cast(pa.decimal128(20, 0) if array.type.bit_width == 64 else pa.int64())
    return array


def _time(array: pa.Array, name: str, kind: pa.DataType) -> pa.Array:
    """Joins seconds and nanoseconds. Raises `InvalidConnectValue`."""
    import pyarrow as pa
    import pyarrow.compute as pc

    seconds, nanos = (pc.struct_field(array, name) for name in ("seconds", "nanos"))
    micros = pc.divide(nanos, 1_000)
    if pc.any(pc.not_equal(nanos, pc.multiply(micros, 1_000))).as_py():
        raise InvalidConnectValue(f"{name} has more than 6 digits after the second")
    try:
        return pc.add_checked(pc.multiply_checked(seconds, 1_000_000), micros.cast(pa.int64())).cast(kind)
    except pa.ArrowInvalid as error:
        raise InvalidConnectValue(f"{name} is out of range") from error


def _json(array: pa.Array, kind: Descriptor) -> pa.Array:
    import pyarrow as pa
    from google.protobuf.json_format import MessageToJson
    from google.protobuf.message import DecodeError
    from google.protobuf.message_factory import GetMessageClass

    parse: Callable[[bytes], Any] = GetMessageClass(kind).FromString
    try:
        texts = [None if data is None else MessageToJson(parse(data), indent=None) for data in array.to_pylist()]
    except (DecodeError, ValueError) as error:
        raise BadMessage(_WRONG_FORM) from error
    return pa.array(texts, pa.string())

"""The fast poller: librdkafka's messages become Arrow columns without a Python object for each.

Uses confluent-kafka's librdkafka through `ctypes`: public functions of its C API and the public struct of a message. ``reader.c`` of
`tidemark.native` copies the messages. Without it, `tidemark.kafka.poll.MessagePoller` reads instead.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from tidemark import native
from tidemark.errors import BrokerUnavailable, TidemarkError
from tidemark.kafka import oauth
from tidemark.kafka.config import KafkaConfig, unusable
from tidemark.kafka.poll import BYTES_A_POLL, MESSAGES_A_POLL, POLL_S, Polled, PollError, chunk_schema, header_type
from tidemark.records.ranges import TopicPartition
from tidemark.tokens import TokenSource

if TYPE_CHECKING:
    import pyarrow as pa

log = logging.getLogger(__name__)

CONSUMER = 1  # RD_KAFKA_CONSUMER
TEXT_BYTES = 512

_P, _I64 = ctypes.c_void_p, ctypes.c_int64
_FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "conf_new": (_P, ()),
    "conf_set": (ctypes.c_int, (_P, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t)),
    "conf_destroy": (None, (_P,)),
    "new": (_P, (ctypes.c_int, _P, ctypes.c_char_p, ctypes.c_size_t)),
    "poll_set_consumer": (ctypes.c_int, (_P,)),
    "queue_get_consumer": (_P, (_P,)),
    "queue_destroy": (None, (_P,)),
    "topic_partition_list_new": (_P, (ctypes.c_int,)),
    "topic_partition_list_add": (_P, (_P, ctypes.c_char_p, ctypes.c_int32)),
    "topic_partition_set_leader_epoch": (None, (_P, ctypes.c_int32)),
    "topic_partition_list_set_offset": (ctypes.c_int, (_P, ctypes.c_char_p, ctypes.c_int32, _I64)),
    "topic_partition_list_destroy": (None, (_P,)),
    "assign": (ctypes.c_int, (_P, _P)),
    "consume_batch_queue": (ctypes.c_ssize_t, (_P, ctypes.c_int, _P, ctypes.c_size_t)),
    "last_error": (ctypes.c_int, ()),
    "err2str": (ctypes.c_char_p, (ctypes.c_int,)),
    "message_errstr": (ctypes.c_char_p, (_P,)),
    "consumer_close": (ctypes.c_int, (_P,)),
    "conf_set_oauthbearer_token_refresh_cb": (None, (_P, _P)),
    "conf_enable_sasl_queue": (None, (_P, ctypes.c_int)),
    "sasl_background_callbacks_enable": (_P, (_P,)),
    "oauthbearer_set_token": (
        ctypes.c_int,
        (_P, ctypes.c_char_p, _I64, ctypes.c_char_p, _P, ctypes.c_size_t, ctypes.c_char_p, ctypes.c_size_t),
    ),
    "oauthbearer_set_token_failure": (ctypes.c_int, (_P, ctypes.c_char_p)),
    "destroy": (None, (_P,)),
}
"""The librdkafka functions that this module calls, without their prefix: result and argument types."""
_CALLED_BY_C = ("message_destroy", "message_timestamp", "message_leader_epoch", "message_headers", "header_get_all", "topic_name")
"""The librdkafka functions that ``reader.c`` calls, in the order of its ``struct client``."""
_C_FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "sort": (None, (_P, _P, _P, _I64, ctypes.c_char_p, ctypes.c_int32, _I64, _P)),
    "measure": (_I64, (_P, _P, _I64, _I64, _P, _P, _P)),
    "copy": (None, (_P, _P, _I64, _P, _P)),
    "discard": (None, (_P, _P, _I64)),
}


class _Message(ctypes.Structure):
    """The public fields of librdkafka's ``rd_kafka_message_t``, up to ``offset``."""

    _fields_ = (
        ("error", ctypes.c_int),
        ("topic", _P),
        ("partition", ctypes.c_int32),
        ("value", _P),
        ("value_size", ctypes.c_size_t),
        ("key", _P),
        ("key_size", ctypes.c_size_t),
        ("offset", _I64),
    )


class _Sorted(ctypes.Structure):
    _fields_ = tuple((name, _I64) for name in ("records", "errors", "last", "leader_epoch", "bytes"))


class _Sizes(ctypes.Structure):
    _fields_ = tuple((name, _I64) for name in ("keys", "values", "headers", "header_names", "header_values"))


class _Binary(ctypes.Structure):
    _fields_ = (("valid", _P), ("ends", _P), ("bytes", _P), ("nulls", _I64))


class _Columns(ctypes.Structure):
    _fields_ = (
        ("offset", _P),
        ("millis", _P),
        ("key", _Binary),
        ("value", _Binary),
        ("with_headers", _P),
        ("header_ends", _P),
        ("without_headers", _I64),
        ("header_name", _Binary),
        ("header_value", _Binary),
    )


class Library:
    """The loaded librdkafka and ``reader.c``. Raises `OSError` or `AttributeError` if they do not fit."""

    def __init__(self, own: ctypes.CDLL) -> None:
        from confluent_kafka import cimpl

        kafka = ctypes.CDLL(cimpl.__file__)  # also resolves the symbols of the librdkafka that it is linked with
        self.client = (_P * len(_CALLED_BY_C))(*(ctypes.cast(getattr(kafka, f"rd_kafka_{name}"), _P).value for name in _CALLED_BY_C))
        self.kafka = {name: _declare(getattr(kafka, f"rd_kafka_{name}"), *of) for name, of in _FUNCTIONS.items()}
        self.own = {name: _declare(getattr(own, f"tidemark_{name}"), *of) for name, of in _C_FUNCTIONS.items()}


def _declare(function: Any, result: Any, arguments: Sequence[Any]) -> Any:
    function.restype, function.argtypes = result, arguments
    return function


def library_for(settings: KafkaConfig) -> Library | None:
    """`library`; `None` for settings that need confluent-kafka's own code: librdkafka's own OAuth methods, plugin paths."""
    mechanism = settings.get("sasl.mechanism") or settings.get("sasl.mechanisms") or ""
    own_method = mechanism.upper() == oauth.MECHANISM and oauth.source_of(settings) is None
    if own_method or "plugin.library.paths" in settings:
        _log_uncompiled()
        return None
    return library()


@functools.cache
def _log_uncompiled() -> None:
    cause = "librdkafka's own OAuth methods and plugins need confluent-kafka"
    log.info("messages are read without the compiled reader, which takes more CPU cause=%s", cause)


@functools.cache
def library() -> Library | None:
    """Loads librdkafka and ``reader.c``. `None` if that fails; the reason is logged once per process."""
    own = native.library()
    try:
        return None if own is None else Library(own)
    except (OSError, AttributeError) as error:
        log.warning("messages are read without the compiled reader, which takes more CPU cause=%s", error)
        return None


class CompiledPoller:
    """A `tidemark.kafka.poll.Poller` with a client of its own."""

    def __init__(self, library: Library, settings: KafkaConfig) -> None:
        self._kafka, self._own, self._client = library.kafka, library.own, library.client
        self._messages = (_P * MESSAGES_A_POLL)()
        self._errors = (_P * MESSAGES_A_POLL)()
        self._partition = b"", 0
        self._handle: int | None = self._connect(settings)
        self._kafka["poll_set_consumer"](self._handle)
        self._queue = self._kafka["queue_get_consumer"](self._handle)

    def _connect(self, settings: KafkaConfig) -> int:
        error_text = ctypes.create_string_buffer(TEXT_BYTES)
        source = oauth.source_of(settings)
        if source is not None:
            source.token()  # raises before there is a client
        conf = self._kafka["conf_new"]()
        for name, value in oauth.librdkafka(settings).items():
            if self._kafka["conf_set"](conf, name.encode(), value.encode(), error_text, TEXT_BYTES) != 0:
                self._kafka["conf_destroy"](conf)
                raise unusable(_text(error_text.value))
        if source is not None:
            self._kafka["conf_set_oauthbearer_token_refresh_cb"](conf, _refresh_token)
            self._kafka["conf_enable_sasl_queue"](conf, 1)
        handle = self._kafka["new"](CONSUMER, conf, error_text, TEXT_BYTES)
        if not handle:
            self._kafka["conf_destroy"](conf)
            raise unusable(f"Failed to create consumer: {_text(error_text.value)}")
        if source is not None:
            _token_sources[int(handle)] = self._kafka, source
            self._kafka["sasl_background_callbacks_enable"](handle)  # from here on, librdkafka's own thread asks
        return int(handle)

    def assign(self, partition: TopicPartition, start: int, leader_epoch: int | None) -> None:
        self._discard()
        topic = partition.topic.encode()
        self._partition = topic, partition.partition
        partitions = self._kafka["topic_partition_list_new"](1)
        try:
            entry = self._kafka["topic_partition_list_add"](partitions, topic, partition.partition)
            self._kafka["topic_partition_list_set_offset"](partitions, topic, partition.partition, start)
            if leader_epoch is not None:
                self._kafka["topic_partition_set_leader_epoch"](entry, leader_epoch)
            if (error := self._kafka["assign"](self._handle, partitions)) != 0:
                raise BrokerUnavailable(cause=_text(self._kafka["err2str"](error)))
        finally:
            self._kafka["topic_partition_list_destroy"](partitions)

    def unassign(self) -> None:
        self._kafka["assign"](self._handle, None)

    def poll(self, count: int, end: int) -> Polled:
        count = min(count, MESSAGES_A_POLL)
        self._discard()  # messages that the caller did not read
        received = self._kafka["consume_batch_queue"](self._queue, int(POLL_S * 1000), self._messages, count)
        if received < 0:
            raise BrokerUnavailable(cause=_text(self._kafka["err2str"](self._kafka["last_error"]())))
        if received == 0:
            return Polled()
        result = _Sorted()
        self._own["sort"](self._client, self._messages, self._errors, received, *self._partition, end, ctypes.byref(result))
        return Polled(
            self._chunks(result.records),
            result.records,
            result.last if result.last >= 0 else None,
            result.leader_epoch if result.leader_epoch >= 0 else None,
            result.bytes,
            [self._failure(number) for number in range(result.errors)],
        )

    def _failure(self, number: int) -> PollError:
        pointer = self._errors[number] or 0
        message = _Message.from_address(pointer)
        return PollError(message.error, _text(self._kafka["message_errstr"](pointer)), message.offset if message.offset >= 0 else None)

    def _chunks(self, count: int) -> Iterator[pa.RecordBatch]:
        at = 0
        while at < count:
            chunk = self._chunk(at, count - at)
            at += chunk.num_rows
            yield chunk

    def _chunk(self, at: int, count: int) -> pa.RecordBatch:
        import pyarrow as pa

        messages = ctypes.addressof(self._messages) + at * ctypes.sizeof(_P)
        with_headers, unreadable, sizes = _bits(count), _bits(count), _Sizes()
        bits = (with_headers.address, unreadable.address)
        count = self._own["measure"](self._client, messages, count, BYTES_A_POLL, ctypes.byref(sizes), *bits)
        offset, millis = pa.allocate_buffer(8 * count), pa.allocate_buffer(8 * count)
        key, value = _Column(count, sizes.keys), _Column(count, sizes.values)
        header_ends = pa.allocate_buffer(4 * (count + 1))
        names, values = _Column(sizes.headers, sizes.header_names), _Column(sizes.headers, sizes.header_values)
        columns = _Columns(
            offset.address, millis.address, key.raw, value.raw, with_headers.address, header_ends.address, 0, names.raw, values.raw
        )
        self._own["copy"](self._client, messages, count, ctypes.byref(sizes), ctypes.byref(columns))
        arrays = [
            pa.Array.from_buffers(pa.int64(), count, [None, offset], 0),
            pa.Array.from_buffers(pa.int64(), count, [None, millis], 0),
            key.array(pa.binary(), columns.key.nulls),
            value.array(pa.binary(), columns.value.nulls),
            _headers(count, with_headers, header_ends, columns, names, values),
            pa.Array.from_buffers(pa.bool_(), count, [None, unreadable], 0),
        ]
        return pa.RecordBatch.from_arrays(arrays, schema=chunk_schema())

    def _discard(self) -> None:
        for messages in (self._messages, self._errors):
            self._own["discard"](self._client, messages, MESSAGES_A_POLL)

    def close(self) -> None:
        if self._handle is None:
            return
        self._discard()
        self._kafka["queue_destroy"](self._queue)
        self._kafka["consumer_close"](self._handle)
        _token_sources.pop(self._handle, None)  # first, because the next client may get the same address
        self._kafka["destroy"](self._handle)
        self._handle = None


_token_sources: dict[int, tuple[dict[str, Any], TokenSource]] = {}
"""By client: librdkafka's functions, and where its tokens come from."""


def _set_token(handle: int, _config: bytes, _opaque: int) -> None:
    """librdkafka's callback, in a thread of librdkafka's."""
    if (registered := _token_sources.get(handle)) is None:  # the client is being closed
        return
    kafka, source = registered
    try:
        token = oauth.renewed(source)
        millis, error_text = int((token.expires_at or 0) * 1000), ctypes.create_string_buffer(TEXT_BYTES)
        value, principal = token.value.encode(), token.principal.encode()
        if kafka["oauthbearer_set_token"](handle, value, millis, principal, None, 0, error_text, TEXT_BYTES) != 0:
            kafka["oauthbearer_set_token_failure"](handle, error_text.value)
    except TidemarkError as error:
        kafka["oauthbearer_set_token_failure"](handle, str(error).encode())


_refresh_token = ctypes.CFUNCTYPE(None, _P, ctypes.c_char_p, _P)(_set_token)
"""`_set_token` for C. It stays in memory as long as this module, and so longer than each client."""


class _Column:
    """Buffers for a column of binary values."""

    def __init__(self, count: int, size: int) -> None:
        import pyarrow as pa

        self.count = count
        self.valid, self.ends, self.bytes = _bits(count), pa.allocate_buffer(4 * (count + 1)), pa.allocate_buffer(size)
        self.raw = _Binary(self.valid.address, self.ends.address, self.bytes.address, 0)

    def array(self, type_: pa.DataType, nulls: int) -> pa.Array:
        import pyarrow as pa

        return pa.Array.from_buffers(type_, self.count, [self.valid if nulls else None, self.ends, self.bytes], nulls)


def _headers(count: int, valid: pa.Buffer, ends: pa.Buffer, columns: _Columns, names: _Column, values: _Column) -> pa.Array:
    import pyarrow as pa

    type_ = header_type()
    none = columns.without_headers
    if none == count:
        return pa.nulls(count, type_)
    children = [names.array(pa.string(), 0), values.array(pa.binary(), columns.header_value.nulls)]
    pairs = pa.Array.from_buffers(type_.value_type, names.count, [None], 0, children=children)
    return pa.Array.from_buffers(type_, count, [valid if none else None, ends], none, children=[pairs])


def _bits(count: int) -> pa.Buffer:
    import pyarrow as pa

    return pa.allocate_buffer((count + 7) // 8)


def _text(text: bytes | None) -> str:
    return (text or b"").decode("utf-8", "replace")

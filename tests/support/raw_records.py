"""Records that some producers write and a broker stores, although librdkafka would refuse or correct them."""

from __future__ import annotations

import io
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.support.waiting import until

PRODUCE, VERSION = 0, 7
TIMEOUT_MS = 10_000
NOT_YET = (3, 6)
"""UNKNOWN_TOPIC_OR_PARTITION, NOT_LEADER_OR_FOLLOWER: the errors for a topic that was just created."""
CRC32C = 0x82F63B78
"""Castagnoli's polynomial, reversed."""


def _divided(rest: int) -> int:
    for _ in range(8):
        rest = rest >> 1 ^ (CRC32C if rest & 1 else 0)
    return rest


CRC_OF_BYTE = [_divided(byte) for byte in range(256)]


@dataclass(frozen=True, slots=True)
class RawRecord:
    """A record with any timestamp (-1: none), and headers whose names are bytes."""

    value: bytes | None
    timestamp_ms: int
    headers: Sequence[tuple[bytes, bytes | None]] = field(default=())
    key: bytes | None = None


def produce_raw(servers: str, topic: str, records: Sequence[RawRecord], partition: int = 0) -> None:
    """Appends the records as one batch, and waits until the broker has them (Kafka's protocol, Produce of version 7)."""
    batch = _batch(records)
    name = topic.encode()
    body = struct.pack(f">hhih{len(b'tests')}s", PRODUCE, VERSION, 1, len(b"tests"), b"tests")
    body += struct.pack(">hhi", -1, -1, TIMEOUT_MS)  # no transaction; all replicas
    body += struct.pack(f">ih{len(name)}siii", 1, len(name), name, 1, partition, len(batch)) + batch
    host, port = servers.split(":")
    error_at = 4 + 4 + 2 + len(name) + 4 + 4  # correlation id, topics, name, partitions, index

    def send() -> int:
        with socket.create_connection((host, int(port)), TIMEOUT_MS / 1000) as connection, connection.makefile("rb") as answers:
            connection.sendall(struct.pack(">i", len(body)) + body)
            (size,) = struct.unpack(">i", answers.read(4))
            (error,) = struct.unpack_from(">h", answers.read(size), error_at)
        assert error in (0, *NOT_YET), f"the broker refused the records with error code {error}"
        return int(error)

    until(lambda: send() == 0)


def _batch(records: Sequence[RawRecord]) -> bytes:
    """A record batch of magic 2, neither compressed nor transactional."""
    first, latest = records[0].timestamp_ms, max(record.timestamp_ms for record in records)
    checked = struct.pack(">hiqqqhii", 0, len(records) - 1, first, latest, -1, -1, -1, len(records))
    checked += b"".join(_record(record, number, first) for number, record in enumerate(records))
    head = struct.pack(">ibI", -1, 2, _crc32c(checked))  # no leader epoch, magic
    return struct.pack(">qi", 0, len(head) + len(checked)) + head + checked


def _record(record: RawRecord, number: int, first_ms: int) -> bytes:
    body = b"\0" + _varint(record.timestamp_ms - first_ms) + _varint(number) + _bytes(record.key) + _bytes(record.value)
    body += _varint(len(record.headers)) + b"".join(_bytes(name) + _bytes(value) for name, value in record.headers)
    return _varint(len(body)) + body


def _bytes(value: bytes | None) -> bytes:
    return _varint(-1) if value is None else _varint(len(value)) + value


def _varint(number: int) -> bytes:
    """Zigzag encoding, seven bits per byte, lowest bits first."""
    rest, out = number << 1 if number >= 0 else ~(number << 1), io.BytesIO()
    while rest > 0x7F:
        out.write(bytes([rest & 0x7F | 0x80]))
        rest >>= 7
    out.write(bytes([rest]))
    return out.getvalue()


def _crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ CRC_OF_BYTE[(crc ^ byte) & 0xFF]
    return crc ^ 0xFFFFFFFF

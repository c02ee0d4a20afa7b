"""The two pollers that read Kafka: the compiled one, and the one that creates Python objects from messages."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pyarrow as pa
import pytest

from tidemark.kafka import compiled
from tidemark.kafka.poll import chunk_schema
from tidemark.kafka.reader import read
from tidemark.records.ranges import TopicPartition

READERS = ("compiled", "python")


@contextlib.contextmanager
def reading_with(reader: str) -> Iterator[None]:
    """Selects the reader of this process within the block."""
    with pytest.MonkeyPatch.context() as patch:
        if reader == "python":
            patch.setattr(compiled, "library", lambda: None)
        else:
            assert compiled.library() is not None, "the compiled reader needs a C compiler"
        yield


def read_with(reader: str, servers: str, topic: str, start: int, end: int) -> pa.Table:
    """Returns all chunks of a range as one table, and checks that each chunk is valid Arrow."""
    with reading_with(reader):
        chunks = list(read({"bootstrap.servers": servers}, TopicPartition(topic, 0), start, end))
    for chunk in chunks:
        chunk.validate(full=True)
    return pa.Table.from_batches(chunks, chunk_schema()).combine_chunks()

"""Keeps a transform's output on disk until the transaction that stores it begins.

A transform may take arbitrarily long. A transaction that waited for it would hold locks and be terminated when idle
(`tidemark.sink.commit.IDLE_TIMEOUT_MS`). So unless a single COPY can stream the rows, they are spooled, and the transaction begins after
the transform. A spool needs the memory of one item plus `MEMORY_BYTES`; the rest is in an unnamed temporary file, which
disappears with the process.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import tempfile
from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

from tidemark.errors import Unavailable

T = TypeVar("T")

MEMORY_BYTES = 8 * 1024 * 1024


class SpoolFailed(Unavailable):
    """The temporary file cannot be written or read; ``cause`` is the operating system's message."""

    folder: str
    cause: str

    def __str__(self) -> str:
        return (
            f"Cannot spool a slice's rows to a temporary file in {self.folder}: {self.cause}. Nothing of this slice was stored. Free space "
            "there, or set TMPDIR to a folder with enough space."
        )


class Spool(Generic[T]):
    """A list on disk. Items are appended, and read in order or by index any number of times."""

    def __init__(self) -> None:
        self._file = tempfile.SpooledTemporaryFile(max_size=MEMORY_BYTES)  # noqa: SIM115 - closed by `close`
        self._positions: list[int] = []

    def close(self) -> None:
        self._file.close()

    def append(self, item: T) -> int:
        """Stores an item and returns its index. Raises `SpoolFailed`."""
        with _translate_errors():
            self._file.seek(0, os.SEEK_END)
            self._positions.append(self._file.tell())
            pickle.dump(item, self._file, protocol=5)
        return len(self._positions) - 1

    def __len__(self) -> int:
        return len(self._positions)

    def __getitem__(self, index: int) -> T:
        with _translate_errors():
            self._file.seek(self._positions[index])
            item: T = pickle.load(self._file)  # noqa: S301 - written by this process
        return item

    def __iter__(self) -> Iterator[T]:
        return (self[index] for index in range(len(self)))


@contextlib.contextmanager
def spooled(items: Iterable[T]) -> Iterator[Spool[T]]:
    """Spools all of ``items`` before the block begins. Raises `SpoolFailed` and errors of ``items``."""
    with contextlib.closing(Spool[T]()) as spool:
        for item in items:
            spool.append(item)
        yield spool


@contextlib.contextmanager
def _translate_errors() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise SpoolFailed(folder=tempfile.gettempdir(), cause=str(error)) from error

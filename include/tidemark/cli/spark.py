"""A small Spark session for commands that need to call a Spark transform."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tidemark.cli.common import stderr

if TYPE_CHECKING:
    import pyarrow as pa


class SmallSpark:
    """A `LocalSpark` that uses one session for all calls."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = folders
        self._session: Any = None

    def schema(self, function: Callable[..., Any], input_schema: pa.Schema) -> Mapping[str, pa.Schema]:
        from tidemark.spark.engine import output_schema

        return output_schema(self._running_session("to find out the transform's columns"), function, input_schema)

    def rows(self, function: Callable[..., Any], batch: pa.RecordBatch) -> Mapping[str, pa.Table]:
        from tidemark.spark.engine import rows_of

        return rows_of(self._running_session("to call the transform"), function, batch)

    def stop(self) -> None:
        if self._session is not None:
            self._session.stop()

    def _running_session(self, purpose: str) -> Any:
        from tidemark.spark.session import small_session

        if self._session is None:
            with stderr.status(f"starting Spark {purpose}"):
                self._session = small_session(self._folders)
        return self._session


@contextlib.contextmanager
def small_spark(folders: Sequence[Path] = ()) -> Iterator[SmallSpark]:
    """Provides a Spark session that ends with the block. Its workers import the user's transforms from ``folders``."""
    spark = SmallSpark(folders)
    try:
        yield spark
    finally:
        spark.stop()

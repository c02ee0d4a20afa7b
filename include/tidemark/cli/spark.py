"""A small Spark session for commands that need to call a Spark transform."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from tidemark import project
from tidemark.cli.common import stderr

if TYPE_CHECKING:
    import pyarrow as pa


class SmallSpark:
    """A `LocalSpark` that uses one session for all calls, until it is closed. Its workers import the user's transforms."""

    def __init__(self) -> None:
        self._session: Any = None

    def schema(self, function: Callable[..., Any], input_schema: pa.Schema) -> Mapping[str, pa.Schema]:
        from tidemark.spark.engine import output_schema

        return output_schema(self._running_session("to find out the transform's columns"), function, input_schema)

    def rows(self, function: Callable[..., Any], batch: pa.RecordBatch) -> Mapping[str, pa.Table]:
        from tidemark.spark.engine import rows_of

        return rows_of(self._running_session("to call the transform"), function, batch)

    def close(self) -> None:
        if self._session is not None:
            self._session.stop()

    def _running_session(self, purpose: str) -> Any:
        from tidemark.spark.session import small_session

        if self._session is None:
            with stderr.status(f"starting Spark {purpose}"):
                self._session = small_session([project.transforms()])
        return self._session

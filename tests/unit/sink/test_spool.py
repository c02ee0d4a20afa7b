"""A list on disk."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pyarrow as pa
import pytest

from tidemark.records.outcome import Disposition, Reject, TransformOutput, only
from tidemark.sink import spool as spool_module
from tidemark.sink.spool import SpoolFailed, spooled


@pytest.mark.parametrize("memory", [1, 2**20], ids=["on disk", "in memory"])
def test_what_is_spooled_is_read_in_order_and_by_index(memory: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The list can be read repeatedly, and the rows' types may differ from item to item."""
    monkeypatch.setattr(spool_module, "MEMORY_BYTES", memory)
    rows = [pa.array([1, 2]), pa.array(["a", None]), pa.nulls(1), pa.array([b"x" * 5000]).slice(0, 1)]
    items = [
        TransformOutput(only(pa.RecordBatch.from_arrays([each], names=["x"])), [7], [Reject(1, Disposition.FAIL, "E", "t")])
        for each in rows
    ]
    with spooled([*items, TransformOutput({})]) as spool:
        for _ in range(2):
            assert list(spool) == [*items, TransformOutput({})]
        assert spool[2] == items[2]
        assert spool[spool.append(items[0])] == items[0]
        assert len(spool) == 6


def test_disk_without_room_is_told_with_its_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """The slice can be retried when there is space."""
    monkeypatch.setattr(spool_module, "MEMORY_BYTES", 1)
    monkeypatch.setattr(tempfile, "SpooledTemporaryFile", lambda max_size: Path("/dev/full").open("r+b", buffering=0))  # noqa: SIM115
    with pytest.raises(SpoolFailed, match=r"No space left on device\. Nothing of this slice was stored\.") as caught, spooled([b"x"]):
        pass
    assert caught.value.retriable

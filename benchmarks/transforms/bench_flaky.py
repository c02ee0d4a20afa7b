"""The events in the Arrow form, of which a share is retried: as many of 1000 as a file says."""

import os
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
from bench_arrow import EVENT, LINEAGE, parse

FILE = "BENCH_FLAKY"
"""The environment variable with the path of the file."""
PARTITIONS = 4
"""Events are numbered round robin over them: each has the same share."""


def transform(batch: pa.RecordBatch) -> pa.RecordBatch:
    events = parse(batch["value"])
    share = int(Path(os.environ[FILE]).read_text()) if FILE in os.environ else 0
    turn = pc.divide(events["event_id"], PARTITIONS)
    fails = pc.less(pc.subtract(turn, pc.multiply(pc.divide(turn, 1000), 1000)), share)
    disposition = pc.if_else(fails, pa.scalar("retry"), pa.scalar(None, pa.string()))
    error = pc.if_else(fails, pa.scalar("ServiceDown: no answer"), pa.scalar(None, pa.string()))
    columns = [*events.columns, *(batch[name] for name in LINEAGE), disposition, error]
    return pa.RecordBatch.from_arrays(columns, names=[*EVENT.names, *LINEAGE, "disposition", "error"])

"""The events in the Arrow form: the JSON of a whole batch is parsed in one go, into the table's types. And variations of it."""

import os
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json

FILE = "BENCH_FLAKY"
"""The environment variable with the path of a file. Of 1000 records, as many are retried as it says."""
PARTITIONS = 4
"""Events are numbered round robin over the topic's partitions."""

EVENT = pa.schema(
    [
        ("event_id", pa.int64()),
        ("happened_at", pa.timestamp("us", "UTC")),
        ("customer", pa.string()),
        ("kind", pa.string()),
        ("amount", pa.float64()),
        ("quantity", pa.int32()),
        ("note", pa.string()),
    ]
)
LINEAGE = ("kafka_topic", "kafka_partition", "kafka_offset")


def transform(batch: pa.RecordBatch) -> pa.RecordBatch:
    events = parse(batch["value"])
    return pa.RecordBatch.from_arrays([*events.columns, *(batch[name] for name in LINEAGE)], names=[*EVENT.names, *LINEAGE])


def flaky(batch: pa.RecordBatch) -> pa.RecordBatch:
    """A share of the events is retried, the same in each partition."""
    events = transform(batch)
    share = int(Path(os.environ[FILE]).read_text()) if FILE in os.environ else 0
    turn = pc.divide(events["event_id"], PARTITIONS)
    fails = pc.less(pc.subtract(turn, pc.multiply(pc.divide(turn, 1000), 1000)), share)
    disposition = pc.if_else(fails, pa.scalar("retry"), pa.scalar(None, pa.string()))
    error = pc.if_else(fails, pa.scalar("ServiceDown: no answer"), pa.scalar(None, pa.string()))
    names = [*events.schema.names, "disposition", "error"]
    return pa.RecordBatch.from_arrays([*events.columns, disposition, error], names=names)


def parse(values: pa.Array) -> pa.RecordBatch:
    """JSON objects, one a value, as rows of `EVENT`.

    Arrow keeps the values of a column one behind the other, which is a JSON text as it stands: the parser needs no separator, and no
    copy. ``use_threads=False``: the tasks already use all cores, and Arrow's threads double the CPU of parsing.
    """
    if len(values) == 0:
        return pa.RecordBatch.from_pylist([], schema=EVENT)
    _, ends, texts = values.buffers()
    bounds = pa.Array.from_buffers(pa.int32(), len(values) + 1, [None, ends], offset=values.offset)
    text = texts.slice(bounds[0].as_py(), bounds[-1].as_py() - bounds[0].as_py())
    table = pyarrow.json.read_json(
        pa.BufferReader(text),
        read_options=pyarrow.json.ReadOptions(use_threads=False, block_size=text.size + 1),
        parse_options=pyarrow.json.ParseOptions(explicit_schema=EVENT, unexpected_field_behavior="ignore"),
    )
    (events,) = table.combine_chunks().to_batches()
    if events.num_rows != len(values):
        raise ValueError(f"{len(values)} records hold {events.num_rows} JSON objects")
    return events

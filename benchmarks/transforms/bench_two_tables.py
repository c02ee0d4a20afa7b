"""The events in the Arrow form, every other one of a partition for each of two tables."""

import bench_arrow
import pyarrow as pa
import pyarrow.compute as pc

PARTITIONS = 4
"""Events are numbered round robin over the topic's partitions."""


def transform(batch: pa.RecordBatch) -> dict[str, pa.RecordBatch]:
    events = bench_arrow.transform(batch)
    odd = pc.not_equal(pc.bit_wise_and(events["event_id"], PARTITIONS), 0)
    return {"even": events.filter(pc.invert(odd)), "odd": events.filter(odd)}

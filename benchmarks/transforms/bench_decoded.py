"""Events that are already decoded, from Avro or Protobuf, in the Arrow form."""

import pyarrow as pa

LINEAGE = ("kafka_topic", "kafka_partition", "kafka_offset")


def transform(batch: pa.RecordBatch) -> pa.RecordBatch:
    events = batch["value"]
    names = [field.name for field in events.type]
    return pa.RecordBatch.from_arrays([*events.flatten(), *(batch[name] for name in LINEAGE)], names=[*names, *LINEAGE])

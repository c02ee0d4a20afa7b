"""The events in the Spark form: ``from_json`` and columns."""

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

EVENT = "event_id bigint, happened_at timestamp, customer string, kind string, amount double, quantity int, note string"


def transform(records: DataFrame) -> DataFrame:
    event = F.from_json(F.col("value").cast("string"), EVENT)
    return records.withColumn("event", event).select("event.*", "kafka_topic", "kafka_partition", "kafka_offset")

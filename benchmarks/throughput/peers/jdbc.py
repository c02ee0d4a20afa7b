"""Spark without Tidemark: the Kafka source, `from_json`, `df.write.jdbc`. Not exactly once: a task that is retried writes its rows twice
(here the unique index would refuse them), and offsets are stored elsewhere."""

from __future__ import annotations

import os
import sys
from typing import Any

from benchmarks.harness.site import COLUMNS, LINEAGE, TABLE, Job, Site
from benchmarks.transforms.bench_spark import EVENT

from tidemark.jvm.jars import spark_jars
from tidemark.spark.engine import SOURCE_OPTIONS
from tidemark.spark.session import LOCAL_SETTINGS, SETTINGS

KAFKA = {name: value for name, value in SOURCE_OPTIONS.items() if name.startswith("kafka.")}


class Jdbc:
    """With large batches, inserts that the driver rewrites to many rows each, and the Kafka settings that Tidemark gives Spark's source."""

    def __init__(self, site: Site) -> None:
        from pyspark.sql import SparkSession

        self._site = site
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
        builder = SparkSession.builder.appName("bench jdbc").master(f"local[{site.cores}]")
        jars = [*(str(jar) for jar in spark_jars()), *site.jars["jdbc"]]
        for name, value in {**SETTINGS, **LOCAL_SETTINGS, "spark.jars": ",".join(jars)}.items():
            builder = builder.config(name, value)
        self._spark = builder.getOrCreate()
        self._spark.sparkContext.setLogLevel("ERROR")

    def prepare(self, job: Job) -> None: ...

    def run(self, job: Job) -> None:
        from pyspark.sql import functions as F

        kafka = {**KAFKA, "kafka.bootstrap.servers": self._site.servers, "subscribe": job.topic.name, "startingOffsets": "earliest"}
        records: Any = self._spark.read.format("kafka").options(**kafka).load()
        event = F.from_json(F.col("value").cast("string"), EVENT)
        rows = records.withColumn("event", event).select(
            *(F.col(f"event.{name}") for name, _ in COLUMNS),
            F.lit(job.topic.topic_id).cast("short").alias(LINEAGE[0]),
            F.col("partition").alias(LINEAGE[1]),
            F.col("offset").alias(LINEAGE[2]),
            F.lit(0).alias(LINEAGE[3]),
        )
        login = {name: self._site.database[name] for name in ("user", "password")}
        properties = {**login, "driver": "org.postgresql.Driver", "batchsize": "10000"}
        rows.write.mode("append").jdbc(self._site.jdbc_url("?reWriteBatchedInserts=true"), TABLE, properties=properties)

    def close(self) -> None:
        self._spark.stop()

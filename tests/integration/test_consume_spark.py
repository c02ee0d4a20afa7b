"""Whole runs through the driver and real Spark: what only they can show."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest
from tests.kafka_topics import Topics
from tests.scenario import ARROW, PLAIN, SPARK, Scenario, eventually

from tidemark import project
from tidemark.connections import Connections
from tidemark.consume.describe import layout_of
from tidemark.consume.work import TransformFailed
from tidemark.db import session
from tidemark.offsets.ranges import Epoch, Slice, TopicPartition
from tidemark.sink.table import SinkMismatch
from tidemark.spark.plan import PlanNotDirect, require_direct
from tidemark.spec.transform import Form, Transform

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


# ---- plans: one Spark session, nothing is read


@pytest.fixture(scope="module")
def spark() -> Iterator[SparkSession]:
    from tidemark.local.jars import spark_jars
    from tidemark.spark.session import SETTINGS, _session

    started = _session("plans", "local[1]", {**SETTINGS, "spark.jars": ",".join(str(jar) for jar in spark_jars())})
    yield started
    started.stop()


@pytest.fixture
def records(spark: SparkSession, topics: Topics) -> DataFrame:
    """A batch of two slices, as a transform gets it."""
    from tidemark.spark.engine import kafka_records

    topic = topics.create(2)
    for partition in range(2):
        topics.produce(topic, [b"1 2", b"3"], partition=partition)
    slices = [Slice(TopicPartition(topic, partition), 1, 0, 2, Epoch(1)) for partition in range(2)]
    return kafka_records(spark, Connections("postgresql:///", {"bootstrap.servers": topics.servers}), slices)


def small(records: DataFrame) -> DataFrame:
    """A table to join with."""
    return records.sparkSession.createDataFrame([("1 2", "one")], "word string, name string")


def text(records: DataFrame) -> DataFrame:
    return records.selectExpr("*", "CAST(value AS STRING) AS word")


def udf(records: DataFrame) -> DataFrame:
    from pyspark.sql import functions as F

    return records.withColumn("length", F.udf(len, "int")("value"))


def pandas_udf(records: DataFrame) -> DataFrame:
    from pyspark.sql import functions as F

    return text(records).withColumn("upper", F.pandas_udf(lambda words: words.str.upper(), "string")("word"))


def chained(records: DataFrame) -> DataFrame:
    from pyspark.sql import functions as F

    named = text(records).join(F.broadcast(small(records)), "word", "left").where("name IS NOT NULL OR value IS NOT NULL")
    return udf(named.withColumn("part", F.explode(F.split("word", " ")))).drop("word")


def broadcast(records: DataFrame, how: str = "inner") -> DataFrame:
    from pyspark.sql import functions as F

    return text(records).join(F.broadcast(small(records)), "word", how)


def in_arrow(records: DataFrame) -> DataFrame:
    return records.select("kafka_offset").mapInArrow(lambda batches: batches, "kafka_offset long")


DIRECT: dict[str, Callable[[DataFrame], DataFrame]] = {
    "as it came": lambda records: records,
    "select and where": lambda records: records.where("value IS NOT NULL").select("kafka_offset"),
    "from_json": lambda records: text(records).selectExpr("from_json(word, 'a INT') AS parsed").select("parsed.*"),
    "explode": lambda records: text(records).selectExpr("kafka_offset", "explode(split(word, ' ')) AS part"),
    "a UDF": udf,
    "a pandas UDF": pandas_udf,
    "mapInArrow": in_arrow,
    "mapInPandas": lambda records: records.select("kafka_offset").mapInPandas(lambda frames: frames, "kafka_offset long"),
    "a broadcast join": broadcast,
    "a left broadcast join": functools.partial(broadcast, how="left"),
    "a left anti broadcast join": functools.partial(broadcast, how="left_anti"),
    "a broadcast join without equality": lambda records: text(records).crossJoin(small(records).limit(1)),
    "all of these": chained,
    "sampling": lambda records: records.sample(0.5, seed=1),
}


@pytest.mark.parametrize("transform", DIRECT.values(), ids=DIRECT.keys())
def test_plan_that_keeps_partitions_in_their_tasks_is_taken(records: DataFrame, transform: Callable[[DataFrame], DataFrame]) -> None:
    """What works on rows one by one, and joins with something small, may be committed by its tasks; each task holds one partition."""
    result = transform(records)
    require_direct(result)
    assert result.rdd.getNumPartitions() == 2


def big_join(records: DataFrame) -> DataFrame:
    return text(records).join(small(records).hint("merge"), "word")


def window(records: DataFrame) -> DataFrame:
    return records.selectExpr("*", "row_number() OVER (PARTITION BY key ORDER BY offset) AS number")


REFUSED: dict[str, Callable[[DataFrame], DataFrame]] = {
    "groupBy": lambda records: records.groupBy("key").count(),
    "an aggregate of all": lambda records: records.selectExpr("count(*)"),
    "distinct": lambda records: records.select("value").distinct(),
    "dropDuplicates": lambda records: records.dropDuplicates(["kafka_topic", "kafka_partition", "kafka_offset"]),
    "a window": window,
    "a join that shuffles": big_join,
    "a self-join": lambda records: records.alias("a").join(records.alias("b").hint("merge"), "kafka_offset"),
    "repartition": lambda records: records.repartition(4),
    "repartition by a column": lambda records: records.repartition(2, "kafka_partition"),
    "coalesce": lambda records: records.coalesce(1),
    "orderBy": lambda records: records.orderBy("kafka_offset"),
    "limit": lambda records: records.limit(1),
    "offset": lambda records: records.offset(1),
    "union with itself": lambda records: records.union(records),
    "union with others": lambda records: records.select("topic").union(small(records).select("name")),
    "other rows": small,
    "the records only broadcast": lambda records: small(records).join(text(records).hint("broadcast"), "word"),
    "a right join": functools.partial(broadcast, how="full"),
    "cached": lambda records: records.cache(),
    "shuffled and cached": lambda records: records.repartition(4).cache(),
    "made into an RDD and back": lambda records: records.select("kafka_topic").rdd.repartition(4).toDF(),
    "other rows that look alike": lambda records: small(records).selectExpr("word AS kafka_topic"),
}


@pytest.mark.parametrize("transform", REFUSED.values(), ids=REFUSED.keys())
def test_plan_that_moves_rows_between_tasks_is_refused_with_the_reason(
    records: DataFrame, transform: Callable[[DataFrame], DataFrame]
) -> None:
    """The operator is named, and what to do instead."""
    with pytest.raises(PlanNotDirect, match=r"plan has \w+Exec \((.|\n)*not supported yet\. Make the other side"):
        require_direct(transform(records))


def test_records_of_a_batch_are_the_slices_and_nothing_else(spark: SparkSession, topics: Topics) -> None:
    """Spark's connector reads ``[start, end)`` of each slice, with headers and lineage."""
    from tidemark.spark.engine import kafka_records

    topic = topics.create(3)
    for partition in range(3):
        topics.produce(topic, [str(number) for number in range(10)], partition=partition, headers=[("h", b"\xff")])
    slices = [Slice(TopicPartition(topic, 0), 1, 2, 5, Epoch(1)), Slice(TopicPartition(topic, 2), 1, 9, 10, Epoch(1))]
    found = kafka_records(spark, Connections("postgresql:///", {"bootstrap.servers": topics.servers}), slices).collect()
    assert sorted((row.kafka_partition, row.kafka_offset, bytes(row.value)) for row in found) == [
        (0, 2, b"2"),
        (0, 3, b"3"),
        (0, 4, b"4"),
        (2, 9, b"9"),
    ]
    assert found[0].headers[0].key == "h"
    assert bytes(found[0].headers[0].value) == b"\xff"


def test_transform_whose_dataframe_cannot_be_built_is_refused(spark: SparkSession) -> None:
    """Spark's own complaint about a column is passed on."""
    from tidemark.spark.engine import output_schema

    with pytest.raises(TransformFailed, match="carier"):
        output_schema(spark, lambda records: records.select("carier"))
    with pytest.raises(TransformFailed, match="it returned NoneType; it must return a DataFrame"):
        output_schema(spark, lambda records: None)


def test_integer_for_a_double_is_refused_with_both_schemas(spark: SparkSession, scenario: Scenario) -> None:
    """Binary COPY would store garbage without a word."""
    from tidemark.spark.engine import output_schema

    scenario.make_sink("payload double precision")
    columns = ["kafka_topic", "kafka_partition", "kafka_offset", "CAST(length(value) AS BIGINT) AS payload"]
    transform = Transform(Form.SPARK, lambda records: records.selectExpr(*columns), "m", "f")
    with session(scenario.database_url) as connection, pytest.raises(SinkMismatch) as refused:
        layout_of(transform, scenario.table, connection, functools.partial(output_schema, spark))
    said = str(refused.value).splitlines()
    assert "  - column payload: the output is int64, the table is double precision; cast it to double, or change the column" in said
    assert "the transform returns: kafka_topic string, kafka_partition int32, kafka_offset int64, payload int64" in said
    assert any(line.startswith("the table has:         payload double precision, kafka_topic_id smallint") for line in said)


def test_error_in_a_users_function_is_told_with_its_place(records: DataFrame) -> None:
    """Of a traceback through Spark's worker remain the error and the last line that it passed through."""
    from pyspark.sql import functions as F

    from tidemark.spark.engine import _translated

    place = r"\(File \".*\", line \d+, in .*\)\."
    with pytest.raises(TransformFailed, match=rf"executors: ZeroDivisionError: float division by zero {place}"), _translated():
        records.select(F.udf(lambda value: 1.0 / 0, "double")("value")).collect()


# ---- whole runs, a driver process each


def result(done: subprocess.CompletedProcess[str]) -> Any:
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def mixed(scenario: Scenario, transform: str) -> Scenario:
    """A consumer of two topics with nulls, empty values, transactions of both ends, and an empty partition."""
    topic, second = scenario.topics.create(3), scenario.topics.create()
    scenario.topics.produce(topic, [None, b"", b"\xff\0"] * 7)
    scenario.topics.transaction(topic, [b"gone"], partition=1, commit=False)
    scenario.topics.transaction(topic, [b"kept"], partition=1)
    scenario.topics.produce(second, [b"other"])
    return scenario.write(transform, topics=[topic, second], batch={"max_records": 15}).make_sink("payload bytea")


MIXED = {"loaded": 23, "unaccounted": 3, "sink_rows": 23}
"""What any form stores of it."""


def test_spark_form_loads_what_is_in_the_topics(scenario: Scenario) -> None:
    """Spark's connector reads the ranges, the same commit stores them; the result for programs is one document on stdout."""
    done = result(mixed(scenario, SPARK).command("consume", scenario.name, "--output", "json"))
    assert {name: done[name] for name in ("state", "records", "loaded", "skipped", "retried", "failed", "unaccounted", "sink_rows")} == {
        "state": "COMMITTED", "records": 26, "skipped": 0, "retried": 0, "failed": 0, **MIXED,
    }  # fmt: skip
    assert len(scenario.rows(where="payload = 'kept'")) == 1
    scenario.check()


@pytest.mark.parametrize("submitted", [False, True], ids=["function form", "arrow form by spark-submit"])
def test_other_forms_load_the_same(scenario: Scenario, submitted: bool) -> None:
    """In client mode the driver writes its attempt's row itself, and takes the master that spark-submit was told."""
    mixed(scenario, ARROW if submitted else PLAIN)
    env, starter = scenario.env(), [sys.executable]
    if submitted:
        env |= {"PYSPARK_PYTHON": sys.executable, "TIDEMARK_SPARK_MASTER": "spark://127.0.0.1:9", "SPARK_LOCAL_IP": "127.0.0.1"}
        starter = [str(Path(sys.executable).with_name("spark-submit")), "--master", "local[2]"]
    command = [*starter, str(project.consume_job()), scenario.name]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr
    assert scenario.counts() == MIXED
    assert scenario.attempt(1) == {"state": "COMMITTED", "error": None}
    scenario.check()


WORDS = """
    from pyspark.sql import DataFrame
    from pyspark.sql import functions as F

    import helper_{name}

    def transform(records: DataFrame) -> DataFrame:
        names = records.sparkSession.createDataFrame([("a", "Alpha"), ("b", "Beta")], "word string, name string")
        shout = F.udf(helper_{name}.shout, "string")
        text = F.col("value").cast("string")
        words = records.where("value IS NULL OR value <> 'filtered'").withColumn("line", text)
        said = F.when(F.col("line").isNull(), "skip").when(F.col("line") == "bad", "fail").when(F.col("line") == "late", "retry")
        words = words.withColumn("word", F.explode_outer(F.split("line", " ")))
        return words.join(F.broadcast(names), "word", "left").select(
            "kafka_topic", "kafka_partition", "kafka_offset",
            shout("word").alias("word"),
            "name",
            said.alias("disposition"),
            F.when(F.col("line") == "bad", "BadLine: not a word").alias("error"),
        )
"""


def test_spark_transform_with_join_explode_and_udf_says_what_becomes_of_each_record(scenario: Scenario) -> None:
    """Anything that keeps a partition in its task: a module of the user's beside the transform, UDFs, a broadcast join, dispositions."""
    (scenario.folder / "transforms" / f"helper_{scenario.name}.py").write_text(
        "def shout(word):\n    return None if word is None else word.upper()\n"
    )
    topic = scenario.topics.create(2)
    headers = [("h", None), ("h", b"\xfe")]
    lines = [b"a b a", None, b"bad", b"filtered"]
    scenario.topics.produce(topic, lines, key=b"\xff", headers=headers, timestamp=1_600_000_000_123)
    scenario.topics.produce(topic, [b"late", b"c"], partition=1)
    scenario.write(WORDS.replace("{name}", scenario.name), topics=topic).make_sink("word text, name text")
    done = result(scenario.command("consume", scenario.name, "--output", "json"))
    assert done["loaded"] == 2
    assert sorted(scenario.rows("kafka_partition, kafka_offset, kafka_seq, word, name", where="kafka_partition = 0")) == [
        (0, 0, 0, "A", "Alpha"),
        (0, 0, 1, "B", "Beta"),
        (0, 0, 2, "A", "Alpha"),
    ]
    assert scenario.counts() == {"loaded": 2, "skipped": 1, "retried": 1, "failed": 1, "unaccounted": 1, "sink_rows": 4}
    assert scenario.failed("partition, record_offset, disposition, error_type, error_text") == [
        (0, 2, "fail", "BadLine", "not a word"),
        (1, 0, "retry", "Error", "the transform gave no reason"),
    ]
    scenario.check(filtered=1)


SHUFFLED = """
    from pyspark.sql import DataFrame

    def transform(records: DataFrame) -> DataFrame:
        columns = ["kafka_topic", "kafka_partition", "kafka_offset", "value AS payload"]
        return records.selectExpr(*columns).dropDuplicates(["payload"])
"""


def test_run_of_a_transform_that_cannot_be_used_fails_and_stores_nothing(scenario: Scenario) -> None:
    """Exit status 1, the reason on stderr and on the attempt's row, nothing on stdout, no row and no move of a position."""
    topic = scenario.topics.create()
    scenario.topics.produce(topic, [b"a", b"a"])
    scenario.write(SHUFFLED, topics=topic).make_sink("payload bytea")
    done = scenario.command("consume", scenario.name, "--output", "json")
    assert (done.returncode, done.stdout) == (1, "")
    assert "Aggregations, windows, sorts, unions, limits, repartition and joins that shuffle are not supported yet." in done.stderr
    error = scenario.attempt(1)["error"]
    assert (error["kind"], error["type"]) == ("refused", "PlanNotDirect")
    assert error["text"] in done.stderr
    assert scenario.positions() == {(topic, 0): 0}
    scenario.check()


HOOK = """
    import os, pathlib, time

    def block(step, part):
        if step.name == "LEDGER" and part.start > 0:
            pathlib.Path(os.environ["BLOCKED"]).touch()
            while True:
                time.sleep(0.1)
"""


def test_driver_that_is_killed_in_the_middle_is_gone_on_from_exactly(scenario: Scenario) -> None:
    """SIGKILL inside the second batch: the first stays, nothing of the second does, no process survives, the next run reads the rest."""
    topic = scenario.topics.create()
    scenario.topics.produce(topic, [str(number) for number in range(100)])
    scenario.write(PLAIN, topics=topic, batch={"max_records": 40}).make_sink()
    transforms, blocked = scenario.folder / "transforms", scenario.folder / "blocked"
    (transforms / f"hook_{scenario.name}.py").write_text(textwrap.dedent(HOOK))
    env = scenario.env() | {"TIDEMARK_STEP_HOOK": f"hook_{scenario.name}:block", "PYTHONPATH": str(transforms), "BLOCKED": str(blocked)}
    command = [sys.executable, str(project.consume_job()), scenario.name]
    driver = subprocess.Popen(command, env=env, stderr=subprocess.DEVNULL, start_new_session=True)
    family: list[psutil.Process] = []
    try:
        eventually(blocked.exists, within_s=60)
        family = psutil.Process(driver.pid).children(recursive=True)
        assert family
    finally:
        driver.kill()
        driver.wait(30)
    eventually(lambda: not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in family))
    assert len(scenario.rows()) == 40
    scenario.check()
    assert scenario.attempt(1)["state"] == "RUNNING"
    done = result(scenario.command("consume", scenario.name, "--output", "json"))
    assert done["records"] == 60
    assert scenario.rows() == [str(number).encode() for number in range(100)]
    scenario.check()

"""Which plans keep each Kafka partition in a separate task, and what is checked about a transform of the Spark form before it runs."""

from __future__ import annotations

import contextlib
import functools
import re
import subprocess
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest
from tests.support.kafka_topics import Topics
from tests.support.spark_here import spark_session
from tests.support.waiting import until

from tidemark.connections import Connections
from tidemark.jvm.java import find_java
from tidemark.records.ranges import Epoch, Slice, TopicPartition
from tidemark.spark.arrow import LARGE, LARGE_B, LargeRows, drop_mark, mark_large_rows, without_byte_count
from tidemark.spark.engine import HEADERS_ARE_MISSING, kafka_records
from tidemark.spark.query_plan import hands_over_once, passed_on, reads_headers, why_staged

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


pytestmark = pytest.mark.thorough
"""They need a separate JVM. In the short run, `test_consume_spark.py` commits directly, and `test_staged.py` as a whole batch."""


@pytest.fixture(scope="module")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    with spark_session(tmp_path_factory.mktemp("transforms")) as session:
        yield session


@pytest.fixture(scope="module")
def topic(kafka_servers: str) -> Iterator[str]:
    """A topic of two partitions with two records each."""
    topics = Topics(kafka_servers)
    topic = topics.create(2)
    for partition in range(2):
        topics.produce(topic, [b"1 2", b"3"], partition=partition)
    yield topic
    topics.delete_all()


@pytest.fixture
def batch(spark: SparkSession, topic: str, kafka_servers: str) -> Callable[[bool], DataFrame]:
    """Creates a batch of two slices, with or without headers."""
    slices = [Slice(TopicPartition(topic, partition), 1, 0, 2, Epoch(1)) for partition in range(2)]
    connections = Connections("postgresql:///", {"bootstrap.servers": kafka_servers})
    return lambda headers: kafka_records(spark, connections, slices, headers=headers)


@pytest.fixture
def records(batch: Callable[[bool], DataFrame]) -> DataFrame:
    """A batch as a transform gets it if it reads all columns."""
    return batch(True)


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


def udf_of_headers(records: DataFrame) -> DataFrame:
    from pyspark.sql import functions as F

    return records.select(F.udf(lambda headers: len(headers or ()), "int")("headers").alias("many"))


def chained(records: DataFrame) -> DataFrame:
    named = broadcast(records, "left").where("name IS NOT NULL OR value IS NOT NULL")
    return udf(named.selectExpr("*", "explode(split(word, ' ')) AS part")).drop("word")


def broadcast(records: DataFrame, how: str = "inner") -> DataFrame:
    return text(records).join(small(records).hint("broadcast"), "word", how)


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
    """If a plan works row by row, or joins with a small table, its tasks may commit its rows. Each task holds one partition."""
    result = transform(records)
    assert why_staged(result) is None
    assert result.rdd.getNumPartitions() == 2


NOT_READ = "RDDScanExec: rows that are not read"
CACHED = "InMemoryTableScanExec: rows that are not read"
NUMBERED = "row_number() OVER (PARTITION BY key ORDER BY offset) AS number"
STAGED: dict[str, tuple[Callable[[DataFrame], DataFrame], str]] = {
    "groupBy": (lambda records: records.groupBy("key").count(), "HashAggregate"),
    "an aggregate of all": (lambda records: records.selectExpr("count(*)"), "HashAggregate"),
    "distinct": (lambda records: records.select("value").distinct(), "HashAggregate"),
    "dropDuplicates": (lambda records: records.dropDuplicates(["kafka_topic", "kafka_partition", "kafka_offset"]), "SortAggregate"),
    "a window": (lambda records: records.selectExpr("*", NUMBERED), "Window"),
    "a join that shuffles": (lambda records: text(records).join(small(records).hint("merge"), "word"), "SortMergeJoin"),
    "a self-join": (lambda records: records.alias("a").join(records.alias("b").hint("merge"), "kafka_offset"), "SortMergeJoin"),
    "repartition": (lambda records: records.repartition(4), "Exchange"),
    "repartition by a column": (lambda records: records.repartition(2, "kafka_partition"), "Exchange"),
    "coalesce": (lambda records: records.coalesce(1), "Coalesce"),
    "orderBy": (lambda records: records.orderBy("kafka_offset"), "Sort"),
    "limit": (lambda records: records.limit(1), "CollectLimit"),
    "offset": (lambda records: records.offset(1), "CollectLimit"),
    "union with itself": (lambda records: records.union(records), "Union"),
    "union with others": (lambda records: records.select("topic").union(small(records).select("name")), "Union"),
    "other rows": (small, NOT_READ),
    "the records only broadcast": (lambda records: small(records).join(text(records).hint("broadcast"), "word"), NOT_READ),
    "a full join": (functools.partial(broadcast, how="full"), "SortMergeJoin"),
    "a right join": (functools.partial(broadcast, how="right"), "SortMergeJoin"),
    "cached": (lambda records: records.cache(), CACHED),
    "shuffled and cached": (lambda records: records.repartition(4).cache(), CACHED),
    "made into an RDD and back": (lambda records: records.select("kafka_topic").rdd.repartition(4).toDF(), NOT_READ),
    "other rows that look alike": (lambda records: small(records).selectExpr("word AS kafka_topic"), NOT_READ),
}


@pytest.mark.parametrize(("transform", "operator"), STAGED.values(), ids=STAGED.keys())
def test_plan_that_moves_rows_between_tasks_is_staged_and_the_operator_is_named(
    records: DataFrame, transform: Callable[[DataFrame], DataFrame], operator: str
) -> None:
    """If no task can commit its rows alone, the driver commits, and the log names the reason."""
    assert re.match(rf"{operator}\b", why_staged(transform(records)))


HEADERS = {
    "untouched": (lambda records: text(records).select("word", "kafka_offset"), False),
    "passed on": (lambda records: records.select("headers", "kafka_offset"), True),
    "computed from": (lambda records: records.selectExpr("size(headers) AS many"), True),
    "filtered by": (lambda records: records.where("headers IS NULL").select("value"), True),
    "asked for": (lambda records: records.selectExpr("headers IS NOT NULL AS there"), True),
    "one of several": (lambda records: records.selectExpr("coalesce(headers, array()) AS some"), True),
    "behind a condition": (lambda records: records.selectExpr("CASE WHEN kafka_offset >= 0 THEN headers[0].key END AS first"), True),
    "exploded": (lambda records: records.selectExpr("explode_outer(headers) AS one"), True),
    "joined by": (lambda records: broadcast(records.selectExpr("*", "headers[0].key AS word")).select("kafka_offset"), True),
    "in a Python function": (udf_of_headers, True),
    "dropped": (lambda records: records.drop("headers"), False),
    "replaced": (lambda records: records.selectExpr("1 AS headers", "kafka_offset"), False),
}


@pytest.mark.parametrize(("transform", "wanted"), HEADERS.values(), ids=HEADERS.keys())
def test_headers_are_unpacked_where_a_transform_looks_at_them(
    batch: Callable[[bool], DataFrame], transform: Callable[[DataFrame], DataFrame], wanted: bool
) -> None:
    """A plan that uses no headers works on records without them. Any other plan would fail on its first record; it is found before."""
    without = transform(batch(False))
    assert reads_headers(without) is wanted
    assert without.schema == transform(batch(True)).schema
    with pytest.raises(Exception, match=HEADERS_ARE_MISSING) if wanted else contextlib.nullcontext():
        without.collect()


def test_headers_count_as_read_where_that_cannot_be_told(batch: Callable[[bool], DataFrame]) -> None:
    assert reads_headers(text(batch(False)).select("word").cache())


def exploded(records: DataFrame) -> DataFrame:
    return text(records).where("word > ''").selectExpr("kafka_topic", "kafka_partition", "explode(split(word, ' '))")


PASSED_ON = {
    "as they were given": (text, ["kafka_topic", "kafka_partition"]),
    "through a filter and an explode": (exploded, ["kafka_topic", "kafka_partition"]),
    "one of them computed": (lambda records: records.withColumn("kafka_partition", records.kafka_partition + 1), ["kafka_topic"]),
    "another column under the name": (lambda records: records.selectExpr("topic AS kafka_topic", "kafka_partition"), ["kafka_partition"]),
    "only one of them": (lambda records: records.select("kafka_partition"), ["kafka_partition"]),
}


@pytest.mark.parametrize(("transform", "names"), PASSED_ON.values(), ids=PASSED_ON.keys())
def test_lineage_that_is_the_sources_own_need_not_travel(records: DataFrame, transform, names: list[str]) -> None:
    """A column that the transform computes instead is checked row by row."""
    assert passed_on(records, transform(records), ["kafka_topic", "kafka_partition"]) == names


HANDED_OVER = {
    "once": (in_arrow, True),
    "after a UDF that gets no Arrow": (lambda records: in_arrow(udf(records)), True),
    "twice": (lambda records: pandas_udf(records).select("upper").mapInArrow(lambda batches: batches, "upper string"), False),
    "and in a broadcast": (lambda records: in_arrow(records.join(small(records).mapInArrow(list, "n long").hint("broadcast"))), False),
}


@pytest.mark.parametrize(("transform", "once"), HANDED_OVER.values(), ids=HANDED_OVER.keys())
def test_it_is_known_whether_a_transform_hands_rows_to_python_itself(records: DataFrame, transform, once: bool) -> None:
    """If it does, its rows are not marked, and Spark has to count their bytes."""
    assert hands_over_once(transform(records)) is once


SIZED: dict[str, tuple[list[str], bool | None]] = {
    "texts and bytes": (["value", "CAST(value AS STRING) AS word", "kafka_offset", "timestamp", "CAST(1 AS DECIMAL(9, 2)) AS price"], True),
    "a name that needs quotes": (["value AS `a.``b`", "kafka_offset"], True),
    "nothing that varies": (["kafka_offset", "timestamp", "true AS yes", "current_date() AS today"], False),
    "an array": (["value", "array(value) AS some"], None),
    "a struct": (["value", "named_struct('v', value) AS some"], None),
    "too many columns for a small row": ([f"kafka_offset AS c{number}" for number in range(LARGE_B // 16 + 1)], None),
}


@pytest.mark.parametrize(("columns", "with_mark"), SIZED.values(), ids=SIZED.keys())
def test_rows_whose_size_is_cheaply_told_are_marked(records: DataFrame, columns: list[str], with_mark: bool | None) -> None:
    """For other rows Spark has to count the bytes, which means that it asks each column after each row."""
    found = mark_large_rows(records.selectExpr(*columns))
    assert (None if found is None else LARGE in found.columns) is with_mark


def test_large_rows_are_emptied_so_that_what_is_handed_over_stays_small(spark: SparkSession) -> None:
    """Up to 10,000 rows are passed at a time. Small rows arrive unchanged, null or not. A slice with a large row is refused as a whole."""
    part = Slice(TopicPartition("t", 0), 1, 0, 12_000, Epoch(1))
    word, name = "repeat('x', IF(id < 10000, 6000, 100000)) AS word", "IF(id > 1, NULL, 'y') AS name"
    sized = spark.range(0, 12_000, 1, 1).selectExpr("id", word, name)
    rows = mark_large_rows(sized)

    def look(batches):
        for batch in batches:
            with contextlib.suppress(LargeRows):
                small = drop_mark(batch, part)
                assert small.schema.names == ["id", "word", "name"]
                assert small["word"].to_pylist() == ["x" * 6000] * len(small)
                assert small["name"].null_count == len(small) - 2
            yield batch.select(["id"]).append_column("bytes", [batch.nbytes] * len(batch)).append_column(LARGE, batch[LARGE])

    with without_byte_count(spark):
        found = rows.mapInArrow(look, f"id long, bytes long, {LARGE} boolean").toPandas()
    assert found["bytes"].nunique() == 2, "batches of 10,000 and of 2,000"
    assert found["bytes"].max() < 64 * 1024 * 1024
    assert found[LARGE].tolist() == [False] * 10_000 + [True] * 2_000


def test_spark_counts_bytes_again_for_the_next_job(spark: SparkSession) -> None:
    """The job passes 100 MB in 10,000 rows."""
    rows = spark.range(0, 10_000, 1, 1).selectExpr("repeat('x', 10000) AS word")
    job = rows.mapInArrow(lambda batches: (batch.slice(0, 1) for batch in batches), "word string")
    with without_byte_count(spark):
        assert len(job.collect()) == 1
    assert len(job.collect()) == 2


def test_a_batch_that_is_done_leaves_nothing_of_kafkas_in_the_heap(spark: SparkSession, records: DataFrame) -> None:
    """Spark keeps consumers and fetched records for 5 minutes, for another reader with the same name, but the name differs for each batch.
    Formerly the heap was full after a few dozen batches, and the JVM did little but collect garbage."""
    assert records.count() == 4
    for kept in ("KafkaConsumer", "ConsumerRecord"):  # each has a separate evictor
        until(lambda kept=kept: in_heap(spark, f"org.apache.kafka.clients.consumer.{kept}") == 0)  # type: ignore[misc]


def in_heap(spark: SparkSession, name: str) -> int:
    """The number of objects of a class in the JVM's heap."""
    jcmd = [str(find_java().with_name("jcmd")), str(spark._jvm.java.lang.ProcessHandle.current().pid()), "GC.class_histogram"]
    table = subprocess.run(jcmd, capture_output=True, text=True, check=True).stdout
    assert "java.lang.String" in table
    found = re.search(rf"^\s*\d+:\s+(\d+)\s+\d+\s+{re.escape(name)}(\s|$)", table, re.MULTILINE)
    return int(found.group(1)) if found else 0

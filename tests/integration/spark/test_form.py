"""Whole runs of the Spark form: what Spark reads, what a transform may return, and what is refused."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from tests.support.raw_records import RawRecord, produce_raw
from tests.support.records import CODECS, compacted, numbers, open_transaction, produce_compressed, produce_large
from tests.support.scenario import SPARK, Scenario
from tests.support.spark_here import run_here
from tests.support.transforms import ECHO_COLUMNS, ECHOES, JUDGES, arrow, echoed, spark, told, with_column
from tests.support.waiting import until

from tidemark.db import session, transaction
from tidemark.errors import TidemarkError
from tidemark.quality import check_conservation
from tidemark.records.outcome import BadOutput
from tidemark.sink.fit import SinkMismatch
from tidemark.spark.errors import DataLoss, NotATime, SparkFailed
from tidemark.worker.call_transform import TransformFailed

LOOKS_AT_HEADERS = """
    from pyspark.sql import DataFrame
    from pyspark.sql import functions as F


    def transform(records: DataFrame) -> DataFrame:
        names = sorted({row.headers[0].key for row in records.select("headers").collect()})
        return records.select("kafka_topic", "kafka_partition", "kafka_offset", F.lit(" ".join(names)).alias("names"))
"""

pytestmark = pytest.mark.usefixtures("session_here")


# ---- what a log may contain


def test_every_part_of_a_record_reaches_the_transform_as_it_was_produced(scenario: Scenario) -> None:
    """Covers keys, values, timestamps of any year in any order, and headers in order, with repetitions, nulls and any bytes."""
    topic = scenario.topics.create(message_timestamp_after_max_ms=str(2**63 - 1))
    repeated = [("trace", b"1"), ("trace", b"2"), ("null", None), ("empty", b""), ("", b"no name"), ("trace", b"\xff\xfe\0\x80")]
    for key in (None, b"", b"\0\xffkey"):
        scenario.topics.produce(topic, [None, b"", b"\0\xff"], key=key, headers=repeated if key else None, timestamp=1_600_000_000_123)
    times = [4_102_444_800_000, 0, 1_600_000_000_000, 1, -86_400_000]
    produce_raw(scenario.topics.servers, topic, [RawRecord(b"x", millis) for millis in times])
    scenario.write(ECHOES["spark"], topics=topic).make_sink(ECHO_COLUMNS)
    run_here(scenario)
    assert echoed(scenario) == told(scenario, topic)
    assert scenario.rows("count(*) OVER ()", where="names IS NULL")[0] == 11
    scenario.check()


def test_a_transform_may_look_at_headers_while_it_builds_its_dataframe(scenario: Scenario) -> None:
    """A batch is read without headers first, and again with them if a plan or an action needs them."""
    topic = scenario.topics.create()
    for name in ("first", "second"):
        scenario.topics.produce(topic, numbers(0, 2), headers=[(name, b"x")])
    scenario.write(LOOKS_AT_HEADERS, topics=topic).make_sink("names text")
    run_here(scenario)
    assert scenario.rows("names") == ["first second"] * 4
    scenario.check()


def test_what_only_java_makes_of_a_record(scenario: Scenario) -> None:
    """Where the other forms have null or fail the record, a header name that is not UTF-8 gets replacement characters, and Kafka's -1 for
    no timestamp becomes the last millisecond before 1970. A failed record is kept as by the other forms."""
    topic = scenario.topics.create()
    records = [RawRecord(b"a", -1, [(b"good", b"1"), (b"\xff\xfe", b"2")]), RawRecord(b"fail", -1)]
    produce_raw(scenario.topics.servers, topic, records)
    scenario.write(ECHOES["spark"], topics=topic).make_sink(ECHO_COLUMNS)
    run_here(scenario)
    just_before = datetime(1969, 12, 31, 23, 59, 59, 999_000, tzinfo=UTC)
    assert scenario.rows("at, names") == [(just_before, ["good", "\ufffd\ufffd"]), (just_before, None)]
    scenario.transform(JUDGES["spark"])
    scenario.set(group=f"{scenario.name}-failed")
    scenario.sql(f"TRUNCATE {scenario.table}")
    run_here(scenario)
    assert scenario.failed("record_offset, record_timestamp") == [(1, None)]


def test_timestamp_that_is_no_time_cannot_be_read_by_sparks_connector(scenario: Scenario) -> None:
    """Nanoseconds written as milliseconds overflow in the connector, whatever the transform reads: the run is refused, no offset moves."""
    topic = scenario.topics.create(message_timestamp_after_max_ms=str(2**63 - 1))
    produce_raw(scenario.topics.servers, topic, [RawRecord(b"w", 1_600_000_000_000), RawRecord(b"x", 1_600_000_000_000_000_000)])
    scenario.write(SPARK, topics=topic)
    scenario.refuses(NotATime, f"cannot read the timestamp of {topic}/0 offset 1: it is not a time", run_here)


def test_gaps_of_a_log_are_unaccounted(scenario: Scenario) -> None:
    """Compaction, aborted transactions and markers leave offsets without a record; a slice may contain nothing else. The run ends before an
    open transaction."""
    gone, aborted, opened, empty = compacted(scenario), scenario.topics.create(), scenario.topics.create(), scenario.topics.create()
    scenario.topics.transaction(aborted, [b"x", b"y"], commit=False)
    scenario.topics.produce(opened, [b"a"])
    scenario.topics.transaction(opened, [b"b"])
    scenario.topics.transaction(opened, [b"z"], commit=False)
    with open_transaction(scenario.topics, opened, b"c") as producer:
        scenario.topics.produce(opened, [b"d"])
        scenario.write(SPARK, topics=[gone, aborted, opened, empty], batch={"max_records": 10}).make_sink("payload bytea")
        run_here(scenario)
        assert sorted(scenario.rows()) == [b"a", b"b", b"other", b"record 19"]
        assert scenario.positions() == {(gone, 0): 21, (aborted, 0): 3, (opened, 0): 5, (empty, 0): 0}
        assert scenario.counts() == {"loaded": 4, "sink_rows": 4, "unaccounted": 25}
        producer.commit_transaction(30)
    until(lambda: len(scenario.records(opened)) == 4, "the marker is in the log")  # the broker responds before it writes it
    run_here(scenario)
    assert sorted(scenario.rows()) == [b"a", b"b", b"c", b"d", b"other", b"record 19"]
    scenario.check()


def test_records_of_1_mb_are_loaded_and_failed_ones_kept_whole(scenario: Scenario) -> None:
    """100 records of the largest size that a broker takes by default, in one slice, through the JVM of a driver with default memory."""
    topic = scenario.topics.create()
    sums = produce_large(scenario.topics, topic, 100)
    said = "IF(offset % 30 = 7, 'fail', 'load') AS disposition"
    scenario.write(spark(f'records.selectExpr(*L, "md5(value) AS payload", "{said}")'), topics=topic).make_sink("payload text")
    run_here(scenario)
    assert scenario.rows("kafka_offset, payload") == [(offset, sums[offset]) for offset in range(100) if offset % 30 != 7]
    assert scenario.failed("record_offset, md5(value)") == [(offset, sums[offset]) for offset in range(7, 100, 30)]
    check_conserved(scenario)


def test_slices_with_large_rows_are_read_again_and_only_those(scenario: Scenario, caplog: pytest.LogCaptureFixture) -> None:
    """A job that finds large rows continues with the other slices. From then on, the run counts bytes."""
    topic = scenario.topics.create(3)
    for partition in range(3):
        scenario.topics.produce(topic, numbers(0, 40), partition=partition)
    produce_large(scenario.topics, topic, 30)
    scenario.topics.produce(topic, numbers(0, 40))
    scenario.write(SPARK, topics=topic, batch={"max_records": 120}).make_sink("payload bytea")
    with caplog.at_level("INFO", engine := "tidemark.spark.engine"):
        run_here(scenario)
    (said,) = [record.getMessage() for record in caplog.records if record.name == engine]
    assert said.startswith("rows of more than 6500 bytes")
    assert len(scenario.rows("payload")) == 40 * 4 + 30
    scenario.check()


def test_records_may_be_compressed_in_any_way(scenario: Scenario) -> None:
    """One partition has records of each of Kafka's codecs."""
    topic = scenario.topics.create()
    for codec in CODECS:
        produce_compressed(scenario.topics, topic, numbers(0, 50), codec)
    scenario.write(SPARK, topics=topic).make_sink("payload bytea")
    run_here(scenario)
    assert scenario.rows() == numbers(0, 50) * len(CODECS)


def test_retention_that_passes_a_range_while_it_is_read_refuses_the_batch(scenario: Scenario) -> None:
    """Spark's connector is set to fail instead of skipping; the next run stores what is lost."""
    topic = scenario.feed(numbers(0, 10), SPARK, ddl="payload bytea", offset_reset="earliest")
    with pytest.raises(DataLoss, match=rf"no longer in the log: .*out of range for partition {topic}-0 The next run reports what is lost"):
        run_here(scenario, before=lambda: scenario.topics.trim(topic, {0: 5}))
    assert scenario.attempt()["error"]["kind"] == "refused"
    assert scenario.rows() == []
    run_here(scenario)
    assert scenario.rows() == numbers(5, 10)
    assert scenario.lost() == [(0, 0, 5, "retention")]
    scenario.check()


# ---- what a transform may return


def test_one_record_may_make_a_hundred_thousand_rows(scenario: Scenario) -> None:
    """These are more rows than a batch has records. Each row has its number within its record."""
    topic = scenario.topics.create()
    scenario.topics.produce(topic, ["1", "100000", "2"])
    as_many = "explode(sequence(0L, CAST(CAST(value AS string) AS bigint) - 1)) AS number"
    scenario.write(spark(f"records.selectExpr(*L, {as_many!r})"), topics=topic).make_sink("number bigint")
    run_here(scenario)
    assert scenario.counts() == {"loaded": 3, "sink_rows": 100_003}
    found = "kafka_offset, count(*), max(kafka_seq) + 1, bool_and(number = kafka_seq)"
    assert scenario.sql(f"SELECT {found} FROM {scenario.table} GROUP BY 1 ORDER BY 1") == [
        (0, 1, 1, True), (1, 100_000, 100_000, True), (2, 2, 2, True),
    ]  # fmt: skip
    scenario.check()


NOTHING = (
    'records.where("false").selectExpr(*L, "value AS payload")',
    'records.selectExpr(*L, "value AS payload", "explode(array_repeat(1, 0)) AS one").drop("one")',
)


def test_run_whose_rows_are_all_filtered_away_moves_the_positions(scenario: Scenario, subtests: pytest.Subtests) -> None:
    """An empty result is valid, too, even if Spark sees that before it has read anything."""
    topic = scenario.topics.create(2)
    scenario.write(SPARK, topics=topic).make_sink("payload bytea")
    for number, expression in enumerate(NOTHING, 1):
        with subtests.test(expression):
            scenario.topics.produce(topic, numbers(0, 3))
            scenario.topics.produce(topic, numbers(0, 2), partition=1)
            scenario.transform(spark(expression))
            run_here(scenario)
            assert scenario.positions() == {(topic, 0): 3 * number, (topic, 1): 2 * number}
            assert scenario.counts() == {"unaccounted": 5 * number}
    scenario.check(filtered=10)


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


def test_transform_with_join_explode_and_udf_says_what_becomes_of_each_record(scenario: Scenario) -> None:
    """All that keeps a partition in its task works: a user's module next to the transform, UDFs, a broadcast join, dispositions."""
    (scenario.folder / "transforms" / f"helper_{scenario.name}.py").write_text(
        "def shout(word):\n    return None if word is None else word.upper()\n"
    )
    topic = scenario.topics.create(2)
    scenario.topics.produce(topic, [b"a b a", None, b"bad", b"filtered"], key=b"\xff", timestamp=1_600_000_000_123)
    scenario.topics.produce(topic, [b"late", b"c"], partition=1)
    scenario.write(WORDS.replace("{name}", scenario.name), topics=topic).make_sink("word text, name text")
    run_here(scenario)
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


# ---- what is refused


PAYLOAD = 'records.selectExpr(*L, "value AS payload")'
UNFIT: dict[str, tuple[type[TidemarkError], str]] = {
    'records.selectExpr(*L, "offset AS payload")': (SinkMismatch, "column payload: the output is int64, the table is bytea"),
    'records.selectExpr(*L, "value AS payload", "1 AS other")': (SinkMismatch, "the table has no column other"),
    'records.selectExpr("kafka_topic", "kafka_offset", "value AS payload")': (SinkMismatch, "lacks the lineage column kafka_partition"),
    'records.select("carier")': (TransformFailed, "`carier` cannot be resolved"),
    "None": (TransformFailed, "it returned NoneType; it must return a DataFrame"),
    "1 / 0": (TransformFailed, "building its DataFrame: ZeroDivisionError: division by zero"),
}


def test_transform_that_does_not_fit_is_refused_before_a_record_is_read(scenario: Scenario, subtests: pytest.Subtests) -> None:
    """Spark knows the columns without reading a record, so they are compared with the table first."""
    topic = scenario.topics.create()
    scenario.topics.produce(topic, [b"a"])
    for expression, (error, said) in UNFIT.items():
        with subtests.test(expression):
            scenario.write(spark(expression), topics=topic)
            scenario.refuses(error, said, run_here)
    scenario.check()


def udf(code: str) -> str:
    """A DataFrame whose payload a Python function makes of the value."""
    return f"records.select(*L, F.udf(lambda value: {code}, 'binary')('value').alias('payload'))"


NO_INT = "encode(CAST(CAST(CAST(value AS string) || 'x' AS int) AS string), 'utf8')"
WRONG: dict[str, tuple[type[TidemarkError], str]] = {
    udf("bytes(value) if 1 / int(value) else value"): (
        TransformFailed,
        r"executors: ZeroDivisionError: division by zero \(File \".*\", line \d+, in <lambda>\)",
    ),
    udf("__import__('sys').exit(3)"): (TransformFailed, r"executors: SystemExit: 3 \(File"),
    udf("__import__('os')._exit(3)"): (SparkFailed, r"Spark could not finish the batch: Python worker exited unexpectedly \(crashed\)"),
    "records.selectExpr(*L, \"IF(value = '0', CAST(raise_error('no zero') AS binary), value) AS payload\")": (
        TransformFailed,
        r"executors: \[USER_RAISED_EXCEPTION\] no zero",
    ),
    f'records.selectExpr(*L, "{NO_INT} AS payload")': (TransformFailed, r"executors: \[CAST_INVALID_INPUT\] The value '1x'"),
    f'{PAYLOAD} if calls == 1 else records.selectExpr(*L, "offset AS payload")': (BadOutput, "payload has type int64; the table has bytea"),
    f'{PAYLOAD} if calls == 1 else records.selectExpr("value AS payload")': (BadOutput, "lineage"),
    'records.selectExpr(*L[:2], "offset + 100 AS kafka_offset", "value AS payload")': (BadOutput, "kafka_offset 100 is outside the range"),
    'records.selectExpr(*L[:2], "CAST(NULL AS bigint) AS kafka_offset", "value AS payload")': (BadOutput, "a row has no lineage"),
    "records.selectExpr(*L, \"value AS payload\", \"explode(array('fail', 'skip')) AS disposition\")": (
        BadOutput,
        "record 0 has rows with dispositions fail and skip: give all the same",
    ),
}


@pytest.mark.thorough
def test_transform_that_goes_wrong_on_records_refuses_the_slice(scenario: Scenario, subtests: pytest.Subtests) -> None:
    """One bad record is enough: an exception ends the job. Rows must match the schema of the empty DataFrame and the records that were
    read."""
    topic = scenario.topics.create()
    scenario.topics.produce(topic, [b"1", b"0"])
    for expression, (error, said) in WRONG.items():
        with subtests.test(expression):
            scenario.write(spark(expression), topics=topic)
            scenario.refuses(error, said, run_here)
    scenario.check()


DEATHS = {
    "function": "import os\nfrom tidemark.transform import Record\n\ndef transform(record: Record) -> dict:\n    os._exit(3)\n",
    "arrow": arrow(f"if len(batch):\n    __import__('os')._exit(3)\n{with_column('payload', 'batch[5]')}\nreturn given"),
}


@pytest.mark.thorough
@pytest.mark.parametrize("form", DEATHS)
def test_worker_that_dies_in_another_form_refuses_the_slice_as_well(scenario: Scenario, form: str) -> None:
    """For example, it may be killed for its memory. Spark's message says that the worker is gone, and a retry may succeed."""
    topic = scenario.topics.create()
    scenario.topics.produce(topic, [b"a"])
    scenario.write(DEATHS[form], topics=topic)
    scenario.refuses(SparkFailed, r"Spark could not finish the batch: Python worker exited unexpectedly \(crashed\)", run_here)


def test_rows_that_claim_another_partition_of_the_batch_are_refused(scenario: Scenario) -> None:
    """A task knows which partition it reads, whatever its rows say. Otherwise it would move an offset whose records another task reads."""
    topic = scenario.topics.create(2)
    scenario.topics.produce(topic, [b"a", b"b"])
    scenario.topics.produce(topic, [b"c"], partition=1)
    swapped = 'records.selectExpr("kafka_topic", "1 - kafka_partition AS kafka_partition", "kafka_offset", "value AS payload")'
    scenario.write(spark(swapped), topics=topic)
    scenario.refuses(BadOutput, "a row belongs to another partition. The transform must not move rows between partitions", run_here)
    scenario.transform(SPARK)
    run_here(scenario)
    assert scenario.rows("kafka_partition, payload") == [(0, b"a"), (0, b"b"), (1, b"c")]
    scenario.check()


# ---- helpers


def check_conserved(scenario: Scenario) -> None:
    """Compares ledger and tables: the part of `Scenario.check` that does not read the topic again."""
    with session(scenario.database_url) as connection, transaction(connection) as cur:
        assert check_conservation(cur, scenario.spec.group, [scenario.table]) == []

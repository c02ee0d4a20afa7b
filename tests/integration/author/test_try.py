"""`tidemark try` shows what a run would do with the latest records, in all forms of a transform, and writes nothing."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.support.orders import COLUMNS, FORMS, Orders, order
from tests.support.scenario import Scenario, as_json
from tests.support.shell import tidemark

from tidemark.author.latest_records import latest
from tidemark.kafka.cluster import Cluster

ROW = {"id": 1, "city": None, "total": "12.50", "at": "2026-01-02T03:04:05.678000Z", "country": "CH"}


@pytest.fixture
def topic(scenario: Scenario) -> str:
    return scenario.topics.create()


def tried(scenario: Scenario, *words: str, **env: str) -> dict[str, Any]:
    done = tidemark(scenario, "try", scenario.name, *words, "--output", "json", env=env)
    assert done.returncode == 0, done.stderr
    return as_json(done.stdout)


def refused(scenario: Scenario) -> str:
    done = tidemark(scenario, "try", scenario.name)
    assert done.returncode == 1, done.stdout
    return done.stderr


def outcomes(found: dict[str, Any]) -> list[tuple[int, str, Any]]:
    """Offset, disposition, and the rows or the error of each record."""
    return [
        (each["offset"], each["disposition"], f"{each['error_type']}: {each['error_text']}" if each["error_type"] else each["rows"])
        for each in found["records"]
    ]


def contents(scenario: Scenario) -> tuple[dict[str, int], list[str]]:
    """The number of rows in each table of the database, and the topics whose names contain the consumer's."""
    tables = scenario.sql("SELECT format('%I.%I', schemaname, tablename) FROM pg_tables WHERE schemaname !~ '^(pg_|information_)'")
    counts = {table: scenario.sql(f"SELECT count(*) FROM {table}")[0][0] for (table,) in tables}
    return counts, Cluster({"bootstrap.servers": scenario.topics.servers}).matching(f".*{scenario.name}.*")


@pytest.mark.parametrize("form", ["function", "arrow", pytest.param("spark", marks=pytest.mark.thorough)])
def test_each_form_shows_rows_and_failures_as_a_run_would_store_them(scenario: Scenario, orders: Orders, form: str) -> None:
    """Covers undecodable records, unknown schemas, and the table's types. Afterwards there is no new table, topic or row."""
    good = orders.written(order(1))
    orders.produce(order(1), good[:-1], b"\0" + (2**31 - 5).to_bytes(4, "big") + good[5:])
    scenario.write(FORMS[form], topics=orders.topic, format={"value": "avro"}, retry={"delays": ["1h"]}).make_sink(COLUMNS)
    before = contents(scenario)
    found = tried(scenario)
    assert outcomes(found) == [
        (0, "load", [ROW]),
        (1, "fail", "Undecodable: its value does not have the form of its Avro schema"),
        (2, "retry", f"SchemaUnknown: the registry does not know schema {2**31 - 5} of its value"),
    ]
    assert (found["consumer"], found["tables"], found["notes"], found["rows"]) == (scenario.name, [scenario.table], [], None)
    assert contents(scenario) == before


PER_ORDER = """
    from tidemark.transform import Fail, Record, Retry, Skip

    def transform(record: Record):
        text = record.value.decode()
        if text == "skip":
            raise Skip("it says so")
        if text == "permanent":
            raise KeyError(text)
        if text == "later":
            raise Retry("not yet")
        return [{"payload": text, "number": number} for number in range(len(text))]
"""


def test_a_function_with_and_without_a_table(scenario: Scenario, topic: str) -> None:
    """With a table, values must fit its columns. Without one, rows are shown as the function returned them."""
    scenario.topics.produce(topic, ["skip", "permanent", "later", "ab", "", "\0"])
    scenario.write(PER_ORDER, topics=topic, retry={"delays": ["1h"], "permanent": ["KeyError"]})
    rows = [{"payload": "ab", "number": 0}, {"payload": "ab", "number": 1}]
    expected = [
        *((0, "skip", []), (1, "fail", "KeyError: 'permanent'"), (2, "retry", "Retry: not yet")),
        *((3, "load", rows), (4, "skip", []), (5, "load", [{"payload": "\0", "number": 0}])),
    ]
    found = tried(scenario)
    assert outcomes(found) == expected
    assert found["notes"] == [
        f"table {scenario.table} does not exist, so values are not compared with it; `tidemark sink ddl {scenario.name}` prints its DDL"
    ]
    found = tried(scenario, TIDEMARK_DATABASE_URL="")
    assert outcomes(found) == expected
    assert found["notes"] == ["TIDEMARK_DATABASE_URL is not set, so values are not compared with the table"]
    scenario.make_sink("payload uuid, number int")
    bad = "Misfit: payload does not fit uuid: the value is not a uuid."
    assert outcomes(tried(scenario, "--records", "3")) == [(3, "fail", bad), (4, "skip", []), (5, "fail", bad)]


def test_terminal_shows_one_line_for_each_row(scenario: Scenario, topic: str) -> None:
    events = [{"id": 1, "note": "a\u001b[1m\u009bb", "at": "2026-01-02T03:04:05Z", "tags": {"x": [1]}}, {"id": "two"}]
    scenario.topics.produce(topic, [*map(json.dumps, events), None])
    scenario.write(None, topics=topic, format={"value": "json"})
    assert "JSON has no schema" in refused(scenario)
    scenario.make_sink("id bigint, note text, at timestamptz, tags jsonb, uid uuid, raw bytea, price numeric(5,2)")
    done = tidemark(scenario, "try", scenario.name)
    assert done.returncode == 0
    assert done.stdout.splitlines() == [
        f"{topic}/0 offset 0",
        '    id=1 note="a\\u001b[1m b" at="2026-01-02T03:04:05Z" tags={"x":[1]} uid=null raw=null price=null',
        f"{topic}/0 offset 1: fail, Fail: id does not fit bigint: the value is text that is not a number",
        f"{topic}/0 offset 2: skip",
        "3 records: 1 loaded, 1 failed, 1 skipped; 1 row",
    ]


def test_consumer_without_code_needs_no_table_if_the_values_have_a_schema(scenario: Scenario, orders: Orders) -> None:
    orders.produce(order(1), None, order(2))
    scenario.write(None, topics=orders.topic, format={"value": "avro"})
    first = {name: ROW[name] for name in ("id", "city", "total", "at")} | {"place": {"country": "CH"}}
    expected = [(0, "load", [first]), (1, "skip", []), (2, "load", [first | {"id": 2}])]
    assert outcomes(tried(scenario)) == expected
    scenario.make_sink()
    found = tried(scenario)
    assert (outcomes(found), found["notes"]) == (expected, [])
    scenario.sql(f"DROP TABLE {scenario.table} CASCADE")
    scenario.make_sink("id bigint, at int")
    assert "column at: the output is" in refused(scenario)


def test_values_that_the_copy_cannot_hold_fail(scenario: Scenario, topic: str) -> None:
    """As in a run, only the record with the value fails: here a bad uuid from an Arrow transform."""
    source = """
        import pyarrow as pa

        def transform(batch: pa.RecordBatch) -> pa.RecordBatch:
            names = ["kafka_topic", "kafka_partition", "kafka_offset"]
            columns = [*(batch[name] for name in names), batch["value"].cast(pa.string()), batch["value"]]
            return pa.RecordBatch.from_arrays(columns, names=[*names, "uid", "raw"])
    """
    uid = "00000000-0000-0000-0000-000000000007"
    scenario.topics.produce(topic, [uid, "x", uid])
    scenario.write(source, topics=topic).make_sink("uid uuid, raw bytea")
    row = {"uid": uid, "raw": f"\\x{uid.encode().hex()}"}
    bad = (1, "fail", "NotEncodable: a value in column uid does not fit uuid.")
    assert outcomes(tried(scenario)) == [(0, "load", [row]), bad, (2, "load", [row])]
    scenario.transform(source.replace('.cast(pa.string()), batch["value"]]', '.cast(pa.int64()).cast(pa.string()), batch["value"]]'))
    assert "ArrowInvalid" in refused(scenario)


@pytest.mark.thorough
def test_rows_of_a_spark_aggregate_belong_to_the_batch_and_udfs_find_their_module(scenario: Scenario, topic: str) -> None:
    source = """
        from pyspark.sql import DataFrame
        from pyspark.sql import functions as F

        def shout(text):
            return text.upper()

        def transform(records: DataFrame) -> DataFrame:
            loud = F.udf(shout)(F.col("value").cast("string"))
            return records.groupBy(loud.alias("word")).agg(F.count("*").alias("times"))
    """
    scenario.topics.produce(topic, ["a", "A", "a"])
    scenario.write(source, topics=topic)
    found = tried(scenario)
    assert found["rows"] == [{"word": "A", "times": 3}]
    assert [each["disposition"] for each in found["records"]] == [None] * 3
    scenario.transform(source.replace("return text.upper()", "raise ValueError('it is ' + text)"))
    assert "ValueError: it is" in refused(scenario)


def test_latest_are_the_last_committed_records_over_all_partitions(scenario: Scenario) -> None:
    """Sorted by timestamp, but within a partition by offset. Aborted records and markers do not count, however many there are."""
    topics = scenario.topics
    topic = topics.create(3)
    for partition, stamps in enumerate(([10, 40, 30], [20, 50])):
        for stamp in stamps:
            topics.produce(topic, [str(stamp)], partition=partition, timestamp=stamp)
    kafka = {"bootstrap.servers": topics.servers}

    def values(count: int) -> list[int]:
        partitions = [each for found in Cluster(kafka).topics([topic]) for each in found.all()]
        return [int(value) for value in latest(kafka, Cluster(kafka).logs(partitions).values(), count)["value"].to_pylist()]

    assert values(100) == [10, 20, 40, 30, 50]
    assert values(3) == [40, 30, 50]
    assert values(1) == [50]
    topics.transaction(topic, ["-1"] * 30, partition=1, commit=False)
    assert values(2) == [30, 50]
    topics.transaction(topic, ["60"], partition=2)
    assert values(2) == [50, 60]


def test_empty_topic_and_fixed_partitions(scenario: Scenario) -> None:
    topic = scenario.topics.create(2)
    scenario.write(topics=topic, partitions={topic: 1})
    done = tidemark(scenario, "try", scenario.name)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "the topics have no records")
    scenario.topics.produce(topic, ["a"], partition=0)
    scenario.topics.produce(topic, ["b"], partition=1)
    assert [(each["partition"], each["rows"]) for each in tried(scenario)["records"]] == [(1, [{"payload": "\\x62"}])]


def test_times_that_python_does_not_have_are_shown(scenario: Scenario) -> None:
    """A record's timestamp after the year 9999 is not shown. Such a value in a row is shown as text."""
    source = """
        import pyarrow as pa

        def transform(batch: pa.RecordBatch) -> pa.RecordBatch:
            names = ["kafka_topic", "kafka_partition", "kafka_offset"]
            far = batch["timestamp"]
            return pa.RecordBatch.from_arrays([*(batch[name] for name in names), far, far.cast("date32")], names=[*names, "far", "day"])
    """
    topic = scenario.topics.create(message_timestamp_after_max_ms=str(2**63 - 1))
    scenario.topics.produce(topic, ["a"], timestamp=300_000_000_000_000)
    scenario.write(source, topics=topic)
    for _ in range(2):
        (record,) = tried(scenario)["records"]
        assert (record["timestamp"], record["rows"]) == (None, [{"far": "11476-08-15 05:20:00.000000Z", "day": "11476-08-15"}])
        scenario.sql(f"DROP TABLE IF EXISTS {scenario.table}")
        scenario.make_sink("far timestamptz, day date")


@pytest.mark.parametrize(
    ("numbers", "note"),
    [
        ([1_767_323_045, 1_767_323_046], "at: all times are in the first weeks of 1970"),
        ([1_767_323_045_678_000], "at: all times are after the year 9999"),
        ([1_767_323_045_678], None),
        ([1_767_323_045, 1_767_323_045_678], None),
        ([None], None),
    ],
)
def test_numbers_in_another_unit_than_milliseconds_are_noticed(
    scenario: Scenario, topic: str, numbers: list[int | None], note: str | None
) -> None:
    scenario.topics.produce(topic, [json.dumps({"at": number}) for number in numbers])
    scenario.write(None, topics=topic, format={"value": "json"}).make_sink("at timestamptz")
    notes = tried(scenario)["notes"]
    assert notes == [] if note is None else notes[0].startswith(f"{note}; is their unit right?")

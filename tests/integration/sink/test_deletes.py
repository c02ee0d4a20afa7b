"""Deletes in upsert sinks: from each form of a transform, from consumers without code, and deletes that cannot be carried out."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from tests.integration.retry.lab import Lab, lab_on
from tests.support.kafka_topics import Topics
from tests.support.orders import Orders, order
from tests.support.scenario import Scenario
from tests.support.shell import tidemark
from tests.support.spark_here import run_here

from tidemark.db import session, transaction
from tidemark.driver import launch
from tidemark.metrics.families import of_work
from tidemark.metrics.ledger import LedgerTotals
from tidemark.quality import ValidatedRun, check_conservation, validate
from tidemark.records.outcome import RecordCounts
from tidemark.sink.deletes import RowsKept

FORMS = {
    "function": """
        from tidemark.transform import Delete, Record

        def transform(record: Record):
            for word in record.value.decode().split():
                city = word.lstrip("-") or None
                yield Delete(city=city) if word.startswith("-") else {"city": city, "place": record.offset}
    """,
    "arrow": """
        import pyarrow as pa
        import pyarrow.compute as pc

        def transform(batch: pa.RecordBatch) -> pa.RecordBatch:
            word = batch["value"].cast(pa.string())
            city = pc.utf8_ltrim(word, characters="-")
            return pa.RecordBatch.from_pydict({
                "kafka_topic": batch["kafka_topic"], "kafka_partition": batch["kafka_partition"], "kafka_offset": batch["kafka_offset"],
                "city": pc.if_else(pc.equal(city, ""), None, city), "place": batch["offset"],
                "disposition": pc.if_else(pc.starts_with(word, "-"), "delete", "load"),
            })
    """,
    "spark": """
        from pyspark.sql import DataFrame
        from pyspark.sql import functions as F

        def transform(records: DataFrame) -> DataFrame:
            word = F.col("value").cast("string")
            return records.select(
                "kafka_topic", "kafka_partition", "kafka_offset", F.expr("nullif(ltrim('-', string(value)), '')").alias("city"),
                F.col("offset").alias("place"), F.when(word.startswith("-"), "delete").otherwise("load").alias("disposition"),
            )
    """,
}
FORMS["staged"] = FORMS["spark"].rstrip() + ".repartition(3)\n"
TABLE = "city text NOT NULL UNIQUE, place bigint"


@pytest.fixture(params=["function", "arrow", *(pytest.param(form, marks=pytest.mark.thorough) for form in ("spark", "staged"))])
def form(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    if found in ("spark", "staged"):
        request.getfixturevalue("session_here")
    return found


def consumer(scenario: Scenario, form: str, deletes: str | None, ddl: str | None = TABLE, **keys: Any) -> Scenario:
    sink = {"table": scenario.table, "mode": "upsert", "key": ["city"]} | ({"deletes": deletes} if deletes else {})
    return scenario.write(FORMS[form], topics=scenario.topics.create(), sink=sink, **keys).make_sink(ddl)


def ran(scenario: Scenario, form: str, *words: str) -> None:
    (topic,) = scenario.keys["topics"]
    scenario.topics.produce(topic, list(words))
    run_here(scenario) if form in ("spark", "staged") else scenario.run()
    with session(scenario.database_url) as connection, transaction(connection) as cur:
        assert check_conservation(cur, scenario.spec.group, [scenario.table], upsert=True) == []


def test_each_form_deletes(scenario: Scenario, form: str) -> None:
    """Only the record whose delete has no key fails."""
    consumer(scenario, form, "hard")
    ran(scenario, form, "ulm", "bonn", "-ulm", "-", "rom", "-york")
    assert scenario.rows("city, place") == [("bonn", 1), ("rom", 4)]
    assert [each[:3] for each in scenario.failed()] == [(3, "fail", "DeleteWithoutKey")]
    ran(scenario, form, "-rom", "ulm")
    assert scenario.rows("city, place") == [("bonn", 1), ("ulm", 7)]
    assert scenario.counts() == {"loaded": 7, "failed": 1, "sink_rows": 7, "deleted": 3}


@pytest.mark.parametrize("form", ["function", "arrow"])
def test_sink_that_refuses_deletes_fails_the_record(scenario: Scenario, form: str) -> None:
    consumer(scenario, form, None)
    ran(scenario, form, "ulm", "-ulm", "bonn")
    assert scenario.rows("city") == ["ulm", "bonn"]
    assert scenario.failed() == [
        (1, "fail", "DeleteRefused", "The record deletes a row, which the sink refuses: set sink.deletes to hard or soft.")
    ]


def test_soft_deletes_keep_the_row(scenario: Scenario) -> None:
    """A later load restores the row. The DDL includes the column ``kafka_deleted``."""
    consumer(scenario, "arrow", "soft", None)
    ran(scenario, "arrow", "ulm", "bonn", "-ulm", "-rom")
    assert scenario.rows("city, place, kafka_deleted") == [("ulm", 0, True), ("bonn", 1, False)]
    ran(scenario, "arrow", "ulm")
    assert scenario.rows("city, place, kafka_deleted") == [("bonn", 1, False), ("ulm", 4, False)]


OUTAGE = """
    import pathlib

    from tidemark.transform import Delete, Record, Retry

    def transform(record: Record):
        word = record.value.decode()
        if word.startswith("?") and not pathlib.Path("@HERE@/up").exists():
            raise Retry("the service is down")
        word = word.lstrip("?")
        return Delete(city=word[1:]) if word.startswith("-") else {"city": word, "place": record.offset}
"""


@pytest.fixture
def outage(scenario: Scenario, topics: Topics) -> Iterator[Lab]:
    """A consumer whose records with a question mark fail until `after_the_outage`."""
    sink = {"table": scenario.table, "mode": "upsert", "key": ["city"], "deletes": "hard"}
    with lab_on(scenario, topics, transform=OUTAGE, ddl=TABLE, sink=sink) as lab:
        yield lab


def after_the_outage(lab: Lab) -> list[Any]:
    """Retries what waits, and returns the sink's cities."""
    (lab.consumer.folder / "transforms" / "up").touch()
    lab.climb(timedelta(minutes=5))
    return lab.consumer.rows("city")


def test_record_that_is_retried_does_not_bring_a_deleted_row_back(outage: Lab) -> None:
    outage.produce("?ulm", "-ulm", "rom", "?-rom", "?-bonn", "bonn", "?york")
    outage.run()
    assert outage.consumer.rows("city") == ["rom", "bonn"]
    assert after_the_outage(outage) == ["bonn", "york"]
    assert outage.consumer.counts()["deleted"] == 3


def test_record_of_a_topic_that_was_created_again_does_not_bring_a_deleted_row_back(outage: Lab) -> None:
    """All records of the new topic are later than the old topic's."""
    outage.consumer.set(offset_reset="earliest")
    outage.read("?ulm", "?york", answers={})
    outage.topics.recreate(outage.topic)
    outage.read("-ulm", answers={})
    assert after_the_outage(outage) == ["york"]


def test_trigger_that_keeps_rows_is_named_as_the_cause(scenario: Scenario) -> None:
    consumer(scenario, "arrow", "hard")
    ran(scenario, "arrow", "ulm")
    scenario.sql("CREATE FUNCTION lake.keeps() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN NULL; END $$")
    scenario.sql(f"CREATE TRIGGER keeps BEFORE DELETE ON {scenario.table} FOR EACH ROW EXECUTE FUNCTION lake.keeps()")
    with pytest.raises(RowsKept, match="kept 1 of 1 row that records delete"):
        ran(scenario, "arrow", "-ulm")
    assert scenario.rows("city") == ["ulm"]


def test_row_that_others_refer_to_fails_the_record(scenario: Scenario) -> None:
    consumer(scenario, "arrow", "hard")
    ran(scenario, "arrow", "ulm", "bonn")
    scenario.sql(f"CREATE TABLE lake.trips (city text REFERENCES {scenario.table} (city)); INSERT INTO lake.trips VALUES ('ulm')")
    ran(scenario, "arrow", "-ulm", "-bonn")
    assert scenario.rows("city") == ["ulm"]
    assert [each[:3] for each in scenario.failed()] == [(2, "fail", "ForeignKeyViolation")]


def test_key_of_another_partition_is_not_deleted(scenario: Scenario) -> None:
    consumer(scenario, "arrow", "hard")
    ran(scenario, "arrow", "ulm")
    (topic,) = scenario.keys["topics"]
    scenario.topics.grow(topic, 2)
    scenario.topics.produce(topic, ["-ulm", "bonn"], partition=1)
    scenario.run()
    assert scenario.rows("city") == ["ulm", "bonn"]
    assert [each[:3] for each in scenario.failed()] == [(0, "fail", "KeyOfOtherPartition")]


# ---- counts


def judged(scenario: Scenario) -> RecordCounts:
    """Validates the last run and returns the counts."""
    run = ValidatedRun(attempt_id=scenario.attempt_id)
    return validate(scenario.database_url, run, group=scenario.spec.group, suites={scenario.table: None}, upsert=True).counts


def test_deletes_are_shown_with_the_rows_that_they_are_of(scenario: Scenario, caplog: pytest.LogCaptureFixture) -> None:
    """Programs always get the number, people only if it is not 0: logs omit it then."""
    caplog.set_level(logging.INFO)
    consumer(scenario, "function", "hard")
    ledger = LedgerTotals()

    def scraped() -> dict[str, float]:
        with session(scenario.database_url) as connection, transaction(connection) as cur:
            ledger.read(cur)
        samples = [one for family in of_work({"g": ledger.totals[scenario.spec.group]}) for one in family.samples]
        return {one.name: one.value for one in samples if one.name in ("tidemark_rows_total", "tidemark_deleted_rows_total")}

    scraped()
    ran(scenario, "function", "ulm bonn")
    assert judged(scenario).deleted == 0
    assert (len(caplog.records) > 0, "deleted=" in caplog.text) == (True, False)
    assert scraped() == {"tidemark_rows_total": 2, "tidemark_deleted_rows_total": 0}
    ran(scenario, "function", "-ulm rom", "-york")
    assert "unaccounted=0 deleted=2 twin=False" in caplog.text
    assert judged(scenario) == RecordCounts(loaded=2, sink_rows=3, deleted=2)
    assert "rows=3 deleted=2" in caplog.text
    assert scraped() == {"tidemark_rows_total": 5, "tidemark_deleted_rows_total": 2}
    progress = launch.progress(scenario.database_url, scenario.attempt_id)
    assert (progress.counts["sink_rows"], progress.counts["deleted"]) == (3, 2)
    ran(scenario, "function", "-bonn oslo")
    table = [line.split() for line in tidemark(scenario, "validate", scenario.name).stdout.splitlines()]
    shown = [line for line in table if line and line[-1] in ("verdict", "passed")]
    assert (shown[0][1:3], shown[-1][0], shown[-1][2:4]) == (["rows", "deletes"], "attempt", ["2", "1"])


@pytest.mark.thorough
def test_table_of_a_run_shows_deletes(scenario: Scenario) -> None:
    consumer(scenario, "function", "hard")
    (topic,) = scenario.keys["topics"]
    scenario.topics.produce(topic, ["ulm bonn", "-ulm rom", "-york"])
    table = [line.split() for line in scenario.command("consume", scenario.name).stdout.splitlines()]
    seen = {line[0]: line[-2:] for line in table if line}
    assert (seen["partition"], seen[f"{topic}/0"], seen["total"]) == (["rows", "deletes"], ["5", "2"], ["5", "2"])


# ---- without code


def test_tombstone_deletes_the_row_of_its_key(orders: Orders) -> None:
    """The fields of the key have the same names as those of the value."""
    scenario = orders.scenario
    sink = {"table": scenario.table, "mode": "upsert", "key": ["order_id"], "deletes": "hard"}
    keys = {"columns": {"order_id": "id"}, "drop": ["place", "at", "total"]}
    scenario.write(None, topics=orders.topic, format={"value": "avro", "key": "avro"}, sink=sink, **keys)
    pairs = [(1, order(1)), (2, order(2)), (1, None), (3, None), (None, None)]
    for number, value in pairs:
        key = None if number is None else orders.written_key({"id": number})
        scenario.topics.produce(orders.topic, [None if value is None else orders.written(value)], key=key)
    scenario.make_sink()
    scenario.run()
    assert scenario.rows("order_id") == [2]
    assert [each[:3] for each in scenario.failed()] == [(4, "fail", "DeleteWithoutKey")]


@pytest.mark.parametrize(("encoding", "one", "two"), [("string", "1", "2"), ("json", '{"id": 1}', '{"id": 2}')])
def test_tombstones_of_json_consumers(scenario: Scenario, encoding: str, one: str, two: str) -> None:
    """A message key that is not an object is used as the whole key."""
    topic = scenario.topics.create()
    sink = {"table": scenario.table, "mode": "upsert", "key": ["id"], "deletes": "soft"}
    scenario.write(None, topics=topic, format={"value": "json", "key": encoding}, sink=sink)
    scenario.make_sink("id bigint NOT NULL UNIQUE, city text, kafka_deleted boolean NOT NULL DEFAULT false")
    values = ['{"id": 1, "city": "ulm"}', '{"id": 2, "city": "bonn"}', None]
    for key, value in zip([one, two, one], values, strict=True):
        scenario.topics.produce(topic, [value], key=key)
    scenario.run()
    assert scenario.rows("id, city, kafka_deleted") == [(1, "ulm", True), (2, "bonn", False)]

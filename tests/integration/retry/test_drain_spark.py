"""Drains of the Spark form: the driver reads the records, the tasks stage the plan's results, and one transaction moves all of them."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest
from tests.integration.retry.lab import Lab, lab_on, minutes
from tests.support.kafka_topics import Topics
from tests.support.scenario import Scenario
from tests.support.spark_here import run_here
from tests.support.transforms import ECHO_COLUMNS, ECHOES

from tidemark.retry.redrive import Destination
from tidemark.rewind.plan_model import ToEarliest
from tidemark.spark import engine

SERVICE = """
    import json
    import pathlib

    from pyspark.sql import DataFrame
    from pyspark.sql import functions as F

    ANSWERS = pathlib.Path(__file__).with_name("answers.json")
    LINEAGE = ["kafka_topic", "kafka_partition", "kafka_offset"]


    def transform(records: DataFrame) -> DataFrame:
        said = json.loads(ANSWERS.read_text())
        answer = F.lit(said.get("*", "load"))
        for word, each in said.items():
            answer = F.when(F.col("word") == word, F.lit(each)).otherwise(answer)
        judged = records.withColumn("word", F.col("value").cast("string")).withColumn("answer", answer).where("answer <> 'drop'")
        rows = judged.withColumn("number", F.explode(F.expr("sequence(1, CASE answer WHEN 'three' THEN 3 ELSE 1 END)")))
        disposition = "CASE WHEN answer IN ('skip', 'retry', 'fail') THEN answer END AS disposition"
        return rows.selectExpr(*LINEAGE, "value AS payload", disposition, "'Down: for ' || word AS error")
"""
"""Like the lab's service, which answers by value. With the answer ``drop``, the plan filters the record out."""
SHUFFLED = SERVICE.replace("rows = judged.", 'rows = judged.repartition(2, "word").')


pytestmark = pytest.mark.usefixtures("session_here")


@pytest.fixture(params=[SERVICE, SHUFFLED], ids=["narrow", "shuffled"])
def lab(request: pytest.FixtureRequest, scenario: Scenario, topics: Topics) -> Iterator[Lab]:
    with lab_on(scenario, topics, partitions=2, transform=request.param, runner=run_here) as lab:
        yield lab


@pytest.mark.thorough
@pytest.mark.sampled
def test_records_climb_and_land_whatever_the_plan_is(lab: Lab) -> None:
    """Rows, lineage, ledger and the next delay are as in the other forms. Records that the plan filters out are skipped. Records of several
    partitions share a slice of a retry topic."""
    words = ("a", "b", "c", "d", "e")
    lab.say(dict.fromkeys(words, "retry"))
    for partition in (0, 1):
        lab.produce("x", *words, partition=partition)
    lab.run()
    assert lab.states() == {"WAITING": 10}
    lab.say({"a": "three", "b": "skip", "c": "retry", "d": "fail", "e": "drop"})
    lab.climb(minutes(5))
    columns = "record_offset, state, retry_number, sink_rows, error_text"
    told = [(1, "LOADED", 1, 3), (2, "SKIPPED", 1, 0), (3, "WAITING", 2, 0), (4, "FAILED", 1, 0), (5, "SKIPPED", 1, 0)]
    assert [row[:4] for row in lab.failed(columns)] == told * 2
    assert lab.rows() == [(0, 0), (1, 0), (1, 1), (1, 2)] * 2
    assert lab.drains() == [("retry.5m", 0, 10, 2, 4, 2, 2, 0)]
    lab.check()
    lab.say({})
    lab.climb(minutes(5))
    assert lab.states() == {"LOADED": 4, "SKIPPED": 4, "FAILED": 2}
    lab.check()


@pytest.mark.thorough
def test_record_that_postgres_refuses_fails_and_the_others_are_loaded(lab: Lab) -> None:
    """The bad row is found individually, as in any batch."""
    lab.sql(f"ALTER TABLE {lab.table} ADD CHECK (payload <> 'bad')")
    lab.read("a", "bad", "b", answers={"*": "retry"})
    lab.say({})
    lab.climb(minutes(5))
    assert lab.failed("record_offset, state, error_type") == [(0, "LOADED", "Down"), (1, "FAILED", "CheckViolation"), (2, "LOADED", "Down")]
    lab.check()


@pytest.mark.thorough
def test_record_that_was_taken_out_while_the_tasks_worked_is_left_out(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """The state of the records' locked rows counts. Staged rows of records that are no longer due are dropped. A slice without any record
    that is still due is passed."""
    lab.read("a", "b", "c", answers={"*": "retry"})
    lab.make_due(minutes(5))
    lab.say({"b": "three"})
    promote = engine.promote_drained

    def meanwhile(*args: Any, **named: Any) -> Any:
        lab.sql("UPDATE tidemark.failed_record SET state = 'DISCARDED', due_at = NULL WHERE record_offset = 0")
        return promote(*args, **named)

    with monkeypatch.context() as patched:
        patched.setattr(engine, "promote_drained", meanwhile)
        lab.drain()
    assert lab.failed("state, sink_rows") == [("DISCARDED", 0), ("LOADED", 3), ("LOADED", 1)]
    assert lab.rows() == [(1, 0), (1, 1), (1, 2), (2, 0)]
    assert lab.drains() == [("retry.5m", 0, 3, 2, 0, 0, 0, 1)]
    lab.check()
    lab.read("d", answers={"*": "retry"})
    lab.make_due(minutes(5))
    discard = "UPDATE tidemark.failed_record SET state = 'DISCARDED', due_at = NULL WHERE state = 'WAITING'"
    run_here(lab.consumer, before=lambda: lab.sql(discard) and None, drain=True)
    assert lab.drains()[1:] == [("retry.5m", 3, 4, 0, 0, 0, 0, 1)]
    lab.check()


@pytest.mark.parametrize("form", [pytest.param("spark", marks=pytest.mark.thorough), "function", "arrow"])
def test_transform_is_told_the_origin_of_a_record_and_its_own_bytes(scenario: Scenario, topics: Topics, form: str) -> None:
    """Scenarios 11, 13: null and empty keys and values; duplicate, empty and null headers; the timestamp; topic, partition and offset of
    the origin. A retry makes the same row as a first read."""
    options: dict[str, Any] = {"runner": run_here} if form == "spark" else {}
    with lab_on(scenario, topics, partitions=2, transform=ECHOES[form], ddl=ECHO_COLUMNS, **options) as lab:
        at = 1_704_067_200_123
        headers: list[tuple[str, bytes | None]] = [("h", b"1"), ("h", b"\xff\x00"), ("", b""), ("none", None)]
        for key, value in ((None, None), (b"", b""), (b"\x00k", b"\xffv"), ("k", "v")):
            lab.topics.produce(lab.topic, [value], key=key, partition=1, headers=headers, timestamp=at)
        lab.topics.produce(lab.topic, [b"plain"], partition=0, timestamp=at)
        lab.run()
        columns = "kafka_partition, kafka_offset, at, key, payload, names, contents::text[]"
        first = lab.consumer.rows(columns)
        lab.rewind(ToEarliest())
        lab.sql(f"ALTER TABLE {lab.table} ADD CONSTRAINT filled CHECK (false)")
        lab.run()
        assert lab.states() == {"FAILED": 5}
        lab.sql(f"ALTER TABLE {lab.table} DROP CONSTRAINT filled")
        lab.redrive(to=Destination.NOW)
        assert lab.relay() == 5
        lab.drain()
        assert lab.consumer.rows(columns) == first
        assert {row[2] for row in first} == {datetime.fromtimestamp(at / 1000, UTC)}
        assert lab.states() == {"LOADED": 5}
        lab.check()


@pytest.mark.thorough
def test_breaker_counts_what_the_plan_has_made(lab: Lab) -> None:
    """Nothing of a batch with too many failures is stored, whether it is staged or not."""
    from tidemark.retry.breaker import BreakerTripped

    lab.consumer.set(retry={"delays": ["5m"], "breaker": {"ratio": 0.6, "minimum": 1}})
    lab.read("a", "bad", "bad", "bad", "b", answers={"bad": "retry"})
    assert lab.states() == {"WAITING": 3}
    lab.produce("a", "bad", "bad", "bad", "bad", "b")
    with pytest.raises(BreakerTripped, match="4 of 6 records failed"):
        lab.run()
    assert lab.states() == {"WAITING": 3}
    lab.check()

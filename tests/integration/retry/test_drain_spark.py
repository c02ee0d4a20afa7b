"""Drains of the Spark form: the driver reads the records, the tasks stage the plan's results, and one transaction moves all of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from tests.integration.retry.lab import Lab, lab_on, minutes
from tests.support.kafka_topics import Topics
from tests.support.scenario import Scenario
from tests.support.spark_here import run_here
from tests.support.transforms import ECHO_COLUMNS, ECHOES

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


def test_record_that_postgres_refuses_fails_and_the_others_are_loaded(lab: Lab) -> None:
    """The bad row is found individually, as in any batch."""
    lab.sql(f"ALTER TABLE {lab.table} ADD CHECK (payload <> 'bad')")
    lab.say({"*": "retry"})
    lab.produce("a", "bad", "b")
    lab.run()
    lab.say({})
    lab.climb(minutes(5))
    assert lab.failed("record_offset, state, error_type") == [(0, "LOADED", "Down"), (1, "FAILED", "CheckViolation"), (2, "LOADED", "Down")]
    lab.check()


def test_record_that_was_taken_out_while_the_tasks_worked_is_left_out(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """The state of the records' locked rows counts. Staged rows of records that are no longer due are dropped."""
    lab.say({"*": "retry"})
    lab.produce("a", "b", "c")
    lab.run()
    lab.publish()
    lab.age(minutes(5))
    lab.say({"b": "three"})
    promote = engine.promote_drained

    def meanwhile(*args: Any, **named: Any) -> Any:
        lab.sql("UPDATE tidemark.failed_record SET state = 'DISCARDED', due_at = NULL WHERE record_offset = 0")
        return promote(*args, **named)

    monkeypatch.setattr(engine, "promote_drained", meanwhile)
    lab.drain()
    assert lab.failed("state, sink_rows") == [("DISCARDED", 0), ("LOADED", 3), ("LOADED", 1)]
    assert lab.rows() == [(1, 0), (1, 1), (1, 2), (2, 0)]
    assert lab.drains() == [("retry.5m", 0, 3, 2, 0, 0, 0, 1)]
    lab.check()


def test_slice_without_a_record_that_is_still_due_is_passed(lab: Lab) -> None:
    lab.say({"*": "retry"})
    lab.produce("a")
    lab.run()
    lab.publish()
    lab.age(minutes(5))
    discard = "UPDATE tidemark.failed_record SET state = 'DISCARDED', due_at = NULL"
    run_here(lab.consumer, before=lambda: lab.sql(discard) and None, drain=True)
    assert lab.drains() == [("retry.5m", 0, 1, 0, 0, 0, 0, 1)]
    lab.check()


def test_transform_is_told_the_origin_of_a_record_and_its_own_bytes(scenario: Scenario, topics: Topics) -> None:
    """Scenarios 11, 13: as in the other forms, with the real relay."""
    with lab_on(scenario, topics, transform=ECHOES["spark"], ddl=ECHO_COLUMNS, runner=run_here) as lab:
        headers: list[tuple[str, bytes | None]] = [("h", b"1"), ("h", b"\xff\x00"), ("", b""), ("none", None)]
        for key, value in ((None, None), (b"", b""), (b"\x00k", b"\xffv"), ("k", "v")):
            lab.topics.produce(lab.topic, [value], key=key, headers=headers, timestamp=1_704_067_200_123)
        lab.produce("plain")
        lab.run()
        columns = "kafka_offset, at, key, payload, names, contents::text[]"
        first = lab.consumer.rows(columns)
        lab.fail_all()
        assert lab.relay() == 5
        lab.drain()
        assert lab.consumer.rows(columns) == first
        lab.check()


def test_breaker_counts_what_the_plan_has_made(lab: Lab) -> None:
    """Nothing of a batch with too many failures is stored, whether it is staged or not."""
    from tidemark.retry.breaker import BreakerTripped

    lab.consumer.set(retry={"delays": ["5m"], "breaker": {"consecutive": 3}})
    lab.say({"bad": "retry"})
    lab.produce("a", "bad", "bad", "bad", "b")
    lab.run()
    assert lab.states() == {"WAITING": 3}
    lab.produce("a", "bad", "bad", "bad", "bad", "b")
    with pytest.raises(BreakerTripped, match="4 records in a row failed"):
        lab.run()
    assert lab.states() == {"WAITING": 3}
    lab.check()

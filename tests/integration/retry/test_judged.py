"""Validation of drains: exactly the rows that a drain loaded are validated, wherever their records were first read."""

from __future__ import annotations

import json
from typing import Any

from tests.integration.retry.lab import Lab, minutes
from tests.support.waiting import until

from tidemark.offsets.store import TaskIdentity
from tidemark.quality import ValidatedRun, ValidationReport, Verdict, validate
from tidemark.rewind.plan_model import ToEarliest

DAG = "drain_retries"
PAYLOAD = {"type": "expect_column_values_to_not_be_null", "kwargs": {"column": "payload"}, "severity": "critical"}


def rows(number: int) -> dict[str, Any]:
    return {"type": "expect_table_row_count_to_equal", "kwargs": {"value": number}, "severity": "critical"}


def drain(lab: Lab, run: str, **answers: str) -> None:
    """Drains all waiting records as a task of this DAG run, and sets the service's answers."""
    lab.make_due(minutes(6))
    lab.say(answers)
    lab.drain(task=TaskIdentity(DAG, run, "drain", 0, 1))


def judge(lab: Lab, run: ValidatedRun | str, *expectations: dict[str, Any]) -> ValidationReport:
    suite = lab.consumer.folder / "suite.json"
    suite.write_text(json.dumps({"name": "suite", "expectations": expectations}))
    run = ValidatedRun(DAG, run) if isinstance(run, str) else run
    return validate(lab.url, run, group=lab.group, suites={lab.table: suite}, upsert=lab.spec.upserts)


def spoil(lab: Lab, *offsets: int) -> None:
    """Removes the payload of the sink rows with these offsets."""
    lab.sql(f"UPDATE {lab.table} SET payload = NULL WHERE kafka_offset = ANY (%(offsets)s)", offsets=list(offsets))


def validated(lab: Lab) -> int:
    query = "SELECT validated_offset FROM tidemark.partition_offset WHERE group_id = %(group_id)s AND NOT drained"
    return int(lab.sql(query, group_id=lab.group_id)[0][0])


def test_drain_is_judged_by_the_rows_that_it_has_loaded_and_by_no_others(lab: Lab) -> None:
    """Not by the rows around them, nor by those of another drain. The verdict names the origin's offsets and has the drain's counts, and is
    stored with the drain's batches. The validated offset of the origin stays, whatever the verdict."""
    lab.read(*map(str, range(10)), answers={"2": "retry", "3": "retry", "7": "retry"})
    first = judge(lab, ValidatedRun(attempt_id=lab.consumer.attempt_id), rows(7))
    assert (first.verdict, validated(lab)) == (Verdict.PASSED, 10)

    drain(lab, "one", **{"3": "three", "7": "retry"})
    spoil(lab, 4, 6)
    verdict = judge(lab, "one", PAYLOAD, rows(4))
    assert verdict.verdict is Verdict.PASSED
    assert verdict.ranges == {f"{lab.topic}/0": [[2, 4]]}
    assert (verdict.counts.loaded, verdict.counts.retried, verdict.counts.sink_rows) == (2, 1, 4)
    assert lab.sql("SELECT validation_id FROM tidemark.batch WHERE drained") == [(verdict.validation_id,)]

    drain(lab, "two")
    spoil(lab, 7)
    verdict = judge(lab, "two", PAYLOAD, rows(1))
    assert (verdict.verdict, verdict.ranges) == (Verdict.CRITICAL, {f"{lab.topic}/0": [[7, 8]]})
    assert lab.sql("SELECT kafka_offset FROM tidemark.validation_row") == [(7,)]
    assert validated(lab) == 10
    assert judge(lab, "one", PAYLOAD, rows(4)).verdict is Verdict.PASSED, "validated again, it is the same rows"
    lab.check()


def test_drain_that_loaded_nothing_has_a_verdict_on_nothing(lab: Lab) -> None:
    """All records are to be retried again, or a rewind has withdrawn them since. The report has no range, so no event is emitted."""
    lab.read("a", "b", answers={"a": "retry"})
    drain(lab, "again", a="retry")
    verdict = judge(lab, "again", rows(1))
    assert (verdict.verdict, verdict.ranges, verdict.counts.retried) == (Verdict.PASSED, {}, 1)
    assert verdict.validation_id is not None
    drain(lab, "loaded")
    assert judge(lab, "loaded", rows(1)).ranges == {f"{lab.topic}/0": [[0, 1]]}
    lab.rewind(ToEarliest())
    assert judge(lab, "loaded", rows(1)).ranges == {}


def test_row_that_a_drain_has_loaded_and_that_is_not_there_is_critical(lab: Lab) -> None:
    """Even without a suite, every record must be accounted for (I3)."""
    lab.read("b", "a", answers={"a": "retry"})
    drain(lab, "loaded", a="three")
    lab.sql(f"DELETE FROM {lab.table} WHERE kafka_offset = 1 AND kafka_seq = 2")
    verdict = validate(lab.url, ValidatedRun(DAG, "loaded"), group=lab.group, suites={lab.table: None})
    assert verdict.verdict is Verdict.CRITICAL
    assert verdict.results[0].text == f"conservation: {lab.topic}/0 [1, 2): rows written: 3 in the ledger, 2 in the sink"


def test_scattered_records_are_judged_one_by_one_and_told_as_one_range(lab: Lab) -> None:
    """To keep events small, a partition with more than a hundred ranges gets a single one, from the first offset to the last. The rows are
    found through the lineage index, however many others the sink has."""
    numbers = list(map(str, range(300)))
    lab.read(*numbers, answers=dict.fromkeys(numbers[::2], "retry"))
    drain(lab, "many")
    topic_id = lab.sql(f"SELECT DISTINCT kafka_topic_id FROM {lab.table}")[0][0]
    lab.sql(f"INSERT INTO {lab.table} SELECT NULL, %(topic_id)s, 5, n, 0 FROM generate_series(1, 50000) n", topic_id=topic_id)
    lab.sql(f"VACUUM ANALYZE {lab.table}")
    before = scans(lab)
    verdict = judge(lab, "many", PAYLOAD, rows(150))
    assert verdict.verdict is Verdict.PASSED
    assert verdict.ranges == {f"{lab.topic}/0": [[0, 299]]}
    until(lambda: scans(lab)[1] != before[1])
    assert scans(lab)[0] == before[0]


def scans(lab: Lab) -> tuple[int, int]:
    """Returns the number of sequential scans of the sink and of scans of its index. Another session's are counted once it has ended."""
    lab.sql("SELECT pg_stat_force_next_flush()")  # otherwise this session's scans show up a second later
    query = "SELECT seq_scan, idx_scan FROM pg_stat_user_tables WHERE relname = %(name)s"
    (found,) = lab.sql(query, name=lab.table.partition(".")[2])
    return found[0], found[1]

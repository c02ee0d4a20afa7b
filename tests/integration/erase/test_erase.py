"""Erasures remove what a condition or a key finds, wherever it is stored, and every record stays accounted for (I3)."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta

import pytest
from tests.integration.rewind.lab import Lab, lab_on, of_all_kinds
from tests.support.erasing import applied, counts, erase, planned, told
from tests.support.kafka_topics import Topics
from tests.support.ledger import payloads
from tests.support.scenario import Scenario
from tests.support.waiting import until

from tidemark.db import ERASE_LOCK, transaction
from tidemark.erase import erasure
from tidemark.erase.erasure import ErasureState, OtherCondition
from tidemark.errors import BadInput
from tidemark.profiles import SCHEMAS
from tidemark.records.outcome import TransformOutput
from tidemark.records.ranges import Slice
from tidemark.rewind.guards import RowsStay
from tidemark.rewind.plan_model import ToOffset
from tidemark.sink.commit import commit_slice


@pytest.fixture
def lab(scenario: Scenario, topics: Topics) -> Iterator[Lab]:
    with lab_on(scenario, topics, [100]) as lab:
        yield lab


def everything(lab: Lab) -> str:
    """All text in the schema and the sink, including archives."""
    tables = lab.sql(
        "SELECT oid::regclass::text FROM pg_class WHERE relnamespace::regnamespace::text = ANY (%s) AND relkind = 'r'", [*SCHEMAS]
    )
    names = [lab.table, *(name for (name,) in tables)]
    return "\n".join(str(row) for name in names for row in lab.sql(f"SELECT to_jsonb(t)::text FROM {name} t"))


def test_rows_are_removed_and_the_ledger_still_adds_up(lab: Lab) -> None:
    """The plan counts and removes nothing. The erasure removes the rows; neither the condition nor a value is stored."""
    lab.read(40, step=20)
    where = "city IN ('city 13', 'city 14') -- 100% of both"
    made = planned(lab, where)
    assert (counts(made), made.state) == ((4, 0, 0), ErasureState.PLANNED)
    assert "city 14" in everything(lab)
    done = applied(lab, made, where)
    assert (counts(done), done.state, done.applied_by) == ((4, 0, 0), ErasureState.APPLIED, "bob")
    assert applied(lab, made, where) == done  # applying it again changes nothing
    assert "city 14" not in everything(lab)
    lab.check()
    lab.read(60, step=20)
    lab.check()


def test_some_rows_of_a_record_can_be_erased(lab: Lab) -> None:
    """The record stays loaded until its last row is gone."""
    lab.read(20)
    erase(lab, "kafka_offset = 14 AND kafka_seq = 1")
    lab.check()
    erase(lab, "kafka_offset = 14")
    lab.check()
    assert 14 not in lab.offsets()


def test_rows_erased_from_the_part_of_a_batch_that_a_rewind_leaves(lab: Lab) -> None:
    """In a batch that loaded all of its records, the part that stays counts the erased records too, before and after the undo."""
    lab.read(3)
    lab.read(10)
    erase(lab, "city IN ('city 4', 'city 5', 'city 9')")
    done = lab.rewind(ToOffset(8))
    lab.check()
    erase(lab, "city = 'city 6'")
    lab.check()
    again = lab.rewind(ToOffset(5))
    lab.check()
    erase(lab, "city IN ('city 3', 'city 7')")
    lab.check()
    lab.undo(again.rewind_id)
    lab.check()
    lab.undo(done.rewind_id)
    lab.check()
    assert lab.offsets() == [8]


def test_archives_are_erased_and_the_rewind_can_still_be_undone(lab: Lab) -> None:
    """Rows are erased before the rewind, from its archive, and from the part of the batch that it kept. None of them comes back."""
    lab.read(40)
    erase(lab, "city = 'city 5'")
    erase(lab, "city = 'city 33'")
    done = lab.rewind(ToOffset(20))
    lab.check()
    assert counts(erase(lab, "city IN ('city 6', 'city 24', 'city 34')")) == (1, 6, 0)
    lab.check()
    assert "city 24" not in everything(lab)
    lab.undo(done.rewind_id)
    lab.check()
    assert not {5, 6, 24, 33, 34} & set(lab.offsets())
    assert {7, 23, 35} <= set(lab.offsets())


def test_archive_that_lost_all_of_its_rows_stays_for_the_undo(lab: Lab) -> None:
    lab.read(8)
    done = lab.rewind(ToOffset(0))
    assert counts(erase(lab, "population IS NOT NULL OR city LIKE 'city%'"))[1] == 7
    lab.undo(done.rewind_id)
    assert lab.rows() == []
    lab.check()


def test_replay_does_not_bring_rows_back(lab: Lab) -> None:
    """The record is still in Kafka, and a replay counts it as skipped. A record that kept some of its rows stays loaded, and a replay
    loads it again."""
    lab.read(20)
    done = erase(lab, "city = 'city 13' OR kafka_offset = 14 AND kafka_seq = 1")
    assert (done.suppressed, done.not_suppressed) == (1, 1)
    lab.check()
    lab.rewind(ToOffset(0))
    (receipt,) = lab.read(20)
    assert (receipt.counts.skipped, receipt.counts.unaccounted) == (3, 0)
    assert 13 not in lab.offsets()
    assert len([row for row in lab.rows() if row[1] == 14]) == 3
    lab.check()


def load_late(lab: Lab) -> None:
    """Stands for a drain that loads the record at offset 11, with a row for the city ``late``."""
    lab.sql(f"INSERT INTO {lab.table} (city, population, kafka_topic_id, kafka_partition, kafka_offset, kafka_seq)"
            " VALUES ('late', 1, %s, 0, 11, 0)", lab.topic_id)  # fmt: skip
    lab.sql("UPDATE tidemark.failed_record SET state = 'LOADED', due_at = NULL, sink_rows = 1 WHERE record_offset = 11")


def test_payload_of_a_failed_record_that_was_loaded_later_goes_with_its_row(lab: Lab) -> None:
    """Key, value, headers, error text and the history of tries are erased. The row of the failed record stays."""
    lab.read(20)
    load_late(lab)
    lab.check()
    made = erase(lab, "city = 'late'")
    assert (made.sink_rows, made.failed_records) == (1, 1)
    record = "SELECT key, value, headers::text, error_text, story::text, emptied_at IS NULL FROM tidemark.failed_record"
    assert lab.sql(f"{record} WHERE record_offset = 11") == [(None, None, "[]", "erased", "[]", False)]
    lab.check()


def test_overwritten_rows_are_found_by_the_same_condition(scenario: Scenario, topics: Topics) -> None:
    """An upsert sink keeps the rows that a replay overwrites, to restore them in an undo. The condition finds them as it finds sink
    rows."""
    with lab_on(scenario, topics, [100], key=["city"]) as lab:
        lab.read(40, step=20)
        done = lab.rewind(ToOffset(20))
        lab.read(40, transform=lambda offset: [f"city {offset % 20}"])
        assert lab.sql("SELECT count(*) FROM tidemark.rewound_row WHERE kept ->> 'city' = 'city 7'") == [(1,)]
        assert counts(erase(lab, "city IN ('city 7', 'city 28')")) == (1, 1, 1)
        assert not any(name in everything(lab) for name in ('"city 7"', '"city 28"'))
        lab.check()
        lab.undo(done.rewind_id)
        assert {7, 27, 28} & set(lab.offsets()) == {27}
        lab.check()


def test_another_condition_than_the_plans_erases_nothing(lab: Lab) -> None:
    """Only a salted hash of the condition is stored, so the condition must be given again."""
    lab.read(20)
    made = planned(lab, "city = 'city 13'")
    with pytest.raises(OtherCondition, match=f"erasure {made.erasure_id} was planned with"):
        applied(lab, made, "true")
    assert 13 in lab.offsets()


def test_error_of_a_condition_names_the_column_and_quotes_no_value(lab: Lab) -> None:
    with pytest.raises(BadInput, match='column "town" does not exist'):
        planned(lab, "town = 'x'")
    with pytest.raises(BadInput, match=r"(?s)^(?!.*secret)"):
        planned(lab, "population = 'secret'")


def test_sink_whose_trigger_keeps_the_rows_refuses_the_erasure(lab: Lab) -> None:
    """An erasure removes everything or nothing."""
    lab.read(20)
    made = planned(lab, "city = 'city 13'")
    lab.trigger("keep", "BEFORE DELETE", "RETURN NULL;")
    with pytest.raises(RowsStay, match="1 rows remain, because of the trigger keep"):
        applied(lab, made, "city = 'city 13'")
    with lab.session() as connection, transaction(connection) as cur:
        assert erasure.read(cur, made.erasure_id).state is ErasureState.PLANNED
    lab.check()


@pytest.fixture
def keyed(scenario: Scenario, topics: Topics) -> Iterator[Lab]:
    """40 records. Those at the offsets 23, 24, 31 and 32 have the key ``ann``; the others have no key."""
    with lab_on(scenario, topics, [23]) as lab:
        for count, key in ((2, "ann"), (6, None), (2, "ann"), (7, None)):
            topics.produce(lab.topic, ["x"] * count, key=key)
        yield lab


def test_person_is_found_by_the_key_of_messages(keyed: Lab) -> None:
    """Covers rows, failed records in every state, and records that are not consumed yet. The latter are skipped when they are consumed."""
    keyed.read(32)
    made = told(keyed, b"ann")
    assert (made.older_rows, made.erasure.sink_rows, made.erasure.failed_records, made.erasure.suppressed) == (0, 4, 1, 4)
    assert [(one.messages, one.topic) for one in made.in_kafka] == [(4, keyed.topic)]
    with pytest.raises(OtherCondition):
        applied(keyed, made.erasure, b"bob")
    with pytest.raises(OtherCondition):
        applied(keyed, made.erasure, "ann")
    assert erase(keyed, b"ann").suppressed == 4
    assert not {23, 24} & set(keyed.offsets())
    record = "SELECT state, key, value, headers::text, error_text, due_at FROM tidemark.failed_record WHERE record_offset = 31"
    assert keyed.sql(record) == [("DISCARDED", None, None, "[]", "erased", None)]
    keyed.check()
    (receipt,) = keyed.read(40)
    assert (receipt.counts.skipped, receipt.counts.failed) == (1, 0)
    done = keyed.rewind(ToOffset(0))
    keyed.read(40)
    assert not {23, 24} & set(keyed.offsets())
    assert keyed.sql("SELECT count(*) FROM tidemark.failed_record WHERE record_offset IN (31, 32)") == [(0,)]
    keyed.check()
    keyed.undo(done.rewind_id)
    keyed.check()
    assert not {23, 24} & set(keyed.offsets())


def test_failed_record_is_found_by_the_key_it_was_stored_with(keyed: Lab) -> None:
    """Its message may have left Kafka, a rewind may have archived it, or an edit may have changed it. None of the payloads remains."""
    keyed.read(20)  # `payloads` gives failed records at even offsets, here 2 and 12, the key k\0
    keyed.sql("INSERT INTO tidemark.retry_action (group_id, kind, filter, reason, done_by, records)"
            " VALUES (%s, 'EDIT', '{}', 'a wrong key was in it', 'ann', 1)", keyed.group_id)  # fmt: skip
    keyed.sql("INSERT INTO tidemark.failed_record_edit (action_id, failed_record_id, key, value, headers)"
            " SELECT act.action_id, failed_record_id, 'old', value, '[]' FROM tidemark.retry_action act, tidemark.failed_record"
            " WHERE record_offset = 1")  # fmt: skip
    keyed.sql("UPDATE tidemark.failed_record SET state = 'HELD', key = 'k2', due_at = NULL WHERE record_offset = 11")
    done = keyed.rewind(ToOffset(10))
    assert erase(keyed, b"k\0").failed_records == 2
    assert erase(keyed, b"old").failed_records == 1
    assert erase(keyed, b"k2").failed_records == 1
    keyed.check()
    keyed.undo(done.rewind_id)
    keyed.check()
    records = keyed.sql("SELECT record_offset, state, value FROM tidemark.failed_record ORDER BY 1")
    assert records == [(offset, "DISCARDED", None) for offset in (1, 2, 11, 12)]
    assert keyed.sql("SELECT key, value FROM tidemark.failed_record_edit") == [(None, None)]


def test_key_does_not_find_rows_from_before_the_log(keyed: Lab, topics: Topics) -> None:
    """The plan says how many such rows there are. A condition can find them."""
    keyed.read(40)
    topics.trim(keyed.topic, {0: 30})
    made = told(keyed, b"ann")
    assert (made.erasure.sink_rows, made.erasure.suppressed) == (0, 2)
    assert made.older_rows == len([row for row in keyed.rows() if row[1] < 30])


def test_key_is_refused_for_aggregates(lab: Lab) -> None:
    """Rows of aggregates belong to batches. A condition finds them, and the plan says that a replay creates them again."""
    lab.read(20)
    lab.sql("UPDATE tidemark.batch SET whole_batch_id = batch_id")
    with pytest.raises(BadInput, match="belong to whole batches"):
        planned(lab, b"ann")
    made = planned(lab, "city = 'city 13'")
    assert (made.suppressed, made.not_suppressed) == (0, 1)


def test_upsert_sink_suppresses_the_keys_of_rows(scenario: Scenario, topics: Topics) -> None:
    """The condition finds the record that last wrote the row. Older records of the same key are not loaded either; a later one is."""
    with lab_on(scenario, topics, [100], key=["city"]) as lab:
        lab.read(40, transform=lambda offset: [f"city {offset % 20}"])
        assert erase(lab, "city IN ('city 7', 'city 8')").suppressed == 2
        lab.rewind(ToOffset(0))
        lab.read(40, transform=lambda offset: [f"city {offset % 20}"], step=15)
        assert not {7, 8, 27, 28} & set(lab.offsets())
        assert {26, 29} <= set(lab.offsets())
        lab.check()
        lab.read(48, transform=lambda offset: [f"city {offset % 20}"])
        assert {47} == {7, 8, 27, 28, 47} & set(lab.offsets())
        lab.check()
        assert "city 8" not in everything(lab)


def test_erasure_waits_for_a_commit_in_flight(lab: Lab) -> None:
    """The erasure also finds the rows of that commit. A commit that begins during the erasure waits, and skips suppressed records."""
    lab.read(10)
    made, begun, go, part = planned(lab, "city = 'city 13'"), threading.Event(), threading.Event(), lab.slice(20)

    def slow(part: Slice) -> Iterator[TransformOutput]:
        begun.set()
        assert go.wait(60)
        yield from of_all_kinds(part)

    def waiting(count: int) -> bool:
        return lab.sql("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted AND database ="
                       " (SELECT oid FROM pg_database WHERE datname = current_database())") == [(count,)]  # fmt: skip

    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(commit_slice, lab.target(), part, slow(part), payloads)
        assert begun.wait(60)
        erasing = pool.submit(applied, lab, made, "city = 'city 13'")
        until(lambda: waiting(1))
        assert not erasing.done()
        go.set()
        assert first.result(60).counts.loaded == 7
        assert erasing.result(60).sink_rows == 1
    lab.check()
    made = planned(lab, "city = 'city 14'")
    with lab.session() as connection, transaction(connection) as cur, ThreadPoolExecutor(2) as pool:
        cur.execute("SELECT pg_advisory_xact_lock_shared(%s, %s)", (ERASE_LOCK, lab.group_id))  # stands for a commit in another process
        erasing = pool.submit(applied, lab, made, "city = 'city 14'")
        until(lambda: waiting(1))
        later = pool.submit(lab.read, 30)
        until(lambda: waiting(2))
        connection.commit()
        assert erasing.result(60).sink_rows == 3
        assert later.result(60)[0].counts.loaded == 7
    assert not {13, 14} & set(lab.offsets())
    lab.check()


def test_retry_that_is_under_way_does_not_bring_a_row_back(lab: Lab) -> None:
    """A rewind archived a waiting record, its replay loaded it, and the row was erased. The undo does not bring the payload back."""
    lab.read(20)
    done = lab.rewind(ToOffset(0))
    lab.read(20)
    load_late(lab)
    assert erase(lab, "city = 'late'").failed_records == 2
    lab.undo(done.rewind_id)
    assert lab.sql("SELECT state, value FROM tidemark.failed_record WHERE record_offset = 11") == [("DISCARDED", None)]
    lab.check()


def test_plan_says_until_when_kafka_keeps_the_messages(lab: Lab, topics: Topics) -> None:
    """The newest message found and the topic's retention give the date. A topic without a limit keeps messages permanently."""
    lab.read(20)
    topics.alter(lab.topic, retention_ms="604800000")
    (held,) = told(lab, "city IN ('city 13', 'city 14')").in_kafka
    assert (held.topic, held.messages) == (lab.topic, 2)
    assert held.until is not None
    assert timedelta(days=6, hours=23) < held.until - datetime.now(UTC) < timedelta(days=7, minutes=1)
    topics.alter(lab.topic, retention_ms="-1")
    (held,) = told(lab, "city = 'city 13'").in_kafka
    assert str(held) == f"1 message in {lab.topic}, kept permanently; set the topic's retention.ms"
    topics.alter(lab.topic, cleanup_policy="compact")
    (held,) = told(lab, "city = 'city 13'").in_kafka
    assert "write a tombstone" in str(held)
    failed = topics.create()
    lab.sql("UPDATE tidemark.failed_record SET retry_topic = %s WHERE record_offset = 12", failed)
    lab.sql("UPDATE tidemark.failed_record SET key = 'ann' WHERE record_offset = 12")
    assert {one.topic: one.messages for one in told(lab, b"ann").in_kafka} == {lab.topic: 1, failed: 1}

"""Erasures: what a condition finds is removed everywhere, and every record stays accounted for (I3)."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from tests.integration.rewind.lab import Lab, lab_on
from tests.kafka_topics import Topics
from tests.scenario import Scenario

from tidemark.db import transaction
from tidemark.erase import erasure
from tidemark.erase.erasure import Erasure, ErasureState, OtherCondition, Person, Planned
from tidemark.erase.topics import Keyed, records_of
from tidemark.errors import BadInput
from tidemark.rewind.guards import RowsStay
from tidemark.rewind.model import ToOffset
from tidemark.spec import ConsumerSpec

REASON = "asked for by the customer"


@pytest.fixture
def lab(scenario: Scenario, topics: Topics) -> Iterator[Lab]:
    with lab_on(scenario, topics, [100]) as lab:
        yield lab


def person(of: str | bytes) -> Person:
    return Person(where=of) if isinstance(of, str) else Person(key=of)


def reading(lab: Lab) -> Callable[[ConsumerSpec, bytes], Keyed]:
    return lambda spec, key: records_of(lab.cluster, lab.consumer.connections.kafka, spec, key, lambda _: None)


def told(lab: Lab, of: str | bytes) -> Planned:
    with lab.session() as connection:
        return erasure.plan(connection, lab.cluster, lab.spec, person(of), reading(lab), reason=REASON, by="ann")


def planned(lab: Lab, of: str | bytes) -> Erasure:
    return told(lab, of).erasure


def applied(lab: Lab, made: Erasure, of: str | bytes) -> Erasure:
    with lab.session() as connection:
        return erasure.apply(connection, lambda _: lab.spec, made.erasure_id, person(of), reading(lab), by="bob")


def erase(lab: Lab, of: str | bytes) -> Erasure:
    """By a condition over the sink, or by the key of messages. The plan counts what the erasure removes."""
    made = planned(lab, of)
    done = applied(lab, made, of)
    assert (counts(made), made.failed_records, made.suppressed) == (counts(done), done.failed_records, done.suppressed)
    return done


def counts(one: Erasure) -> tuple[int, int, int]:
    return one.sink_rows, one.archived_rows, one.overwritten_rows


def everything(lab: Lab) -> str:
    """All text that the schema and the sink hold, archives included."""
    tables = lab.sql("SELECT relname FROM pg_class WHERE relnamespace = 'tidemark'::regnamespace AND relkind = 'r'")
    names = [lab.table, *(f"tidemark.{name}" for (name,) in tables)]
    return "\n".join(str(row) for name in names for row in lab.sql(f"SELECT to_jsonb(t)::text FROM {name} t"))


def test_rows_are_removed_and_the_ledger_still_adds_up(lab: Lab) -> None:
    """The plan counts and removes nothing. The erasure removes the rows, and neither condition nor value is stored."""
    lab.read(40, step=20)
    where = "city IN ('city 13', 'city 14') -- 100% of both"
    made = planned(lab, where)
    assert (counts(made), made.state) == ((4, 0, 0), ErasureState.PLANNED)
    assert "city 14" in everything(lab)
    done = applied(lab, made, where)
    assert (counts(done), done.state, done.applied_by) == ((4, 0, 0), ErasureState.APPLIED, "bob")
    assert applied(lab, made, where) == done  # again: nothing happens
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


def test_archives_are_erased_and_the_rewind_can_still_be_undone(lab: Lab) -> None:
    """Rows erased before the rewind, in its archive, and in the part of the batch that it left: none comes back."""
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


def test_rows_erased_from_the_part_of_a_batch_that_a_rewind_leaves(lab: Lab) -> None:
    """A batch that loaded all of its records: the part that stays counts the erased ones too, before and after the undo."""
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


def test_archive_that_lost_all_of_its_rows_stays_for_the_undo(lab: Lab) -> None:
    lab.read(8)
    done = lab.rewind(ToOffset(0))
    assert counts(erase(lab, "population IS NOT NULL OR city LIKE 'city%'"))[1] == 7
    lab.undo(done.rewind_id)
    assert lab.rows() == []
    lab.check()


def test_replay_does_not_bring_rows_back(lab: Lab) -> None:
    """The record is in Kafka, and the ledger counts it as skipped. A record that keeps other rows is loaded again."""
    lab.read(20)
    done = erase(lab, "city = 'city 13' OR kafka_offset = 14 AND kafka_seq = 1")
    assert (done.suppressed, done.not_suppressed) == (1, 1)
    lab.rewind(ToOffset(0))
    (receipt,) = lab.read(20)
    assert (receipt.counts.skipped, receipt.counts.unaccounted) == (3, 0)
    assert 13 not in lab.offsets()
    assert len([row for row in lab.rows() if row[1] == 14]) == 3
    lab.check()


def test_payload_of_a_failed_record_that_was_loaded_later_goes_with_its_row(lab: Lab) -> None:
    """Key, value, headers, the error's text and the tries; the row stays in the ledger."""
    lab.read(20)
    lab.sql(f"INSERT INTO {lab.table} (city, population, kafka_topic_id, kafka_partition, kafka_offset, kafka_seq)"
            " VALUES ('late', 1, %s, 0, 11, 0)", lab.topic_id)  # fmt: skip
    lab.sql("UPDATE tidemark.failed_record SET state = 'LOADED', due_at = NULL, sink_rows = 1 WHERE record_offset = 11")
    lab.check()
    made = erase(lab, "city = 'late'")
    assert (made.sink_rows, made.failed_records) == (1, 1)
    record = "SELECT key, value, headers::text, error_text, story::text, emptied_at IS NULL FROM tidemark.failed_record"
    assert lab.sql(f"{record} WHERE record_offset = 11") == [(None, None, "[]", "erased", "[]", False)]
    lab.check()


def test_overwritten_rows_are_found_by_the_same_condition(scenario: Scenario, topics: Topics) -> None:
    """An upsert sink keeps what a replay overwrites, so that the undo restores it; the condition sees those rows as the sink's."""
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
    """The condition is stored as a salted hash only, so it is given again."""
    lab.read(20)
    made = planned(lab, "city = 'city 13'")
    with pytest.raises(OtherCondition, match=f"erasure {made.erasure_id} was planned with"):
        applied(lab, made, "true")
    assert 13 in lab.offsets()


def test_condition_that_postgres_cannot_evaluate_is_refused(lab: Lab) -> None:
    """The error names the column and quotes no value."""
    lab.read(20)
    with pytest.raises(BadInput, match='column "town" does not exist'):
        planned(lab, "town = 'secret'")
    with pytest.raises(BadInput) as raised:
        planned(lab, "population = 'secret'")
    assert "secret" not in str(raised.value)


def test_sink_whose_trigger_keeps_the_rows_refuses_the_erasure(lab: Lab) -> None:
    """Nothing is half erased."""
    lab.read(20)
    made = planned(lab, "city = 'city 13'")
    lab.sql("CREATE FUNCTION lake_keep() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END'")
    lab.sql(f"CREATE TRIGGER keep BEFORE DELETE ON {lab.table} FOR EACH ROW EXECUTE FUNCTION lake_keep()")
    with pytest.raises(RowsStay, match="1 rows remain, because of the trigger keep"):
        applied(lab, made, "city = 'city 13'")
    with lab.session() as connection, transaction(connection) as cur:
        assert erasure.read(cur, made.erasure_id).state is ErasureState.PLANNED
    lab.check()

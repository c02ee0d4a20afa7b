"""Upsert sinks: rows below the point of a rewind that its replay overwrites are kept, and the undo restores them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import pytest
from tests.integration.rewind.lab import Lab, Transform, lab_on, of_all_kinds, role_on
from tests.support.kafka_topics import Topics
from tests.support.ledger import payloads
from tests.support.scenario import Scenario as Consumer

from tidemark.db import connect
from tidemark.offsets import store
from tidemark.profiles import Profile
from tidemark.rewind.archive_retention import remove_archives
from tidemark.rewind.guards import RowsStay
from tidemark.rewind.plan import PlanRefused
from tidemark.rewind.plan_model import ToOffset, Undo
from tidemark.rewind.rows.archive import RowsRefused
from tidemark.sink.commit import commit_slice

DAY = timedelta(days=1)


@pytest.fixture
def lab(scenario: Consumer, topics: Topics) -> Iterator[Lab]:
    """An upsert sink with a row per city, and columns that no transform knows."""
    with lab_on(scenario, topics, (100, 100), key=("city",)) as lab:
        lab.sql(
            f"ALTER TABLE {lab.table} ADD COLUMN number bigint GENERATED ALWAYS AS IDENTITY, ADD COLUMN note text,"
            " ADD COLUMN twice bigint GENERATED ALWAYS AS (population * 2) STORED, ADD COLUMN at timestamptz DEFAULT clock_timestamp(),"
            " ADD COLUMN code char(3) DEFAULT 'a', ADD COLUMN share double precision DEFAULT random(), "
            "ADD COLUMN raw bytea DEFAULT '\\x00ff',"
            ' ADD COLUMN "odd %s {name}\'" text[] DEFAULT \'{"a,b",NULL}\', ADD COLUMN doc json DEFAULT \'{"b": 1,  "b": 2}\''
        )
        yield lab


def every(number: int) -> Transform:
    """Maps the offsets to ``number`` cities in turn."""
    return lambda offset: [f"city {offset % number}"]


def kept(lab: Lab) -> list[Any]:
    """The offsets of the rows that are kept outside the sink."""
    return [row[0] for row in lab.sql("SELECT kafka_offset FROM tidemark.rewound_row ORDER BY number")]


def noted(lab: Lab) -> None:
    """Gives each row a different note, as a user might by hand."""
    lab.sql(f"UPDATE {lab.table} SET note = 'note of ' || city")


# ---- an undo restores everything


def test_undo_gives_back_what_the_replay_wrote_over_to_the_last_column(lab: Lab) -> None:
    """Even after new records were read, and repeatedly back and forth. After the undo, no row is still kept."""
    lab.read(40, step=20)
    noted(lab)
    before = lab.image()
    done = lab.rewind(ToOffset(20), f"{lab.topic}:0")
    lab.read(70, transform=lambda offset: [f"city {offset - 20}"], step=8)
    lab.check()
    assert sorted(kept(lab)) == [offset for offset in range(3, 20) if offset % 10 > 2]
    after = (lab.image().sink, lab.position(), lab.ledger())
    for _ in range(2):
        back = lab.undo(done.rewind_id)
        assert lab.image() == before
        assert kept(lab) == []
        lab.check()
        done = lab.undo(back.rewind_id)
        assert (lab.image().sink, lab.position(), lab.ledger()) == after
        lab.check()


@pytest.mark.sampled
@pytest.mark.parametrize("body", ["RETURN NULL;", "NEW.city := NEW.city; NEW.population := 7; RETURN NEW;"], ids=["drops", "changes"])
def test_a_trigger_that_meddles_with_what_was_written_over_refuses_the_undo(lab: Lab, body: str) -> None:
    """The error names it, and nothing is changed."""
    lab.read(50, transform=lambda offset: [f"city {offset % 40}"])
    done = lab.rewind(ToOffset(45), f"{lab.topic}:0")
    lab.read(60, transform=lambda offset: [f"city {offset % 30}"])
    planned = lab.plan(Undo(done.rewind_id))
    lab.trigger("meddles", "BEFORE INSERT", body)
    with lab.unchanged(RowsRefused, r"rewound_row: .* dropped or changed by the trigger meddles"):
        lab.apply(planned.rewind_id)


def test_a_trigger_that_keeps_rows_in_the_way_of_others_refuses_the_undo(lab: Lab) -> None:
    """The undo of an undo brings back the replay's rows, so the rows in their place must give way."""
    lab.read(50, transform=lambda offset: [f"city {offset % 40}"])
    done = lab.rewind(ToOffset(45), f"{lab.topic}:0")
    lab.read(60, transform=lambda offset: [f"city {offset % 30}"])
    undone = lab.undo(done.rewind_id)
    planned = lab.plan(Undo(undone.rewind_id))
    lab.trigger("keeps", "BEFORE DELETE", "IF OLD.kafka_offset < 45 THEN RETURN NULL; END IF; RETURN OLD;")
    with lab.unchanged(RowsStay, "the trigger keeps"):
        lab.apply(planned.rewind_id)


@pytest.mark.thorough
def test_rows_of_a_former_life_of_the_topic_come_back(lab: Lab) -> None:
    """They are older than all rows of the new topic, whatever their offsets."""
    lab.read(60, transform=every(30))
    noted(lab)
    lab.consumer.topics.recreate(lab.topic, 2)
    lab.consumer.topics.produce(lab.topic, ["x"] * 50)
    (described,) = lab.cluster.topics([lab.topic])
    with lab.watch.cursor() as cur:
        lab.topic_id = store.ensure_topic(cur, lab.topic, described.kafka_uuid)
        for partition in described.all():
            store.start_partition(cur, lab.group_id, lab.topic_id, partition.partition, 0)
    lab.read(20, transform=every(10))
    assert kept(lab) == []
    before = lab.image()
    done = lab.rewind(ToOffset(15), f"{lab.topic}:0")
    lab.read(40, transform=every(25))
    assert set(kept(lab)) & set(range(50, 60))
    repaired = lab.image().sink
    back = lab.undo(done.rewind_id)
    assert lab.image() == before
    lab.undo(back.rewind_id)
    assert lab.image().sink == repaired


# ---- late records


def test_a_late_record_does_not_replace_a_newer_row(lab: Lab) -> None:
    """It counts as loaded, like a record whose row a later one of the same batch has replaced."""
    lab.read(20, transform=every(3))
    lab.rewind(ToOffset(40), f"{lab.topic}:0")
    lab.read(60, transform=every(6))
    before = lab.rows()
    with lab.late(20, 40):
        lab.read(40, transform=every(9))
    assert [row for row in lab.rows() if row[3] in {f"city {number}" for number in range(6)}] == before
    assert {row[3]: row[1] for row in lab.rows() if row not in before} == {"city 6": 33, "city 7": 34, "city 8": 35}
    assert lab.sql("SELECT loaded, sink_rows FROM tidemark.batch WHERE start_offset = 20") == [(14, 18)]
    lab.check()


def test_late_records_are_where_they_belong_after_an_undo(lab: Lab) -> None:
    """A late row that loses to a newer one is kept, because the undo removes the newer one."""
    lab.read(20, transform=every(12))
    lab.rewind(ToOffset(40), f"{lab.topic}:0")
    lab.read(60, transform=every(4))
    done = lab.rewind(ToOffset(50), f"{lab.topic}:0")
    lab.read(80, transform=every(8))
    with lab.late(20, 40):
        lab.read(40, transform=every(10))
    lab.check()
    after = lab.image().sink
    back = lab.undo(done.rewind_id)
    rows: dict[str, int] = {}
    for span, number in ((range(20), 12), (range(20, 40), 10), (range(40, 60), 4)):
        rows |= {f"city {offset % number}": offset for offset in span if offset % 10 > 2}
    assert {row[3]: row[1] for row in lab.rows()} == rows
    lab.check()
    lab.undo(back.rewind_id)
    assert lab.image().sink == after
    lab.check()


@pytest.mark.thorough
def test_what_a_late_record_replaced_comes_back_if_its_range_is_taken_back(lab: Lab) -> None:
    """The undo of the rewind that skipped the range makes the range one that was never read."""
    lab.read(20, transform=every(12))
    before = lab.image()
    skipped = lab.rewind(ToOffset(40), f"{lab.topic}:0")
    lab.read(60, transform=every(4))
    done = lab.rewind(ToOffset(50), f"{lab.topic}:0")
    with lab.late(20, 40):
        lab.read(40, transform=every(10))
    lab.read(70, transform=every(5))
    lab.undo(done.rewind_id)
    lab.undo(skipped.rewind_id)
    assert lab.image() == before


# ---- staged batches


def test_aggregates_come_back_whichever_partitions_they_were_made_of(lab: Lab) -> None:
    """Their lineage is the start of their batch, which may lie in a different partition than the start of the batch that overwrites
    them."""
    lab.staged(20, 20, ulm=1, bonn=2, rom=3)
    lab.staged(20, 40, bonn=4, york=5)
    before = lab.image()
    done = lab.rewind(ToOffset(20))
    lab.staged(20, 30, ulm=6, york=7)
    lab.staged(50, 50, ulm=8, rom=9)
    lab.staged(50, 60, rom=10, ulm=11)
    assert lab.cities() == {"ulm": 11, "rom": 10, "york": 7}
    lab.check()
    repaired = lab.image().sink
    back = lab.undo(done.rewind_id)
    assert lab.image() == before
    lab.check()
    lab.undo(back.rewind_id)
    assert lab.image().sink == repaired


@pytest.mark.thorough
def test_of_aggregates_that_were_written_over_the_last_one_comes_back(lab: Lab) -> None:
    """Offsets of different partitions have no order. A batch outside the rewind is not taken back."""
    lab.staged(5, 10, rom=1)
    lab.staged(5, 25, ulm=2)
    lab.staged(5, 30, rom=3)
    done = lab.rewind(ToOffset(25), f"{lab.topic}:1")
    lab.staged(5, 40, ulm=4)
    lab.staged(8, 40, ulm=5)
    lab.staged(8, 50, ulm=6)
    lab.undo(done.rewind_id)
    assert lab.cities() == {"ulm": 5, "rom": 3}
    lab.check()


def test_an_aggregate_that_a_batch_outside_the_rewind_has_written_since_refuses_the_undo(lab: Lab) -> None:
    """Nothing shows which of the two is the last one."""
    lab.staged(20, 20, ulm=1)
    lab.staged(20, 40, ulm=2)
    done = lab.rewind(ToOffset(20), f"{lab.topic}:1")
    lab.staged(30, 20, ulm=3)
    with pytest.raises(RowsRefused, match="duplicate key value violates unique constraint"):
        lab.undo(done.rewind_id)
    assert lab.cities() == {"ulm": 3}


# ---- changes of the table


def test_columns_that_the_table_got_since_are_kept_and_those_that_it_lost_are_missed(lab: Lab) -> None:
    lab.read(40)
    done = lab.rewind(ToOffset(20), f"{lab.topic}:0")
    lab.read(25, transform=lambda offset: [f"city {offset - 20}"])
    lab.sql(f"ALTER TABLE {lab.table} ADD COLUMN more bigint DEFAULT 5")
    lab.sql(f"UPDATE {lab.table} SET more = kafka_offset")
    lab.read(30, transform=lambda offset: [f"city {offset - 20}"])
    lab.undo(done.rewind_id)
    assert dict(lab.sql(f"SELECT city, more FROM {lab.table} WHERE kafka_offset IN (3, 6, 9, 33)")) == {
        "city 3": 5, "city 6": 6, "city 9": 9, "city 33": 5,
    }  # fmt: skip
    done = lab.rewind(ToOffset(20), f"{lab.topic}:0")
    lab.read(25, transform=lambda offset: [f"city {offset - 20}"])
    lab.sql(f"ALTER TABLE {lab.table} DROP COLUMN more")
    lab.sql("DELETE FROM tidemark.rewind_archive")  # otherwise the column would be reported as missing from the archive first
    planned = lab.plan(Undo(done.rewind_id))
    with lab.unchanged(RowsRefused, "the column more no longer exists"):
        lab.apply(planned.rewind_id)


def test_a_sink_that_upserts_no_more_refuses_the_undo(lab: Lab) -> None:
    lab.read(40)
    done = lab.rewind(ToOffset(20), f"{lab.topic}:0")
    lab.read(30, transform=lambda offset: [f"city {offset - 20}"])
    lab.consumer.set(sink={"table": lab.table})
    with pytest.raises(RowsRefused, match="was an upsert sink when they were overwritten"):
        lab.undo(done.rewind_id)


# ---- retention and roles


def test_nothing_is_kept_where_nothing_can_be_undone(lab: Lab) -> None:
    """No row is kept before the first rewind, or after its retention time. From then on it cannot be undone, even if it took no rows
    out."""
    lab.read(40, transform=every(5))
    assert kept(lab) == []
    done = lab.rewind(ToOffset(60), f"{lab.topic}:0")
    lab.read(70, transform=every(5))
    assert kept(lab) != []
    lab.sql("UPDATE tidemark.rewind SET applied_at = applied_at - interval '25 hours'")
    with lab.session() as connection:
        (removed,) = remove_archives(connection, DAY)
        assert (removed.rewind_id, removed.rows) == (done.rewind_id, 5)
        assert remove_archives(connection, DAY) == []
    assert lab.sql("SELECT * FROM tidemark.undo_floor") == kept(lab) == []
    lab.read(80, transform=every(6))
    assert kept(lab) == []
    with pytest.raises(PlanRefused, match="that were overwritten since rewind 1 are no longer kept"):
        lab.plan(Undo(done.rewind_id))


@pytest.mark.thorough
def test_a_younger_rewind_can_be_undone_when_the_time_of_an_older_one_is_over(lab: Lab) -> None:
    lab.read(40, transform=every(30))
    lab.rewind(ToOffset(30), f"{lab.topic}:0")
    lab.read(50, transform=every(25))
    lab.sql("UPDATE tidemark.rewind SET applied_at = applied_at - interval '25 hours'")
    before = lab.image()
    done = lab.rewind(ToOffset(20), f"{lab.topic}:0")
    lab.read(45, transform=every(17))
    with lab.session() as connection:
        assert len(remove_archives(connection, DAY)) == 2
    lab.read(60, transform=every(19))
    lab.undo(done.rewind_id)
    assert lab.image() == before


def test_verify_tells_what_the_replay_has_changed_of_older_rows(lab: Lab) -> None:
    """They were not in the archive, but they do not count as new rows."""
    lab.read(40)
    done = lab.rewind(ToOffset(30), f"{lab.topic}:0")
    lab.read(60, transform=lambda offset: [f"city {offset - 30}" if offset % 10 < 8 else f"town {offset}"])
    seen = lab.verified(done.rewind_id)
    assert (seen.equal, seen.changed, seen.gone, seen.new) == (0, 5, 7, 2)
    assert {(example.was or {})["kafka_offset"] for example in seen.examples["changed"]} == {3, 4, 5, 6, 7}


def test_roles_with_the_profiles_and_the_grants_of_the_docs_write_over_and_undo(lab: Lab) -> None:
    """One role consumes, another rewinds."""
    lab.read(40, transform=every(30))
    before = lab.image()
    with (
        role_on(lab, Profile.RUNNER, "docs/deployment/index.md") as runner,
        role_on(lab, Profile.REWINDER, "docs/rewind.md") as rewinder,
        contextlib.closing(connect(rewinder, application="tidemark rewind")) as connection,
    ):
        lab.sql(f"GRANT UPDATE ON {lab.table} TO {urlsplit(runner).username}, {urlsplit(rewinder).username}")
        done = lab.apply(lab.plan(ToOffset(30), f"{lab.topic}:0", connection=connection).rewind_id, connection=connection).plan
        part = lab.slice(50)
        cities = of_all_kinds(part, lambda offset: [f"city {offset - 30}"])
        commit_slice(replace(lab.target(), database_url=runner), part, cities, payloads)
        assert len(kept(lab)) == 7
        lab.apply(lab.plan(Undo(done.rewind_id), connection=connection).rewind_id, connection=connection)
    assert lab.image() == before

"""All kinds of sinks: upserts, rows that belong to batches instead of records, LIST-partitioned tables, large tables."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import psycopg2
import pytest
from tests.integration.rewind.lab import Lab, lab_on
from tests.support.kafka_topics import Topics
from tests.support.ledger import in_thread
from tests.support.scenario import Scenario as Consumer
from tests.support.waiting import until

from tidemark.rewind.apply import StalePlan
from tidemark.rewind.guards import RowsStay
from tidemark.rewind.plan import PlanRefused
from tidemark.rewind.plan_model import ShiftBy, ToBatch, ToEarliest, ToOffset, Undo
from tidemark.rewind.rows import archive
from tidemark.rewind.rows.archive import RowsRefused

# ---- upserts


def few_cities(offset: int) -> list[str]:
    return [f"city {offset % 7}"]


@pytest.fixture
def upsert(scenario: Consumer, topics: Topics) -> Iterator[Lab]:
    with lab_on(scenario, topics, (100, 100), key=("city",)) as lab:
        yield lab


def test_a_key_that_another_partition_has_taken_since_refuses_the_undo(upsert: Lab) -> None:
    upsert.read(90, transform=few_cities)
    done = upsert.rewind(ToOffset(55), f"{upsert.topic}:0")
    upsert.read(9, 1, transform=few_cities)
    planned = upsert.plan(Undo(done.rewind_id))
    with upsert.unchanged(RowsRefused, "duplicate key value violates unique constraint"):
        upsert.apply(planned.rewind_id)


# ---- rows that belong to batches


def total(lab: Lab, *ends: int) -> None:
    """Reads the partitions up to these ends in one staged batch, which writes one row without a record's lineage."""
    records = sum(max(end - at, 0) for end, at in zip(ends, lab.positions(), strict=False))
    lab.staged(*ends, all=records)


@pytest.fixture
def totals(lab: Lab) -> Lab:
    """Three staged batches over all partitions, ending at 20, 50 and 55 in each."""
    for ends in ((20, 20, 20), (50, 50, 50), (55, 55, 55)):
        total(lab, *ends)
    assert [row[-1] for row in lab.rows()] == [60, 90, 15]
    return lab


def test_a_target_inside_a_batch_without_lineage_names_the_boundaries(totals: Lab) -> None:
    """The batch's rows depend on all its records, in every partition. So the plan is refused, and the error names the possible targets."""
    topic = totals.topic
    before = totals.audit()
    with pytest.raises(PlanRefused) as raised:
        totals.plan(ToOffset(30))
    (problem,) = raised.value.problems
    assert f"are {topic}/0 to 20, {topic}/1 to 20, {topic}/2 to 20 or earlier" in problem
    assert f"and {topic}/0 to 50, {topic}/1 to 50, {topic}/2 to 50." in problem
    for scope in ("0", "1,2"):  # the error names each batch that would be split
        with pytest.raises(PlanRefused) as raised:
            totals.plan(ToOffset(20), f"{topic}:{scope}")
        assert len(raised.value.problems) == 2
    assert totals.audit() == before


def test_such_batches_are_taken_back_whole_and_come_back_whole(totals: Lab) -> None:
    before = totals.image()
    done = totals.rewind(ToOffset(20))
    assert [row[-1] for row in totals.rows()] == [60]
    totals.check()
    total(totals, 60, 60, 60)
    undone = totals.undo(done.rewind_id)
    assert totals.image() == before
    totals.check()
    totals.undo(undone.rewind_id)
    assert [row[-1] for row in totals.rows()] == [60, 120]
    totals.check()


def test_to_batch_takes_all_partitions_of_such_a_batch(totals: Lab) -> None:
    ((batch_id,),) = totals.sql("SELECT batch_id FROM tidemark.batch WHERE partition = 2 AND start_offset = 20")
    totals.rewind(ToBatch(batch_id))
    assert totals.positions() == [20, 20, 20]
    totals.check()


def test_such_a_batch_since_the_plan_that_would_be_torn_makes_it_stale(lab: Lab) -> None:
    """The batch did not exist when the plan was made."""
    total(lab, 20, 20)
    planned = lab.plan(ShiftBy(0), f"{lab.topic}:0")
    total(lab, 50, 50)
    with pytest.raises(StalePlan, match="can only be taken back whole"):
        lab.apply(planned.rewind_id)
    lab.check()


# ---- LIST-partitioned sinks


PARTITIONED = """
    CREATE SCHEMA IF NOT EXISTS lake;
    CREATE TABLE {table} (
        city text, population bigint, kafka_topic_id smallint NOT NULL, kafka_partition integer NOT NULL, kafka_offset bigint NOT NULL,
        kafka_seq integer NOT NULL, UNIQUE (kafka_topic_id, kafka_partition, kafka_offset, kafka_seq)
    ) PARTITION BY LIST (kafka_partition);
    CREATE TABLE {table}_p0 PARTITION OF {table} FOR VALUES IN (0);
    CREATE TABLE {table}_p1 PARTITION OF {table} FOR VALUES IN (1);
    CREATE TABLE {table}_rest PARTITION OF {table} DEFAULT;
"""


@pytest.fixture
def listed(scenario: Consumer, topics: Topics, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lab]:
    """A sink with table partitions for Kafka partitions 0 and 1; 2 is in the default one. Tables of any size count as large enough to be
    swapped."""
    monkeypatch.setattr(archive, "SWAP_ROWS", 1)
    monkeypatch.setattr(Consumer, "make_sink", lambda self, ddl: self.sql(PARTITIONED.format(table=self.table)))
    with lab_on(scenario, topics, (100, 100, 60)) as lab:
        for partition, end in enumerate((90, 80, 60)):
            lab.read(end, partition)
        lab.sql(f"ANALYZE {lab.table}")
        yield lab


def relation(lab: Lab, name: str) -> Any:
    ((oid,),) = lab.sql(f"SELECT '{name}'::regclass::oid::bigint")
    return oid


def archives(lab: Lab, rewind_id: int) -> list[Any]:
    return lab.sql("SELECT number, table_partition, rows FROM tidemark.rewind_archive WHERE rewind_id = %s ORDER BY 1", rewind_id)


def test_a_whole_kafka_partition_is_moved_as_a_table_partition(listed: Lab) -> None:
    """The relation itself becomes the archive, and an empty one like it takes its place. Rows of a shared table partition are moved one by
    one."""
    before, oid = listed.image(), relation(listed, f"{listed.table}_p0")
    done = listed.rewind(ToEarliest(), f"{listed.topic}:0,2")
    assert archives(listed, done.rewind_id) == [(1, True, 81), (2, False, 54)]
    assert relation(listed, f"tidemark_archive.rewound_{done.rewind_id}_1") == oid
    assert [part.sink_rows for part in done.groups[0].partitions] == [81, 54]
    assert listed.offsets(0) == listed.offsets(2) == []
    assert len(listed.offsets(1)) == 56
    listed.check()
    listed.read(100)
    assert listed.sql(f"SELECT count(*) FROM {listed.table}_p0") == [(90,)]
    listed.check()
    listed.undo(done.rewind_id)
    assert listed.image() == before
    listed.check()


def test_a_table_partition_with_rows_that_stay_is_not_moved(listed: Lab) -> None:
    """The rows that stay are before the target, or belong to another topic."""
    done = listed.rewind(ToOffset(10), f"{listed.topic}:0")
    assert archives(listed, done.rewind_id) == [(1, False, 72)]
    other = listed.topic_id + 1
    listed.sql(f"INSERT INTO {listed.table} VALUES ('x', 1, {other}, 1, 0, 0)")
    done = listed.rewind(ToEarliest(), f"{listed.topic}:1")
    assert archives(listed, done.rewind_id) == [(1, False, 72)]
    assert listed.sql(f"SELECT kafka_topic_id FROM {listed.table} WHERE kafka_partition = 1") == [(other,)]


@pytest.mark.thorough
def test_a_reader_who_stays_makes_it_go_row_by_row(listed: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """The swap would have to wait for the reader, and other readers would queue behind it. So it gives up after a short wait."""
    monkeypatch.setattr(archive, "SWAP_WAIT_MS", 200)
    before = listed.image()
    with contextlib.closing(psycopg2.connect(listed.url)) as reader, reader.cursor() as cur:
        cur.execute(f"SELECT count(*) FROM {listed.table}")
        done = listed.rewind(ToEarliest(), f"{listed.topic}:0")
        cur.execute(f"SELECT count(*) FROM {listed.table} WHERE kafka_partition = 0")
        assert cur.fetchone() == (0,)
    assert archives(listed, done.rewind_id) == [(1, False, 81)]
    listed.undo(done.rewind_id)
    assert listed.image() == before


@pytest.mark.thorough
def test_rows_that_came_while_a_swap_waited_stay(listed: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of another topic is written by a transaction that is open while the swap waits for its lock. The swap checks again under the
    lock."""
    monkeypatch.setattr(archive, "SWAP_WAIT_MS", 60_000)
    other = listed.topic_id + 1
    planned = listed.plan(ToEarliest(), f"{listed.topic}:0")
    with contextlib.closing(psycopg2.connect(listed.url)) as writer, writer.cursor() as cur:
        cur.execute(f"INSERT INTO {listed.table} VALUES ('x', 1, {other}, 0, 0, 0)")
        with in_thread(lambda: listed.apply(planned.rewind_id)) as applied:
            until(lambda: listed.sql("SELECT 1 FROM pg_locks WHERE mode = 'AccessExclusiveLock' AND NOT granted"))
            writer.commit()
            assert applied.result(180).plan.groups[0].partitions[0].sink_rows == 81
    assert archives(listed, planned.rewind_id) == [(1, False, 81)]
    assert listed.sql(f"SELECT kafka_topic_id FROM {listed.table} WHERE kafka_partition = 0") == [(other,)]
    listed.undo(planned.rewind_id)
    listed.check()


def test_a_trigger_sees_each_row_of_a_table_partition_that_goes(listed: Lab) -> None:
    """This includes a trigger that keeps the rows. Moving the table partition as a whole would bypass it."""
    planned = listed.plan(ToEarliest(), f"{listed.topic}:0")
    listed.trigger("keep", "BEFORE DELETE", "RETURN NULL;")
    with listed.unchanged(RowsStay, "0 of 81 rows were taken out, 81 remain: the trigger keep"):
        listed.apply(planned.rewind_id)


def test_what_would_be_lost_with_a_table_partition_keeps_it_in_place(listed: Lab) -> None:
    """Grants on it, or a view."""
    for partition, rows, extra in (
        (0, 81, "CREATE VIEW {leaf}_view AS SELECT * FROM {leaf}"),
        (1, 72, "GRANT SELECT ON {leaf} TO pg_monitor"),
    ):
        leaf = f"{listed.table}_p{partition}"
        oid = relation(listed, leaf)
        listed.sql(extra.format(leaf=leaf))
        done = listed.rewind(ToEarliest(), f"{listed.topic}:{partition}")
        assert archives(listed, done.rewind_id) == [(1, False, rows)]
        assert relation(listed, leaf) == oid

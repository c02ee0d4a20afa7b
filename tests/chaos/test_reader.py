"""The chaos tests' own checks detect what they are meant to detect."""

from __future__ import annotations

import contextlib

import psycopg2
import pytest
from tests.chaos.reader import problems, snapshot
from tests.support.points import Points

from tidemark.sink.steps import Step

TAMPERED = {
    "a row is lost": ("DELETE FROM {sink} WHERE kafka_offset = 0", "rows of offsets"),
    "a row is there twice": (
        "INSERT INTO {sink} SELECT payload, kafka_topic_id, kafka_partition, kafka_offset, 1 FROM {sink} WHERE kafka_offset = 0",
        "rows of offsets",
    ),
    "a row lies beyond the position": ("UPDATE {sink} SET kafka_offset = 1000 WHERE kafka_offset = 0", "rows of offsets"),
    "a failed record is lost": ("DELETE FROM tidemark.failed_record WHERE record_offset = 3", "failed records of offsets"),
    "the position is behind the rows": ("UPDATE tidemark.partition_offset SET next_offset = 1", "the position went back"),
    "the position is ahead of the rows": ("UPDATE tidemark.partition_offset SET next_offset = next_offset + 1", "the ledger ends at"),
    "a ledger row is lost": ("DELETE FROM tidemark.batch", "ledger rows have changed"),
    "the ledger counts wrongly": ("UPDATE tidemark.batch SET loaded = loaded - 1, unaccounted = unaccounted + 1", "counts wrongly"),
}


def test_reader_sees_every_way_in_which_the_tables_can_disagree(trial):
    """The result of a run is good. After any single change to it, it is not."""
    chaos = trial(2)
    chaos.feed.add(2)
    chaos.run_here()
    good = chaos.reader.look()
    assert problems(chaos.feed, good) == []
    assert sum(map(len, good.rows.values())) > 0
    assert sum(map(len, good.failed.values())) > 0
    for what, (statement, told) in TAMPERED.items():
        with contextlib.closing(psycopg2.connect(chaos.scenario.database_url)) as session, session.cursor() as cur:
            cur.execute(statement.format(sink=chaos.scenario.table))
            found = problems(chaos.feed, snapshot(cur, chaos.scenario.table, chaos.feed.topic), good)  # the change is rolled back
        assert any(told in each for each in found), what


def test_point_that_nobody_reaches_fails_its_test(tmp_path):
    """A fault that did not happen proves nothing."""
    points = Points(tmp_path)
    points.at(Step.COMMIT)
    with pytest.raises(AssertionError, match="COMMIT"):
        points.check_all_reached()

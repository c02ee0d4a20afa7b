"""A process that dies between any two statements of plan, apply or undo changes nothing, and the next one does all of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from psycopg2.extensions import cursor as PostgresCursor
from tests.integration.rewind.lab import Lab, lab_on, of_all_kinds, one_city
from tests.support.deaths import LosingAnswers, commits_on
from tests.support.kafka_topics import Topics
from tests.support.ledger import payloads
from tests.support.scenario import Scenario

from tidemark.errors import DatabaseUnavailable
from tidemark.rewind.plan_model import ShiftBy, ToOffset, Undo
from tidemark.sink.commit import commit_slice


@pytest.fixture
def read(lab: Lab) -> Lab:
    lab.read(90, step=40)
    lab.read(60, 1)
    lab.validate_to(33)
    return lab


def both(lab: Lab) -> str:
    """The partitions that the tests rewind."""
    return f"{lab.topic}:0,1"


def test_plan_apply_and_undo_that_die_anywhere_change_nothing(read: Lab) -> None:
    """Offsets, epochs, rows, ledger, archives and stored plans are unchanged, and the next call does all of it. At the undo, the first
    rewind's archive still exists, and rows loaded since are still in the sink."""
    assert read.struck(lambda cursor: read.plan(ToOffset(25), both(read), cursor=cursor)) >= 7
    ((rewind_id,),) = read.sql("SELECT rewind_id FROM tidemark.rewind")
    before = read.image()
    assert read.struck_apply(rewind_id) >= 22
    assert read.positions() == [25, 25, 0]
    assert read.apply(rewind_id).already
    read.check()
    read.read(100, 0, lambda offset: one_city(offset + 1000))
    assert read.struck_apply(read.plan(Undo(rewind_id)).rewind_id) >= 32
    assert read.image() == before
    read.check()


@pytest.fixture
def upsert(scenario: Scenario, topics: Topics) -> Iterator[Lab]:
    """A sink with one row per city, and an applied rewind: replaced rows from before its target are kept."""
    with lab_on(scenario, topics, (100,), key=("city",)) as lab:
        lab.read(60, transform=lambda offset: [f"city {offset % 40}"])
        lab.rewind(ToOffset(30))
        yield lab


def test_a_commit_that_dies_while_it_writes_over_kept_rows_keeps_none(upsert: Lab) -> None:
    """The copies are stored in the commit's transaction."""
    part, target = upsert.slice(60), upsert.target()

    def act(cursor: type[PostgresCursor]) -> None:
        with commits_on(cursor):
            commit_slice(target, part, of_all_kinds(part, lambda offset: [f"city {offset - 30}"]), payloads)

    assert upsert.struck(act) >= 5
    assert upsert.sql("SELECT count(*) FROM tidemark.rewound_row") == [(7,)]
    upsert.check()


def test_a_rewind_whose_answer_to_commit_is_lost_has_happened_or_not(read: Lab) -> None:
    """The second call reports whether it was already applied. It is never applied twice."""
    planned = read.plan(ShiftBy(-20), both(read))
    with read.session() as connection:
        losing: Any = LosingAnswers(connection, when=lambda: read.positions() == [70, 40, 0])
        with pytest.raises(DatabaseUnavailable):
            read.apply(planned.rewind_id, connection=losing)
    assert read.apply(planned.rewind_id).already
    assert read.positions() == [70, 40, 0]

"""A process that dies between any two statements of plan, apply or undo changes nothing, and the next one does all of it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import psycopg2
import pytest
from psycopg2.extensions import cursor as PostgresCursor
from tests.integration.rewind.lab import Lab, lab_on, of_all_kinds, one_city
from tests.support.kafka_topics import Topics
from tests.support.ledger import backend_of, payloads
from tests.support.scenario import Scenario

from tidemark.db import Connection, connect
from tidemark.errors import DatabaseUnavailable
from tidemark.rewind.model import ShiftBy, ToOffset, Undo
from tidemark.sink import commit

Act = Callable[[Connection], object]


class Watched(PostgresCursor):
    """Makes the server terminate the session after the n-th statement."""

    done = 0
    last = 0
    killer: Any

    def execute(self, *args: Any, **kwargs: Any) -> None:
        super().execute(*args, **kwargs)
        Watched.done += 1
        if Watched.done == Watched.last:
            with Watched.killer.cursor() as cur:
                cur.execute("SELECT pg_terminate_backend(%s, 5000)", (backend_of(self.connection),))


@contextlib.contextmanager
def watched(lab: Lab, last: int) -> Iterator[Connection]:
    with contextlib.closing(connect(lab.url, application="tidemark rewind")) as connection:
        connection.cursor_factory = Watched
        Watched.done, Watched.last, Watched.killer = 0, last, lab.watch
        yield connection


def struck(lab: Lab, act: Act) -> int:
    """Repeats ``act``, killed one statement later each time, until it succeeds. Checks that nothing changes before. Returns the number of
    deaths."""
    before = (lab.image(), lab.epochs(), lab.audit())
    for last in count(1):
        with watched(lab, last) as connection:
            try:
                act(connection)
            except DatabaseUnavailable:
                assert (lab.image(), lab.epochs(), lab.audit()) == before, f"after statement {last}"
            else:
                return last - 1
    raise AssertionError


@pytest.fixture
def read(lab: Lab) -> Lab:
    lab.read(90, step=40)
    lab.read(60, 1)
    lab.validate_to(33)
    return lab


SCOPE = "0,1"


def test_a_plan_is_stored_whole_or_not_at_all(read: Lab) -> None:
    assert struck(read, lambda connection: read.plan(ToOffset(25), f"{read.topic}:{SCOPE}", connection=connection)) >= 10
    assert read.sql("SELECT count(*) FROM tidemark.rewind") == [(1,)]


def test_an_apply_that_dies_anywhere_changes_nothing(read: Lab) -> None:
    """Offsets, epochs, rows, ledger, archives and stored plans are unchanged, and the same plan can still be applied."""
    planned = read.plan(ToOffset(25), f"{read.topic}:{SCOPE}")
    assert struck(read, lambda connection: read.apply(planned.rewind_id, connection=connection)) >= 25
    assert read.positions() == [25, 25, 0]
    assert read.apply(planned.rewind_id).already
    read.check()


def test_an_undo_that_dies_anywhere_changes_nothing(read: Lab) -> None:
    """The first rewind's archive still exists, and rows loaded since are still in the sink."""
    before = read.image()
    done = read.rewind(ToOffset(25), f"{read.topic}:{SCOPE}")
    read.read(100, 0, lambda offset: one_city(offset + 1000))
    planned = read.plan(Undo(done.rewind_id))
    assert struck(read, lambda connection: read.apply(planned.rewind_id, connection=connection)) >= 35
    assert read.image() == before
    read.check()


@pytest.fixture
def upsert(scenario: Scenario, topics: Topics) -> Iterator[Lab]:
    """A sink with one row per city, and an applied rewind: replaced rows from before its target are kept."""
    with lab_on(scenario, topics, (100,), key=("city",)) as lab:
        lab.read(60, transform=lambda offset: [f"city {offset % 40}"])
        lab.rewind(ToOffset(30))
        yield lab


def test_an_undo_on_an_upsert_sink_that_dies_anywhere_changes_nothing(upsert: Lab) -> None:
    """A replaced row is either kept or in the sink again, never both and never neither. The undo of an undo has the most work: some
    replaced rows come back, others are removed again."""
    upsert.read(80, transform=lambda offset: [f"city {offset - 30}"])
    repaired = upsert.image().sink
    undone = upsert.undo(1)
    upsert.read(95, transform=lambda offset: [f"city {offset - 40}"])
    assert upsert.sql("SELECT count(*) FROM tidemark.rewound_row") == [(7,)]
    planned = upsert.plan(Undo(undone.rewind_id))
    assert struck(upsert, lambda connection: upsert.apply(planned.rewind_id, connection=connection)) >= 40
    assert upsert.image().sink == repaired
    assert upsert.sql("SELECT count(*) FROM tidemark.rewound_row") == [(7,)]
    upsert.check()


def test_a_commit_that_dies_while_it_writes_over_kept_rows_keeps_none(upsert: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copies are stored in the commit's transaction."""
    part, target = upsert.slice(60), upsert.target()

    def connected(url: str, *, application: str) -> Connection:
        connection = connect(url, application=application)
        connection.cursor_factory = Watched
        return connection

    monkeypatch.setattr(commit, "connect", connected)

    def act(_connection: Connection) -> None:
        commit.commit_slice(target, part, of_all_kinds(part, lambda offset: [f"city {offset - 30}"]), payloads)

    assert struck(upsert, act) >= 8
    assert upsert.sql("SELECT count(*) FROM tidemark.rewound_row") == [(7,)]
    upsert.check()


def test_a_rewind_whose_answer_to_commit_is_lost_has_happened_or_not(read: Lab) -> None:
    """The second call reports whether it was already applied. It is never applied twice."""
    planned = read.plan(ShiftBy(-20), f"{read.topic}:{SCOPE}")

    class Losing:
        """A connection that commits and then fails."""

        def __init__(self, connection: Connection) -> None:
            self._connection = connection
            self.commits = 0

        def __getattr__(self, name: str) -> Any:
            return getattr(self._connection, name)

        def __enter__(self) -> Any:
            return self._connection.__enter__()

        def __exit__(self, *error: Any) -> None:
            self._connection.__exit__(*error)
            self.commits += 1
            if self.commits == 2 and error[0] is None:
                raise psycopg2.OperationalError("server closed the connection unexpectedly")

    with read.session() as connection:
        losing: Any = Losing(connection)
        with pytest.raises(DatabaseUnavailable):
            read.apply(planned.rewind_id, connection=losing)
    assert read.positions() == [70, 40, 0]
    assert read.apply(planned.rewind_id).already
    assert read.positions() == [70, 40, 0]

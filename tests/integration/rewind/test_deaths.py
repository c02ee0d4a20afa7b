"""A process that dies between any two statements of plan, apply or undo leaves what was there before, and the next one does it all."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import psycopg2
import pytest
from psycopg2.extensions import cursor as PostgresCursor
from tests.integration.rewind.lab import Lab, one_city

from tidemark.db import Connection, connect
from tidemark.errors import DatabaseUnavailable
from tidemark.rewind.model import ShiftBy, ToOffset, Undo

Act = Callable[[Connection], object]


class Watched(PostgresCursor):
    """Has the server end its session after the n-th statement."""

    done = 0
    last = 0
    killer: Any

    def execute(self, *args: Any, **kwargs: Any) -> None:
        super().execute(*args, **kwargs)
        Watched.done += 1
        if Watched.done == Watched.last:
            with Watched.killer.cursor() as cur:
                cur.execute("SELECT pg_terminate_backend(%s, 5000)", (self.connection.info.backend_pid,))


@contextlib.contextmanager
def watched(lab: Lab, last: int) -> Iterator[Connection]:
    with contextlib.closing(connect(lab.url, application="tidemark rewind")) as connection:
        connection.cursor_factory = Watched
        Watched.done, Watched.last, Watched.killer = 0, last, lab.watch
        yield connection


def struck(lab: Lab, act: Act) -> int:
    """Does ``act`` again and again, killed one statement later each time; nothing changes until it gets through. How often it died."""
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
    """Offsets, epochs, rows, ledger, archive and audit are as before, and the same plan can still be applied."""
    planned = read.plan(ToOffset(25), f"{read.topic}:{SCOPE}")
    assert struck(read, lambda connection: read.apply(planned.rewind_id, connection=connection)) >= 25
    assert read.positions() == [25, 25, 0]
    assert read.apply(planned.rewind_id).already
    read.check()


def test_an_undo_that_dies_anywhere_changes_nothing(read: Lab) -> None:
    """What the first rewind has archived is still there, and what came since still in the sink."""
    before = read.image()
    done = read.rewind(ToOffset(25), f"{read.topic}:{SCOPE}")
    read.read(100, 0, lambda offset: one_city(offset + 1000))
    planned = read.plan(Undo(done.rewind_id))
    assert struck(read, lambda connection: read.apply(planned.rewind_id, connection=connection)) >= 35
    assert read.image() == before
    read.check()


def test_a_rewind_whose_answer_to_commit_is_lost_has_happened_or_not(read: Lab) -> None:
    """The second call says which it was: applied already, or applied now; never twice."""
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

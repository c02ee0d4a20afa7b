"""Sessions that the server terminates at a chosen statement, and commits whose answer is lost."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import psycopg2
import pytest
from psycopg2.extensions import cursor as PostgresCursor

from tests.support.ledger import backend_of
from tests.support.sampling import ALL, SHARE
from tidemark.db import Connection, connect
from tidemark.errors import DatabaseUnavailable
from tidemark.sink import commit

END = "SELECT pg_terminate_backend(%s, 5000)"

Hook = Callable[[PostgresCursor, int, str], None]
"""Gets the cursor, the number of the statement, from 1, and its text. A COPY is a statement, too."""


def hooked(before: Hook | None = None, after: Hook | None = None) -> type[PostgresCursor]:
    """A cursor class that calls the hooks with each statement. All cursors of the class count together."""
    numbers = count(1)

    def run(cursor: PostgresCursor, send: Callable[[], None], query: object) -> None:
        number = next(numbers)
        if before:
            before(cursor, number, str(query))
        send()
        if after:
            after(cursor, number, str(query))

    class Hooked(PostgresCursor):
        def execute(self, query: Any, *args: Any) -> None:
            run(self, lambda: super(Hooked, self).execute(query, *args), query)

        def copy_expert(self, sql: Any, *args: Any, **options: Any) -> None:
            run(self, lambda: super(Hooked, self).copy_expert(sql, *args, **options), sql)

    return Hooked


def end_session(cursor: PostgresCursor, watch: Connection) -> None:
    """Makes the server terminate the cursor's session."""
    with watch.cursor() as cur:
        cur.execute(END, (backend_of(cursor.connection),))


def deaths(act: Callable[[type[PostgresCursor]], object], watch: Connection) -> Iterator[int]:
    """Repeats ``act`` until it succeeds. The server terminates the session of its cursors after the first statement, the next time after
    the second, and so on. Yields the number of that statement after each death. ``make test`` omits most of the statements."""
    step = 1 if ALL else SHARE
    for last in count(random.randint(1, step), step):

        def end(cursor: PostgresCursor, number: int, _query: str, last: int = last) -> None:
            if number == last:
                end_session(cursor, watch)

        try:
            act(hooked(after=end))
        except DatabaseUnavailable:
            yield last
        else:
            return


@contextlib.contextmanager
def commits_on(cursor: type[PostgresCursor]) -> Iterator[None]:
    """In the block, commits in this process use cursors of this class."""

    def connected(*args: Any, **options: Any) -> Connection:
        connection = connect(*args, **options)
        connection.cursor_factory = cursor
        return connection

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(commit, "connect", connected)
        yield


class LosingAnswers:
    """A connection that commits and then fails, if ``when`` holds after the commit."""

    def __init__(self, connection: Connection, when: Callable[[], bool] = lambda: True) -> None:
        self._connection, self._when = connection, when

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)

    def __enter__(self) -> Any:
        return self._connection.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._connection.__exit__(*error)
        if error[0] is None:
            self._lose()

    def commit(self) -> None:
        self._connection.commit()
        self._lose()

    def _lose(self) -> None:
        if self._when():
            raise psycopg2.OperationalError("server closed the connection unexpectedly")

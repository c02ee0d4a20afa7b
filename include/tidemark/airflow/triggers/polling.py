"""How a trigger polls the consumers' databases: one after the other, in a thread, which a hanging database blocks."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Mapping
from logging import Logger
from typing import TYPE_CHECKING, Any, TypeVar

from airflow.sdk import BaseHook

from tidemark.errors import TidemarkError

if TYPE_CHECKING:
    from tidemark.db import Cursor

Query = TypeVar("Query")
Answer = TypeVar("Answer")


class Poll:
    """Polls of a trigger. Between polls it holds no database session, and it uses at most one thread. Logs once that a source cannot
    be read, and once that it can be read again."""

    def __init__(self, log: Logger, what: str) -> None:
        self._log = log
        self._what = what
        self._unreadable: set[str] = set()

    async def ask(self, databases: Callable[[], Mapping[str, Query]], ask: Callable[[Any, Query], Answer]) -> dict[str, Answer]:
        """Returns the answers by the id of the database's connection, without databases that do not answer. ``databases`` returns the query
        for each. Empty if the consumers' files cannot be read."""
        try:
            queries = await asyncio.to_thread(databases)
        except (TidemarkError, OSError) as error:
            self._log_change("the consumers' files", str(error))
            return {}
        self._log_change("the consumers' files")
        answers = {}
        for name, query in queries.items():
            try:
                connection = await BaseHook.aget_connection(name)
                answers[name] = await asyncio.to_thread(ask, connection, query)
            except Exception as error:  # noqa: BLE001 - no error of one database may block the others
                self._log_change(name, str(error).strip() or type(error).__name__)
                continue
            self._log_change(name)
        return answers

    def _log_change(self, source: str, problem: str | None = None) -> None:
        if problem is not None and source not in self._unreadable:
            self._log.warning("cannot look up %s of=%s cause=%s", self._what, source, problem)
            self._unreadable.add(source)
        elif problem is None and source in self._unreadable:
            self._log.info("can look up again %s of=%s", self._what, source)
            self._unreadable.remove(source)


@contextlib.contextmanager
def cursor(connection: Any, application: str) -> Iterator[Cursor]:
    """One transaction in a session of its own on the database of an Airflow connection. Raises `TidemarkError`."""
    import psycopg2

    from tidemark.airflow.connections import postgres_url
    from tidemark.db import session, transaction
    from tidemark.errors import DatabaseUnavailable

    try:
        with session(postgres_url(connection), application=application) as opened, transaction(opened) as cur:
            yield cur
    except psycopg2.Error as error:  # schema or privileges missing
        raise DatabaseUnavailable(cause=str(error).strip()) from error

"""How a trigger asks the consumers' databases: one after the other, in a thread, and without an end if one does not answer."""

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

Asked = TypeVar("Asked")
Answer = TypeVar("Answer")


class Poll:
    """Polls of a trigger. Between polls it holds no database session, and it uses at most one thread. What cannot be read is logged once,
    and again when it can be read."""

    def __init__(self, log: Logger, what: str) -> None:
        self._log = log
        self._what = what
        self._away: set[str] = set()

    async def ask(self, databases: Callable[[], Mapping[str, Asked]], ask: Callable[[Any, Asked], Answer]) -> dict[str, Answer] | None:
        """The answer of each database that answers, by the id of its connection. ``databases`` says what to ask of each; `None` if it
        cannot, because the consumers' files cannot be read."""
        try:
            todo = await asyncio.to_thread(databases)
        except (TidemarkError, OSError) as error:
            self._tell("the consumers' files", str(error))
            return None
        self._tell("the consumers' files")
        answers = {}
        for name, asked in todo.items():
            try:
                connection = await BaseHook.aget_connection(name)
                answers[name] = await asyncio.to_thread(ask, connection, asked)
            except Exception as error:  # noqa: BLE001 - no error of one database may block the others
                self._tell(name, str(error).strip() or type(error).__name__)
                continue
            self._tell(name)
        return answers

    def _tell(self, where: str, problem: str | None = None) -> None:
        if problem is not None and where not in self._away:
            self._log.warning("cannot look up %s of=%s cause=%s", self._what, where, problem)
            self._away.add(where)
        elif problem is None and where in self._away:
            self._log.info("can look up again %s of=%s", self._what, where)
            self._away.remove(where)


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

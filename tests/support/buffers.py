"""Counts the pages of tables and indexes that each statement of a block touches, by Postgres' own counters: cached or not, including
triggers and foreign keys. The pages that a COMMIT touches are not counted."""

from __future__ import annotations

import contextlib
import unittest.mock
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import psycopg2

from tidemark.db import Connection, Cursor

TOUCHED = """SELECT coalesce(sum(pg_stat_get_xact_blocks_fetched(oid)), 0)::bigint FROM pg_catalog.pg_class
              WHERE relkind IN ('r', 'i', 't') AND relnamespace NOT IN ('pg_catalog'::regnamespace, 'information_schema'::regnamespace)"""
COUNTED = ("SELECT", "WITH", "INSERT", "UPDATE", "DELETE", "COPY", "EXPLAIN")


@dataclass(frozen=True, slots=True)
class Spent:
    statement: str
    buffers: int


@contextlib.contextmanager
def counted(*connections: Connection) -> Iterator[list[Spent]]:
    """Yields the statements of ``connections`` and of all sessions that are opened in the block."""
    found: list[Spent] = []

    class Counting(Cursor):
        def execute(self, query: Any, arguments: Any = None) -> None:
            with self._counted(query):
                super().execute(query, arguments)

        def copy_expert(self, sql: Any, file: Any, **more: Any) -> None:
            with self._counted(sql):
                super().copy_expert(sql, file, **more)

        @contextlib.contextmanager
        def _counted(self, query: Any) -> Iterator[None]:
            text = (query.decode() if isinstance(query, bytes) else str(query)).strip()
            said = "\n".join(line for line in text.splitlines() if not line.startswith("--"))
            if self.name is not None or not said.startswith(COUNTED):
                yield
                return
            before = self._touched()
            yield
            found.append(Spent(said, max(0, self._touched() - before)))

        def _touched(self) -> int:
            with Cursor(self.connection) as cur:
                cur.execute(TOUCHED)
                (touched,) = cur.fetchone() or (0,)
            return int(touched)

    connect = psycopg2.connect
    with unittest.mock.patch.object(psycopg2, "connect", lambda *given, **named: connect(*given, **{"cursor_factory": Counting, **named})):
        for connection in connections:
            connection.cursor_factory = Counting
        try:
            yield found
        finally:
            for connection in connections:
                connection.cursor_factory = None

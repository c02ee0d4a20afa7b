"""The consumers' files and their databases, as the page reads them."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import psycopg2

from tidemark import project
from tidemark.airflow import connections
from tidemark.airflow.dags import consume
from tidemark.airflow.dags.consume import Declared
from tidemark.db import Connection, SafeCursor, read_url, session
from tidemark.errors import BadInput, StatementTimeout, TidemarkError
from tidemark.spec import ConsumerSpec

log = logging.getLogger(__name__)

T = TypeVar("T")

CONNECT_S = 3
"""How long a database may take to accept a connection."""
STATEMENT_MS = 5_000
"""How long a statement may take."""

_READ_ONLY = f"SET LOCAL statement_timeout TO {STATEMENT_MS}; SET LOCAL transaction_read_only TO on; SET LOCAL TimeZone TO 'UTC'"
_files = threading.Lock()
_known: tuple[object, dict[str, Declared]] = (None, {})


def declared() -> dict[str, Declared]:
    """The consumers' files by name, invalid ones too. They are read again only when a file has changed."""
    global _known
    stamp = _stamp()
    with _files:
        if _known[0] != stamp:
            _known = (stamp, {one.spec.name: one for one in consume.declared()})
        return _known[1]


@dataclass(frozen=True, slots=True)
class Answers:
    """What the databases said, by consumers' names; and the databases that did not answer."""

    found: dict[str, Any]
    banners: list[dict[str, Any]]


def ask_each(consumers: Mapping[str, Declared], ask: Callable[[Connection, list[ConsumerSpec]], Mapping[str, T]]) -> Answers:
    """Calls ``ask`` once for each database, in threads, with the consumers that are there. One that fails becomes a banner."""
    there: dict[str, list[ConsumerSpec]] = defaultdict(list)
    for one in consumers.values():
        there[one.spec.connections.postgres].append(one.spec)
    answers = Answers({}, [])
    if not there:
        return answers

    def one_database(specs: list[ConsumerSpec]) -> Mapping[str, T]:
        with database(specs[0]) as connection:
            return ask(connection, specs)

    with ThreadPoolExecutor(min(8, len(there)), thread_name_prefix="tidemark-page") as pool:
        asked = {conn_id: pool.submit(one_database, specs) for conn_id, specs in there.items()}
    for conn_id, future in sorted(asked.items()):
        try:
            answers.found.update(future.result())
        except (TidemarkError, psycopg2.Error) as error:
            names = sorted(spec.name for spec in there[conn_id])
            answers.banners.append({"connection": conn_id, "consumers": names, **problem(error)})
    return answers


@contextlib.contextmanager
def database(spec: ConsumerSpec) -> Iterator[Connection]:
    """A session of the consumer's database. Every transaction in it is read-only and has `STATEMENT_MS` for each statement."""
    url = read_url(connections.database_url(spec))
    url += f"{'&' if '?' in url else '?'}connect_timeout={CONNECT_S}"
    with session(url, application="tidemark page") as connection:
        connection.cursor_factory = _Reading
        yield connection


class _Reading(SafeCursor):
    """Begins each transaction with its limits, also behind a transaction pooler, where a setting of the session could get lost."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        super().execute(_READ_ONLY)


def problem(error: Exception) -> dict[str, str]:
    """What is wrong with a database, and what to do."""
    if isinstance(error, psycopg2.errors.UndefinedTable | psycopg2.errors.UndefinedColumn | psycopg2.errors.InvalidSchemaName):
        return {"problem": "its schema tidemark is older than this version", "fix": "Run: tidemark migrate"}
    if isinstance(error, psycopg2.errors.InsufficientPrivilege):
        return {"problem": first_line(error), "fix": "Run: tidemark migrate --grant-to ROLE --as reader"}
    if isinstance(error, StatementTimeout):
        return {"problem": f"it did not answer within {STATEMENT_MS // 1000} s", "fix": "The page asks again by itself."}
    if isinstance(error, BadInput):
        return {"problem": f"{error.what}: {error.found}", "fix": error.fix}
    log.warning("database not read error=%s", first_line(error))
    return {"problem": first_line(error), "fix": "Check the server and the connection. The page asks again by itself."}


def first_line(error: Exception) -> str:
    """An error in one line."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]


def _stamp() -> object:
    def of(folder: Any) -> Iterable[tuple[str, int, int]]:
        for path in folder.iterdir():
            with contextlib.suppress(OSError):
                found = path.stat()
                yield path.name, found.st_mtime_ns, found.st_size

    folder = project.consumers()
    return (folder, frozenset(of(folder))) if folder.is_dir() else folder

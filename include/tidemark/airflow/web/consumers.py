"""The consumers' files and their databases, as the page reads them."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import psycopg2

from tidemark import project
from tidemark.airflow import connections
from tidemark.airflow.dags import consume
from tidemark.airflow.dags.consume import DeclaredConsumer
from tidemark.airflow.operators import by_database
from tidemark.db import Connection, SafeCursor, session, with_parameter
from tidemark.errors import BadInput, DatabaseUnavailable, StatementTimeout, TidemarkError
from tidemark.rewind.plan_model import Plan
from tidemark.spec import ConsumerSpec

log = logging.getLogger(__name__)

T = TypeVar("T")

CONNECT_S = 3
"""How long a database may take to accept a connection."""
STATEMENT_MS = 5_000
"""How long a statement may take."""

_READ_ONLY = f"SET LOCAL statement_timeout TO {STATEMENT_MS}; SET LOCAL transaction_read_only TO on; SET LOCAL TimeZone TO 'UTC'"
_files = threading.Lock()
_cached: tuple[object, dict[str, DeclaredConsumer]] = (None, {})


def declared() -> dict[str, DeclaredConsumer]:
    """Returns the consumers' files by name, invalid ones too. Reads them again only when a file has changed."""
    global _cached
    fingerprint = _fingerprint()
    with _files:
        if _cached[0] != fingerprint:
            _cached = (fingerprint, {consumer.spec.name: consumer for consumer in consume.declared()})
        return _cached[1]


@dataclass(frozen=True, slots=True)
class Answers:
    """The answers by consumer, and a banner for each database that did not answer."""

    by_consumer: dict[str, Any]
    banners: list[dict[str, Any]]


def ask_each(consumers: Mapping[str, DeclaredConsumer], ask: Callable[[Connection, list[ConsumerSpec]], Mapping[str, T]]) -> Answers:
    """Calls ``ask`` once for each database, in threads, with its consumers. A database that fails becomes a banner."""
    by_connection = by_database(consumer.spec for consumer in consumers.values())
    answers = Answers({}, [])
    if not by_connection:
        return answers

    def ask_database(specs: list[ConsumerSpec]) -> Mapping[str, T]:
        with database(specs[0]) as connection:
            return ask(connection, specs)

    with ThreadPoolExecutor(min(8, len(by_connection)), thread_name_prefix="tidemark-page") as pool:
        futures = {conn_id: pool.submit(ask_database, specs) for conn_id, specs in by_connection.items()}
    for conn_id, future in sorted(futures.items()):
        try:
            answers.by_consumer.update(future.result())
        except (TidemarkError, psycopg2.Error) as error:
            names = sorted(spec.name for spec in by_connection[conn_id])
            answers.banners.append({"connection": conn_id, "consumers": names, **problem(error)})
    return answers


@contextlib.contextmanager
def database(spec: ConsumerSpec) -> Iterator[Connection]:
    """Opens a session of the consumer's database. Its transactions are read-only, with `STATEMENT_MS` for each statement."""
    url = with_parameter(connections.database_url(spec), "connect_timeout", str(CONNECT_S))
    with session(url, application="tidemark page") as connection:
        connection.cursor_factory = _Reading
        yield connection


class _Reading(SafeCursor):
    """Begins each transaction with its limits, also behind a transaction pooler, where a setting of the session could get lost."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        super().execute(_READ_ONLY)


def problem(error: Exception) -> dict[str, str]:
    """Describes what is wrong with a database, and the fix."""
    if isinstance(error, psycopg2.errors.UndefinedTable | psycopg2.errors.UndefinedColumn | psycopg2.errors.InvalidSchemaName):
        return {"problem": "its schema tidemark is older than this version", "fix": "Run: tidemark migrate"}
    if isinstance(error, psycopg2.errors.InsufficientPrivilege):
        return {"problem": first_line(error), "fix": "Run: tidemark migrate --grant-to ROLE --as reader"}
    if isinstance(error, StatementTimeout):
        return {"problem": f"it did not answer within {STATEMENT_MS // 1000} s", "fix": "The page asks again by itself."}
    if isinstance(error, BadInput):
        return {"problem": f"{error.what}: {error.found}", "fix": error.fix}
    why = first_line(error.cause if isinstance(error, DatabaseUnavailable) else error)
    log.warning("database not read error=%s", why)
    return {"problem": why, "fix": "Check the server and the connection. The page asks again by itself."}


def require_moved(consumer: DeclaredConsumer, plan: Plan) -> None:
    """Raises `BadInput` if the rewind does not move the consumer."""
    if consumer.spec.name not in {group.consumer for group in plan.groups}:
        mismatch = f"rewind {plan.rewind_id} does not move {consumer.spec.name}"
        raise BadInput(what="rewind", found=mismatch, fix="Rewinds lists the rewinds of each consumer.")


def first_line(error: Exception | str) -> str:
    """Returns the first line of an error's text."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]


def _fingerprint() -> object:
    def files(folder: Any) -> Iterable[tuple[str, int, int]]:
        for path in folder.iterdir():
            with contextlib.suppress(OSError):
                status = path.stat()
                yield path.name, status.st_mtime_ns, status.st_size

    folder = project.consumers()
    return (folder, frozenset(files(folder))) if folder.is_dir() else folder

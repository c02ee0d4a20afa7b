"""A task's lineage facets: the topics with the committed ranges, the tables with their columns, and the results of a validation.

Needs no lineage library: `tidemark.airflow.lineage.openlineage` converts them to OpenLineage's classes.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import psycopg2

from tidemark.db import DatabaseUrl, answering, parsed, read_url, rows, session, statements, transaction, with_parameter
from tidemark.errors import TidemarkError
from tidemark.quality.verdict import ExpectationResult
from tidemark.sink.table import Column, read_columns

log = logging.getLogger(__name__)

ANSWER_S = 3
"""How long the database may take to accept a connection, and may then be silent. The provider gives the whole event 10 s."""
STATEMENT_MS = 2_000
"""How long a statement may take, by the server's clock."""

SQL = statements("tidemark.airflow.lineage", "facets.sql")


@dataclass(frozen=True, slots=True)
class Consumed:
    """An attempt of a task. ``topics``: those of the consumer's file, which lineage lists even if nothing was read."""

    group: str
    attempt_id: int
    tables: tuple[str, ...]
    topics: tuple[str, ...]
    bootstrap_servers: str
    database_url: DatabaseUrl = field(repr=False)


@dataclass(frozen=True, slots=True)
class ValidationFacts:
    """A validation of a run's tables."""

    tables: tuple[str, ...]
    results: tuple[ExpectationResult, ...] = field(repr=False)
    database_url: DatabaseUrl = field(repr=False)


@dataclass(frozen=True, slots=True)
class CommittedRange:
    """A range of a partition, ``[start, end)``, the rows that its batches wrote, and how many of these delete."""

    topic: str
    partition: int
    start: int
    end: int
    sink_rows: int
    deleted: int


@dataclass(frozen=True, slots=True)
class AttemptFacts:
    """The committed ranges of an attempt, and the columns of its tables."""

    ranges: Sequence[CommittedRange]
    columns: Mapping[str, Sequence[Column]]


def facts(attempt: Consumed) -> AttemptFacts | None:
    """Reads the ledger and the tables' columns. `None` if the database does not answer in time: lineage must not hold up a task."""
    try:
        url = with_parameter(read_url(attempt.database_url), "connect_timeout", str(ANSWER_S))
        with session(url, application="tidemark lineage") as connection, answering(connection, ANSWER_S), transaction(connection) as cur:
            cur.execute(f"SET LOCAL statement_timeout TO {STATEMENT_MS}; SET LOCAL transaction_read_only TO on")
            cur.execute(SQL["attempt_ranges"], {"attempt_id": attempt.attempt_id})
            return AttemptFacts([CommittedRange(**row) for row in rows(cur)], {table: read_columns(cur, table) for table in attempt.tables})
    except (TidemarkError, psycopg2.Error) as error:
        log.warning(
            "lineage without offsets and columns group=%s attempt=%s cause=%s", attempt.group, attempt.attempt_id, str(error).strip()
        )
        return None


def kafka_address(bootstrap_servers: str) -> str:
    """``host:port`` of the first server, which OpenLineage's naming takes for the cluster."""
    first = bootstrap_servers.split(",")[0].strip().rpartition("://")[2]
    host = first.rpartition("]")[2] if first.startswith("[") else first
    return first if ":" in host else f"{first}:9092"


def postgres_address(database_url: DatabaseUrl) -> tuple[str, str]:
    """``host:port`` of the first server, and the database's name. Never a login."""
    parts = parsed(read_url(database_url))
    host = (parts.get("host") or parts.get("hostaddr") or "").split(",")[0]
    if not host or host.startswith("/"):
        host = "localhost"
    port = (parts.get("port") or "").split(",")[0] or "5432"
    return f"{f'[{host}]' if ':' in host else host}:{port}", parts.get("dbname") or parts.get("user") or "postgres"

"""Sessions on the Postgres database that holds a consumer's sink, its positions and its ledger.

`connect` opens one, `transaction` bounds one, `statements` reads the SQL that stands beside a module. Statements never commit:
whoever opened the transaction ends it.

Every transaction begins with `FIX_PATH`. Otherwise a role that may create functions in any schema of the session's ``search_path`` could
have ours call its own: Postgres prefers the function whose argument types fit best, wherever it is.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import socket
import struct
import threading
import time
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from importlib import resources
from typing import Any

import psycopg2
from psycopg2.extensions import PYDATETIMETZ, TRANSACTION_STATUS_ACTIVE, new_type, parse_dsn, register_type
from psycopg2.extensions import connection as Connection
from psycopg2.extensions import cursor as Cursor

from tidemark.errors import BadInput, DatabaseReadOnly, DatabaseUnavailable

__all__ = [
    "FIX_PATH",
    "MIGRATION_LOCK",
    "REDRIVE_LOCK",
    "RELEASE_IF_LOST",
    "REWIND_LOCK",
    "Connection",
    "Cursor",
    "answering",
    "connect",
    "is_outage",
    "rows",
    "session",
    "statements",
    "transaction",
    "unavailable",
]

log = logging.getLogger(__name__)

MIGRATION_LOCK = 0x7469_6465  # "tide"
"""The key of the advisory lock that the process that migrates a database holds; others wait for it."""
REWIND_LOCK = 0x7265_7769  # "rewi"
"""With a group's id the key of the advisory lock that a rewind takes exclusively, and that whatever must not run beside one shares."""
REDRIVE_LOCK = 0x7265_6472  # "redr"
"""With a group's id the key of the advisory lock that a redrive holds while it runs."""

CLIENT_DEFAULTS = {
    "connect_timeout": 10,
    "keepalives": 1,
    "keepalives_idle": 30,
    "keepalives_interval": 10,
    "keepalives_count": 3,
    "tcp_user_timeout": 60_000,
}
"""libpq's settings, where the URL does not state them. A peer that vanished is noticed after 60 s: without ``tcp_user_timeout`` Linux
retransmits for a quarter of an hour. It also bounds how long a peer may take nothing of a COPY."""
RELEASE_IF_LOST = "; ".join(
    f"SET LOCAL {name} TO {value}"
    for name, value in (
        ("tcp_keepalives_idle", 30),
        ("tcp_keepalives_interval", 10),
        ("tcp_keepalives_count", 3),
        ("tcp_user_timeout", 60_000),
    )
)
"""The same for the server's side of a transaction: soon after its client has vanished it ends, and lets its locks go. By default the server
waits for hours. For one transaction, because a pooler hands the session on. It has no effect on a Unix socket."""
READ_ONLY = "25006"
"""The SQLSTATE of a statement that writes in a transaction that may not."""
SILENCE_S = 1800.0
"""A server that is asked and that sends and takes no byte for so long is given up. A staged batch of 10 million rows is one statement."""
SEARCH_PATH = "pg_catalog, pg_temp"
"""Temporary tables last: they could hide those of the catalog otherwise. Everything else is written with its schema."""
FIX_PATH = f"SET LOCAL search_path TO {SEARCH_PATH}"
"""For one transaction, so that it neither gets lost nor reaches other clients behind a pooler that shares sessions by transaction."""
_URL_FIX = "Write postgresql://user:password@host:port/database with names and password percent-encoded: %40 for an @, %2F for a slash."


def connect(url: str, *, application: str = "tidemark") -> Connection:
    """A new session, outside any transaction; the caller closes it.

    ``application`` becomes ``application_name``, so that an operator sees in ``pg_stat_activity`` whose session it is.
    Raises `BadInput` for a URL that cannot be read, without quoting any of it, and `DatabaseUnavailable` if no session could be had.
    """
    _check_url(url)
    connection: Connection | None = None
    try:
        stated = parse_dsn(url)
        defaults: dict[str, Any] = {name: value for name, value in CLIENT_DEFAULTS.items() if name not in stated}
        connection = psycopg2.connect(url, application_name=application, **defaults)
    except psycopg2.Error as error:
        said = str(error).strip()
        if isinstance(error, psycopg2.OperationalError) and "for connection option" not in said and "invalid port number" not in said:
            raise DatabaseUnavailable(cause=said) from error
    except ValueError:
        pass  # a NUL, or bytes that are not UTF-8
    if connection is None:
        # Outside the handlers: libpq's message quotes the URL and with it the password, and must not become this error's context.
        raise BadInput(what="database URL", found="libpq cannot read it", fix=_URL_FIX)
    register_type(TIMESTAMPTZ, connection)
    return connection


def _check_url(url: str) -> None:
    """Refuses what libpq would misread so that a part of the password becomes the host, the port or the database, which errors name."""
    scheme, _, rest = url.partition("://")
    if scheme not in {"postgresql", "postgres"}:
        raise BadInput(what="database URL", found="it does not begin with postgresql://", fix=_URL_FIX)
    before, _, after = rest.partition("@")
    if "@" in after or ("@" in rest and re.search("[/?]", before)):
        raise BadInput(what="database URL", found="it has an @ that is not between password and host", fix=_URL_FIX)


def _moment(text: str | bytes | None, cursor: Cursor) -> datetime | str | None:
    """A timestamptz: as a ``datetime``, or as Postgres writes it where Python has none (years outside 1 to 9999, infinity). A time that a
    producer made up is data, and must not stop the reader of its row."""
    if text is None:
        return None
    text = text if isinstance(text, str) else text.decode()
    if text.endswith("infinity"):
        return text
    try:
        moment: datetime = PYDATETIMETZ(text, cursor)
        moment.astimezone(UTC)  # in the session's time zone the year may be one of Python's, and none in UTC
    except (ValueError, OverflowError):
        return text
    return moment


TIMESTAMPTZ = new_type(PYDATETIMETZ.values, "TIMESTAMPTZ", _moment)


@contextlib.contextmanager
def transaction(connection: Connection) -> Iterator[Cursor]:
    """One transaction with `FIX_PATH`: commits when the block ends, rolls back when it raises.

    A session that was lost shows as `DatabaseUnavailable`; whether a COMMIT that was under way then happened is not known here.
    """
    try:
        with connection, connection.cursor() as cursor:
            Cursor.execute(cursor, FIX_PATH)
            yield cursor
    except (psycopg2.OperationalError, psycopg2.InterfaceError, psycopg2.InternalError) as error:
        if is_outage(error):
            raise unavailable(error) from error
        raise


def unavailable(error: psycopg2.Error) -> DatabaseUnavailable:
    """An outage (`is_outage`) as ours."""
    said = str(error).strip()
    return DatabaseReadOnly(cause=said) if error.pgcode == READ_ONLY else DatabaseUnavailable(cause=said)


def is_outage(error: psycopg2.Error) -> bool:
    """Did the session or the server go away, or is a resource short, so that the same statement may succeed later?

    Classes of SQLSTATE: 08 connection, 40 rolled back for another's sake, 53 out of a resource, 55 lock not had in time,
    57 ended by an operator, 58 system error, and XX000 an error of the server's own (a file that may not grow is one); no SQLSTATE at
    all: the session was lost. And `READ_ONLY`: a standby, which a failover may make the primary.
    """
    return error.pgcode in {None, "XX000", READ_ONLY} or error.pgcode[:2] in {"08", "40", "53", "55", "57", "58"}


@contextlib.contextmanager
def session(url: str, *, application: str = "tidemark") -> Iterator[Connection]:
    """`connect`, closed when the block ends."""
    with contextlib.closing(connect(url, application=application)) as connection:
        yield connection


@contextlib.contextmanager
def answering(connection: Connection, within_s: float = SILENCE_S) -> Iterator[None]:
    """Within the block a statement fails as an outage when the session has been silent both ways for so long.

    The kernel notices a peer that is gone. This is for one that acknowledges and never answers: a server that is stopped, a pooler that
    is stuck. Where the kernel does not count bytes (no Linux, no TCP), nothing is bounded.
    """
    ended = threading.Event()
    with socket.socket(fileno=os.dup(connection.fileno())) as line:
        thread = threading.Thread(target=_end_silence, args=(connection, line, within_s, ended), name="silence", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()


def _end_silence(connection: Connection, line: socket.socket, within_s: float, ended: threading.Event) -> None:
    seen, since = _bytes_passed(line), time.monotonic()
    while seen is not None and not ended.wait(within_s / 20):
        passed = _bytes_passed(line)
        if passed != seen or connection.closed or connection.get_transaction_status() != TRANSACTION_STATUS_ACTIVE:
            seen, since = passed, time.monotonic()
        elif time.monotonic() - since > within_s:
            log.warning("session given up, Postgres was silent silence_s=%.0f", within_s)
            with contextlib.suppress(OSError):
                line.shutdown(socket.SHUT_RDWR)
            return


def _bytes_passed(line: socket.socket) -> tuple[int, int] | None:
    """Bytes that the peer has acknowledged, and bytes received: ``tcpi_bytes_acked`` and ``tcpi_bytes_received`` of Linux' ``tcp_info``."""
    try:
        told = line.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 136)
        acked, received = struct.unpack_from("=QQ", told, 120)
    except (AttributeError, OSError, struct.error):
        return None
    return acked, received


def statements(package: str, file: str) -> Mapping[str, str]:
    """The statements of a ``.sql`` file in ``package``, by the name in the ``-- name:`` line above each."""
    text = resources.files(package).joinpath(file).read_text(encoding="utf-8")
    parts = re.split(r"^-- name: *(\w+) *\n", text, flags=re.MULTILINE)
    return {name: body.strip() for name, body in zip(parts[1::2], parts[2::2], strict=True)}


def rows(cursor: Cursor) -> list[dict[str, Any]]:
    """What the last statement returned, a mapping by column name for each row."""
    assert cursor.description is not None
    names = [column.name for column in cursor.description]
    return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]

"""Sessions on the Postgres database that holds a consumer's sink, positions and ledger.

`connect` opens a session, `transaction` runs one transaction, `statements` loads the SQL file beside a module. Statements never commit: the
code that opened the transaction ends it.

Every transaction begins with `FIX_PATH`. Otherwise a role that may create functions in any schema of the session's ``search_path`` could
get Tidemark to call them: Postgres prefers the function with the best-fitting argument types, in whichever schema.
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
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import MAXYEAR, MINYEAR, UTC, datetime
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote, unquote

import psycopg2
from psycopg2.extensions import PYDATETIMETZ, TRANSACTION_STATUS_ACTIVE, new_type, parse_dsn, register_type

from tidemark import secret
from tidemark.errors import (
    BadInput,
    ConnectionRefused,
    DatabaseReadOnly,
    DatabaseUnavailable,
    LockTimeout,
    PasswordUnavailable,
    StatementTimeout,
)
from tidemark.tokens import Token, TokenSource, TokenUnavailable
from tidemark.waiting import LOOK_EVERY_S, REPORT_AFTER_S

log = logging.getLogger(__name__)

T = TypeVar("T")

Connection = psycopg2.extensions.connection
Cursor = psycopg2.extensions.cursor

DatabaseUrl = str | Path
"""A libpq URL, or the file that holds it, which is read at each connection because the password may change.

Beside libpq's parameters, the URL may have one of `PASSWORD_SOURCES`, which is asked for the password at each connection. So the source
travels to every process, and the password to none."""

PASSWORD_COMMAND, PASSWORD_CALLABLE = PASSWORD_SOURCES = ("password_command", "password_callable")
"""Parameters of a database URL that say where the password comes from: a command, or a Python function as ``module:function``."""
CLOUDS = {"aws-rds": "tidemark.cloud_tokens:aws_rds"}
"""Functions that have a name of their own."""

MIGRATION_LOCK = 0x7469_6465  # "tide"
"""Key of the advisory lock that a process holds while it migrates a database; others wait for it."""
REWIND_LOCK = 0x7265_7769  # "rewi"
"""With a group's id, the key of the advisory lock that a rewind takes exclusively. Work that must not run during a rewind shares it."""
ERASE_LOCK = 0x6572_6173  # "eras"
"""With a group's id, the key of the advisory lock that an erasure takes exclusively, and each commit of the group shares."""
REDRIVE_LOCK = 0x7265_6472  # "redr"
"""With a group's id, the key of the advisory lock that a redrive holds while it runs."""
EVOLVE_LOCK = 0x6576_6F6C  # "evol"
"""With a hash of a table's name, the key of the advisory lock that a run holds while it adds columns to the table."""

CLIENT_DEFAULTS = {
    "connect_timeout": 10,
    "keepalives": 1,
    "keepalives_idle": 30,
    "keepalives_interval": 10,
    "keepalives_count": 3,
    "tcp_user_timeout": 60_000,
}
"""Defaults for libpq settings that the URL lacks. Detects a vanished peer after 60 s; without ``tcp_user_timeout``, Linux retransmits for
15 minutes. The timeout also limits how long a peer may accept no data of a COPY."""
SETTINGS_WRONG = re.compile(
    "no password supplied|authentication failed|(database|role) .* does not exist|no pg_hba.conf entry|certificate"
    "|SSL(?! SYSCALL| error: unexpected eof| connection has been closed)|translate host name(?!.*Temporary failure)|Connection refused"
)
"""Texts of libpq and Postgres about a connection that the same settings would probably not open later. psycopg2 has no SQLSTATE for a
connection that fails. In another language, only the error's advice differs."""
LIBPQ_HINT = re.compile(r"\s*Is the server running .*\?")
RELEASE_IF_LOST = "; ".join(
    f"SET LOCAL {name} TO {value}"
    for name, value in (
        ("tcp_keepalives_idle", 30),
        ("tcp_keepalives_interval", 10),
        ("tcp_keepalives_count", 3),
        ("tcp_user_timeout", 60_000),
    )
)
"""The same for the server: a transaction ends, and releases its locks, soon after its client has vanished; by default the server waits for
hours. Set for one transaction only, because a pooler reuses the session. No effect on a Unix socket."""
READ_ONLY = "25006"
"""SQLSTATE of a write in a read-only transaction."""
SILENCE_S = 1800.0
"""How long a server may neither send nor accept a byte during a statement. A staged batch of 10 million rows is one statement."""
SEARCH_PATH = "pg_catalog, pg_temp"
"""Temporary tables come last, so that they cannot hide catalog tables. All other names are schema-qualified."""
FIX_PATH = f"SET LOCAL search_path TO {SEARCH_PATH}"
"""Applied per transaction: behind a transaction pooler, a session setting could get lost or affect other clients."""
UNLIMITED = """SELECT set_config(name, '0', true) FROM pg_settings
                WHERE name IN ('idle_in_transaction_session_timeout', 'transaction_timeout')"""
"""Removes a transaction's time limits. Postgres before 17 has no ``transaction_timeout``."""
_URL_FIX = "Write postgresql://user:password@host:port/database with names and password percent-encoded: %40 for an @, %2F for a slash."


def read_url(url: DatabaseUrl) -> str:
    """Reads the URL from its file, if it is in one. Raises `DatabaseUnavailable` if the file cannot be read."""
    try:
        return secret.read(url) if isinstance(url, Path) else url
    except secret.SecretUnreadable as error:
        raise DatabaseUnavailable(cause=str(error)) from None


def with_parameter(url: str, name: str, value: str) -> str:
    """The URL with one more parameter."""
    return f"{url}{'&' if '?' in url else '?'}{name}={quote(value, safe='')}"


def parsed(url: str) -> dict[str, str]:
    """The URL's parts by libpq's names. Raises `BadInput`, which quotes nothing of the URL, if it cannot be parsed."""
    _check_url(url)
    url, _ = _without_sources(url)
    with contextlib.suppress(psycopg2.Error, ValueError):  # ValueError: a NUL, or bytes that are not UTF-8
        parts: dict[str, str] = parse_dsn(url)
        return parts
    raise BadInput(what="database URL", found="libpq cannot parse it", fix=_URL_FIX)


def with_password(url: DatabaseUrl) -> dict[str, str]:
    """The URL's parts by libpq's names, for libpq's programs, with the password of this moment. Raises what `connect` raises before it
    connects."""
    url = read_url(url)
    parts = parsed(url)
    source = _password_source(url, parts)
    return parts if source is None else parts | {"password": _password(source.token)}


def connect(url: DatabaseUrl, *, application: str = "tidemark") -> Connection:
    """Opens a session, outside any transaction; the caller closes it.

    ``application`` becomes ``application_name``, which identifies the session in ``pg_stat_activity``. Asks the URL's source of passwords,
    if it has one; a second time if the server refuses a password that has just been replaced. The only place that opens sessions.

    Raises `BadInput`, which quotes nothing of the URL, if it cannot be parsed, `DatabaseUnavailable` if the connection fails, and
    `PasswordUnavailable`, which is one.
    """
    url = read_url(url)
    parts = parsed(url)
    source = _password_source(url, parts)
    password = _password(source.token) if source is not None else None
    try:
        connection = _connected(url, parts, application, password)
    except DatabaseUnavailable as error:
        if source is None or "FATAL" not in error.cause or (newer := _password(source.renewed)) == password:
            raise
        connection = _connected(url, parts, application, newer)
    connection.url = url
    return connection


def _connected(url: str, parts: Mapping[str, str], application: str, password: str | None) -> Session:
    connection: Session | None = None
    settings: dict[str, Any] = {name: value for name, value in CLIENT_DEFAULTS.items() if name not in parts}
    if password is not None:
        settings["password"] = password
    try:
        dsn, _ = _without_sources(url)
        connection = psycopg2.connect(dsn, connection_factory=Session, application_name=application, **settings)
    except psycopg2.Error as error:
        error_text = str(error).strip()
        if (
            isinstance(error, psycopg2.OperationalError)
            and "for connection option" not in error_text
            and "invalid port number" not in error_text
        ):
            cause = " ".join(LIBPQ_HINT.sub("", error_text).split()).rstrip(".")
            raise (ConnectionRefused if SETTINGS_WRONG.search(cause) else DatabaseUnavailable)(cause=cause) from error
    except ValueError:
        pass  # a NUL, or bytes that are not UTF-8
    if connection is None:
        # Outside the handlers: libpq's message quotes the URL, including the password, and must not become this error's context.
        raise BadInput(what="database URL", found="libpq cannot parse it", fix=_URL_FIX)
    register_type(TIMESTAMPTZ, connection)
    return connection


def _without_sources(url: str) -> tuple[str, list[tuple[str, str]]]:
    """The URL for libpq, and the parameters that name `PASSWORD_SOURCES`."""
    address, _, query = url.partition("?")
    pairs = [pair for pair in query.split("&") if pair]
    sources = [(name, unquote(value)) for name, _, value in (pair.partition("=") for pair in pairs) if name in PASSWORD_SOURCES]
    if not sources:
        return url, []
    others = "&".join(pair for pair in pairs if pair.partition("=")[0] not in PASSWORD_SOURCES)
    return f"{address}{'?' if others else ''}{others}", sources


def _password_source(url: str, parts: Mapping[str, str]) -> TokenSource | None:
    _, sources = _without_sources(url)
    if not sources:
        return None
    (name, value), *others = sources
    if others or "password" in parts:
        raise BadInput(what=name, found=f"{others[0][0] if others else 'a password'} of the database is set too", fix="Remove one of them.")
    setting = f"{name} of the database (TIDEMARK_DATABASE_{name.upper()}, or the extra of the Postgres connection)"
    if name == PASSWORD_COMMAND:
        return TokenSource(setting=setting, command=value)
    about = {name: parts.get(name, default) for name, default in (("host", ""), ("port", "5432"), ("user", ""), ("dbname", ""))}
    return TokenSource(setting=setting, function=CLOUDS.get(value, value), about=tuple(about.items()))


def _password(ask: Callable[[], Token]) -> str:
    """A token as password. A source that fails is an outage of Postgres for all who connect: they wait, or try again."""
    try:
        return ask().value
    except TokenUnavailable as error:
        raise PasswordUnavailable(cause=f"{error.setting}: {error.cause}") from error


def _check_url(url: str) -> None:
    """Refuses URLs in which libpq would take a part of the password for the host, port or database, which error messages name."""
    scheme, _, rest = url.partition("://")
    if scheme not in {"postgresql", "postgres"}:
        raise BadInput(what="database URL", found="it does not start with postgresql://", fix=_URL_FIX)
    if "\x00" in url:
        raise BadInput(what="database URL", found="it has a NUL, where libpq would end it", fix=_URL_FIX)
    before, _, after = rest.partition("@")
    if "@" in after or ("@" in rest and re.search("[/?]", before)):
        raise BadInput(what="database URL", found="it has an @ that is not between password and host", fix=_URL_FIX)


def _parse_timestamptz(text: str | bytes | None, cursor: Cursor) -> datetime | str | None:
    """A timestamptz as a ``datetime``, or as Postgres' text if Python cannot represent it (years outside 1 to 9999, infinity), so that a
    row with a producer's bogus timestamp stays readable."""
    if text is None:
        return None
    text = text if isinstance(text, str) else text.decode()
    if text.endswith("infinity"):
        return text
    try:
        moment: datetime = PYDATETIMETZ(text, cursor)
        if not MINYEAR < moment.year < MAXYEAR:
            moment.astimezone(UTC)  # raises if the year is out of range in UTC
    except (ValueError, OverflowError):
        return text
    return moment


TIMESTAMPTZ = new_type(PYDATETIMETZ.values, "TIMESTAMPTZ", _parse_timestamptz)


@contextlib.contextmanager
def transaction(connection: Connection) -> Iterator[Cursor]:
    """Runs one transaction with `FIX_PATH`: commits when the block ends, rolls back when it raises.

    Raises `DatabaseUnavailable` if the session is lost; the outcome of a COMMIT in progress is then unknown.
    """
    with outages(), connection, connection.cursor() as cursor:
        Cursor.execute(cursor, FIX_PATH)
        yield cursor


@contextlib.contextmanager
def outages() -> Iterator[None]:
    """Raises `DatabaseUnavailable` for the block's errors that are outages (`is_outage`). `transaction` includes it."""
    try:
        yield
    except (psycopg2.OperationalError, psycopg2.InterfaceError, psycopg2.InternalError) as error:
        if is_outage(error):
            raise unavailable(error) from error
        raise


@contextlib.contextmanager
def kept_open(connection: Connection) -> Iterator[Cursor]:
    """Keeps a transaction open on a second session with the URL and name of ``connection``, and rolls it back when the block ends.

    For a lock that must outlast the transactions of ``connection``: behind a transaction pooler, a session-level lock would stay on a
    backend that other clients use. The idle transaction has no snapshot, so it does not hold back VACUUM.
    """
    assert isinstance(connection, Session)
    application = connection.get_dsn_parameters()["application_name"]
    with outages(), session(connection.url, application=application) as other:
        other.set_session(isolation_level="READ COMMITTED")  # a stricter level would keep its snapshot
        with other.cursor() as cursor:
            cursor.execute(f"{FIX_PATH}; {RELEASE_IF_LOST}; {UNLIMITED}")
            try:
                yield cursor
            finally:
                with contextlib.suppress(psycopg2.Error):
                    other.rollback()


def pooled(connection: Connection) -> bool:
    """Whether a pooler is between this session and Postgres: it gives clients other process ids than those of the backends."""
    with transaction(connection) as cursor:
        return _pooled(cursor)


def _pooled(cursor: Cursor) -> bool:
    cursor.execute("SELECT pg_backend_pid()")
    return bool(cursor.fetchone() != (cursor.connection.info.backend_pid,))


class Session(Connection):
    """A session of `connect`. Errors of the session and its cursors quote no value of a row, wherever they are shown.

    ``url``: from which it was opened. ``often``: the text that `execute_often` sends for each statement executed before, by name.
    ``computing``: Postgres waits for this process to compute.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.url = ""
        self.often: dict[str, str] = {}
        self.computing = False
        self.cursor_factory = SafeCursor

    def commit(self) -> None:
        with _errors_without_values():
            super().commit()


class SafeCursor(Cursor):
    """A cursor whose errors quote no value of a row."""

    def execute(self, query: Any, vars: Any = None) -> None:
        with _errors_without_values():
            super().execute(query, vars)

    def copy_expert(self, sql: Any, file: Any, size: int = 8192) -> None:
        with _errors_without_values():
            super().copy_expert(sql, file, size)


class _errors_without_values:
    """Replaces the text of a psycopg2 error, which quotes the statement and the rows. ``diag`` keeps the original."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: Any) -> None:
        if isinstance(error, psycopg2.Error):
            error.args = (_without_values(error),)


def execute_often(cursor: Cursor, name: str, statement: str, values: Mapping[str, Any]) -> None:
    """Executes a statement that a session repeats often, with ``values`` for its ``%(name)s``.

    Prepares it the second time: Postgres parses it once and soon reuses one plan. Not behind a pooler, where each transaction may run on
    another backend.
    """
    prepared = cursor.connection.often if isinstance(cursor.connection, Session) else {}
    if name not in prepared:
        prepared[name] = ""
    elif not prepared[name]:
        prepared[name] = statement if _pooled(cursor) else _prepare(cursor, name, statement)
    cursor.execute(prepared[name] or statement, values)


def _prepare(cursor: Cursor, name: str, statement: str) -> str:
    """Prepares the statement, which survives a rollback. Returns the statement that executes it."""
    numbers: dict[str, int] = {}
    body = re.sub(r"%\((\w+)\)s", lambda match: f"${numbers.setdefault(match[1], len(numbers) + 1)}", statement)
    cursor.execute(f"PREPARE tidemark_{name} AS {body}")
    return f"EXECUTE tidemark_{name} ({', '.join(f'%({value})s' for value in numbers)})"


@contextlib.contextmanager
def keep_visible(connection: Connection) -> Iterator[None]:
    """Keeps the session's ``application_name`` in ``pg_stat_activity`` within the block, so that others see that its process runs.

    Behind a pooler, this needs an open transaction, because between two transactions the session may have no backend.
    """
    if not pooled(connection):
        yield
        return
    with kept_open(connection):
        yield


def set_audit_actor(cursor: Cursor, by: str, reason: str = "") -> None:
    """Names the user, and the reason, for the events that triggers write in this transaction (`sql/0009_audit.sql`)."""
    cursor.execute("SELECT set_config('tidemark.claimed_by', %s, true), set_config('tidemark.reason', %s, true)", (by, reason))


def unavailable(error: psycopg2.Error) -> DatabaseUnavailable:
    """Tidemark's error for an outage (`is_outage`)."""
    error_text = str(error).strip()
    if isinstance(error, psycopg2.errors.QueryCanceled) and "statement timeout" in error_text:
        return StatementTimeout(cause=error_text.splitlines()[0])
    if isinstance(error, psycopg2.errors.LockNotAvailable):
        return LockTimeout(cause=error_text.splitlines()[0])
    return DatabaseReadOnly(cause=error_text) if error.pgcode == READ_ONLY else DatabaseUnavailable(cause=error_text)


def data_error(error: psycopg2.Error) -> DataError:
    """A data error, split into text that names tables, columns and constraints, and text that quotes values."""
    message, primary, detail = _without_values(error), error.diag.message_primary, error.diag.message_detail
    if primary and primary not in message:
        detail = " ".join(_sentence(text) for text in (primary, detail) if text)
    names = [f"{what} {name}" for what, name in (("column", error.diag.column_name), ("constraint", error.diag.constraint_name)) if name]
    missing = [name for name in names if name.split(" ", 1)[1] not in message] if message == primary else []
    return DataError(_sentence(f"{message.rstrip('.')} ({', '.join(missing)})" if missing else message), detail)


@dataclass(frozen=True, slots=True)
class DataError:
    """Postgres' message without the values of rows, and its original text that quotes them (DETAIL, a quoted value)."""

    message: str
    detail: str | None = field(repr=False)


_NAME_ERRORS = frozenset({
    "DatatypeMismatch", "FeatureNotSupported", "GeneratedAlways", "InvalidColumnReference", "InvalidSchemaName", "UndefinedColumn",
    "UndefinedFunction", "UndefinedObject", "UndefinedTable", "WrongObjectType",
})  # fmt: skip
"""psycopg2's classes of errors that quote names from a statement. While rows are read, the same errors quote values: those of a cast to
``regclass``, for example."""
_OBJECT_ERRORS = frozenset({"InsufficientPrivilege", "WithCheckOptionViolation"})
"""Errors that always name the object that refuses an access or a row."""
_QUOTED = re.compile("[\"'«»„“”‚‘’「」].*[\"'«»„“”‚‘’「」]", re.DOTALL)
"""From the first quotation mark to the last: the value may contain some itself, and ``lc_messages`` decides which ones Postgres writes."""
_WITH_DIGITS = re.compile(r"(?<!\w\()\b\w*\d[^\s,)\]]*")
"""Each word with a digit, except a type's length."""


def _without_values(error: psycopg2.Error) -> str:
    """Postgres' message in one line, without anything that may be a value of a row. Errors without a SQLSTATE come from the client."""
    message, code, kind = error.diag.message_primary, error.pgcode, type(error).__name__
    if message is None or code is None:
        return str(error).strip()
    context = error.diag.context or ""
    if in_users_function(error):
        match = _FUNCTION.search(context)
        function = f"the function {match[1]}()" if match else "a trigger or a function of the table"
        if kind in _NAME_ERRORS and error.diag.internal_position and _STATIC.search(context.partition("\n")[0]):
            return f"{function}: {' '.join(message.split())}"
        return f"{function} {'raised an error of its own' if _raised(error) else f'failed with {kind}'} ({code})"
    if _OWN_FUNCTION.match(context) or code[:2] in _SERVER_CLASSES or code in _SERVER_CODES or kind in _OBJECT_ERRORS:
        return " ".join(message.split())
    if kind in _NAME_ERRORS and error.diag.statement_position:
        return " ".join(_sentence(text) for text in (message, error.diag.message_hint) if text)
    before, colon, _ = _QUOTED.sub("…", message).partition(": ")
    return " ".join((_WITH_DIGITS.sub("…", before) + (": …" if colon else "")).split())


_SERVER_CLASSES = frozenset({"08", "23", "25", "40", "53", "57", "58"})
_SERVER_CODES = frozenset({"55006", "55P03"})
"""Classes and codes of SQLSTATE whose messages name constraints, files, limits and processes, unless a function raises them."""


def in_users_function(error: psycopg2.Error) -> bool:
    """Whether the error comes from a trigger or function that is not Tidemark's."""
    context = error.diag.context or ""
    return not _OWN_FUNCTION.match(context) and (_raised(error) or bool(_IN_FUNCTION.search(_INPUT_CONTEXT.sub("", context))))


_INPUT_CONTEXT = re.compile(r"^(?:COPY |JSON ).*", re.MULTILINE | re.DOTALL)
_IN_FUNCTION = re.compile(r"\bPL/|\bSQL\b")
"""The context lines of functions, in every language of Postgres, and of input, which quote it and come last."""
_FUNCTION = re.compile(r"^PL/pgSQL[^\n(]*?((?:[\w$]+\.)?[\w$]+)\(", re.MULTILINE)
_OWN_FUNCTION = re.compile(r"PL/pgSQL[^\n(]*?(?:inline_code_block|\btidemark\.\w+\()")
"""Tidemark's own function, or the block of a migration, in which an error happened."""
_STATIC = re.compile(r"at SQL statement$")
"""A statement in the function's own text, whose names are not computed from values."""


def _raised(error: psycopg2.Error) -> bool:
    """Whether the error comes from a RAISE or ASSERT, which alone can choose any SQLSTATE."""
    return (error.diag.source_function or "").startswith("exec_stmt_")


def _sentence(text: str) -> str:
    return text if text.endswith(".") else f"{text}."


def is_outage(error: psycopg2.Error) -> bool:
    """Whether the session or the server was lost, or a resource exhausted, so that the same statement may succeed later.

    Classes of SQLSTATE: 08 connection, 40 rolled back in favour of another transaction, 53 out of a resource, 55 lock not granted in time,
    57 operator intervention, 58 system error. XX000 is an internal error (such as a file that cannot grow). No SQLSTATE: the session was
    lost. `READ_ONLY`: a standby, which a failover may promote to primary. An error raised by a function itself does not count.
    """
    if _raised(error):
        return False
    return error.pgcode in {None, "XX000", READ_ONLY} or error.pgcode[:2] in {"08", "40", "53", "55", "57", "58"}


def may_be_row_error(error: psycopg2.Error) -> bool:
    """Whether the same statement could succeed at once without one of its rows.

    Not if the session was lost or the transaction has to give way, nor without a lock, a disk or a connection. Other outages
    (`is_outage`) may also come from one row: a function of the table can fail internally (XX000), find an object in a wrong state (55000)
    or reach a limit of the session's configuration (53400). Corrupted data and indexes (XX001, XX002) never come from a row.
    """
    if (error.pgcode or "")[:2] == "XX":
        return _raised(error) or (error.pgcode == "XX000" and error.diag.source_file not in _STORAGE)
    return error.pgcode in {"53000", "53200", "53400", "55000", "55006"} or not is_outage(error)


_STORAGE = frozenset({"buffile.c", "bufmgr.c", "copydir.c", "fd.c", "freespace.c", "localbuf.c", "md.c", "slru.c", "smgr.c", "xlog.c"})
"""Postgres' source files whose internal errors (XX000) are about files, such as one that cannot grow."""


@contextlib.contextmanager
def session(url: DatabaseUrl, *, application: str = "tidemark") -> Iterator[Connection]:
    """Opens a session with `connect`, and closes it when the block ends."""
    with contextlib.closing(connect(url, application=application)) as connection:
        yield connection


def computed(connection: Connection, batches: Iterator[T]) -> Iterator[T]:
    """Yields the batches of a COPY. While a transform computes the next one, Postgres' silence does not count as an outage."""
    while True:
        if isinstance(connection, Session):
            connection.computing = True
        try:
            batch = next(batches)
        except StopIteration:
            return
        finally:
            if isinstance(connection, Session):
                connection.computing = False
        yield batch


@contextlib.contextmanager
def answering(connection: Connection, within_s: float = SILENCE_S, *, url: DatabaseUrl | None = None) -> Iterator[None]:
    """Fails a statement in the block as an outage once the session has been silent in both directions for ``within_s``.

    The kernel detects a peer that is gone. This detects a peer that acknowledges but never responds: a stopped server, a stuck pooler.
    Time in which Postgres waits for this process does not count (`computed`). Logs a long silence and, with ``url``, the sessions whose
    locks the statement waits for. Has no effect where the kernel does not count bytes (no Linux, no TCP).
    """
    ended = threading.Event()
    with socket.socket(fileno=os.dup(connection.fileno())) as line:
        silence = _Silence(connection, line, within_s, url)
        thread = threading.Thread(target=silence.watch, args=(ended,), name="silence", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()


def cut(connection: Connection) -> None:
    """Ends the connection, so that another thread's statement in flight fails."""
    with contextlib.suppress(OSError, psycopg2.Error), socket.socket(fileno=os.dup(connection.fileno())) as line:
        line.shutdown(socket.SHUT_RDWR)


@dataclass
class _Silence:
    """Watches a session for `answering`, in a thread of its own."""

    connection: Connection
    line: socket.socket
    within_s: float
    url: DatabaseUrl | None

    def watch(self, ended: threading.Event) -> None:
        last_bytes, since, reported_s = _bytes_passed(self.line), time.monotonic(), 0.0
        while last_bytes is not None and not ended.wait(min(self.within_s / 20, LOOK_EVERY_S)):
            bytes_passed, silent_s = _bytes_passed(self.line), time.monotonic() - since
            status = self.connection.get_transaction_status()
            is_ours = status != TRANSACTION_STATUS_ACTIVE or getattr(self.connection, "computing", False)
            if bytes_passed != last_bytes or self.connection.closed or is_ours:
                last_bytes, since, reported_s = bytes_passed, time.monotonic(), 0.0
            elif silent_s > self.within_s:
                log.warning("session given up, Postgres was silent silence_s=%.0f", self.within_s)
                with contextlib.suppress(OSError):
                    self.line.shutdown(socket.SHUT_RDWR)
                return
            elif silent_s >= max(REPORT_AFTER_S, 2 * reported_s):
                reported_s = silent_s
                threading.Thread(target=self._report, args=(silent_s,), daemon=True).start()  # this server may not respond either

    def _report(self, silent_s: float) -> None:
        holders = ""
        if self.url is not None:
            with contextlib.suppress(DatabaseUnavailable), session(self.url) as connection, transaction(connection) as cur:
                application = self.connection.get_dsn_parameters()["application_name"]
                cur.execute(_BLOCKING, {"pid": self.connection.get_backend_pid(), "application": application})
                holders = described_sessions(cur)
        if holders:
            log.warning("waiting for a lock what=statement waited_s=%.0f held_by=%s", silent_s, holders)
        else:
            log.info("waiting for=the result of a statement since_s=%.0f", silent_s)


_BLOCKING = """
WITH RECURSIVE blocking (pid) AS (
    SELECT unnest(pg_blocking_pids(pid)) FROM pg_stat_activity WHERE pid = %(pid)s AND application_name = %(application)s
     UNION
    SELECT unnest(pg_blocking_pids(pid)) FROM blocking
)
SELECT pid, application_name, usename, date_trunc('second', xact_start) FROM blocking JOIN pg_stat_activity USING (pid) ORDER BY pid
"""
"""The sessions that a session waits for, directly or indirectly. Behind a pooler, the process may by now serve another client."""


def described_sessions(cur: Cursor) -> str:
    """Formats the sessions of the last statement's rows: process, name, role and start of the transaction."""
    return ", ".join(f"{name or '?'} (pid {pid}, role {role}, since {since or '?'})" for pid, name, role, since in cur.fetchall())


def _bytes_passed(line: socket.socket) -> tuple[int, int] | None:
    """Bytes acknowledged by the peer, and bytes received: ``tcpi_bytes_acked`` and ``tcpi_bytes_received`` of Linux' ``tcp_info``."""
    try:
        info = line.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 136)
        acked, received = struct.unpack_from("=QQ", info, 120)
    except (AttributeError, OSError, struct.error):
        return None
    return acked, received


def statements(package: str, file: str) -> Mapping[str, str]:
    """The statements of a ``.sql`` file in ``package``, by the names in their ``-- name:`` lines."""
    text = resources.files(package).joinpath(file).read_text(encoding="utf-8")
    parts = re.split(r"^-- name: *(\w+) *\n", text, flags=re.MULTILINE)
    return {name: body.strip() for name, body in zip(parts[1::2], parts[2::2], strict=True)}


def array(numbers: Iterable[int]) -> str:
    """Formats integers as Postgres' array text. A list would become an expression, which Postgres parses ten times as slowly."""
    return f"{{{','.join(map(str, numbers))}}}"


def limit_lock_waits(cursor: Cursor, wait_ms: int) -> None:
    """Sets ``lock_timeout`` for the rest of the transaction."""
    cursor.execute("SELECT set_config('lock_timeout', %s, true)", (str(wait_ms),))


def single_row(cursor: Cursor) -> tuple[Any, ...]:
    """The row of a statement that always returns one."""
    row = cursor.fetchone()
    assert row is not None
    return row


def scalar(cursor: Cursor) -> Any:
    """The first column of `single_row`."""
    return single_row(cursor)[0]


def rows(cursor: Cursor) -> list[dict[str, Any]]:
    """The rows of the last statement, each as a mapping by column name."""
    assert cursor.description is not None
    names = [column.name for column in cursor.description]
    return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]

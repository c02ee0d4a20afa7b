"""The ``tidemark`` schema of a database: numbered SQL files, applied in order by yoyo, each in a transaction of its own.

A migration named ``NNNN_what_it_does.additive.sql`` leaves every statement of the release before it valid: it adds tables, indexes, and
columns that are nullable or have a default (to an archive ``rewound_…`` too, where its table gets one). Code that does not know an additive
migration runs on the newer schema, so drivers keep running while it is applied. Any other migration is refused while drivers are running,
and code that does not know it refuses the database.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import psycopg2
import psycopg2.errors
from psycopg2.extensions import TRANSACTION_STATUS_IDLE

from tidemark import project, roles
from tidemark.db import FIX_PATH, MIGRATION_LOCK, connect, is_outage, kept_open, session, set_audit_actor, transaction
from tidemark.errors import BadInput, DatabaseUnavailable, Refused, Unavailable

if TYPE_CHECKING:
    from tidemark.db import Connection, Cursor, DatabaseUrl
    from tidemark.profiles import Profile

OLDEST_POSTGRES = 15
"""The first major version that takes every migration: 0001 has ``NULLS NOT DISTINCT``."""
BOOKKEEPING = "tidemark.migration"
ADDITIVE = ".additive"
DRIVER = "tidemark driver "  # with the attempt's id the name of a driver's session
LOCK_WAITS_S = (1, 2, 4, 8, 15, 15, 15, 15)
"""How long each try of a migration waits for its locks. Commits queue behind it meanwhile, so it then pauses for as long, and no wait comes
near the lock timeout of a commit (120 s)."""


class PostgresTooOld(Refused):
    """The server's major version does not take all migrations."""

    version: str

    def __str__(self) -> str:
        return f"Postgres is version {self.version}; Tidemark needs {OLDEST_POSTGRES} or newer. Nothing was changed; upgrade the server."


class SchemaMismatch(Refused):
    """The database is at another version of the schema than this code."""

    missing: list[str]
    unknown: list[str]

    def __str__(self) -> str:
        if self.unknown:
            return (
                f"The database was migrated by another version of Tidemark: this one does not know {', '.join(self.unknown)}. "
                "Nothing was changed; use the version that migrated it, or a newer one."
            )
        return f"The database lacks {', '.join(self.missing)}. Run: tidemark migrate"


class DriversRunning(Refused):
    """A migration that is not additive would break the statements of drivers that are running."""

    migrations: list[str]
    drivers: list[str]

    def __str__(self) -> str:
        return (
            f"Stop all runs first: {', '.join(self.migrations)} cannot be applied while drivers are running ({', '.join(self.drivers)}). "
            "Nothing was changed; pause the DAGs, wait for the runs to end, and migrate again."
        )


class MigrationBlocked(Unavailable):
    """Running transactions held the locks that a migration needs, for all of its tries."""

    migration: str

    def __str__(self) -> str:
        return (
            f"Migration {self.migration} got no lock on its tables in {len(LOCK_WAITS_S)} tries, because transactions were using them. "
            "Nothing of it was stored; the migrations before it were. Migrate again when fewer runs are active."
        )


class SchemaHidden(Refused):
    """The role may not look into the schema ``tidemark``."""

    role: str

    def __str__(self) -> str:
        return (
            f"The role {self.role} may not use the schema tidemark. Its owner must run: "
            f"tidemark migrate --grant-to {self.role} --as PROFILE (docs/security.md lists the profiles)."
        )


class MigrationFailed(Refused):
    """Postgres refused a migration; ``message`` is its own."""

    migration: str
    message: str

    def __str__(self) -> str:
        return f"Migration {self.migration} failed: {self.message} Nothing of it was stored; the migrations before it were."


def known() -> list[str]:
    """The migrations of this code, in order. Raises `BadInput` if there are none."""
    names = sorted(path.stem for path in project.migrations().glob("[0-9]*.sql"))
    if not names:
        raise BadInput(what="migrations", found=f"{project.migrations()} has none", fix="Install Tidemark again.")
    return names


def applied(connection: Connection) -> list[str]:
    """The migrations that this database has had, in order; empty if it has never been migrated."""
    with transaction(connection) as cursor:
        try:
            cursor.execute("SELECT to_regclass(%s)", (BOOKKEEPING,))
        except psycopg2.errors.InsufficientPrivilege:
            raise SchemaHidden(role=connection.info.user) from None
        row = cursor.fetchone()
        if row is None or row[0] is None:
            return []
        cursor.execute(f"SELECT migration_id FROM {BOOKKEEPING} ORDER BY migration_id")  # noqa: S608 - a constant
        return [name for (name,) in cursor.fetchall()]


def require_current(connection: Connection) -> None:
    """Raises `SchemaMismatch` unless the database has all migrations of this code, and of later ones only additive ones."""
    have, want = applied(connection), known()
    missing = [name for name in want if name not in have]
    unknown = _incompatible(have, want)
    if missing or unknown:
        raise SchemaMismatch(missing=missing, unknown=unknown)


def migrate(url: DatabaseUrl, *, by: str = "", grant_to: str | None = None, profiles: Sequence[Profile] = ()) -> list[str]:
    """Brings the database to this code's version and returns the names of what was applied, in order.

    Then grants ``profiles`` to the role ``grant_to``, and to each other role what it was granted before: new tables are included. ``by``
    is for the audit log. Without migrations to apply, a role that does not own the schema may call it; nothing is granted then.

    Idempotent; two that start at once take turns. A migration that fails or is killed leaves the ones before it, and itself not at all.
    Before changing anything it raises `PostgresTooOld`, `SchemaMismatch` if the database is newer than this code supports, and
    `DriversRunning` if a migration is not additive and drivers are running. Raises `MigrationFailed`, and `MigrationBlocked` if it gets no
    locks; see `tidemark.roles.grant` for what it raises.
    """
    with session(url, application="tidemark migrate") as connection, kept_open(connection) as guard:
        require_version(connection)
        guard.execute("SELECT pg_advisory_xact_lock(%s)", (MIGRATION_LOCK,))  # until this process ends, however it ends
        have, want = applied(connection), known()
        if unknown := _incompatible(have, want):
            raise SchemaMismatch(missing=[], unknown=unknown)
        todo = [name for name in want if name not in have]
        breaking = [name for name in todo if not name.endswith(ADDITIVE)]
        with transaction(connection) as cursor:
            if have and breaking and (drivers := _drivers(cursor)):
                raise DriversRunning(migrations=breaking, drivers=drivers)
            if todo:
                cursor.execute("CREATE SCHEMA IF NOT EXISTS tidemark")
        if todo:
            _apply(url, by)
        later = [name for name in have if name not in want]
        if later and grant_to is not None:
            raise SchemaMismatch(missing=[], unknown=later)
        if not later:  # a later version's tables are unknown here
            with transaction(connection) as cursor:
                set_audit_actor(cursor, by)
                if grant_to is not None:
                    roles.grant(cursor, grant_to, profiles)
                roles.renew(cursor)
        return todo


def require_version(connection: Connection) -> None:
    """Raises `PostgresTooOld`."""
    if connection.server_version < OLDEST_POSTGRES * 10_000:
        raise PostgresTooOld(version=connection.info.parameter_status("server_version") or str(connection.server_version))


def _incompatible(have: list[str], want: list[str]) -> list[str]:
    """Migrations of the database that this code neither knows nor may ignore."""
    return [name for name in have if name not in want and not name.endswith(ADDITIVE)]


def _drivers(cursor: Cursor) -> list[str]:
    """The drivers that have a session on this database, by the name of the session. Every role may see that. A backend of a pooler keeps
    the name of its last client, so the attempt must be running too."""
    cursor.execute(
        "SELECT DISTINCT application_name FROM pg_stat_activity JOIN tidemark.attempt ON application_name = %s || attempt_id"
        " WHERE datname = current_database() AND attempt.state = 'RUNNING' ORDER BY 1",
        (DRIVER,),
    )
    return [name.removeprefix("tidemark ") for (name,) in cursor.fetchall()]


def _apply(url: DatabaseUrl, by: str) -> None:
    from yoyo import read_migrations
    from yoyo.backends.core.postgresql import PostgresqlBackend
    from yoyo.connections import parse_uri

    class Backend(PostgresqlBackend):  # type: ignore[misc]
        """yoyo on the session settings of `tidemark.db.connect`, with its own tables in our schema and under our lock."""

        lock_table = "migration_lock"
        log_table = "migration_log"
        version_table = "migration_version"

        def connect(self, dburi: Any) -> Any:
            connection = connect(url, application="tidemark migrate")
            connection.autocommit = True
            return connection

        def execute(self, sql: str, params: Any = None) -> Any:
            """A statement outside a transaction gets its own `FIX_PATH`; so does a transaction: BEGIN takes in what was sent before it."""
            idle = self.connection.info.transaction_status == TRANSACTION_STATUS_IDLE
            return super().execute(f"{FIX_PATH}; {sql}" if idle else sql, params)

        def quote_identifier(self, s: str) -> str:
            quoted: str = super().quote_identifier(s)
            return f"tidemark.{quoted}" if s in (self.migration_table, self.lock_table, self.log_table, self.version_table) else quoted

        def list_tables(self, **_: Any) -> list[str]:
            return [name for (name,) in self.execute("SELECT tablename FROM pg_tables WHERE schemaname = 'tidemark'")]

        def _check_transactional_ddl(self) -> bool:
            """yoyo would find out with a table of its own."""
            return True

        def apply_one(self, migration: Any, force: bool = False, mark: bool = True) -> None:
            """Statements and bookkeeping in one transaction: with yoyo's two, a kill between them would leave an unrecorded migration."""
            for wait_s in LOCK_WAITS_S:
                try:
                    with self.transaction():
                        self.execute(f"SET LOCAL lock_timeout = {round(wait_s * 1000)}")
                        self.execute("SELECT set_config('tidemark.claimed_by', %s, true)", (by,))
                        migration.process_steps(self, "apply", force=force)
                        if mark:
                            self.mark_one(migration, log=False)
                        return
                except psycopg2.errors.LockNotAvailable:
                    time.sleep(wait_s)
                except psycopg2.Error as error:
                    message = " ".join(str(error).split())
                    if is_outage(error):
                        raise DatabaseUnavailable(cause=message) from error
                    raise MigrationFailed(migration=migration.id, message=message) from error
            raise MigrationBlocked(migration=migration.id)

    with Backend(parse_uri("postgresql:///"), "migration") as backend:
        backend.init_database()
        migrations = read_migrations(str(project.migrations()))
        backend.apply_migrations(backend.to_apply(migrations))

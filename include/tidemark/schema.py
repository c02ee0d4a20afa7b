"""The ``tidemark`` schema of a database: numbered SQL files, applied in order by yoyo, each in a transaction of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psycopg2
import psycopg2.errors

from tidemark import project
from tidemark.db import MIGRATION_LOCK, SEARCH_PATH, is_outage, session, transaction
from tidemark.errors import BadInput, DatabaseUnavailable, Refused

if TYPE_CHECKING:
    from tidemark.db import Connection

BOOKKEEPING = "tidemark.migration"


@dataclass(kw_only=True, eq=False)
class SchemaMismatch(Refused):
    """The database is at another version of the schema than this code."""

    missing: list[str]
    unknown: list[str]

    def __str__(self) -> str:
        if self.unknown:
            return (
                f"The database was migrated by a newer Tidemark: this one does not know {', '.join(self.unknown)}. "
                "Nothing was changed; upgrade Tidemark to the version that migrated it."
            )
        return f"The database lacks {', '.join(self.missing)}. Run: tidemark migrate"


@dataclass(kw_only=True, eq=False)
class SchemaHidden(Refused):
    """The role may not look into the schema ``tidemark``."""

    role: str

    def __str__(self) -> str:
        return f"The role {self.role} may not use the schema tidemark. Give it the grants in docs/deployment.md, Roles."


@dataclass(kw_only=True, eq=False)
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
    """Raises `SchemaMismatch` unless the database is at exactly this code's version."""
    have, want = applied(connection), known()
    missing = [name for name in want if name not in have]
    unknown = [name for name in have if name not in want]
    if missing or unknown:
        raise SchemaMismatch(missing=missing, unknown=unknown)


def migrate(url: str) -> list[str]:
    """Brings the database to this code's version and returns the names of what was applied, in order.

    Idempotent; two that start at once take turns. A migration that fails or is killed leaves the ones before it, and itself not at
    all. Raises `SchemaMismatch`, before changing anything, if the database is newer than this code, and `MigrationFailed`.
    """
    with session(url, application="tidemark migrate") as guard:
        guard.autocommit = True
        with guard.cursor() as cursor:
            cursor.execute(f"SET search_path TO {SEARCH_PATH}")
            cursor.execute("SELECT pg_advisory_lock(%s)", (MIGRATION_LOCK,))  # until this session ends, however it ends
            have = applied(guard)
            unknown = [name for name in have if name not in known()]
            if unknown:
                raise SchemaMismatch(missing=[], unknown=unknown)
            todo = [name for name in known() if name not in have]
            if todo:
                cursor.execute("CREATE SCHEMA IF NOT EXISTS tidemark")
                _apply(url)
        return todo


def _apply(url: str) -> None:
    from yoyo import read_migrations
    from yoyo.backends.core.postgresql import PostgresqlBackend
    from yoyo.connections import parse_uri

    class Backend(PostgresqlBackend):  # type: ignore[misc]
        """yoyo on the session settings of `tidemark.db.connect`, with its own tables in our schema and under our lock."""

        lock_table = "migration_lock"
        log_table = "migration_log"
        version_table = "migration_version"

        def connect(self, dburi: Any) -> Any:
            from tidemark.db import connect

            connection = connect(url, application="tidemark migrate")
            connection.autocommit = True
            return connection

        def init_connection(self, connection: Any) -> None:
            with connection.cursor() as cursor:
                cursor.execute(f"SET search_path TO {SEARCH_PATH}")

        def quote_identifier(self, s: str) -> str:
            quoted: str = super().quote_identifier(s)
            return f"tidemark.{quoted}" if s in (self.migration_table, self.lock_table, self.log_table, self.version_table) else quoted

        def list_tables(self, **_: Any) -> list[str]:
            return [name for (name,) in self.execute("SELECT tablename FROM pg_tables WHERE schemaname = 'tidemark'")]

        def _check_transactional_ddl(self) -> bool:
            """yoyo would find out with a table of its own."""
            return True

        def apply_one(self, migration: Any, force: bool = False, mark: bool = True) -> None:
            """Statements and bookkeeping in one transaction: yoyo's two would leave a migration that nobody knows of if killed between."""
            try:
                with self.transaction():
                    migration.process_steps(self, "apply", force=force)
                    if mark:
                        self.mark_one(migration, log=False)
            except psycopg2.Error as error:
                message = " ".join(str(error).split())
                if is_outage(error):
                    raise DatabaseUnavailable(cause=message) from error
                raise MigrationFailed(migration=migration.id, message=message) from error

    with Backend(parse_uri("postgresql:///"), "migration") as backend:
        backend.init_database()
        migrations = read_migrations(str(project.migrations()))
        backend.apply_migrations(backend.to_apply(migrations))

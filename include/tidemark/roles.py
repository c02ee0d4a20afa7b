"""Grants database roles the rights of profiles (`tidemark.profiles`), and checks the rights that a command needs.

A role may have several profiles. They are stored in ``tidemark.role_profile``, and every migration grants them again (`renew`): new tables
need no further command.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from psycopg2 import sql

from tidemark.db import Connection, Cursor, statements, transaction
from tidemark.errors import BadInput, Refused
from tidemark.profiles import ALL, PAYLOADS, RIGHTS, SCHEMAS, TABLES, Profile

SQL = statements("tidemark", "roles.sql")


class RoleLacks(Refused):
    """The session's role lacks rights of the profile that a command needs."""

    role: str
    profile: Profile
    rights: tuple[str, ...]

    def __str__(self) -> str:
        more = f" and {len(self.rights) - 3} more" if len(self.rights) > 3 else ""
        return (
            f"The role {self.role} lacks rights of the profile {self.profile}: {', '.join(self.rights[:3])}{more}. Nothing was changed. "
            f"The owner of the schema tidemark must run: tidemark migrate --grant-to {self.role} --as {self.profile} "
            "(and --as for each other profile that the role keeps)"
        )


class NotTheOwner(Refused):
    """Only the owner of the schema may grant profiles."""

    role: str
    owner: str

    def __str__(self) -> str:
        return f"The role {self.role} does not own the schema tidemark. Nothing was granted; run the command as {self.owner}."


def missing(cursor: Cursor, profile: Profile) -> list[str]:
    """The profile's rights that the session's role lacks, such as ``UPDATE on tidemark.flow``. Locks nothing."""
    rights = RIGHTS[profile]
    required = [("SELECT", table, ALL, ALL if rights.payloads else PAYLOADS.get(table, ALL)) for table in TABLES]
    required += [("INSERT", table, ALL, ALL) for table in rights.insert]
    required += [("UPDATE", table, columns, ALL) for table, columns in rights.update.items()]
    required += [("DELETE", table, ALL, ALL) for table in rights.delete]
    names = ["privileges", "tables", "columns", "hidden"]
    privileges, tables, *columns = zip(*required, strict=True)
    values = [list(privileges), list(tables), *([" ".join(names) for names in part] for part in columns)]
    schemas = {"schemas": list(SCHEMAS), "creates_in": rights.creates_in}
    callable_ = {"sequences": list(rights.sequences), "functions": list(rights.functions)}
    cursor.execute(SQL["missing"], {**dict(zip(names, values, strict=True)), **callable_, **schemas})
    return [right for (right,) in cursor.fetchall()]


def require(connection: Connection, profile: Profile) -> None:
    """Raises `RoleLacks` unless the session's role has all rights of a profile, however it got them."""
    with transaction(connection) as cursor:
        if lacking := missing(cursor, profile):
            raise RoleLacks(role=connection.info.user, profile=profile, rights=tuple(lacking))


def grant(cursor: Cursor, role: str, profiles: Iterable[Profile]) -> None:
    """Grants a role the rights of exactly these profiles, revokes all others in the schema, and records an event.

    Raises `BadInput` if the role does not exist or needs no grants, `NotTheOwner` for any role but the owner's.
    """
    ordered = sorted(set(profiles), key=list(Profile).index)
    owner, is_owner, current = _owner(cursor)
    if not is_owner:
        raise NotTheOwner(role=current, owner=owner)
    cursor.execute(SQL["role"], {"role": role})
    row = cursor.fetchone()
    if row is None:
        fix = f"Create it first: CREATE ROLE {_quoted(cursor, role)} LOGIN PASSWORD '...'."
        raise BadInput(what="--grant-to", found=f'there is no role "{role}"', fix=fix)
    if row[0]:
        raise BadInput(what="--grant-to", found=f'"{role}" owns the schema tidemark', fix="The owner needs no profile; name another role.")
    cursor.execute(SQL["record"], {"role": role, "profiles": [str(profile) for profile in ordered]})
    _apply(cursor, owner, role, ordered)


def renew(cursor: Cursor) -> None:
    """Grants all recorded profiles again; forgets roles that no longer exist. Does nothing for a role other than the schema's owner."""
    owner, is_owner, _ = _owner(cursor)
    if not is_owner:
        return
    cursor.execute(SQL["forget"])
    cursor.execute(SQL["recorded"])
    for role, profiles in cursor.fetchall():
        _apply(cursor, owner, role, [Profile(profile) for profile in profiles])


def _owner(cursor: Cursor) -> tuple[str, bool, str]:
    """Returns the schema's owner, whether the session's role has the owner's rights, and that role."""
    cursor.execute(SQL["owner"])
    owner, is_owner, role = cursor.fetchone() or ("", False, "")
    return owner, is_owner, role


def _apply(cursor: Cursor, owner: str, role: str, profiles: Sequence[Profile]) -> None:
    """Revokes and grants in the caller's transaction, so sessions of the role never lack a right meanwhile."""
    to = sql.Identifier(role)
    cursor.execute(SQL["relations"], {"role": role})
    for kind, name in cursor.fetchall():
        cursor.execute(sql.SQL("REVOKE ALL ON {} {} FROM {}").format(sql.SQL(kind), _relation(name), to))
    schemas = sql.SQL(", ").join(map(sql.Identifier, SCHEMAS))
    cursor.execute(sql.SQL("REVOKE ALL ON SCHEMA {} FROM {}").format(schemas, to))
    for kind in ("TABLES", "SEQUENCES"):  # earlier versions of the documentation granted these
        revoke = sql.SQL("ALTER DEFAULT PRIVILEGES FOR ROLE {} IN SCHEMA tidemark REVOKE ALL ON {} FROM {}")
        cursor.execute(revoke.format(sql.Identifier(owner), sql.SQL(kind), to))
    cursor.execute(sql.SQL("GRANT USAGE ON SCHEMA {} TO {}").format(schemas, to))
    rights = [RIGHTS[profile] for profile in profiles]
    payloads = any(granted.payloads for granted in rights)
    for table in TABLES:
        _grant(cursor, "SELECT", table, ALL if payloads or table not in PAYLOADS else _readable(cursor, table), to)
    for granted in rights:
        for table in granted.insert:
            _grant(cursor, "INSERT", table, ALL, to)
        for table, columns in granted.update.items():
            _grant(cursor, "UPDATE", table, columns, to)
        for table in granted.delete:
            _grant(cursor, "DELETE", table, ALL, to)
        for name in granted.sequences:
            cursor.execute(sql.SQL("GRANT USAGE ON SEQUENCE {} TO {}").format(_relation(name), to))
        for name in granted.functions:
            cursor.execute(sql.SQL("GRANT EXECUTE ON FUNCTION {} TO {}").format(_relation(name), to))
        if granted.creates_in:
            cursor.execute(sql.SQL("GRANT CREATE ON SCHEMA {} TO {}").format(sql.Identifier(granted.creates_in), to))


def _grant(cursor: Cursor, privilege: str, table: str, columns: Sequence[str], to: sql.Identifier) -> None:
    of = sql.SQL(" ({})").format(sql.SQL(", ").join(map(sql.Identifier, columns))) if columns else sql.SQL("")
    cursor.execute(sql.SQL("GRANT {}{} ON TABLE {} TO {}").format(sql.SQL(privilege), of, _relation(table), to))


def _readable(cursor: Cursor, table: str) -> list[str]:
    cursor.execute(SQL["columns"], {"table": table})
    return [name for (name,) in cursor.fetchall() if name not in PAYLOADS[table]]


def _relation(name: str) -> sql.Identifier:
    return sql.Identifier("tidemark", name)


def _quoted(cursor: Cursor, name: str) -> str:
    return sql.Identifier(name).as_string(cursor)

"""Roles for one test, with profiles, and a database that belongs to one of them."""

from __future__ import annotations

import contextlib
import functools
import uuid
from collections.abc import Iterator
from urllib.parse import urlsplit, urlunsplit

from tests.support.documented import grants
from tests.support.fetching import execute
from tidemark import migrations
from tidemark.local import LocalStack
from tidemark.local.postgres import DATABASE
from tidemark.profiles import Profile


class Roles:
    """An owner, a less privileged role ``run``, and roles created with `new`. Each role's password is its name. All tests on a stack have
    the same owner."""

    def __init__(self, stack: LocalStack, *, migrated: bool) -> None:
        self._stack, self._mark = stack, uuid.uuid4().hex[:10]
        self.owner = _owner(stack)
        self.database = f"test_{self._mark}"
        self.all: list[str] = []
        template = f"TEMPLATE {_template(stack)}" if migrated else ""
        self.admin(f"CREATE DATABASE {self.database} OWNER {self.owner} {template}")
        self.run = self.new("run")

    def new(self, name: str, *profiles: Profile) -> str:
        """Creates a role, with these profiles if there are any."""
        role = f"{name}_{self._mark}"
        self.admin(f"CREATE ROLE {role} LOGIN PASSWORD '{role}'")
        self.all.append(role)
        if profiles:
            self.give(role, *profiles)
        return role

    def give(self, role: str, *profiles: Profile) -> None:
        """Grants profiles to a role, as ``tidemark migrate --grant-to`` does."""
        migrations.migrate(self.url(self.owner), by="the tests", grant_to=role, profiles=profiles)

    def give_sink(self, role: str, table: str) -> None:
        """Grants the privileges on a sink that docs/deployment/index.md lists."""
        (block,) = grants("docs/deployment/index.md")
        self.own(block.replace("tidemark_run", role).replace("lake.cities", table))

    def url(self, role: str) -> str:
        return _url(self._stack, self.database, role)

    def own(self, *statements: str) -> None:
        execute(self._stack.postgres.url(self.database), *statements)

    def admin(self, *statements: str) -> None:
        execute(self._stack.postgres.url(DATABASE), *statements)

    def drop(self) -> None:
        self.admin(f"DROP DATABASE {self.database} WITH (FORCE)", *(f'DROP ROLE IF EXISTS "{role}"' for role in self.all))


def _url(stack: LocalStack, database: str, role: str) -> str:
    parts = urlsplit(stack.postgres.url(database))
    return urlunsplit(parts._replace(netloc=f"{role}:{role}@{parts.hostname}:{parts.port}"))


@functools.cache
def _owner(stack: LocalStack) -> str:
    role = f"owner_{uuid.uuid4().hex[:10]}"
    execute(stack.postgres.url(DATABASE), f"CREATE ROLE {role} LOGIN PASSWORD '{role}'")
    return role


@functools.cache
def _template(stack: LocalStack) -> str:
    """A database that the owner has migrated."""
    owner = _owner(stack)
    template = f"template_{owner}"
    execute(stack.postgres.url(DATABASE), f"CREATE DATABASE {template} OWNER {owner}")
    migrations.migrate(_url(stack, template, owner))
    return template


@contextlib.contextmanager
def made_roles(stack: LocalStack, *, migrated: bool = True) -> Iterator[Roles]:
    roles = Roles(stack, migrated=migrated)
    try:
        yield roles
    finally:
        roles.drop()

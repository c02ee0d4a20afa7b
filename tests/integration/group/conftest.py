"""One database for all tests of the coordinator, and a separate group for each test."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator

import pytest
from tests.integration.group.players import Scene, scene_on
from tests.support.fetching import execute
from tests.support.members import Group

from tidemark.local import LocalStack


@pytest.fixture(scope="session")
def groups_url(stack: LocalStack, template: str, url_of: Callable[[str], str]) -> str:
    """A migrated database that the tests share. Each test has a separate group in it."""
    name = f"groups_{uuid.uuid4().hex[:12]}"
    create = f"CREATE DATABASE {name} TEMPLATE {template}"
    execute(stack.env()["TIDEMARK_DATABASE_URL"], create, f"ALTER DATABASE {name} SET synchronous_commit = off")
    return url_of(name)


@pytest.fixture
def scene(groups_url: str) -> Iterator[Scene]:
    """The group does not exist yet; the first member that joins creates it."""
    with scene_on(groups_url, f"group-{uuid.uuid4().hex[:8]}") as scene:
        yield scene


@pytest.fixture
def group(database_url: str) -> Iterator[Group]:
    with Group(database_url) as group:
        yield group

"""Servers that chaos tests may stop, kill and starve, separate from those of the other tests."""

from __future__ import annotations

import tempfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.chaos.postgres_server import PostgresServer
from tests.chaos.trial import Trial
from tests.support.points import Points, points_among
from tests.support.scenario import Scenario
from tests.support.shared import SHARED

from tidemark import migrations
from tidemark.local import LocalStack


@pytest.fixture(scope="session")
def stack() -> Iterator[LocalStack]:
    """Postgres and Kafka for the chaos tests. A test that strikes at one of them must leave it running. They stop after the last test."""
    with SHARED["chaos"] as ends:
        folder = Path(ends.enter_context(tempfile.TemporaryDirectory(prefix="tidemark-chaos-")))
        folder.chmod(0o755)  # if root runs the tests, Postgres runs as another user
        yield ends.enter_context(LocalStack(folder).running())


@pytest.fixture(scope="session")
def template(stack: LocalStack) -> str:
    migrations.migrate(stack.create_database("template_tidemark"))
    return "template_tidemark"


@pytest.fixture
def database_url(stack: LocalStack, template: str) -> Iterator[str]:
    """A separate database for the test. No session stays open until the end of the test: it would not survive."""
    name = f"chaos_{uuid.uuid4().hex[:12]}"
    server = PostgresServer(stack, stack.postgres.url())
    server.sql(f"CREATE DATABASE {name} TEMPLATE {template}")
    yield stack.postgres.url(name)
    server.sql(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture
def server(stack: LocalStack, database_url: str) -> PostgresServer:
    return PostgresServer(stack, database_url)


@pytest.fixture(scope="session")
def kafka_servers(stack: LocalStack) -> str:
    return stack.kafka.bootstrap_servers()


@pytest.fixture
def points(project_dir: Path) -> Iterator[Points]:
    """Points in every process that commits for this test. Checks at the end that each of them was reached."""
    with points_among(project_dir / "transforms") as points:
        yield points


@pytest.fixture
def trial(scenario: Scenario, points: Points) -> Iterator[Callable[..., Trial]]:
    """Creates the test's consumer: ``trial(partitions, ...)``, see `Trial`. Checks at the end that everything in its feed is stored exactly
    once."""
    made: list[Trial] = []

    def make(partitions: int, *words: Any, **keys: Any) -> Trial:
        made.append(Trial(scenario, points, partitions, *words, **keys))
        return made[-1]

    yield make
    for each in made:
        try:
            each.check_done()
        finally:
            each.close()

"""Real servers for the tests that need them: one embedded stack a session, a fresh migrated database and fresh topics a test."""

from __future__ import annotations

import os
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import psycopg2
import pytest

from tests.kafka_topics import Topics
from tests.scenario import Scenario, tidy_imports
from tidemark import schema
from tidemark.local import LocalStack

if not hasattr(sys.modules["__main__"], "__file__"):  # a worker of xdist; pyspark would take it for its own doctests, and exit
    sys.modules["__main__"].__file__ = str(Path(pytest.__file__).with_name("__main__.py"))

LONGEST_FIRST = ("e2e", "chaos", "soak", "integration", "unit")


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Iterator[None]:
    """With several workers (``-n``) the tests of a file stay together, because they share what is slow to start, and all that share the
    one Airflow. What takes longest comes first, so that the workers end together."""
    folders = {item: item.path.relative_to(Path(__file__).parent).parts[0] for item in items}
    for item, folder in folders.items():
        item.add_marker(pytest.mark.xdist_group(folder if folder == "e2e" else item.path.stem))
    yield
    items.sort(key=lambda item: LONGEST_FIRST.index(folders[item]))


@pytest.fixture(scope="session")
def stack() -> Iterator[LocalStack]:
    """Postgres and Kafka for the whole session. A test that stops one of them starts it again.

    ``TIDEMARK_TEST_STACK`` names the folder of a stack that runs already.
    """
    if running := os.environ.get("TIDEMARK_TEST_STACK"):
        yield LocalStack(Path(running))
        return
    with tempfile.TemporaryDirectory(prefix="tidemark-tests-") as folder:
        Path(folder).chmod(0o755)  # where root runs the tests, Postgres is another user, whom pytest's own folders do not let pass
        with LocalStack(Path(folder)).running() as stack:
            yield stack


@pytest.fixture(scope="session")
def template(stack: LocalStack) -> str:
    """A migrated database that is only ever cloned."""
    schema.migrate(stack.create_database("template_tidemark"))
    return "template_tidemark"


@pytest.fixture
def database_url(stack: LocalStack, template: str) -> Iterator[str]:
    """A database of the test's own, with the ``tidemark`` schema and nothing in it."""
    name = f"test_{uuid.uuid4().hex[:12]}"
    admin = psycopg2.connect(stack.env()["TIDEMARK_DATABASE_URL"])
    admin.autocommit = True
    with admin.cursor() as cur:
        cur.execute(f"CREATE DATABASE {name} TEMPLATE {template}")
    yield stack.postgres.url(name)
    with admin.cursor() as cur:
        cur.execute(f"DROP DATABASE {name} WITH (FORCE)")
    admin.close()


@pytest.fixture(scope="session")
def kafka_servers(stack: LocalStack) -> str:
    return stack.kafka.bootstrap_servers()


@pytest.fixture
def topics(kafka_servers: str) -> Iterator[Topics]:
    """Makes topics with names of their own, fills them, deletes them after the test."""
    made = Topics(kafka_servers)
    yield made
    made.delete_all()


@pytest.fixture
def project_dir(tmp_path: Path) -> Path:
    """A user's folders for specs and transforms: ``consumers`` and ``transforms``."""
    (tmp_path / "consumers").mkdir()
    (tmp_path / "transforms").mkdir()
    return tmp_path


@pytest.fixture
def scenario(project_dir: Path, database_url: str, topics: Topics) -> Iterator[Scenario]:
    """A consumer of the test's own, to be written, run and checked."""
    with tidy_imports():
        yield Scenario(project_dir, database_url, topics)

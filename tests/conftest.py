"""Real servers for the tests that need them: one embedded stack per session, a fresh migrated database and fresh topics per test."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg2
import pytest
from hypothesis import settings

from tests.support import one_kafka, other_servers
from tests.support.costs import Costs
from tests.support.fetching import execute
from tests.support.kafka_topics import Topics
from tests.support.needs import Needs
from tests.support.pooler import Pooler, pooler
from tests.support.readers import READERS, reading_with
from tests.support.roles import Roles, made_roles
from tests.support.sampling import ALL, examples, left_out
from tests.support.scenario import Scenario, tidy_imports
from tests.support.shared import ONE_SPARK, SHARED, TESTS, costs, scope, shard, stop_unless_needed_by
from tidemark import migrations
from tidemark.local import LocalStack

if TYPE_CHECKING:
    from tests.support.change_data import ChangeSource
    from tests.support.orders import Orders

if not hasattr(sys.modules["__main__"], "__file__"):  # an xdist worker; pyspark would assume that it runs its own doctests, and exit
    sys.modules["__main__"].__file__ = str(Path(pytest.__file__).with_name("__main__.py"))

settings.register_profile(
    "tidemark",
    deadline=None,  # the duration of an example means nothing while other tests run, too
    max_examples=examples(100),
    print_blob=True,
    derandomize=False,  # by default, Hypothesis tries the same examples in every CI run
)
settings.load_profile("tidemark")

LONGEST_FIRST = ("e2e", "chaos", "soak", "integration", "unit")
SHARD = os.environ.get("TIDEMARK_TEST_SHARD")
"""Such as ``1/4``: the first of four shards of equal cost."""
NEEDS = Needs()
other_servers.use()


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput") and config.getoption("numprocesses", 0) and not ALL:
        config.add_cleanup(one_kafka.offer())
    config.pluginmanager.register(Costs(config))
    config.pluginmanager.register(NEEDS)


def pytest_report_header() -> str:
    part = "every combination and example" if ALL else "a sample of combinations, by the seed above; `make test-all` runs all"
    return f"{part}; shard {SHARD}" if SHARD else part


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    """Omits what this run does not try. The most expensive tests come first, so that all workers finish together."""
    yield
    omitted = left_out(items, config.getoption("randomly_seed", 0)) | NEEDS.omit(items)
    if SHARD:
        number, _, of = SHARD.partition("/")
        chosen = shard({scope(item.nodeid) for item in items}, int(number), int(of), costs())
        omitted |= {item for item in items if scope(item.nodeid) not in chosen}
    items[:] = [item for item in items if item not in omitted]
    config.hook.pytest_deselected(items=list(omitted))
    spent = costs()
    items.sort(key=lambda item: (LONGEST_FIRST.index(item.path.relative_to(TESTS).parts[0]), -spent.get(scope(item.nodeid), 0)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return scope(nodeid)

    return ByFile(config, log)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    stop_unless_needed_by(nextitem)


@pytest.fixture(scope="session")
def stack() -> Iterator[LocalStack]:
    """Postgres and Kafka for the whole session. In ``make test``, all workers have the same Kafka. A test that stops one of the servers is
    for `make test-all` only, and starts it again.

    ``TIDEMARK_TEST_STACK`` names the folder of a stack that is already running.
    """
    if running := os.environ.get("TIDEMARK_TEST_STACK"):
        stack = LocalStack(Path(running))
        if one_kafka.is_shared():
            stack.kafka = one_kafka.shared().kafka
        yield stack
        return
    with tempfile.TemporaryDirectory(prefix="tidemark-tests-", dir=in_memory()) as folder:
        Path(folder).chmod(0o755)  # if root runs the tests, Postgres runs as another user, which cannot access pytest's own folders
        stack = LocalStack(Path(folder))
        with one_kafka.started(stack) if one_kafka.is_shared() else stack.running():
            without_fsync(stack)
            yield stack


def in_memory() -> str | None:
    """A folder in memory, if there is one with room. A database has 500 files: to clone it takes 0.03 s of CPU time there, and up to 0.3 s
    on a disk."""
    folder = "/dev/shm"
    return folder if os.access(folder, os.W_OK) and shutil.disk_usage(folder).free > 8 << 30 else None


def without_fsync(stack: LocalStack) -> None:
    """Makes commits ten times as fast, and databases cloned from the template three times. These tests kill processes, not the machine, so
    the kernel keeps what Postgres has written. The servers of the chaos tests keep the settings that a user has."""
    changes = [f"ALTER SYSTEM SET {name} = off" for name in ("fsync", "full_page_writes", "wal_init_zero", "wal_recycle")]
    execute(stack.env()["TIDEMARK_DATABASE_URL"], *changes, "SELECT pg_reload_conf()")


@pytest.fixture(scope="session")
def template(stack: LocalStack) -> str:
    """A migrated database that is only ever cloned."""
    migrations.migrate(stack.create_database("template_tidemark"))
    return "template_tidemark"


@pytest.fixture(scope="session")
def poolers(stack: LocalStack) -> Iterator[Callable[[str], Pooler]]:
    """Starts one PgBouncer for each mode (`tests.support.pooler.MODES`) that a test needs."""
    with contextlib.ExitStack() as running:
        url = stack.env()["TIDEMARK_DATABASE_URL"]
        yield functools.cache(lambda mode: running.enter_context(pooler(url, mode)))


@pytest.fixture(scope="session")
def url_of(stack: LocalStack, poolers: Callable[[str], Pooler]) -> Callable[[str], str]:
    """The URL of a database, through PgBouncer if ``TIDEMARK_TEST_POOLER`` names its mode."""
    mode = os.environ.get("TIDEMARK_TEST_POOLER")
    return lambda name: poolers(mode).url(stack.postgres.url(name)) if mode else stack.postgres.url(name)


@pytest.fixture
def database_url(stack: LocalStack, template: str, url_of: Callable[[str], str]) -> Iterator[str]:
    """A separate database for the test, with the ``tidemark`` schema but no data."""
    name = f"test_{uuid.uuid4().hex[:12]}"
    admin = psycopg2.connect(stack.env()["TIDEMARK_DATABASE_URL"])
    admin.autocommit = True
    with admin.cursor() as cur:
        cur.execute(f"CREATE DATABASE {name} TEMPLATE {template}")
    yield url_of(name)
    with admin.cursor() as cur:
        cur.execute(f"DROP DATABASE {name} WITH (FORCE)")
    admin.close()


@pytest.fixture
def roles(stack: LocalStack) -> Iterator[Roles]:
    """Roles with profiles, and a migrated database of one of them."""
    with made_roles(stack) as roles:
        yield roles


@pytest.fixture(scope="session")
def kafka_servers(stack: LocalStack) -> str:
    return stack.kafka.bootstrap_servers()


@pytest.fixture(params=READERS)
def reader(request: pytest.FixtureRequest) -> Iterator[None]:
    """Runs the test in this process with each of the two pollers behind `tidemark.kafka.reader.read`."""
    with reading_with(request.param):
        yield


@pytest.fixture(scope="session")
def registry() -> Iterator[str]:
    """The URL of a schema registry, which starts with the first test that needs it. Each process has a separate registry, because a test
    may have to know the next id that the registry assigns. Tests share its subjects, so name them after the test's own topics."""
    with tempfile.TemporaryDirectory(prefix="tidemark-registry-") as folder:
        stack = LocalStack(Path(folder))
        stack.start(stack.registry)
        try:
            yield stack.registry.url()
        finally:
            stack.stop(stack.registry)


@pytest.fixture(scope="session")
def change_source(kafka_servers: str) -> Iterator[ChangeSource]:
    """A database whose changes Debezium writes to the session's Kafka. It starts with the first test that needs it."""
    from tests.support import change_data

    with change_data.running(kafka_servers) as source:
        yield source


@pytest.fixture
def orders(scenario: Scenario, registry: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Orders]:
    """A topic of orders in Avro, which the consumer can read."""
    from confluent_kafka.schema_registry import SchemaRegistryClient

    from tests.support.orders import Orders

    monkeypatch.setenv("TIDEMARK_REGISTRY_URL", registry)
    with SchemaRegistryClient({"url": registry}) as client:
        yield Orders(scenario, client, registry)


@pytest.fixture
def topics(kafka_servers: str) -> Iterator[Topics]:
    """Creates topics with unique names, fills them, and deletes them after the test."""
    made = Topics(kafka_servers)
    yield made
    made.delete_all()


@pytest.fixture
def project_dir(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A user's folders for specs and transforms: ``consumers`` and ``transforms``. All tests on a `session_here` share them, because its
    workers import from there."""
    if "session_here" in request.fixturenames:
        home: Path = request.getfixturevalue("session_here")
        return home
    return made_project(tmp_path)


@pytest.fixture(scope="session")
def session_here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One Spark session for all of `IN_ONE_SPARK` (`tests.support.spark_here`). Returns the folder of their consumers and transforms."""
    from tests.support.spark_here import spark_session

    home = made_project(tmp_path_factory.mktemp("home"))
    with SHARED[ONE_SPARK] as ends:
        ends.enter_context(spark_session(home / "transforms"))
        yield home


def made_project(folder: Path) -> Path:
    (folder / "consumers").mkdir()
    (folder / "transforms").mkdir()
    return folder


@pytest.fixture
def scenario(project_dir: Path, database_url: str, topics: Topics) -> Iterator[Scenario]:
    """A separate consumer for the test, to write, run and check."""
    with tidy_imports():
        yield Scenario(project_dir, database_url, topics)

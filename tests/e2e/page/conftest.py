"""One api-server and one browser for all tests of the page; the data comes from real runs on real servers (`tests.e2e.page.data`)."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator

import pytest
from playwright.sync_api import BrowserContext
from tests.e2e.browser import chromium
from tests.e2e.page.data import Data
from tests.e2e.page.site import USERS, Site
from tests.e2e.page.visitor import Visit, Visitor
from tests.e2e.served import served
from tests.support.kafka_topics import Topics
from tests.support.scenario import tidy_imports
from tests.support.shared import ONE_PAGE, SHARED

from tidemark import migrations
from tidemark.local import LocalStack
from tidemark.local.airflow_settings import connections_env

PICTURES = "TIDEMARK_SCREENSHOTS" in os.environ
collect_ignore_glob = ["test_[!p]*.py" if PICTURES else "test_pictures.py"]


@pytest.fixture(scope="session")
def site(stack: LocalStack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Served below a base path, as behind a company's proxy. Stops after the page's last test."""
    home = tmp_path_factory.mktemp("page")
    topics = Topics(stack.kafka.bootstrap_servers())
    url = stack.create_database(f"page_{os.getpid()}")
    migrations.migrate(url)
    data = Data(home, url, topics)
    with SHARED[ONE_PAGE] as ends:
        ends.callback(topics.delete_all)
        with tidy_imports():
            data.make_for_pictures() if PICTURES else data.make()
        env = {
            **connections_env(url, {"bootstrap.servers": topics.servers}, "local[1]"),
            "TIDEMARK_TRANSFORMS": str(home / "transforms"),
            "AIRFLOW_CONN_ELSEWHERE": "postgres://nobody@127.0.0.1:1/nowhere",
            "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_USERS": ",".join(f"{name}:{role}" for name, role in USERS.items()),
            "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_PASSWORDS_FILE": str(home / "passwords.json"),
        }
        site = Site(ends.enter_context(served(home, env, path="/night/airflow")), home, data)
        for name in data.with_runs:
            site.pause(f"consume__{name}", False)
        yield site


@pytest.fixture(scope="session")
def contexts(site: Site) -> Callable[[str], BrowserContext]:
    """A browser's profile for each user, with its cache."""
    browser = SHARED[ONE_PAGE].enter_context(chromium())

    @functools.cache
    def of(user: str) -> BrowserContext:
        context = browser.new_context(viewport={"width": 1280, "height": 800}, color_scheme="light", timezone_id="UTC")
        context.add_cookies([{"name": "_token", "value": site.token(user), "url": site.url}])
        context.set_default_timeout(60_000)
        return context

    return of


@pytest.fixture
def visit(contexts: Callable[[str], BrowserContext], site: Site) -> Iterator[Visit]:
    """Opens a page for a user. Checks at the end that the browser has reported no error."""
    visitors: list[Visitor] = []

    def start(user: str) -> Visitor:
        visitors.append(Visitor(contexts(user), site))
        return visitors[-1]

    yield start
    for visitor in visitors:
        visitor.page.close()
        assert visitor.errors == []

"""One real Airflow for all end-to-end tests, with the project's own DAGs and with consumers that belong to the tests, and one browser."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser
from tests.e2e.browser import chromium
from tests.e2e.lab import Lab
from tests.support.shared import SHARED

from tidemark.local import LocalStack


@pytest.fixture(scope="session")
def lab_session(stack: LocalStack) -> Iterator[Lab]:
    """An Airflow of four processes that read the project's ``dags/``. Every consumer of `tests.e2e.lab` is declared. The processes stop
    after the last end-to-end test, and leave nothing behind."""
    with SHARED["e2e"] as ends:
        lab = Lab(Path(ends.enter_context(tempfile.TemporaryDirectory(prefix="tidemark-e2e-"))), stack)
        ends.callback(lab.down)
        lab.up()
        yield lab


@pytest.fixture(scope="module")
def lab(lab_session: Lab) -> Iterator[Lab]:
    """The one Airflow, with all four processes running. Checks after the last test of a module that no driver and no JVM is left, and that
    each topic is in its sink once."""
    lab_session.repair()
    yield lab_session
    lab_session.points.release_all()
    lab_session.check_nothing_runs()
    lab_session.check_exactly_once()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser

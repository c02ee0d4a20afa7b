"""One real Airflow for all end-to-end tests of a session, over the project's own DAGs and consumers of the tests' own."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.e2e.lab import Lab

from tidemark.local import LocalStack


@pytest.fixture(scope="session")
def lab_session(stack: LocalStack) -> Iterator[Lab]:
    """Four processes that read ``dags/`` of the project, with every consumer of `tests.e2e.lab` declared."""
    with tempfile.TemporaryDirectory(prefix="tidemark-e2e-") as folder:
        lab = Lab(Path(folder), stack)
        try:
            lab.up()
            yield lab
        finally:
            lab.down()


@pytest.fixture
def lab(lab_session: Lab) -> Iterator[Lab]:
    """The session's Airflow, whole. Afterwards no driver and no JVM is left, and every topic that was touched is in its sink once."""
    lab_session.repair()
    yield lab_session
    lab_session.release_all()
    lab_session.check_nothing_runs()
    lab_session.check_exactly_once()

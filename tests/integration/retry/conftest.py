"""Fixtures: a consumer with the ladder of the design, whose topic has one partition and is empty; an outbox; connections of Airflow."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.integration.retry.lab import Lab, lab_on
from tests.integration.retry.outbox import Outbox, outbox_on
from tests.support.kafka_topics import Topics
from tests.support.scenario import Scenario

from tidemark.local.airflow_settings import connections_env

NOWHERE = "postgresql://nobody@127.0.0.1:9/nowhere"
POSTGRES = "AIRFLOW_CONN_TIDEMARK_POSTGRES"


@pytest.fixture
def lab(scenario: Scenario, topics: Topics) -> Iterator[Lab]:
    with lab_on(scenario, topics) as lab:
        yield lab


@pytest.fixture
def outbox(scenario: Scenario, topics: Topics) -> Iterator[Outbox]:
    """A group whose failed records are added by hand. Its retry topics do not exist yet."""
    with outbox_on(scenario, topics) as outbox:
        yield outbox


@pytest.fixture
def airflow(lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, Airflow has connections to the servers of the lab and, named ``away``, to a database that is unreachable."""
    env = {
        **connections_env(lab.url, lab.consumer.connections.kafka, "local[1]"),
        "AIRFLOW_CONN_AWAY": connections_env(NOWHERE, {}, "local[1]")[POSTGRES],
        "AIRFLOW_HOME": str(tmp_path / "airflow"),
        "TIDEMARK_CONSUMERS": str(lab.consumer.folder / "consumers"),
    }
    for name, value in env.items():
        monkeypatch.setenv(name, value)

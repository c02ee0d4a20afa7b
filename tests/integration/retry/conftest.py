"""Fixtures: a consumer with the ladder of the design, whose topic has one partition and is empty."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.integration.retry.lab import Lab, lab_on
from tests.integration.retry.outbox import Outbox, outbox_on
from tests.support.kafka_topics import Topics
from tests.support.scenario import Scenario


@pytest.fixture
def lab(scenario: Scenario, topics: Topics) -> Iterator[Lab]:
    with lab_on(scenario, topics) as lab:
        yield lab


@pytest.fixture
def outbox(scenario: Scenario, topics: Topics) -> Iterator[Outbox]:
    """A group whose failed records are added by hand. Its retry topics do not exist yet."""
    with outbox_on(scenario, topics) as outbox:
        yield outbox

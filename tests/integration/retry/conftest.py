"""A consumer with the design's ladder, over a topic of one partition that is empty."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.integration.retry.lab import Lab, lab_on
from tests.integration.retry.outbox import Outbox, outbox_on
from tests.kafka_topics import Topics
from tests.scenario import Scenario


@pytest.fixture
def lab(scenario: Scenario, topics: Topics) -> Iterator[Lab]:
    with lab_on(scenario, topics) as lab:
        yield lab


@pytest.fixture
def outbox(scenario: Scenario, topics: Topics) -> Iterator[Outbox]:
    """Records are added by hand, and its topics are not made yet."""
    with outbox_on(scenario, topics) as outbox:
        yield outbox

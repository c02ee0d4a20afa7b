"""A consumer of a topic with three partitions, whose slices are committed by hand, and one that runs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
from tests.integration.rewind.hands import Hands
from tests.integration.rewind.lab import Lab, lab_on
from tests.support.kafka_topics import Topics
from tests.support.scenario import Scenario


@pytest.fixture
def lab(scenario: Scenario, topics: Topics) -> Iterator[Lab]:
    """The partitions have 100, 100 and 60 records. None has been read yet."""
    with lab_on(scenario, topics, (100, 100, 60)) as lab:
        yield lab


@pytest.fixture
def hands(scenario: Scenario) -> Iterator[Hands]:
    with contextlib.closing(Hands(scenario, partitions=2, batch={"max_records": 7}, retry={"delays": ["1h"]})) as hands:
        yield hands

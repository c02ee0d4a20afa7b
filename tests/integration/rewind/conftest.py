"""A consumer of a topic with three partitions, whose slices are committed by hand."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.integration.rewind.lab import Lab, lab_on
from tests.support.kafka_topics import Topics
from tests.support.scenario import Scenario


@pytest.fixture
def lab(scenario: Scenario, topics: Topics) -> Iterator[Lab]:
    """The partitions have 100, 100 and 60 records. None has been read yet."""
    with lab_on(scenario, topics, (100, 100, 60)) as lab:
        yield lab

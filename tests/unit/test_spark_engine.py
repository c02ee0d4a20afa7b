"""What becomes of a call to a JVM that is gone."""

from __future__ import annotations

import pytest
from py4j.protocol import Py4JError, Py4JNetworkError

from tidemark.spark.engine import SparkFailed, lost_jvm


@pytest.mark.parametrize(
    "error", [Py4JError("An error occurred while calling o53.read"), Py4JNetworkError("closed"), ConnectionRefusedError()]
)
def test_a_jvm_that_is_gone_is_an_outage_wherever_it_shows(error: Exception) -> None:
    """The soak met it while a plan was being built: the attempt ended as failed in a way that nobody knows."""
    with pytest.raises(SparkFailed) as raised, lost_jvm():
        raise error
    assert raised.value.retriable


def test_what_is_wrong_for_another_reason_stays_what_it_is() -> None:
    with pytest.raises(KeyError), lost_jvm():
        raise KeyError("x")

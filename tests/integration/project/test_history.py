"""A long history does not make the product's work more expensive. The full measurement is ``python -m benchmarks --what history``."""

from __future__ import annotations

import uuid
from typing import Any

import pytest
from benchmarks.database import history

from tidemark.local import LocalStack

WITHOUT_STATISTICS = (
    "claims and the commit of a slice",
    "the end of an attempt",
    "validation of a run",
    "the plan of a drain",
    "the relay",
)
"""This work of runs must not depend on ANALYZE: a database that was restored from a dump has no statistics at first."""


@pytest.mark.sampled
@pytest.mark.parametrize("analyzed", [True, False])
def test_work_touches_no_more_pages_with_ten_times_the_history(stack: LocalStack, analyzed: bool) -> None:
    env, both = stack.env(), list[dict[str, list[Any]]]()
    for shape in (history.QUICK.small, history.QUICK.large):
        name, servers = f"history_{uuid.uuid4().hex[:8]}", env["TIDEMARK_KAFKA_BOOTSTRAP_SERVERS"]
        with history.filled(env["TIDEMARK_DATABASE_URL"], servers, shape, print, analyzed=analyzed, name=name) as place:
            both.append(history.pages(place, None if analyzed else WITHOUT_STATISTICS))
    assert [one for one in history.compared(*both) if one["grows"]] == []

"""``make test`` runs a sample of the large matrices and of Hypothesis' examples; ``make test-all`` sets ``TIDEMARK_TEST_ALL`` and runs all.

The sample of a matrix follows from pytest-randomly's seed, which every run prints; ``--randomly-seed=N`` takes the same sample again.
"""

from __future__ import annotations

import os
import random
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any, TypeVar

import pytest

T = TypeVar("T")

ALL = bool(os.environ.get("TIDEMARK_TEST_ALL"))
SHARE = 4
"""``make test`` tries one example where ``make test-all`` tries so many."""


def examples(number: int) -> int:
    """``max_examples`` for a test of which ``make test-all`` runs ``number`` examples."""
    return number if ALL else max(number // SHARE, min(number, 3))


def left_out(items: Iterable[pytest.Item], seed: int) -> set[pytest.Item]:
    """The parameter sets that this run does not need.

    ``@pytest.mark.sampled("step", "fault")`` keeps as few sets of its test as contain every step and every fault at least once;
    ``@pytest.mark.sampled`` keeps one.
    """
    matrices: dict[str, list[pytest.Function]] = defaultdict(list)
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("sampled"):
            matrices[item.nodeid.partition("[")[0]].append(item)
    found: set[pytest.Item] = set()
    for name, matrix in matrices.items():
        kept = covering({item: _values(item) for item in matrix}, random.Random(f"{seed} {name}"))
        found |= set(matrix) - set(kept)
    return found


def dealt(values: Sequence[T], number: int, of: int, seed: int) -> list[T]:
    """What the ``number``-th of so many tests tries of these values, in their order: together the tests try each value once. For tests
    that share something slow between the values, where `left_out` would set it up again for each value."""
    chance = random.Random(seed)
    mine = chance.sample(range(len(values)), len(values))[number::of]
    return [value for place, value in enumerate(values) if ALL or place in mine]


def covering(values: Mapping[T, Set[Any]], chance: random.Random) -> list[T]:
    """Some of the keys, at least one, that have every value among them: always the one that adds most."""
    shuffled = chance.sample(list(values), len(values))
    kept, missing = shuffled[:1], set().union(*values.values()) - values[shuffled[0]]
    while missing:
        kept.append(max(shuffled, key=lambda one: len(values[one] & missing)))
        missing -= values[kept[-1]]
    return kept


def _values(item: pytest.Function) -> set[tuple[str, str]]:
    (marker,) = item.iter_markers("sampled")
    return {(name, repr(item.callspec.params[name])) for name in marker.args}

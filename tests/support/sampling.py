"""What ``make test`` omits, and ``make test-all`` runs: it sets ``TIDEMARK_TEST_ALL``.

- ``@pytest.mark.thorough`` omits a test, or a parameter set, whose claim another test of ``make test`` also proves, with less work.
- ``@pytest.mark.sampled`` omits most of a matrix.
- ``examples`` omits most of Hypothesis' examples.

The sample of a matrix depends on pytest-randomly's seed, which every run prints; ``--randomly-seed=N`` selects the same sample again.
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
"""``make test`` tries one example for every ``SHARE`` examples of ``make test-all``."""


def examples(number: int) -> int:
    """``max_examples`` for a test of which ``make test-all`` runs ``number`` examples."""
    return number if ALL else max(number // SHARE, min(number, 3))


def left_out(items: Iterable[pytest.Item], seed: int) -> set[pytest.Item]:
    """The tests that this run omits: thorough ones, and most parameter sets of sampled ones.

    ``@pytest.mark.sampled("step", "fault")`` keeps a few sets of its test that together contain every step and every fault;
    ``@pytest.mark.sampled`` keeps one set.
    """
    if ALL:
        return set()
    matrices: dict[str, list[pytest.Function]] = defaultdict(list)
    found: set[pytest.Item] = set()
    for item in items:
        if item.get_closest_marker("thorough"):
            found.add(item)
        elif isinstance(item, pytest.Function) and item.get_closest_marker("sampled"):
            matrices[item.nodeid.partition("[")[0]].append(item)
    for name, matrix in matrices.items():
        kept = covering({item: _values(item) for item in matrix}, random.Random(f"{seed} {name}"))
        found |= set(matrix) - set(kept)
    return found


def dealt(values: Sequence[T], number: int, of: int, seed: int) -> list[T]:
    """The values that test ``number`` out of ``of`` tests tries, in their order. In a sample, the tests together try each value once. For
    tests that share an expensive setup between their values; with `left_out`, each value would need a separate setup."""
    chance = random.Random(seed)
    mine = chance.sample(range(len(values)), len(values))[number::of]
    return [value for place, value in enumerate(values) if ALL or place in mine]


def covering(values: Mapping[T, Set[Any]], chance: random.Random) -> list[T]:
    """Some of the keys, at least one, which together have every value. The first is random; each further one adds the most values."""
    shuffled = chance.sample(list(values), len(values))
    kept, missing = shuffled[:1], set().union(*values.values()) - values[shuffled[0]]
    while missing:
        kept.append(max(shuffled, key=lambda one: len(values[one] & missing)))
        missing -= values[kept[-1]]
    return kept


def _values(item: pytest.Function) -> set[tuple[str, str]]:
    (marker,) = item.iter_markers("sampled")
    return {(name, repr(item.callspec.params[name])) for name in marker.args}

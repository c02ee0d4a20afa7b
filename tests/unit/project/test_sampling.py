"""A sample of a matrix has every value of its parameters, is small, and depends only on the seed."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support import sampling
from tests.support.sampling import covering, dealt

SIZES = st.tuples(st.integers(1, 7), st.integers(1, 5))


def matrix(sizes: tuple[int, ...]) -> dict[tuple[int, ...], set[tuple[str, int]]]:
    return {cell: set(zip("abc", cell, strict=False)) for cell in itertools.product(*map(range, sizes))}


@given(SIZES, st.integers())
def test_sample_has_every_value_in_as_few_sets_as_possible(sizes: tuple[int, int], seed: int) -> None:
    """For example, seven steps and three faults need seven sets, as in a Latin square."""
    values = matrix(sizes)
    kept = covering(values, random.Random(seed))
    assert set().union(*(values[cell] for cell in kept)) == set().union(*values.values())
    assert len(kept) == len(set(kept)) == max(sizes)


def test_sample_of_a_matrix_without_parameters_is_one_set() -> None:
    assert len(covering(dict.fromkeys("abc", frozenset()), random.Random(1))) == 1


def test_seed_repeats_the_sample_and_another_takes_other_sets() -> None:
    """So a run can be repeated, and many runs together cover everything."""
    values = matrix((7, 3))
    assert covering(values, random.Random(5)) == covering(values, random.Random(5))
    assert {cell for seed in range(50) for cell in covering(values, random.Random(seed))} == set(values)


@given(st.integers(0, 9), st.integers(1, 4), st.integers())
def test_values_that_are_dealt_to_several_tests_come_once_each(count: int, tests: int, seed: int) -> None:
    """Each test gets its values in their original order, because it may depend on that."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling, "ALL", False)
        hands = [dealt(range(count), number, tests, seed) for number in range(tests)]
        assert sorted(value for hand in hands for value in hand) == list(range(count))
        assert all(hand == sorted(hand) for hand in hands)
        patch.setattr(sampling, "ALL", True)
        assert dealt(range(count), 0, tests, seed) == list(range(count))


def test_few_examples_are_not_divided_away(monkeypatch) -> None:
    monkeypatch.setattr(sampling, "ALL", False)
    assert [sampling.examples(number) for number in (1, 3, 8, 100)] == [1, 3, 3, 25]
    monkeypatch.setattr(sampling, "ALL", True)
    assert sampling.examples(100) == 100

"""The random load of `tests.support.change_load`, without a database."""

from __future__ import annotations

from random import Random
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from tests.support.change_load import Load


def load(rng: Random, count: int) -> list[Any]:
    return list(Load(rng, "t", truncates=True).transactions(count))


@given(st.integers(0, 2**32))
def test_a_seed_gives_the_same_load_again(seed: int) -> None:
    assert load(Random(seed), 10) == load(Random(seed), 10)


@given(st.randoms(use_true_random=False))
def test_a_key_is_inserted_once_at_a_time(rng: Random) -> None:
    """Every update and delete finds its row. The random generator is Hypothesis's, so that failing examples shrink."""
    live: set[int] = set()
    for statement, values in (each for transaction in load(rng, 10) for each in transaction):
        match statement.split()[0]:
            case "INSERT":
                assert values[0] not in live
                live.add(values[0])
            case "TRUNCATE":
                live.clear()
            case "DELETE":
                live.remove(values[0])
            case "UPDATE":
                assert values[-1] in live
                if "SET id =" in statement:
                    live.remove(values[-1])
                    assert values[0] not in live
                    live.add(values[0])

"""What a batch reads: `plan_batch` with any claims, ends and budgets."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.sampling import examples

from tidemark.records.ranges import RECORDS_A_TASK, Claim, Epoch, Slice, TopicPartition, plan_batch

LAGS = st.lists(st.one_of(st.integers(0, 5), st.integers(0, 1_000_000), st.just(RECORDS_A_TASK)), max_size=12)
BUDGETS = st.one_of(st.integers(1, 50), st.integers(1, 2_000_000), st.just(RECORDS_A_TASK))
quick = settings(max_examples=examples(300))


def claims_of(lags: list[int]) -> tuple[list[Claim], dict[TopicPartition, int]]:
    """A claim for each lag, on two topics and at different positions, and the end of each partition."""
    claims = [
        Claim(TopicPartition(f"t{number % 2}", number), 1 + number % 2, 1000 * number, Epoch(number + 1)) for number in range(len(lags))
    ]
    return claims, {claim.partition: claim.position + lag for claim, lag in zip(claims, lags, strict=True)}


def sizes(slices: list[Slice]) -> list[int]:
    return [part.span for part in slices]


@quick
@given(LAGS, BUDGETS, st.randoms(use_true_random=False))
def test_slices_begin_at_the_position_end_by_the_end_and_use_up_the_budget(lags: list[int], budget: int, random) -> None:
    """One slice per partition, each ``[position, <= end)`` under the claim's epoch, whatever the order of the claims. If everything fits,
    the batch contains everything."""
    claims, ends = claims_of(lags)
    slices = plan_batch(claims, ends, budget)
    held = {claim.partition: claim for claim in claims}
    assert [part.partition for part in slices] == sorted({part.partition for part in slices})
    for part in slices:
        claim = held[part.partition]
        assert (part.start, part.topic_id, part.epoch) == (claim.position, claim.topic_id, claim.epoch)
        assert part.start < part.end <= ends[part.partition]
    read = sum(sizes(slices))
    assert min(budget, max(lags, default=0)) <= read <= budget
    assert read == sum(lags) or sum(lags) > budget
    assert plan_batch(random.sample(claims, len(claims)), ends, budget) == slices


@quick
@given(LAGS.filter(any), st.integers(1, 2_000_000))
def test_those_with_most_to_read_share_evenly_and_get_no_slice_too_small_for_a_task(lags: list[int], budget: int) -> None:
    """A slice has at least `RECORDS_A_TASK` records if there are that many and the budget allows it. A partition that is not chosen has no
    more to read than any chosen one."""
    claims, ends = claims_of(lags)
    slices = plan_batch(claims, ends, budget)
    lag = {claim.partition: lag for claim, lag in zip(claims, lags, strict=True)}
    for part in slices:
        assert part.span >= min(lag[part.partition], RECORDS_A_TASK, budget)
    cut = [part.span for part in slices if part.end < ends[part.partition]]
    assert not cut or max(cut) - min(cut) <= len(cut)
    assert not cut or max(sizes(slices)) <= max(cut)
    taken = {part.partition for part in slices}
    assert max((lag[one] for one in lag.keys() - taken), default=0) <= min(lag[one] for one in taken)


@settings(max_examples=examples(100))
@given(st.lists(st.integers(0, 300_000), max_size=6), st.integers(20_000, 400_000))
def test_batch_after_batch_reaches_every_end_and_then_there_is_none(lags: list[int], budget: int) -> None:
    """Every batch advances a position, so a run ends."""
    claims, ends = claims_of(lags)
    for _ in range(200):
        slices = plan_batch(claims, ends, budget)
        if not slices:
            break
        moved = {part.partition: part.end for part in slices}
        claims = [replace(claim, position=moved.get(claim.partition, claim.position)) for claim in claims]
    assert {claim.partition: claim.position for claim in claims} == ends
    assert plan_batch(claims, ends, budget) == []


@pytest.mark.parametrize(
    ("lags", "budget", "expected"),
    [
        ([], 10, []),
        ([0, 0], 10, []),
        ([3], 10, [3]),
        ([3, 0, 4], 10, [3, 4]),
        ([30, 30], 10, [10]),  # with both, each would get fewer records than a task is worth
        ([300_000, 300_000], 250_000, [125_000, 125_000]),
        ([300_000, 300_000, 300_000], 250_000, [125_000, 125_000]),
        ([300_000, 100_000], 300_000, [200_000, 100_000]),
        ([300_000, 5], 200_000, [199_995, 5]),
        ([RECORDS_A_TASK, RECORDS_A_TASK], 2 * RECORDS_A_TASK - 1, [RECORDS_A_TASK]),
        ([1], 1, [1]),
    ],
)
def test_the_budget_is_shared(lags: list[int], budget: int, expected: list[int]) -> None:
    """What the smallest partitions do not use goes to the others. A partition that would get too little waits for the next batch."""
    assert sizes(plan_batch(*claims_of(lags), budget)) == expected


def test_a_partition_whose_end_is_not_known_or_lies_behind_the_position_is_not_read() -> None:
    """Ends are a snapshot: a position may already be beyond its end, and a topic may have new partitions."""
    claims = [Claim(TopicPartition("t", 0), 1, 10, Epoch(1)), Claim(TopicPartition("t", 1), 1, 10, Epoch(1))]
    assert plan_batch(claims, {TopicPartition("t", 0): 7}, 100) == []


def test_an_empty_slice_cannot_be_made() -> None:
    """A slice contains something to read: ``start < end``."""
    for end in (5, 4):
        with pytest.raises(ValueError, match=r"t/0: \[5, \d\) is empty"):
            Slice(TopicPartition("t", 0), 1, 5, end, Epoch(1))
    assert str(Slice(TopicPartition("t", 0), 1, 5, 9, Epoch(1))) == "t/0 [5, 9)"


@quick
@given(LAGS, BUDGETS)
def test_retry_topics_share_evenly_whatever_waits_in_one_of_them(lags: list[int], budget: int) -> None:
    """Scenario 38: the delays are treated fairly. Each partition gets everything it has, or at least an even share."""
    claims, ends = claims_of(lags)
    slices = {part.partition: part for part in plan_batch([replace(claim, drained=True) for claim in claims], ends, budget)}
    behind = [claim for claim, lag in zip(claims, lags, strict=True) if lag]
    for claim in behind:
        got = slices[claim.partition].span if claim.partition in slices else 0
        assert got >= min(ends[claim.partition] - claim.position, budget // len(behind))

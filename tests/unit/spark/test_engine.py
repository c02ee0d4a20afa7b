"""What happens to a call if the JVM is gone, and what a worker keeps from one task to the next."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from py4j.protocol import Py4JError, Py4JNetworkError

from tidemark.records.ranges import Epoch, Slice, TopicPartition
from tidemark.spark.engine import packed
from tidemark.spark.errors import SparkFailed, lost_jvm


@pytest.mark.parametrize(
    "error", [Py4JError("An error occurred while calling o53.read"), Py4JNetworkError("closed"), ConnectionRefusedError()]
)
def test_a_jvm_that_is_gone_is_an_outage_wherever_it_shows(error: Exception) -> None:
    """The soak test lost the JVM while a plan was being built, and the attempt failed with an unknown error."""
    with pytest.raises(SparkFailed) as raised, lost_jvm():
        raise error
    assert raised.value.retriable


def test_what_is_wrong_for_another_reason_stays_what_it_is() -> None:
    with pytest.raises(KeyError), lost_jvm():
        raise KeyError("x")


def test_a_worker_does_not_look_through_what_it_has_imported_after_each_task() -> None:
    """Spark collects garbage after each task of a worker. With 100,000 objects that took 50 ms, as long as 15,000 records."""
    code = """if True:
        import gc, pyarrow
        from tidemark.worker.slice_worker import collect_less_garbage
        from tidemark.spark import engine

        for task in (lambda: pyarrow.array([1]), lambda: engine._answer(lambda: None), lambda: list(engine._idle(None, iter(())))):
            collect_less_garbage.cache_clear()
            gc.unfreeze()
            task()
            print(len(gc.get_objects()))
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    before, *after = map(int, done.stdout.split())
    assert max(after) < 2_000 < 50_000 < before


@given(st.lists(st.integers(1, 1_000_000), min_size=1, max_size=60), st.integers(1, 20))
def test_slices_are_shared_evenly_among_tasks(sizes: list[int], tasks: int) -> None:
    """Each slice is in one share, and there are at most as many shares as tasks. Their sizes differ by at most the largest slice."""
    slices = [Slice(TopicPartition("t", number), 1, 10, 10 + size, Epoch(1)) for number, size in enumerate(sizes)]
    shares = packed(slices, tasks)
    assert sorted(part.partition.partition for share in shares for part in share) == list(range(len(sizes)))
    assert len(shares) == min(tasks, len(sizes))
    weights = [sum(part.end - part.start for part in share) for share in shares]
    assert max(weights) - min(weights) <= max(sizes)

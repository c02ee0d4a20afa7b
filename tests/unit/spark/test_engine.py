"""What happens to a call if the JVM is gone, and what a worker keeps from one task to the next."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from py4j.protocol import Py4JError, Py4JNetworkError

from tidemark.records.ranges import Epoch, Slice, TopicPartition
from tidemark.spark import engine
from tidemark.spark.engine import UNDECODABLE, SparkEngine, packed
from tidemark.spark.errors import SparkFailed, lost_jvm
from tidemark.worker.call_transform import TransformFailed


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


def test_only_slices_with_undecodable_records_are_staged_after_others_may_be_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tasks that commit one slice each may have stored some when one of them meets such a record. A stored slice cannot be part of another
    commit; alone, it is a receipt."""
    good, bad = (Slice(TopicPartition("t", number), 1, 0, 10, Epoch(1)) for number in range(2))
    runs: list[tuple[str, list[Slice]]] = []

    def plan_job(_target: Any, slices: list[Slice], _isolate: bool, undecodable: Any, *, headers: bool) -> Any:
        return None, ("staged" if undecodable else "direct", slices), False

    def collect(job: Any) -> list[Any]:
        runs.append(job)
        if bad in job[1]:
            raise TransformFailed(where="the executors", problem=f"ValueError: {UNDECODABLE}.")
        return list(job[1])

    def stage(_target: Any, slices: list[Slice], *_: Any) -> list[Any]:
        runs.append(("staged", slices))
        return list(slices)

    for name, value in {
        "why_staged": lambda job: job[0] if job[0] == "staged" else None,
        "partitions_of_tasks": lambda job: [(part.partition.topic, part.partition.partition) for part in job[1]],
        "reads_headers": lambda _: False,
        "few_records": lambda _: contextlib.nullcontext(),
        "_collect": collect,
    }.items():
        monkeypatch.setattr(engine, name, value)
    tested: Any = SparkEngine.__new__(SparkEngine)
    tested._spec, tested._connections = SimpleNamespace(group="g"), SimpleNamespace(kafka={})
    tested._decoding = SimpleNamespace(needed=True)
    tested._spark = SimpleNamespace(sparkContext=SimpleNamespace(setLocalProperty=lambda *_: None))
    tested._plan_job, tested._stage_and_promote = plan_job, stage
    tested._find_undecodable = lambda _: {bad.partition: ["a reject"]}
    target = SimpleNamespace(by_record=True, layouts=[1])
    assert tested._try_plan(target, [good, bad], isolate=False) == [good, bad]
    assert runs == [("direct", [good, bad]), ("direct", [good]), ("staged", [bad])]

"""Spark in the tests' process: one session for several modules. Starting a driver for each run would take most of the time."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.scenario import Scenario
from tidemark.consume import run
from tidemark.driver import launch
from tidemark.jvm.jars import spark_jars
from tidemark.offsets.store import TaskIdentity
from tidemark.records.ranges import Slice
from tidemark.spark import engine
from tidemark.spark.engine import SparkEngine
from tidemark.spark.session import SETTINGS, _session, end_jvm
from tidemark.spec.user_transform import load_permanent
from tidemark.values.fields import transform_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class Lasting(SparkEngine):
    """An engine that leaves its session open for the next run."""

    before: Callable[[], None]
    """Called before each batch is read."""

    def run(self, target: Any, slices: Sequence[Slice], **options: Any) -> Any:
        self.before()
        return super().run(target, slices, **options)

    def stop(self) -> None: ...


@contextlib.contextmanager
def spark_session(transforms: Path) -> Iterator[SparkSession]:
    """A session with two cores, which all engines use while the block runs. Its Python workers import from ``transforms``, where modules
    may be added at any time.

    Starts a new JVM: one that an earlier test has left, of `tidemark try` for instance, does not have Kafka's connector.
    """
    end_jvm()
    jars = ",".join(str(jar) for jar in spark_jars())
    session = _session("tests", "local[2]", {**SETTINGS, "spark.jars": jars, "spark.executorEnv.PYTHONPATH": str(transforms)})
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(engine, "start_session", lambda *_args, **_settings: session)
            yield session
    finally:
        session.stop()


def run_here(
    scenario: Scenario,
    before: Callable[[], None] = lambda: None,
    task: TaskIdentity | None = None,
    *,
    drain: bool = False,
    kind: type[Lasting] = Lasting,
) -> launch.Progress:
    """Makes one run, or one drain, in the existing session, and raises its error. Like `Scenario.run`, but for the Spark form."""
    spec = scenario.spec
    attempt = scenario.attempt_id = run.open_attempt(scenario.database_url, spec.group, task or TaskIdentity())

    def start(_records: int | None, _rehearsed: str | None) -> Lasting:
        transform, permanent = transform_of(spec, scenario.folders), load_permanent(spec, scenario.folders)
        lasting = kind(spec, scenario.connections, transform, permanent, attempt, scenario.folders)
        lasting.before = before
        return lasting

    run.consume(spec, scenario.connections, attempt, start, drain=drain)
    return launch.progress(scenario.database_url, attempt)

"""A driver's use of the Spark application that small runs share (`tidemark.spark.keeper`).

Each driver has its own session, with its own settings, temporary views and job group. Each task has its own Python worker, forked from a
daemon that has imported Tidemark but no consumer's modules, so transforms see neither the modules nor the memory of one another.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from tidemark.driver.keeper_client import attach_application
from tidemark.spark.releases import sessions_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

T = TypeVar("T")

WORKER_PREFIXES = ("SPARK_", "PYSPARK_", "PYTHON")
"""Prefixes of the variables that Spark sets for its workers."""


def borrow_session(group: str, master: str, conf: Mapping[str, str], modules: str) -> SparkSession | None:
    """A new session in the keeper's application with these settings. `None` without a keeper, or if the application did not start.

    ``modules``: a zip file from which workers import. Unlike `SparkContext.addPyFile` this leaves nothing behind in the application.
    """
    address = attach_application(group, master, conf)
    if address is None:
        return None
    from pyspark import SparkConf, SparkContext
    from pyspark.java_gateway import launch_gateway
    from pyspark.sql import SparkSession

    class SharedContext(SparkContext):
        """Ends with this process. `stop`, which a transform might call, leaves the application running for others."""

        def stop(self) -> None: ...

    class SharedSession(SparkSession):
        def stop(self) -> None: ...

    gateway_env = {"PYSPARK_GATEWAY_PORT": str(address[0]), "PYSPARK_GATEWAY_SECRET": address[1]}
    os.environ.update(gateway_env)
    try:
        launch: Any = launch_gateway  # not typed
        SparkContext._ensure_initialized(gateway=launch())  # noqa: SLF001 - what SparkContext's constructor would do
    finally:
        for name in gateway_env:
            del os.environ[name]
    jvm: Any = SparkContext._jvm  # noqa: SLF001
    default_session = sessions_of(jvm).getDefaultSession().get()
    java_context = jvm.JavaSparkContext.fromSparkContext(default_session.sparkContext())
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    context = SharedContext(jsc=java_context, conf=SparkConf(_jvm=jvm, _jconf=java_context.getConf()))
    context._python_includes = [modules]  # noqa: SLF001 - an absolute path: workers do not look it up among Spark's files
    return SharedSession(context, default_session.newSession())


class Environment:
    """Sets a worker's environment to this process's when it is unpickled there."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _set_environment, (dict(os.environ),)


def _set_environment(variables: Mapping[str, str]) -> Environment:
    for name in os.environ.keys() - variables.keys():
        if not name.startswith(WORKER_PREFIXES):
            del os.environ[name]
    os.environ.update(variables)
    return Environment()


def with_environment(task: Callable[..., T]) -> Callable[..., T]:
    """``task`` for a worker that was started with another environment than this process's.

    The worker sets the environment before it imports the modules of the task, because it unpickles `Environment` first.
    """
    return partial(_call_task, Environment(), task)


def _call_task(_: Environment, task: Callable[..., T], *arguments: Any) -> T:
    return task(*arguments)

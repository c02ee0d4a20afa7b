"""The Spark application that small runs of a project share, from both sides: a keeper's holder starts it, a driver uses it.

Each driver has a session of its own, with its own settings, temporary views and job group. Each task has a Python worker of its own,
forked from a daemon that has imported Tidemark and nothing of any consumer, so a transform sees neither the modules nor the memory of
another one.
"""

from __future__ import annotations

import os
import select
import socket
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from tidemark.driver.keeper_client import attached, receive, send

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

T = TypeVar("T")

LOOK_EVERY_S = 1.0
OF_WORKERS = ("SPARK_", "PYSPARK_", "PYTHON")
"""Prefixes of the variables that Spark sets for its workers."""


def hold(channel: socket.socket, master: str, conf: Mapping[str, str]) -> None:
    """Starts the application and sends its address. Returns when ``channel`` or the JVM has ended."""
    from pyspark import SparkContext

    from tidemark.spark.session import end_jvm, start_shared

    spark = start_shared(master, conf)
    gateway: Any = SparkContext._gateway  # noqa: SLF001 - what a second Python process needs to connect
    send(channel, {"port": gateway.gateway_parameters.port, "secret": gateway.gateway_parameters.auth_token})
    context = spark.sparkContext._jsc.sc()  # noqa: SLF001 - Python's interface lacks the method
    while gateway.proc.poll() is None:
        if not select.select([channel], [], [], LOOK_EVERY_S)[0]:
            continue
        said = receive(channel)
        if said is None:
            break
        context.cancelJobGroupAndFutureJobs(said["cancel"])
    end_jvm()


def borrowed(group: str, master: str, conf: Mapping[str, str], modules: str) -> SparkSession | None:
    """A new session in the keeper's application with these settings. `None` without a keeper, or if the application did not start.

    ``modules``: a zip file from which workers import. Unlike `SparkContext.addPyFile` this leaves nothing behind in the application.
    """
    address = attached(group, master, conf)
    if address is None:
        return None
    from pyspark import SparkConf, SparkContext
    from pyspark.java_gateway import launch_gateway
    from pyspark.sql import SparkSession

    class Borrowed(SparkContext):
        """Ends with this process. Stopping it, which a transform might do, leaves the application to others."""

        def stop(self) -> None: ...

    class Session(SparkSession):
        def stop(self) -> None: ...

    at = {"PYSPARK_GATEWAY_PORT": str(address[0]), "PYSPARK_GATEWAY_SECRET": address[1]}
    os.environ.update(at)
    try:
        launch: Any = launch_gateway  # not typed
        SparkContext._ensure_initialized(gateway=launch())  # noqa: SLF001 - what SparkContext's constructor would do
    finally:
        for name in at:
            del os.environ[name]
    jvm: Any = SparkContext._jvm  # noqa: SLF001
    lasting = jvm.org.apache.spark.sql.classic.SparkSession.getDefaultSession().get()
    java = jvm.JavaSparkContext.fromSparkContext(lasting.sparkContext())
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    context = Borrowed(jsc=java, conf=SparkConf(_jvm=jvm, _jconf=java.getConf()))
    context._python_includes = [modules]  # noqa: SLF001 - an absolute path: workers do not look it up among Spark's files
    return Session(context, lasting.newSession())


class Environment:
    """Sets a worker's environment to this process's when it is unpickled there."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _environment, (dict(os.environ),)


def _environment(variables: Mapping[str, str]) -> Environment:
    for name in os.environ.keys() - variables.keys():
        if not name.startswith(OF_WORKERS):
            del os.environ[name]
    os.environ.update(variables)
    return Environment()


def with_environment(task: Callable[..., T]) -> Callable[..., T]:
    """``task`` for a worker that was not started with this process's environment.

    The environment is set before the modules of the task are imported, because `Environment` is unpickled first.
    """
    return partial(_called, Environment(), task)


def _called(_: Environment, task: Callable[..., T], *given: Any) -> T:
    return task(*given)

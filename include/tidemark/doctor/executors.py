"""The same servers, as Spark's executors reach them."""

from __future__ import annotations

import platform
import socket
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import metadata

from tidemark.connections import Connections
from tidemark.db import read_url, session
from tidemark.doctor.database import CLOCKS_AGREE_S, clock_ahead_s
from tidemark.doctor.finding import Finding, failure, ok, warning
from tidemark.doctor.topic_checks import unreachable
from tidemark.errors import TidemarkError
from tidemark.kafka.cluster import Cluster
from tidemark.spark.session import plain_session
from tidemark.wires import of_spark

TASKS_PER_CORE = 2
"""So that each executor most likely gets a task."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What a task has found on its host. ``clock_ahead_s`` is None without a database session."""

    host: str
    python: str
    tidemark: str
    away: tuple[str, ...]
    clock_ahead_s: float | None


def examine_executors(connections: Connections) -> Iterator[Finding]:
    """Starts Spark, and runs a few tasks that open a session and a TCP connection to each broker. In local mode the driver's own findings
    hold. Raises `SparkFailed` if Spark does not start or its tasks do not run."""
    if connections.spark_master.startswith("local"):
        yield ok("executors", f"{connections.spark_master}: they run on this host")
        return
    with plain_session("tidemark doctor", connections) as spark:
        tasks = max(1, spark.sparkContext.defaultParallelism * TASKS_PER_CORE)
        conf = dict(spark.sparkContext.getConf().getAll())
        yield from (warning("spark", one.found, f"{one.fix}.") for one in of_spark(conf["spark.master"], conf))
        look = partial(_look, read_url(connections.database_url), dict(connections.kafka))
        seen = {one.host: one for one in spark.sparkContext.parallelize(range(tasks), tasks).mapPartitions(look).collect()}
    here = (_minor(platform.python_version()), metadata.version("tidemark"))
    for host, one in sorted(seen.items()):
        yield from _of(f"executor {host}", one, here)


def _of(subject: str, seen: Seen, here: tuple[str, str]) -> Iterator[Finding]:
    findings = []
    if seen.away:
        fix = "Executors read Kafka and write to Postgres themselves: open the network from every worker."
        findings.append(failure(subject, f"not reachable from there: {', '.join(seen.away)}", fix))
    if (_minor(seen.python), seen.tidemark) != here:
        found = f"Python {seen.python}, tidemark {seen.tidemark}; the driver has Python {here[0]}, tidemark {here[1]}"
        findings.append(failure(subject, found, "Install the same versions on workers, or ship a packed environment: docs/deployment.md."))
    if seen.clock_ahead_s is not None and abs(seen.clock_ahead_s) > CLOCKS_AGREE_S:
        findings.append(warning(subject, f"its clock is {seen.clock_ahead_s:+.1f} s from Postgres", "Synchronize both with NTP."))
    yield from findings or [ok(subject, f"Python {seen.python}, tidemark {seen.tidemark}; reaches Postgres and every broker")]


def _look(url: str, kafka: Mapping[str, str], _numbers: Iterable[int]) -> Iterator[Seen]:
    away, ahead = [], None
    try:
        with session(url, application="tidemark doctor") as connection:
            ahead = clock_ahead_s(connection)
    except TidemarkError as error:
        away.append(f"Postgres ({error})")
    try:
        away += unreachable(Cluster(kafka).brokers())
    except TidemarkError as error:
        away.append(f"Kafka ({error})")
    yield Seen(socket.gethostname(), platform.python_version(), metadata.version("tidemark"), tuple(away), ahead)


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])

"""Examines the same servers from Spark's executors."""

from __future__ import annotations

import platform
import socket
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from tidemark.connections import Connections, on_cluster
from tidemark.db import read_url, session
from tidemark.doctor.database import CLOCKS_AGREE_S, clock_ahead_s
from tidemark.doctor.finding import Finding, failure, ok, warning
from tidemark.errors import TidemarkError
from tidemark.kafka.cluster import Cluster
from tidemark.kafka.contact import unreachable
from tidemark.packages import version
from tidemark.spark.session import plain_session
from tidemark.wires import of_spark

TASKS_PER_CORE = 2
"""Enough that each executor most likely gets a task."""


@dataclass(frozen=True, slots=True)
class HostReport:
    """A task's findings on its host. ``clock_ahead_s`` is None without a database session."""

    host: str
    python: str
    tidemark: str
    unreachable: tuple[str, ...]
    clock_ahead_s: float | None


def examine_executors(connections: Connections) -> Iterator[Finding]:
    """Starts Spark, and runs a few tasks that open a session and a TCP connection to each broker. In local mode, the driver's own findings
    apply; in cluster mode, executors may not reach this host. Raises `SparkFailed` if Spark does not start or its tasks do not run."""
    if connections.spark_master.startswith("local"):
        yield ok("executors", f"{connections.spark_master}: they run on this host")
        return
    if on_cluster(connections.spark_master, connections.spark_conf):
        yield ok("executors", "not examined: drivers run on the cluster, and what they reach from there is shown by a run")
        return
    with plain_session("tidemark doctor", connections) as spark:
        tasks = max(1, spark.sparkContext.defaultParallelism * TASKS_PER_CORE)
        conf = dict(spark.sparkContext.getConf().getAll())
        yield from (warning("spark", exposure.found, f"{exposure.fix}.") for exposure in of_spark(conf["spark.master"], conf))
        inspect = partial(_inspect, read_url(connections.database_url), dict(connections.kafka))
        reports = spark.sparkContext.parallelize(range(tasks), tasks).mapPartitions(inspect).collect()
    driver = (_minor(platform.python_version()), version())
    for host, report in sorted({report.host: report for report in reports}.items()):
        yield from _host_findings(f"executor {host}", report, driver)


def _host_findings(subject: str, report: HostReport, driver: tuple[str, str]) -> Iterator[Finding]:
    findings = []
    if report.unreachable:
        fix = "Executors read Kafka and write to Postgres themselves: open the network from every worker."
        findings.append(failure(subject, f"not reachable from there: {', '.join(report.unreachable)}", fix))
    if (_minor(report.python), report.tidemark) != driver:
        mismatch = f"Python {report.python}, tidemark {report.tidemark}; the driver has Python {driver[0]}, tidemark {driver[1]}"
        findings.append(
            failure(subject, mismatch, "Install the same versions on workers, or ship a packed environment: docs/deployment/index.md.")
        )
    if report.clock_ahead_s is not None and abs(report.clock_ahead_s) > CLOCKS_AGREE_S:
        findings.append(warning(subject, f"its clock is {report.clock_ahead_s:+.1f} s from Postgres", "Synchronize both with NTP."))
    yield from findings or [ok(subject, f"Python {report.python}, tidemark {report.tidemark}; reaches Postgres and every broker")]


def _inspect(url: str, kafka: Mapping[str, str], _numbers: Iterable[int]) -> Iterator[HostReport]:
    unreached, ahead = [], None
    try:
        with session(url, application="tidemark doctor") as connection:
            ahead = clock_ahead_s(connection)
    except TidemarkError as error:
        unreached.append(f"Postgres ({error})")
    try:
        unreached += unreachable(Cluster(kafka).brokers())
    except TidemarkError as error:
        unreached.append(f"Kafka ({error})")
    yield HostReport(socket.gethostname(), platform.python_version(), version(), tuple(unreached), ahead)


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])

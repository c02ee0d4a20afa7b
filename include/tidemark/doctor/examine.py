"""Runs the whole examination: the environment's servers, and each consumer's check before a run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence, Set
from functools import partial
from pathlib import Path

from tidemark import migrations
from tidemark.author.check import Surroundings, check
from tidemark.connections import BOOTSTRAP_SERVERS, DATABASE_URL, FILES, KAFKA_CONFIG, Connections
from tidemark.db import session, transaction
from tidemark.doctor.cluster_manager import examine_cluster
from tidemark.doctor.database import examine_database
from tidemark.doctor.executors import examine_executors
from tidemark.doctor.finding import Finding, Level, attempted, failure, ok, warning
from tidemark.doctor.topic_checks import examine_brokers, examine_topics, group_progress
from tidemark.doctor.tried import untried
from tidemark.doctor.versions import examine_versions, installed
from tidemark.errors import BadInput, TidemarkError
from tidemark.kafka.cluster import Cluster
from tidemark.offsets import lag
from tidemark.offsets.health import RANK, Health
from tidemark.spec import ConsumerSpec
from tidemark.spec.problem import shown
from tidemark.wires import of_servers


def examine(connections: Connections, specs: Sequence[ConsumerSpec], folders: Sequence[Path]) -> Iterator[Finding]:
    """Yields the findings one by one: fast checks first, the executors last. Changes nothing. ``folders``: those of the transforms."""
    yield from examine_versions()
    yield from attempted("network", lambda: _network(connections))
    failed: set[str] = set()
    for server, act in (
        ("postgres", lambda: examine_database(connections.database_url, specs)),
        ("kafka", lambda: _kafka(connections, specs)),
    ):
        for finding in attempted(server, act):
            yield finding
            if finding.level is Level.FAILURE:
                failed.add(finding.subject)
    if "postgres" not in failed:
        yield from attempted("health", lambda: _health(connections, specs))
    env = _answering(connections, failed)
    for spec in specs:
        yield from attempted(f"{spec.name}: check", partial(_check, spec, Surroundings(folders, None, env)))
    yield from attempted("driver on the cluster", lambda: examine_cluster(connections, specs))
    yield from attempted("executors", lambda: examine_executors(connections))
    yield _tried(connections, failed)


def _tried(connections: Connections, failed: Set[str]) -> Finding:
    """Which versions are outside of those that were tried; of servers, if they answered. ``failed``: the subjects of failures."""
    versions = installed()
    if "postgres" not in failed:
        with contextlib.suppress(TidemarkError), session(connections.database_url, application="tidemark doctor") as connection:
            versions["postgres"] = str(connection.info.parameter_status("server_version"))
    if "kafka" not in failed:
        with contextlib.suppress(TidemarkError):
            if release := Cluster(connections.kafka).release():
                versions["kafka"] = release
    if outside := untried(versions):
        return ok("tried", f"outside of the versions that were tried: {', '.join(outside)}")
    return ok("tried", "no version is older or newer than those that were tried")


def _answering(connections: Connections, failed: Set[str]) -> Mapping[str, str]:
    """The variables of the connections, without the servers that are a finding of their own. ``failed``: the subjects of failures."""
    env = connections.env()
    if failed & {"postgres", "postgres version", "schema"}:
        env |= {DATABASE_URL: "", FILES[DATABASE_URL]: ""}
    if "kafka" in failed:
        env |= {BOOTSTRAP_SERVERS: "", KAFKA_CONFIG: "", FILES[KAFKA_CONFIG]: ""}
    return env


def _check(spec: ConsumerSpec, surroundings: Surroundings) -> Iterator[Finding]:
    """What `tidemark consumers check` finds; its notes only if there is no problem. A table or topic that does not exist is a warning."""
    report = check(spec, surroundings)
    subject = f"{spec.name}: check"
    for problem in report.problems:
        level = warning if problem in report.missing else failure
        yield level(subject, f"{shown(problem.file)}:{problem.line}:{problem.column}: {problem.message}", problem.fix)
    # a server that does not answer is a finding of its own
    errors = [error for error in report.errors if not (isinstance(error, BadInput) and not surroundings.env.get(error.what, "-"))]
    yield from (failure(subject, str(error), "") for error in errors)
    if not report.problems and not errors:
        yield ok(subject, "; ".join(("no problem was found", *report.notes)))


def _network(connections: Connections) -> Iterator[Finding]:
    exposed = [warning("network", exposure.found, f"{exposure.fix}.") for exposure in of_servers(connections)]
    yield from exposed or [ok("network", "Postgres and Kafka are on loopback, or verified")]


def _health(connections: Connections, specs: Sequence[ConsumerSpec]) -> Iterator[Finding]:
    """Reports each consumer's health as of its last sample."""
    with session(connections.database_url, application="tidemark doctor") as connection:
        migrations.require_current(connection)
        with transaction(connection) as cur:
            groups = {group_lag.lag.group: group_lag.lag for group_lag in lag.groups(cur, names=[spec.group for spec in specs])}
    for spec in specs:
        group_lag = groups.get(spec.group)
        if group_lag is None:
            yield ok(f"{spec.name}: health", "it has not run yet")
        elif RANK[group_lag.health] <= RANK[Health.UNKNOWN]:
            yield warning(f"{spec.name}: health", f"{group_lag.health}: {group_lag.why}", group_lag.fix)
        else:
            yield ok(f"{spec.name}: health", f"{group_lag.health}: {group_lag.why}")


def _kafka(connections: Connections, specs: Sequence[ConsumerSpec]) -> Iterator[Finding]:
    cluster = Cluster(connections.kafka)
    yield from examine_brokers(cluster)
    progress = {}
    with contextlib.suppress(TidemarkError), session(connections.database_url, application="tidemark doctor") as connection:
        migrations.require_current(connection)  # problems of the database are findings of their own
        progress = {spec.name: group_progress(connection, spec.group) for spec in specs}
    for spec in specs:
        yield from attempted(f"{spec.name}: topics", partial(examine_topics, cluster, spec, progress.get(spec.name)))

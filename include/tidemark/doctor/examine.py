"""Runs the whole examination: the environment's servers, and the consumers' requirements."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from functools import partial

from tidemark import migrations
from tidemark.connections import Connections
from tidemark.db import session, transaction
from tidemark.doctor.cluster_manager import examine_cluster
from tidemark.doctor.database import examine_database
from tidemark.doctor.executors import examine_executors
from tidemark.doctor.finding import Finding, attempted, ok, warning
from tidemark.doctor.topic_checks import examine_brokers, examine_topics, group_progress
from tidemark.doctor.tried import untried
from tidemark.doctor.versions import examine_versions, installed
from tidemark.errors import TidemarkError
from tidemark.kafka.cluster import Cluster
from tidemark.offsets import lag
from tidemark.offsets.health import RANK, Health
from tidemark.spec import ConsumerSpec
from tidemark.wires import of_servers
from tidemark.worker.decoding import Decoding


def examine(connections: Connections, specs: Sequence[ConsumerSpec]) -> Iterator[Finding]:
    """Yields the findings one by one: fast checks first, the executors last. Changes nothing."""
    yield from examine_versions()
    yield from attempted("network", lambda: _network(connections))
    yield from attempted("postgres", lambda: examine_database(connections.database_url, specs))
    yield from attempted("kafka", lambda: _kafka(connections, specs))
    yield from attempted("health", lambda: _health(connections, specs))
    for spec in specs:
        yield from attempted(f"{spec.name}: schemas", partial(_schemas, connections, spec))
    yield from attempted("driver on the cluster", lambda: examine_cluster(connections, specs))
    yield from attempted("executors", lambda: examine_executors(connections))
    yield _tried(connections)


def _tried(connections: Connections) -> Finding:
    """Which versions are outside of those that were tried. A server that does not answer is a finding of its own."""
    found = installed()
    with contextlib.suppress(TidemarkError), session(connections.database_url, application="tidemark doctor") as connection:
        found["postgres"] = str(connection.info.parameter_status("server_version"))
    with contextlib.suppress(TidemarkError):
        if release := Cluster(connections.kafka).release():
            found["kafka"] = release
    outside = untried(found)
    return ok("tried", f"not with {', '.join(outside)}" if outside else "with these versions, or older and newer ones")


def _network(connections: Connections) -> Iterator[Finding]:
    exposed = [warning("network", exposure.found, f"{exposure.fix}.") for exposure in of_servers(connections)]
    yield from exposed or [ok("network", "Postgres and Kafka are on loopback, or verified")]


def _schemas(connections: Connections, spec: ConsumerSpec) -> Iterator[Finding]:
    decoding = Decoding(spec, connections.registry, lambda: Cluster(connections.kafka).subscribed(spec))
    if decoding.needed:
        decoding.input_schema()
        if spec.format.uses_registry:
            yield ok(f"{spec.name}: schemas", "there is one for each topic")


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

"""The whole examination, of what the environment names and of the consumers' needs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from functools import partial

from tidemark import migrations
from tidemark.connections import Connections
from tidemark.db import session, transaction
from tidemark.doctor.database import examine_database
from tidemark.doctor.executors import examine_executors
from tidemark.doctor.finding import Finding, attempted, ok, warning
from tidemark.doctor.topic_checks import examine_brokers, examine_topics, read_by
from tidemark.doctor.versions import examine_versions
from tidemark.errors import TidemarkError
from tidemark.kafka.cluster import Cluster
from tidemark.offsets import lag
from tidemark.offsets.health import RANK, Health
from tidemark.spec import ConsumerSpec
from tidemark.wires import of_servers
from tidemark.worker.decoding import Decoding


def examine(connections: Connections, specs: Sequence[ConsumerSpec]) -> Iterator[Finding]:
    """The findings, as they are made: what is fast first, the executors last. Changes nothing."""
    yield from examine_versions()
    yield from attempted("network", lambda: _network(connections))
    yield from attempted("postgres", lambda: examine_database(connections.database_url, specs))
    yield from attempted("kafka", lambda: _kafka(connections, specs))
    yield from attempted("health", lambda: _health(connections, specs))
    for spec in specs:
        yield from attempted(f"{spec.name}: schemas", partial(_schemas, connections, spec))
    yield from attempted("executors", lambda: examine_executors(connections))


def _network(connections: Connections) -> Iterator[Finding]:
    exposed = [warning("network", one.found, f"{one.fix}.") for one in of_servers(connections)]
    yield from exposed or [ok("network", "Postgres and Kafka are on loopback, or verified")]


def _schemas(connections: Connections, spec: ConsumerSpec) -> Iterator[Finding]:
    decoding = Decoding(spec, connections.registry, lambda: Cluster(connections.kafka).subscribed(spec))
    if decoding.needed:
        decoding.input_schema()
        yield ok(f"{spec.name}: schemas", "there is one for each topic")


def _health(connections: Connections, specs: Sequence[ConsumerSpec]) -> Iterator[Finding]:
    """How each consumer does, as everywhere else, as of its last sample."""
    with session(connections.database_url, application="tidemark doctor") as connection:
        migrations.require_current(connection)
        with transaction(connection) as cur:
            groups = {one.lag.group: one.lag for one in lag.groups(cur, names=[spec.group for spec in specs])}
    for spec in specs:
        one = groups.get(spec.group)
        if one is None:
            yield ok(f"{spec.name}: health", "it has not run yet")
        elif RANK[one.health] <= RANK[Health.UNKNOWN]:
            yield warning(f"{spec.name}: health", f"{one.health}: {one.why}", one.fix)
        else:
            yield ok(f"{spec.name}: health", f"{one.health}: {one.why}")


def _kafka(connections: Connections, specs: Sequence[ConsumerSpec]) -> Iterator[Finding]:
    cluster = Cluster(connections.kafka)
    yield from examine_brokers(cluster)
    read = {}
    with contextlib.suppress(TidemarkError), session(connections.database_url, application="tidemark doctor") as connection:
        migrations.require_current(connection)  # what is wrong with the database is a finding of its own
        read = {spec.name: read_by(connection, spec.group) for spec in specs}
    for spec in specs:
        yield from attempted(f"{spec.name}: topics", partial(examine_topics, cluster, spec, read.get(spec.name)))

"""The servers that the environment names, for the commands."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from tidemark import migrations, roles
from tidemark.connections import database_url, kafka_config
from tidemark.db import Connection, session
from tidemark.kafka.cluster import Cluster
from tidemark.profiles import Profile


@contextlib.contextmanager
def connected(application: str = "tidemark", *, needs: Profile = Profile.READER) -> Iterator[Connection]:
    """Opens a database session. Raises `SchemaMismatch` if the schema is not this version's, and `RoleLacks` unless the role has all
    rights of the profile ``needs``."""
    with session(database_url(), application=application) as connection:
        migrations.require_current(connection)
        roles.require(connection, needs)
        yield connection


def kafka_cluster() -> Cluster:
    """The Kafka cluster. All consumers of a command use the same one."""
    return Cluster(kafka_config())

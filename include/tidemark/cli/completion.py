"""Completes the names of consumers, topics and rewinds in a shell: ``tidemark --install-completion``.

A completion must not disturb the line that it completes: without servers, or with a broken project, it offers nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable

LIMIT_S = 2.0
"""How long Kafka may take for each answer, and Postgres for a connection."""


def consumers(incomplete: str) -> list[str]:
    from tidemark.spec import consumer_names

    return _matching(consumer_names, incomplete)


def topics(incomplete: str) -> list[str]:
    from tidemark.connections import kafka_config
    from tidemark.kafka.cluster import Cluster

    return _matching(lambda: Cluster(kafka_config(), timeout_s=LIMIT_S).matching(".*"), incomplete)


def rewinds(incomplete: str) -> list[str]:
    """The numbers of the latest rewinds, newest first."""
    from tidemark.connections import database_url
    from tidemark.db import read_url, session, transaction, with_parameter

    def numbers() -> list[str]:
        url = with_parameter(read_url(database_url()), "connect_timeout", f"{LIMIT_S:.0f}")
        with session(url, application="tidemark completion") as connection, transaction(connection) as cur:
            cur.execute("SELECT rewind_id FROM tidemark.rewind ORDER BY rewind_id DESC LIMIT 100")
            return [str(number) for (number,) in cur.fetchall()]

    return _matching(numbers, incomplete)


def _matching(names: Callable[[], Iterable[str]], incomplete: str) -> list[str]:
    with contextlib.suppress(Exception):
        return [name for name in names() if name.startswith(incomplete)]
    return []

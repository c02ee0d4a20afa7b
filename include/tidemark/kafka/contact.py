"""Tells a wrong address from a slow cluster, at a process's first request to a cluster.

librdkafka tries an address that refuses connections for as long as it tries one that is slow, and says neither which address nor why.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TYPE_CHECKING

from tidemark.errors import BrokerUnavailable

if TYPE_CHECKING:
    from confluent_kafka.admin import AdminClient

PATIENCE_S = 2.0
"""How long a cluster may take for the first answer before its addresses are tried one by one, and how long each of them may take."""
REPEAT_S = 10.0
"""How long a failure is repeated without another try, for commands that look up several things."""
CLOSED = "no broker accepts a connection: {}. Look at TIDEMARK_KAFKA_BOOTSTRAP_SERVERS, or at bootstrap.servers of the Kafka connection"
MISLEADING = "{servers} answers, but names brokers that accept no connection: {}. Look at advertised.listeners of the brokers"
_reached: set[str] = set()
"""The servers that this process has reached."""
_failures: dict[str, tuple[float, BrokerUnavailable]] = {}
"""When, by the monotonic clock, and why a cluster could not be reached."""


def require_contact(client: AdminClient, servers: str) -> None:
    """Raises `BrokerUnavailable` with the addresses if none of them accepts a connection, or if the cluster names brokers that do not.

    Returns if the cluster answers, or if it may only be slow. Asks until the process has reached this cluster once.
    """
    if servers in _reached:
        return
    at, failure = _failures.get(servers, (-REPEAT_S, None))
    if failure is not None and time.monotonic() < at + REPEAT_S:
        raise failure
    try:
        _meet(client, servers)
    except BrokerUnavailable as error:
        _failures[servers] = time.monotonic(), error
        raise
    _reached.add(servers)


def _meet(client: AdminClient, servers: str) -> None:
    future = client.describe_cluster(request_timeout=PATIENCE_S)
    wait([future], PATIENCE_S)
    if not future.done() or future.exception() is not None:
        _require_open(servers, servers.split(","), CLOSED)
        _require_open(servers, _advertised(client), MISLEADING)


def _advertised(client: AdminClient) -> list[str]:
    """The addresses that the brokers give to their clients. Empty if they cannot be asked."""
    from confluent_kafka import KafkaException

    try:
        brokers = client.list_topics(timeout=PATIENCE_S).brokers.values()
    except KafkaException:
        return []
    return [f"{broker.host}:{broker.port}" for broker in brokers]


def _require_open(servers: str, addresses: Iterable[str], text: str) -> None:
    listed = [address.strip() for address in addresses]
    with ThreadPoolExecutor(max(len(listed), 1)) as pool:
        problems = list(pool.map(_problem, listed))
    if listed and all(problems):
        named = "; ".join(f"{address} ({reason})" for address, reason in zip(listed, problems, strict=True))
        raise BrokerUnavailable(cause=text.format(named, servers=servers))


def _problem(address: str) -> str | None:
    """Why a connection to this address fails. None if it does not."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    try:
        with socket.create_connection((host.strip("[]") or port, int(port) if host and port.isdigit() else 9092), timeout=PATIENCE_S):
            return None
    except TimeoutError:
        return f"no answer within {PATIENCE_S:g} s"
    except (OSError, ValueError) as error:
        return getattr(error, "strerror", None) or str(error)

"""Tells a wrong address from a slow cluster, at a process's first request to a cluster.

librdkafka tries an address that refuses connections for as long as it tries one that is slow, and says neither which address nor why.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TYPE_CHECKING

from tidemark.errors import BrokerUnavailable

if TYPE_CHECKING:
    from confluent_kafka.admin import AdminClient

PATIENCE_S = 2.0
"""How long a cluster may take for the first answer before its addresses are tried one by one, and how long each of them may take."""
REPEAT_S = 10.0
"""How long a failure is repeated without another try, for commands that look up several things."""
DEFAULT_PORT = 9092
CLOSED = "no broker accepts a connection: {}. Look at TIDEMARK_KAFKA_BOOTSTRAP_SERVERS, or at bootstrap.servers of the Kafka connection"
MISLEADING = "{servers} answers, but names brokers that accept no connection: {}. Look at advertised.listeners of the brokers"
_examined: set[str] = set()
"""The servers that answered this process, or may only be slow."""
_failures: dict[str, tuple[float, str]] = {}
"""The last failure by servers: until when, by the monotonic clock, it is repeated, and its text."""


def require_contact(client: AdminClient, another: Callable[[], AdminClient], servers: str) -> None:
    """Raises `BrokerUnavailable` with the addresses if none of them accepts a connection, or if the cluster names brokers that do not.

    ``another`` connects a second client: the first one, once it knows the brokers' addresses, rarely asks at the given ones again.
    Returns if the cluster answers, or if it may only be slow; this process then never examines these servers again.
    """
    if servers in _examined:
        return
    repeated_until, failure = _failures.get(servers, (0.0, ""))
    if time.monotonic() >= repeated_until:
        failure = _failure(client, another, servers)
        if not failure:
            _examined.add(servers)
            return
        _failures[servers] = time.monotonic() + REPEAT_S, failure
    raise BrokerUnavailable(cause=failure)


def _failure(client: AdminClient, another: Callable[[], AdminClient], servers: str) -> str:
    """Why no request can reach the cluster. Empty if one can, or may."""
    from confluent_kafka import KafkaException

    future = client.describe_cluster(request_timeout=PATIENCE_S)
    wait([future], PATIENCE_S)
    if future.done() and future.exception() is None:
        return ""
    bootstrap = [address.strip() for address in servers.split(",")]
    if len(problems := unreachable(bootstrap)) == len(bootstrap):
        return CLOSED.format("; ".join(problems))
    try:
        brokers = advertised(another(), PATIENCE_S)
    except KafkaException:
        return ""
    if brokers and len(problems := unreachable(brokers)) == len(brokers):
        return MISLEADING.format("; ".join(problems), servers=servers)
    return ""


def advertised(client: AdminClient, timeout_s: float) -> list[str]:
    """The addresses that the brokers give to their clients, ``host:port``, in the order of their ids. Raises `KafkaException`."""
    brokers = client.list_topics(timeout=timeout_s).brokers
    return [f"{brokers[number].host}:{brokers[number].port}" for number in sorted(brokers)]


def unreachable(addresses: Iterable[str]) -> list[str]:
    """The addresses to which no TCP connection opens within `PATIENCE_S`, each with the reason."""
    listed = list(addresses)
    with ThreadPoolExecutor(max(len(listed), 1)) as pool:
        problems = pool.map(_problem, listed)
        return [f"{address} ({problem})" for address, problem in zip(listed, problems, strict=True) if problem]


def _problem(address: str) -> str | None:
    """Why a connection to this address fails. None if it does not."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    try:
        with socket.create_connection((host.strip("[]") or port, int(port) if host else DEFAULT_PORT), timeout=PATIENCE_S):
            return None
    except TimeoutError:
        return f"no answer within {PATIENCE_S:g} s"
    except OSError as error:
        return error.strerror or str(error)
    except (ValueError, OverflowError) as error:  # the port is no number, or too large; the host is no name
        return str(error)

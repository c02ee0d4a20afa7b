"""Classifies Kafka's errors: an outage, a missing permission, or a refused request."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from tidemark.errors import BrokerUnavailable, Refused, TidemarkError

if TYPE_CHECKING:
    from confluent_kafka import KafkaError

_FINAL = {
    "POLICY_VIOLATION",
    "TOPIC_EXCEPTION",
    "SECURITY_DISABLED",
    "TOPIC_DELETION_DISABLED",
    "UNSUPPORTED_FOR_MESSAGE_FORMAT",
    "UNSUPPORTED_VERSION",
}
"""Permanent errors, besides those that begin with ``INVALID_``. All others count as outages: librdkafka's own errors, elections, quotas,
and failed authentication, because credentials are replaced during runs."""


class NotAllowed(Refused):
    """The cluster's ACLs do not allow an operation on these topics, or on another resource that ``topics`` names."""

    kafka_name = "TOPIC_AUTHORIZATION_FAILED"
    topics: list[str]
    operation: str
    """Its name in an ACL: ``DESCRIBE``."""
    servers: str

    def __str__(self) -> str:
        return f"{self.servers} does not allow {self.operation} on {', '.join(self.topics)}. Ask for an ACL that allows it."


class KafkaRefuses(Refused):
    """Kafka refuses the request, and would refuse it again. ``name``: Kafka's name of the error."""

    name: str
    cause: str
    servers: str

    def __str__(self) -> str:
        return f"{self.servers} refuses: {self.cause} ({self.name})."


def failure_of(error: KafkaError, servers: str, operation: str, topics: Iterable[str] = ()) -> TidemarkError:
    """The exception for ``operation`` (its name in an ACL) on these topics, or on the cluster."""
    if is_denial(error):
        return NotAllowed(topics=sorted(topics) or ["the cluster"], operation=operation, servers=servers)
    if error.name().startswith("INVALID_") or error.name() in _FINAL:
        return KafkaRefuses(name=error.name(), cause=error.str().rstrip("."), servers=servers)
    return BrokerUnavailable(cause=f"{servers}: {error.str()}")


def is_denial(error: KafkaError) -> bool:
    return error.name().endswith("_AUTHORIZATION_FAILED")

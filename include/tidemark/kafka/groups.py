"""Kafka's own consumer groups: their live members, and offsets committed without joining them.

Kafka accepts such offsets while a group has no members. Tidemark never joins a group in Kafka.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tidemark.errors import BrokerUnavailable, Refused, TidemarkError
from tidemark.kafka.cluster import REQUEST_TIMEOUT_S, Cluster
from tidemark.kafka.failures import failure_of
from tidemark.records.ranges import TopicPartition

if TYPE_CHECKING:
    from confluent_kafka import KafkaError
    from confluent_kafka.admin import AdminClient

SHOWN = 5
"""How many members a message names at most."""


class GroupInUse(Refused):
    """Only the group's live members in Kafka may commit its offsets. ``members`` is empty if they are unknown."""

    kafka_name = "NON_EMPTY_GROUP"
    group: str
    members: list[str]
    servers: str

    def __str__(self) -> str:
        return (
            f"Group {self.group} has live members in Kafka{named(self.members)} on {self.servers}, so Kafka accepts no offsets for it from "
            "others. Stop these consumers, give the Tidemark consumer another group, or remove `mirror: true` from its file."
        )


@dataclass(frozen=True, slots=True)
class Commit:
    """Offsets sent to a group. ``client`` must live until the answer arrives."""

    group: str
    offsets: Mapping[TopicPartition, int]
    servers: str
    client: AdminClient
    answer: Future[Any]

    def wait(self, timeout_s: float = REQUEST_TIMEOUT_S) -> None:
        """Waits until Kafka has stored the offsets. Raises `GroupInUse`, `NotAllowed` or `BrokerUnavailable`."""
        from confluent_kafka import KafkaException

        try:
            parts = self.answer.result(timeout_s).topic_partitions
        except FutureTimeout as error:
            raise BrokerUnavailable(cause=f"{self.servers}: no answer about group {self.group} for {timeout_s:g} s") from error
        except KafkaException as error:
            raise _translated(error.args[0], self.group, "READ", self.servers) from error
        for part in parts:
            if part.error is not None:
                raise _translated(part.error, self.group, "READ", self.servers, part.topic)


def commit(cluster: Cluster, group: str, offsets: Mapping[TopicPartition, int]) -> Commit:
    """Sends the next offsets to read to a group, which may be new, without waiting for the answer. Raises `BrokerUnavailable`."""
    from confluent_kafka import ConsumerGroupTopicPartitions, KafkaException
    from confluent_kafka import TopicPartition as Wire

    client = cluster.admin()
    positions = [Wire(part.topic, part.partition, offset) for part, offset in sorted(offsets.items())]
    requests = [ConsumerGroupTopicPartitions(group, positions)]
    try:
        (answer,) = client.alter_consumer_group_offsets(requests, request_timeout=REQUEST_TIMEOUT_S).values()
    except KafkaException as error:
        raise _translated(error.args[0], group, "READ", cluster.servers) from error
    return Commit(group, dict(offsets), cluster.servers, client, answer)


def members(cluster: Cluster, group: str) -> list[str]:
    """The live members of a group as ``client id at host``; empty for a missing group. Raises `NotAllowed` or `BrokerUnavailable`."""
    from confluent_kafka import KafkaException

    (future,) = cluster.admin().describe_consumer_groups([group], request_timeout=REQUEST_TIMEOUT_S).values()
    try:
        return [f"{member.client_id} at {member.host.lstrip('/')}" for member in cluster.result(future).members]
    except KafkaException as error:
        raise _translated(error.args[0], group, "DESCRIBE", cluster.servers) from error


def delete(cluster: Cluster, group: str) -> bool:
    """Deletes a group's offsets in Kafka; false if it does not exist. Raises `GroupInUse`, `NotAllowed` or `BrokerUnavailable`."""
    from confluent_kafka import KafkaError, KafkaException

    (future,) = cluster.admin().delete_consumer_groups([group], request_timeout=REQUEST_TIMEOUT_S).values()
    try:
        cluster.result(future)
    except KafkaException as error:
        if error.args[0].code() == KafkaError.GROUP_ID_NOT_FOUND:
            return False
        raise _translated(error.args[0], group, "DELETE", cluster.servers) from error
    return True


def named(members: Sequence[str]) -> str:
    """The members for a message: `` (app-1 at 10.0.0.7)``; empty without members."""
    more = f" and {len(members) - SHOWN} more" if len(members) > SHOWN else ""
    return f" ({', '.join(members[:SHOWN])}{more})" if members else ""


def _translated(error: KafkaError, group: str, operation: str, servers: str, topic: str = "") -> TidemarkError:
    from confluent_kafka import KafkaError

    if error.code() in (KafkaError.UNKNOWN_MEMBER_ID, KafkaError.NON_EMPTY_GROUP, KafkaError.REBALANCE_IN_PROGRESS):
        return GroupInUse(group=group, members=[], servers=servers)
    of_group = not topic or error.code() == KafkaError.GROUP_AUTHORIZATION_FAILED
    return failure_of(error, servers, operation, [f"group {group}" if of_group else topic])

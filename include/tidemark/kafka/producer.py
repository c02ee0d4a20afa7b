"""Publishes messages within a limited time, and reports the outcome of each."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterable, Iterator, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

from tidemark.kafka.config import KafkaConfig, connected

if TYPE_CHECKING:
    from confluent_kafka import KafkaError, Producer

DELIVERY_MS = 6_000
"""How long delivery of a message is attempted. The publisher holds row locks meanwhile, and a rewind waits 10 s for them."""
ANSWER_S = DELIVERY_MS / 1000 + 1.0
"""The time within which every message has a report."""

SETTINGS = {
    "enable.idempotence": "true",  # implies acks=all: an acknowledged message is stored once, in order
    "message.timeout.ms": str(DELIVERY_MS),
    "message.max.bytes": "1000000000",  # the topic's own limit decides, with a report for each message
    "compression.type": "lz4",  # the topic's limit applies after compression, so what fit the origin compressed must fit here
    "topic.metadata.propagation.max.ms": "3000",  # with the default of 30 s, a deleted topic would not be reported in time
    "linger.ms": "5",
    "log_level": "0",  # important errors arrive as delivery reports
}
POLL_EVERY = 500
"""How many messages to produce between polls for delivery reports: a poll costs about as much as a report."""
ALONE = {"batch.num.messages": "1", "linger.ms": "0", "compression.type": "zstd"}
"""Each message in its own batch, so that a bad message does not affect others."""


class DeliveryStatus(Enum):
    STORED = "stored"
    REFUSED = "refused"
    """The broker refused this message or another one in its batch."""
    BLOCKED = "blocked"
    """Cannot publish to this topic: it does not exist, or ACLs forbid it."""
    UNKNOWN = "unknown"
    """No report, or one that is not about the message: it may or may not be stored."""


class Outgoing(NamedTuple):
    """A message to publish. A header name is cut at U+0000, because librdkafka's names are C strings."""

    topic: str
    partition: int
    key: bytes | None
    value: bytes | None
    headers: Sequence[tuple[str, bytes | None]]


class DeliveryReport(NamedTuple):
    """The outcome of a message: its offset, or the client's error text."""

    answer: DeliveryStatus
    offset: int = -1
    text: str = ""


NO_ANSWER = DeliveryReport(DeliveryStatus.UNKNOWN, text="the broker did not answer")


class Publisher:
    """An idempotent producer, for one thread."""

    def __init__(self, config: KafkaConfig, *, alone: bool = False) -> None:
        own = {**SETTINGS, **(ALONE if alone else {})}
        if "compression.type" in config or "compression.codec" in config:  # two names of one setting
            del own["compression.type"]
        self._settings = {**config, **own}
        self._client: Producer | None = None
        self._denied = False

    def connect(self) -> Producer:
        """Returns the client, connecting it if necessary. A message produced in its first 0.1 s is delayed by 0.5 s."""
        from confluent_kafka import Producer as Make

        if self._client is None:
            self._denied = False
            self._client = connected(Make, self._settings)
        return self._client

    def publish(self, messages: Iterable[Outgoing]) -> Iterator[DeliveryReport]:
        """Publishes the messages and yields a report for each, in order, within about `ANSWER_S`. Never raises broker errors.

        Consumes ``messages`` lazily. Yields reports of stored messages while others are still being published.
        """
        from confluent_kafka import KafkaException

        client, until = self.connect(), time.monotonic() + ANSWER_S
        reports: list[DeliveryReport] = []
        yielded = 0
        for number, message in enumerate(messages):
            reports.append(NO_ANSWER)
            on_delivery = functools.partial(_record, reports, number)
            try:
                self._produce(client, message, on_delivery, until)
            except KafkaException as error:
                reports[number] = _failed(error.args[0])
            if number % POLL_EVERY == 0:
                self._serve(client, 0.0)
                while yielded < len(reports) and reports[yielded].answer is DeliveryStatus.STORED:
                    yield reports[yielded]
                    yielded += 1
        if not self._serve_all(client, until):
            client.purge()  # no answer in time: the messages must not be sent later
            self._serve_all(client, time.monotonic() + 1.0)
        if self._denied:
            blocked = DeliveryReport(DeliveryStatus.BLOCKED, text="WRITE is not allowed on it or on any other topic")
            reports = [blocked if report.answer is DeliveryStatus.UNKNOWN else report for report in reports]
        if any(report.answer in (DeliveryStatus.UNKNOWN, DeliveryStatus.BLOCKED) for report in reports):
            self._client = None  # it may have failed permanently, and it caches authorization errors
        yield from reports[yielded:]

    def _serve_all(self, client: Producer, until: float) -> bool:
        """Polls until all delivery reports have arrived; `False`: not in time. ``flush`` would not survive a fatal error."""
        while len(client) and (remaining_s := until - time.monotonic()) > 0:
            self._serve(client, min(remaining_s, 0.1))
        return not len(client)

    def _serve(self, client: Producer, timeout_s: float) -> None:
        """Polls for delivery reports. A fatal error is raised here once, for example if a producer without any WRITE gets no id."""
        from confluent_kafka import KafkaError as Code
        from confluent_kafka import KafkaException

        try:
            client.poll(timeout_s)
        except KafkaException as error:
            self._denied |= error.args[0].code() == Code.CLUSTER_AUTHORIZATION_FAILED

    def _produce(self, client: Producer, message: Outgoing, on_delivery: Any, until: float) -> None:
        while True:
            try:
                client.produce(
                    message.topic,
                    message.value,
                    message.key,
                    partition=message.partition,
                    headers=[*message.headers],
                    on_delivery=on_delivery,
                )
            except BufferError:
                if time.monotonic() > until:
                    return
                self._serve(client, 0.05)
            else:
                return


class Publishers:
    """Both kinds of publisher, for repeated use."""

    def __init__(self, config: KafkaConfig) -> None:
        self.together = Publisher(config)
        self.alone = Publisher(config, alone=True)
        """For messages that were refused in a batch with others."""


def _record(reports: list[DeliveryReport], number: int, error: KafkaError | None, message: Any) -> None:
    reports[number] = DeliveryReport(DeliveryStatus.STORED, message.offset()) if error is None else _failed(error)


def _failed(error: KafkaError) -> DeliveryReport:
    from confluent_kafka import KafkaError as Code

    text = f"{error.name()}: {error.str()}"
    if error.code() == Code.TOPIC_AUTHORIZATION_FAILED:
        return DeliveryReport(DeliveryStatus.BLOCKED, text="WRITE on it is not allowed")
    if error.code() in (
        Code.MSG_SIZE_TOO_LARGE,
        Code.INVALID_MSG,
        Code.INVALID_MSG_SIZE,
        Code.INVALID_RECORD,
        Code.INVALID_TIMESTAMP,
        Code._INVALID_ARG,  # noqa: SLF001 - its public name
    ):
        return DeliveryReport(DeliveryStatus.REFUSED, text=text)
    if error.code() in (
        Code.UNKNOWN_TOPIC_OR_PART,
        Code._UNKNOWN_TOPIC,  # noqa: SLF001 - its public name
        Code._UNKNOWN_PARTITION,  # noqa: SLF001 - its public name
        Code.TOPIC_EXCEPTION,
        Code.POLICY_VIOLATION,
    ):
        return DeliveryReport(DeliveryStatus.BLOCKED, text=text)
    return DeliveryReport(DeliveryStatus.UNKNOWN, text=text)

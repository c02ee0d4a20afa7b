"""Messages to the cluster, each with its own answer, within a time that is known beforehand."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from tidemark.kafka.config import KafkaConfig, connected

if TYPE_CHECKING:
    from confluent_kafka import KafkaError, Producer

DELIVERY_MS = 6_000
"""How long one message is tried. Whoever publishes holds row locks meanwhile, and a rewind waits 10 s for them."""
ANSWER_S = DELIVERY_MS / 1000 + 1.0
"""By then every message has its answer."""

SETTINGS = {
    "enable.idempotence": "true",  # and with it acks=all: what is answered is stored once, in order
    "message.timeout.ms": str(DELIVERY_MS),
    "message.max.bytes": "1000000000",  # the topic decides what is too large, and answers it for each message
    "compression.type": "lz4",  # the topic's limit is on what is compressed: what its origin took compressed must get through here
    "topic.metadata.propagation.max.ms": "3000",  # 30 s by default: then a topic that went away would be no answer, but silence
    "linger.ms": "5",
    "log_level": "0",  # what matters comes as a delivery report
}
ALONE = {"batch.num.messages": "1", "linger.ms": "0", "compression.type": "zstd"}
"""Each message a batch of its own: what is wrong with it falls on no other."""


class Answer(Enum):
    STORED = "stored"
    REFUSED = "refused"
    """The broker does not take this message, or another one of its batch."""
    BLOCKED = "blocked"
    """The broker takes nothing for this topic: it is not there, or not allowed."""
    UNKNOWN = "unknown"
    """No answer, or one that says nothing about the message: it may be stored or not."""


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A message as it is to be stored. A header's name that holds U+0000 ends there: librdkafka's names are C strings."""

    topic: str
    partition: int
    key: bytes | None
    value: bytes | None
    headers: Sequence[tuple[str, bytes | None]]


@dataclass(frozen=True, slots=True)
class Report:
    """What became of a message: where it is stored, or what the client says of it."""

    answer: Answer
    offset: int = -1
    text: str = ""


class Publisher:
    """An idempotent producer; not to be shared by threads. Connects when the first message is published, which takes half a second."""

    def __init__(self, config: KafkaConfig, *, alone: bool = False) -> None:
        self._settings = {**config, **SETTINGS, **(ALONE if alone else {})}
        self._client: Producer | None = None
        self._denied = False

    def publish(self, messages: Sequence[Outgoing]) -> list[Report]:
        """A report for each message, in their order, after `ANSWER_S` at the latest. Raises nothing that comes from the broker."""
        from confluent_kafka import KafkaException
        from confluent_kafka import Producer as Make

        if self._client is None:
            self._denied = False
            self._client = connected(Make, self._settings)
        client, until = self._client, time.monotonic() + ANSWER_S
        reports = [Report(Answer.UNKNOWN, text="the broker did not answer")] * len(messages)
        for number, message in enumerate(messages):
            note = functools.partial(_note, reports, number)
            try:
                self._produce(client, message, note, until)
            except KafkaException as error:
                reports[number] = _failed(error.args[0])
            self._serve(client, 0.0)
        if not self._serve_all(client, until):
            client.purge()  # without an answer in time: nothing of it may be sent later
            self._serve_all(client, time.monotonic() + 1.0)
        if self._denied:
            nowhere = Report(Answer.BLOCKED, text="WRITE is not allowed on it nor on any other topic")
            reports = [nowhere if report.answer is Answer.UNKNOWN else report for report in reports]
        if any(report.answer in (Answer.UNKNOWN, Answer.BLOCKED) for report in reports):
            self._client = None  # it may have given up for good, and it remembers what was not allowed
        return reports

    def _serve_all(self, client: Producer, until: float) -> bool:
        """Takes delivery reports until none is missing; `False`: not in time. As ``flush``, which does not survive a fatal error."""
        while len(client) and (left := until - time.monotonic()) > 0:
            self._serve(client, min(left, 0.1))
        return not len(client)

    def _serve(self, client: Producer, timeout_s: float) -> None:
        """Takes delivery reports. A fatal error is raised here once; that there is no id for a producer which may write nowhere is one."""
        from confluent_kafka import KafkaError as Code
        from confluent_kafka import KafkaException

        try:
            client.poll(timeout_s)
        except KafkaException as error:
            self._denied |= error.args[0].code() == Code.CLUSTER_AUTHORIZATION_FAILED

    def _produce(self, client: Producer, message: Outgoing, note: Any, until: float) -> None:
        while True:
            try:
                client.produce(
                    message.topic,
                    message.value,
                    message.key,
                    partition=message.partition,
                    headers=list(message.headers),
                    on_delivery=note,
                )
            except BufferError:
                if time.monotonic() > until:
                    return
                self._serve(client, 0.05)
            else:
                return


class Publishers:
    """The two ways to publish. Whoever publishes again and again keeps them."""

    def __init__(self, config: KafkaConfig) -> None:
        self.together = Publisher(config)
        self.alone = Publisher(config, alone=True)
        """For messages that were refused together with others."""


def _note(reports: list[Report], number: int, error: KafkaError | None, message: Any) -> None:
    reports[number] = Report(Answer.STORED, message.offset()) if error is None else _failed(error)


def _failed(error: KafkaError) -> Report:
    from confluent_kafka import KafkaError as Code

    text = f"{error.name()}: {error.str()}"
    if error.code() == Code.TOPIC_AUTHORIZATION_FAILED:
        return Report(Answer.BLOCKED, text="WRITE on it is not allowed")
    if error.code() in (
        Code.MSG_SIZE_TOO_LARGE,
        Code.INVALID_MSG,
        Code.INVALID_MSG_SIZE,
        Code.INVALID_RECORD,
        Code.INVALID_TIMESTAMP,
        Code._INVALID_ARG,  # noqa: SLF001 - its public name
    ):
        return Report(Answer.REFUSED, text=text)
    if error.code() in (
        Code.UNKNOWN_TOPIC_OR_PART,
        Code._UNKNOWN_TOPIC,  # noqa: SLF001 - its public name
        Code._UNKNOWN_PARTITION,  # noqa: SLF001 - its public name
        Code.TOPIC_EXCEPTION,
        Code.POLICY_VIOLATION,
    ):
        return Report(Answer.BLOCKED, text=text)
    return Report(Answer.UNKNOWN, text=text)

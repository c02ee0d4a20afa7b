"""One set of client settings, under librdkafka's names, for both clients: librdkafka itself and the JVM's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from tidemark.errors import BadInput
from tidemark.kafka.security import to_jvm, to_librdkafka

Client = TypeVar("Client")

KafkaConfig = Mapping[str, str]
"""librdkafka settings (``bootstrap.servers``, ``security.protocol``, ...), as an Airflow Kafka connection has them in its extra."""

OURS = frozenset(
    {"group.id", "enable.auto.commit", "enable.auto.offset.store", "auto.offset.reset", "isolation.level", "enable.partition.eof"}
)
"""Settings that decide what is read and what is committed: Tidemark sets them, a user's value could lose or double records."""

SAME_IN_THE_JVM = frozenset(
    {
        "bootstrap.servers",
        "client.id",
        "client.rack",
        "request.timeout.ms",
        "metadata.max.age.ms",
    }
)


def checked(config: Mapping[str, object]) -> dict[str, str]:
    """Settings as strings by librdkafka's names, with ``bootstrap.servers`` there and none of those that are Tidemark's; else `BadInput`.

    Security settings may also have the JVM's names (``sasl.jaas.config``, ``ssl.truststore.location``), see `to_librdkafka`.
    """
    settings = to_librdkafka({key: _text(value) for key, value in config.items() if value is not None})
    if not settings.get("bootstrap.servers"):
        raise BadInput(
            what="Kafka settings",
            found="bootstrap.servers is missing",
            fix="Set TIDEMARK_KAFKA_BOOTSTRAP_SERVERS, or bootstrap.servers in the Kafka connection's extra.",
        )
    fixed = sorted(OURS.intersection(settings) - {"group.id"})
    if fixed:
        raise BadInput(
            what=f"Kafka setting {fixed[0]}",
            found=f"it is {settings[fixed[0]]!r}, but offsets are read and committed by Tidemark alone",
            fix="Remove it from the Kafka settings; the consumer's spec says where a partition starts (offset_reset).",
        )
    settings.pop("group.id", None)  # the group is the spec's; Airflow's connection form asks for one all the same
    return settings


def jvm(config: KafkaConfig) -> dict[str, str]:
    """The same settings for the JVM's client (Spark's connector): those of `SAME_IN_THE_JVM`, and security as `to_jvm` translates it.

    Settings that only librdkafka has (queue sizes, callbacks, statistics) are left out. Raises `BadInput` for a security setting
    that has no counterpart, because leaving it out would connect in another way than asked.
    """
    return {key: value for key, value in config.items() if key in SAME_IN_THE_JVM} | to_jvm(config)


def connected(make: Callable[[Any], Client], settings: Mapping[str, str]) -> Client:
    """A client made by ``make``; raises `BadInput` for a setting that librdkafka does not know or cannot use (a file that is missing)."""
    from confluent_kafka import KafkaException

    try:
        return make(dict(settings))
    except KafkaException as error:
        fix = "Correct the Kafka settings (TIDEMARK_KAFKA_CONFIG, or the extra of the Kafka connection)."
        raise BadInput(what="Kafka settings", found=error.args[0].str(), fix=fix) from None


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)

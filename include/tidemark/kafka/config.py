"""One set of client settings with librdkafka's names, for both librdkafka and the JVM's client."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

from tidemark.errors import BadInput
from tidemark.kafka import oauth
from tidemark.kafka.security import to_jvm, to_librdkafka
from tidemark.tokens import TokenSource

Client = TypeVar("Client")

KafkaConfig = Mapping[str, str]
"""librdkafka settings (``bootstrap.servers``, ``security.protocol``, ...), as in the extra of an Airflow Kafka connection, with those of
`tidemark.kafka.oauth`."""

OURS = frozenset(
    {"group.id", "enable.auto.commit", "enable.auto.offset.store", "auto.offset.reset", "isolation.level", "enable.partition.eof"}
)
"""Settings that determine which records are read and committed. Only Tidemark sets them: a user's value could lose or duplicate records."""

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
    """Returns the settings as strings under librdkafka's names. Raises `BadInput` without ``bootstrap.servers``, if one of `OURS` is set,
    or if tokens are needed and nothing says where they come from.

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
            found=f"it is {settings[fixed[0]]!r}, but only Tidemark decides what is read and committed",
            fix="Remove it from the Kafka settings. To choose where a partition starts, set offset_reset in the consumer's spec.",
        )
    oauth.check(settings)
    settings.pop("group.id", None)  # the spec names the group, but Airflow's connection form asks for one too
    return settings


def jvm(config: KafkaConfig) -> dict[str, str]:
    """Returns the settings for the JVM's client (Spark's connector): those of `SAME_IN_THE_JVM`, security as translated by `to_jvm`, and
    ``kafka.sasl.*``, which is for this client alone.

    Omits settings that only librdkafka has (queue sizes, callbacks, statistics). Raises `BadInput` for a security setting without a
    counterpart, because omitting it would change how the client connects, and for tokens that come from Python.
    """
    own = oauth.for_jvm(config)
    if oauth.JVM_CALLBACK in config:  # it logs in instead of librdkafka
        config = {key: value for key, value in config.items() if not key.startswith("sasl.oauthbearer.")}
    return {key: value for key, value in config.items() if key in SAME_IN_THE_JVM} | to_jvm(config) | own


def connected(make: Callable[[Any], Client], settings: Mapping[str, str]) -> Client:
    """Creates a client with ``make``; the only place that does. librdkafka renews its token in a thread of its own.

    Raises `BadInput` for a setting that librdkafka does not know or cannot use (a missing file), and `TokenUnavailable`.
    """
    from confluent_kafka import KafkaException

    known: dict[str, Any] = oauth.librdkafka(settings)
    if (source := oauth.source_of(settings)) is not None:
        source.token()  # an error here says more than a client that waits for its first token
        known["oauth_cb"] = partial(_next_token, source)
    try:
        return make(known)
    except KafkaException as error:
        raise unusable(error.args[0].str()) from None


def _next_token(source: TokenSource, _config: str) -> tuple[str, float | None, str, dict[str, str]]:
    """confluent-kafka's callback."""
    token = oauth.renewed(source)
    return token.value, token.expires_at, token.principal, {}


def unusable(error_text: str) -> BadInput:
    """The error for settings that librdkafka refuses, with librdkafka's own text."""
    fix = "Correct the Kafka settings (TIDEMARK_KAFKA_CONFIG, or the extra of the Kafka connection)."
    return BadInput(what="Kafka settings", found=error_text, fix=fix)


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)

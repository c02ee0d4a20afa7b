"""One set of client settings, under librdkafka's names, for both clients: librdkafka itself and the JVM's."""

from __future__ import annotations

from collections.abc import Mapping

from tidemark.errors import BadInput

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
        "security.protocol",
        "sasl.kerberos.service.name",
        "ssl.endpoint.identification.algorithm",
        "request.timeout.ms",
        "metadata.max.age.ms",
    }
)


def checked(config: Mapping[str, object]) -> dict[str, str]:
    """Settings as strings, with ``bootstrap.servers`` there and none of those that are Tidemark's; else `BadInput`."""
    settings = {key: _text(value) for key, value in config.items() if value is not None}
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
    """The same settings for the JVM's client (Spark's connector). PEM files and user names are put into its form.

    Settings that only librdkafka has (queue sizes, callbacks, statistics) are left out. Raises `BadInput` for a security setting
    that has no counterpart, because leaving it out would connect in another way than asked.
    """
    result = {key: value for key, value in config.items() if key in SAME_IN_THE_JVM}
    mechanism = config.get("sasl.mechanism") or config.get("sasl.mechanisms")
    if mechanism:
        result["sasl.mechanism"] = mechanism
        if "sasl.username" in config:
            module = "plain.PlainLoginModule" if mechanism == "PLAIN" else "scram.ScramLoginModule"
            user, password = _quoted(config["sasl.username"]), _quoted(config.get("sasl.password", ""))
            result["sasl.jaas.config"] = f"org.apache.kafka.common.security.{module} required username={user} password={password};"
    if "ssl.ca.location" in config:
        result |= {"ssl.truststore.type": "PEM", "ssl.truststore.location": config["ssl.ca.location"]}
    if "ssl.ca.pem" in config:
        result |= {"ssl.truststore.type": "PEM", "ssl.truststore.certificates": config["ssl.ca.pem"]}
    if config.get("enable.ssl.certificate.verification", "true").lower() == "false":
        raise BadInput(
            what="Kafka setting enable.ssl.certificate.verification",
            found="the JVM's client, which reads for Spark-form transforms, cannot leave certificates unchecked",
            fix="Give the CA's certificate in ssl.ca.location.",
        )
    unknown = sorted(key for key in config if key.startswith(("ssl.", "sasl.")) and key not in _TRANSLATED and key not in result)
    if unknown:
        raise BadInput(
            what=f"Kafka setting {unknown[0]}",
            found="Spark's connector has no such setting",
            fix="Use ssl.ca.location, sasl.mechanism, sasl.username and sasl.password, or write the transform in the Arrow form.",
        )
    return result


_TRANSLATED = frozenset(
    {
        "sasl.mechanism",
        "sasl.mechanisms",
        "sasl.username",
        "sasl.password",
        "ssl.ca.location",
        "ssl.ca.pem",
        "ssl.endpoint.identification.algorithm",
    }
)


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'

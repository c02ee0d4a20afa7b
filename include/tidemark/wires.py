"""How Postgres, Kafka and Spark are reached across a network, and what is missing there: encryption, or a check of who answers.

Everything that a driver hands to executors carries credentials, because executors write to Postgres and read Kafka themselves. So Spark
is always authenticated, or the user must have said that it need not be (`guarded`). Loopback is no exception: every user of the host can
connect to a port on it. Kafka without TLS and Postgres without ``sslmode=verify-full`` work: the driver logs a warning once a run. Pure
functions; nothing is connected.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from urllib.parse import urlsplit

from tidemark.connections import Connections
from tidemark.db import DatabaseUrl, parsed, read_url
from tidemark.errors import BadInput
from tidemark.kafka.config import KafkaConfig

AUTHENTICATE = "spark.authenticate"
SECRET = "spark.authenticate.secret"  # noqa: S105 - a setting's name
ENCRYPTED_BY = ("spark.network.crypto.enabled", "spark.authenticate.enableSaslEncryption", "spark.ssl.rpc.enabled")
ENCRYPTION = {"spark.network.crypto.enabled": "true", "spark.io.encryption.enabled": "true"}
"""Added to an authenticated application: RPC and shuffles are encrypted on the network, and what Spark spills to disk as well."""

_SHARED = (
    f"Set {AUTHENTICATE} to true and {SECRET} to one value for the master, the workers and this driver "
    "(TIDEMARK_SPARK_CONF_FILE, or conf in the Spark connection's extra)"
)
_GENERATED = f"Set {AUTHENTICATE} to true: Spark generates the secret on YARN and Kubernetes"


@dataclass(frozen=True, slots=True)
class Exposure:
    """A connection that others on the network could read or take over. Its text shows no credentials."""

    found: str
    fix: str

    def __str__(self) -> str:
        return f"{self.found}. {self.fix}."


def of_servers(connections: Connections) -> list[Exposure]:
    """What is missing towards Kafka and Postgres. Raises what `of_postgres` raises."""
    return [*of_kafka(connections.kafka), *of_postgres(connections.database_url)]


def of_kafka(config: KafkaConfig) -> list[Exposure]:
    """Raises nothing: a protocol that librdkafka does not know is refused when a client is made."""
    hosts = _remote(_kafka_host(server) for server in config["bootstrap.servers"].split(","))
    protocol = config.get("security.protocol", "PLAINTEXT").upper()
    if not hosts:
        return []
    if not protocol.endswith("SSL"):
        found = f"Kafka at {hosts} is reached in plain text: security.protocol is {protocol}"
        return [Exposure(found, "Set security.protocol to SASL_SSL or SSL, and ssl.ca.location")]
    unchecked = {"enable.ssl.certificate.verification": ("false", "f", "0"), "ssl.endpoint.identification.algorithm": ("none",)}
    for name, values in unchecked.items():
        if config.get(name, "").lower() in values:
            found = f"Kafka at {hosts} is not verified: {name} is {config[name]}"
            return [Exposure(found, f"Remove {name}, and set ssl.ca.location")]
    return []


def of_postgres(url: DatabaseUrl) -> list[Exposure]:
    """Raises `BadInput` if libpq cannot parse the URL. An ``sslmode`` outside the URL does not count, because executors do not get it."""
    stated = parsed(read_url(url))
    addresses, names = stated.get("hostaddr", "").split(","), stated.get("host", "").split(",")
    hosts = _remote(address or name for address, name in zip_longest(addresses, names, fillvalue=""))
    mode = stated.get("sslmode") or ("verify-full" if stated.get("sslrootcert") == "system" else "prefer")
    if not hosts or mode == "verify-full" or stated.get("gssencmode") == "require":
        return []
    found = f"Postgres at {hosts} is not verified, and may be reached in plain text: sslmode is {mode}"
    return [Exposure(found, "Add sslmode=verify-full and sslrootcert to the database URL, or to the connection's extra")]


def of_spark(master: str, conf: Mapping[str, str]) -> list[Exposure]:
    """``conf``: every setting that is in force, Spark's own configuration included."""
    if not _on(conf, AUTHENTICATE):
        state = "is not set" if AUTHENTICATE not in conf else f"is {conf[AUTHENTICATE]}"
        found = f"Spark at {master} is not authenticated: {AUTHENTICATE} {state}. Tasks carry the credentials of Postgres and Kafka"
        if is_local(master):
            return [
                Exposure(f"{found}, and every user of this host can fetch them", f"Remove {AUTHENTICATE}: then Spark generates a secret")
            ]
        return [Exposure(found, _SHARED if master.startswith("spark://") else _GENERATED)]
    if not on_loopback(master) and not any(_on(conf, name) for name in ENCRYPTED_BY):
        found = f"Spark at {master} is not encrypted: {ENCRYPTED_BY[0]} is {conf.get(ENCRYPTED_BY[0], 'not set')}"
        return [Exposure(found, f"Set {ENCRYPTED_BY[0]} to true")]
    return []


def guarded(master: str, conf: Mapping[str, str]) -> dict[str, str]:
    """What to add to ``conf`` before a driver starts on this master; nothing that ``conf`` decides. In local mode, Spark generates the
    secret that authentication needs.

    Raises `BadInput` if a cluster would be unauthenticated and ``conf`` does not say that it is meant to be.
    """
    if AUTHENTICATE not in conf:
        if is_local(master):
            return {AUTHENTICATE: "true"}
        (exposure,) = of_spark(master, conf)
        accept = f"{exposure.fix}. If everybody who can reach it is trusted, set {AUTHENTICATE} to false."
        raise BadInput(what="Spark", found=exposure.found, fix=accept)
    if not _on(conf, AUTHENTICATE) or is_local(master):
        return {}
    if master.startswith("spark://") and not conf.get(SECRET):
        raise BadInput(what=SECRET, found=f"it is not set, and {AUTHENTICATE} is true", fix=f"{_SHARED}.")
    if on_loopback(master):
        return {}
    encrypted = any(_on(conf, name) for name in ENCRYPTED_BY)
    return {name: value for name, value in ENCRYPTION.items() if name not in conf and not (encrypted and name in ENCRYPTED_BY)}


def is_local(master: str) -> bool:
    """Whether the executors run in the driver's JVM."""
    return re.fullmatch(r"local(\[.*\])?", master) is not None


def on_loopback(master: str) -> bool:
    """Whether the executors reach the driver at 127.0.0.1: in local mode, or in a standalone cluster on this machine alone."""
    if master.startswith("spark://"):
        return not _remote(urlsplit(f"//{each}").hostname or "" for each in master.removeprefix("spark://").split(","))
    return master.startswith("local")


def _remote(hosts: Iterable[str]) -> str:
    """The hosts that are neither this machine's loopback nor Unix sockets, for a text."""
    return ", ".join(host for host in hosts if not _here(host))


def _here(host: str) -> bool:
    if not host or host.startswith(("/", "@")) or host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]").partition("%")[0]).is_loopback
    except ValueError:
        return False


def _kafka_host(server: str) -> str:
    """The host of one bootstrap server, which librdkafka takes with or without a protocol and a port."""
    address = server.strip().rpartition("://")[2]
    return address if address.count(":") > 1 and not address.startswith("[") else urlsplit(f"//{address}").hostname or address


def _on(conf: Mapping[str, str], name: str) -> bool:
    return conf.get(name, "").strip().lower() == "true"

"""Checks connections to Postgres, Kafka and Spark across a network for missing encryption or server verification.

Everything that a driver hands to executors carries credentials, because executors write to Postgres and read Kafka themselves. So Spark
is always authenticated, unless the user has explicitly turned that off (`guarded`). Loopback is no exception: every user of the host can
connect to its ports. Kafka without TLS and Postgres without ``sslmode=verify-full`` work: the driver logs a warning once a run. The
functions are pure and connect nowhere.
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
"""Added to an authenticated application: encrypts RPC and shuffles on the network, and Spark's spills to disk."""

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
    """The exposures of Kafka and Postgres. Raises the errors of `of_postgres`."""
    return [*of_kafka(connections.kafka), *of_postgres(connections.database_url)]


def of_kafka(config: KafkaConfig) -> list[Exposure]:
    """The exposures of Kafka. Raises nothing: creating a client refuses an unknown protocol."""
    hosts = _remote(_kafka_host(server) for server in config["bootstrap.servers"].split(","))
    protocol = config.get("security.protocol", "PLAINTEXT").upper()
    if not hosts:
        return []
    if not protocol.endswith("SSL"):
        problem = f"Kafka at {hosts} is reached in plain text: security.protocol is {protocol}"
        return [Exposure(problem, "Set security.protocol to SASL_SSL or SSL, and ssl.ca.location")]
    unchecked = {"enable.ssl.certificate.verification": ("false", "f", "0"), "ssl.endpoint.identification.algorithm": ("none",)}
    for name, values in unchecked.items():
        if config.get(name, "").lower() in values:
            problem = f"Kafka at {hosts} is not verified: {name} is {config[name]}"
            return [Exposure(problem, f"Remove {name}, and set ssl.ca.location")]
    return []


def of_postgres(url: DatabaseUrl) -> list[Exposure]:
    """The exposures of Postgres. Ignores an ``sslmode`` outside the URL, because executors do not get it. Raises `BadInput` for a URL that
    libpq cannot parse."""
    parts = parsed(read_url(url))
    addresses, names = parts.get("hostaddr", "").split(","), parts.get("host", "").split(",")
    hosts = _remote(address or name for address, name in zip_longest(addresses, names, fillvalue=""))
    mode = parts.get("sslmode") or ("verify-full" if parts.get("sslrootcert") == "system" else "prefer")
    if not hosts or mode == "verify-full" or parts.get("gssencmode") == "require":
        return []
    problem = f"Postgres at {hosts} is not verified, and may be reached in plain text: sslmode is {mode}"
    return [Exposure(problem, "Add sslmode=verify-full and sslrootcert to the database URL, or to the connection's extra")]


def of_spark(master: str, conf: Mapping[str, str]) -> list[Exposure]:
    """The exposures of Spark. ``conf``: all effective settings, Spark's own configuration included."""
    if not _on(conf, AUTHENTICATE):
        state = "is not set" if AUTHENTICATE not in conf else f"is {conf[AUTHENTICATE]}"
        problem = f"Spark at {master} is not authenticated: {AUTHENTICATE} {state}. Tasks carry the credentials of Postgres and Kafka"
        if is_local(master):
            return [
                Exposure(f"{problem}, and every user of this host can fetch them", f"Remove {AUTHENTICATE}: then Spark generates a secret")
            ]
        return [Exposure(problem, _SHARED if master.startswith("spark://") else _GENERATED)]
    if not on_loopback(master) and not any(_on(conf, name) for name in ENCRYPTED_BY):
        problem = f"Spark at {master} is not encrypted: {ENCRYPTED_BY[0]} is {conf.get(ENCRYPTED_BY[0], 'not set')}"
        return [Exposure(problem, f"Set {ENCRYPTED_BY[0]} to true")]
    return []


def guarded(master: str, conf: Mapping[str, str]) -> dict[str, str]:
    """The security settings to add to ``conf`` before a driver starts on this master; never overrides ``conf``. In local mode, Spark
    generates the secret that authentication needs.

    Raises `BadInput` if a cluster would be unauthenticated and ``conf`` does not explicitly allow that.
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
        return not _remote(urlsplit(f"//{address}").hostname or "" for address in master.removeprefix("spark://").split(","))
    return master.startswith("local")


def _remote(hosts: Iterable[str]) -> str:
    """The hosts that are neither loopback nor Unix sockets, for a message."""
    return ", ".join(host for host in hosts if not _here(host))


def _here(host: str) -> bool:
    if not host or host.startswith(("/", "@")) or host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]").partition("%")[0]).is_loopback
    except ValueError:
        return False


def _kafka_host(server: str) -> str:
    """The host of one bootstrap server, whose protocol and port are optional."""
    address = server.strip().rpartition("://")[2]
    return address if address.count(":") > 1 and not address.startswith("[") else urlsplit(f"//{address}").hostname or address


def _on(conf: Mapping[str, str], name: str) -> bool:
    return conf.get(name, "").strip().lower() == "true"

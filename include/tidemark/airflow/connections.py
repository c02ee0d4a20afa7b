"""Converts Airflow connections to Tidemark's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlencode

from tidemark.connections import DEPLOY_MODE, Connections, on_cluster
from tidemark.db import PASSWORD_SOURCES
from tidemark.errors import BadInput
from tidemark.kafka.config import checked
from tidemark.spec import ConsumerSpec

if TYPE_CHECKING:
    from airflow.sdk import Connection

LIBPQ = frozenset(
    {
        "channel_binding",
        "gssdelegation",
        "gssencmode",
        "gsslib",
        "hostaddr",
        "krbsrvname",
        "load_balance_hosts",
        "options",
        "passfile",
        "require_auth",
        "requirepeer",
        "service",
        "sslcert",
        "sslcertmode",
        "sslcrl",
        "sslcrldir",
        "sslkey",
        "sslmode",
        "sslnegotiation",
        "sslpassword",
        "sslrootcert",
        "sslsni",
        "ssl_max_protocol_version",
        "ssl_min_protocol_version",
        "target_session_attrs",
        "tcp_user_timeout",
    }
)
"""Keys of a Postgres connection's extra that are passed to libpq. All others belong to Airflow or SQLAlchemy."""


def resolve(spec: ConsumerSpec) -> Connections:
    """Resolves a spec's connections. Raises `BadInput` if one does not exist or cannot be used; the error contains no secret."""
    registry_settings = registry(spec) if spec.format.uses_registry else None
    return Connections(database_url(spec), kafka(spec), *spark_settings(_get(spec, "spark")), registry_settings)


def registry(spec: ConsumerSpec) -> dict[str, Any]:
    """The settings of the consumer's schema registry."""
    return registry_config(_get(spec, "registry"))


def kafka(spec: ConsumerSpec) -> dict[str, str]:
    """librdkafka's settings of the consumer's Kafka connection."""
    return kafka_config(_get(spec, "kafka"))


def database_url(spec: ConsumerSpec) -> str:
    """The URL of the consumer's Postgres connection, including the libpq settings and the source of its password in its extra."""
    return postgres_url(_get(spec, "postgres"))


def postgres_url(connection: Connection) -> str:
    """Formats a Postgres connection as a URL (`tidemark.db.DatabaseUrl`)."""
    login = quote(connection.login or "", safe="")
    if connection.password:
        login += ":" + quote(connection.password, safe="")
    extra = {key: str(value) for key, value in connection.extra_dejson.items() if key in LIBPQ or key in PASSWORD_SOURCES}
    host = connection.host or ""
    if host.startswith("/"):  # the directory of a Unix socket
        extra["host"], host = host, ""
    port = f":{connection.port}" if connection.port else ""
    address = ",".join(_address(name, port) for name in host.split(","))
    query = f"?{urlencode(extra, quote_via=quote)}" if extra else ""  # libpq does not decode "+" to a space
    return f"postgresql://{login}{'@' if login else ''}{address}/{quote(connection.schema or '', safe='')}{query}"


def kafka_config(connection: Connection) -> dict[str, str]:
    """librdkafka's settings. Like Airflow's Kafka provider, reads them all from the extra."""
    try:
        return checked(connection.extra_dejson)
    except BadInput as error:
        raise replace(error, what=f"connection {connection.conn_id}: {error.what}") from None


def registry_config(connection: Connection) -> dict[str, Any]:
    """The settings of the registry's client, from an HTTP connection's address and login. Its extra has further settings, by the names of
    confluent-kafka's client: ``ssl.ca.location``."""
    host = connection.host or ""
    settings: dict[str, Any] = dict(connection.extra_dejson)
    if host:
        port = f":{connection.port}" if connection.port else ""
        settings["url"] = host if "://" in host else f"{connection.schema or 'http'}://{_address(host, port)}"
    if not settings.get("url"):
        raise BadInput(
            what=f"connection {connection.conn_id}",
            found="it has no host",
            fix="Set the registry's URL as the host: https://registry:8081.",
        )
    if connection.login:
        settings["basic.auth.user.info"] = f"{connection.login}:{connection.password or ''}"
    return settings


def spark_settings(connection: Connection) -> tuple[str, Mapping[str, str]]:
    """The master and settings of a Spark connection. The host is ``local[*]``, ``spark://host``, ``yarn`` or ``k8s://...``; settings are
    under ``conf`` in the extra. ``deploy-mode: cluster`` becomes the setting `DEPLOY_MODE`."""
    extra = connection.extra_dejson
    settings = extra.get("conf") or {}
    if not isinstance(settings, Mapping):
        raise BadInput(
            what=f"connection {connection.conn_id}",
            found="conf in its extra is not a mapping",
            fix='Write Spark settings by name: {"conf": {"spark.executor.memory": "4g"}}.',
        )
    conf = {key: str(value).lower() if isinstance(value, bool) else str(value) for key, value in settings.items()}
    named = {
        "deploy-mode": extra.get("deploy-mode"),
        "deploy_mode": extra.get("deploy_mode"),
        f"{DEPLOY_MODE} in conf": conf.pop(DEPLOY_MODE, None),
    }
    modes = {name: str(mode) for name, mode in named.items() if mode}
    if len(set(modes.values())) > 1:
        raise BadInput(
            what=f"connection {connection.conn_id}",
            found=f"it names several deploy modes: {', '.join(f'{name} is {mode}' for name, mode in modes.items())}",
            fix="Keep deploy-mode only.",
        )
    master = connection.host or "local[*]"
    if connection.port:
        master = f"{master}:{connection.port}"
    if master.partition(":")[0] not in ("local", "spark", "k8s", "yarn") and not master.startswith("local["):
        master = f"spark://{master}"
    if (mode := next(iter(modes.values()), "client")) != "client":
        conf[DEPLOY_MODE] = mode
    on_cluster(master, conf, f"connection {connection.conn_id}")
    if queue := extra.get("queue"):
        conf.setdefault("spark.yarn.queue", str(queue))
    return master, conf


def _address(host: str, port: str) -> str:
    """A host as written in a URL, with the connection's port unless the host has its own."""
    if host.startswith("["):
        return host if "]:" in host else host + port
    if host.count(":") > 1:  # an IPv6 address
        return f"[{host}]{port}"
    return host if ":" in host else host + port


def _get(spec: ConsumerSpec, kind: str) -> Connection:
    from airflow.sdk import BaseHook

    from tidemark.airflow.version_compat import AirflowNotFoundException

    conn_id: str = getattr(spec.connections, kind)
    try:
        return BaseHook.get_connection(conn_id)
    except AirflowNotFoundException as error:
        raise BadInput(
            what=f"connection {conn_id}",
            found=f"not found in Airflow; {spec.name} uses it for {kind}",
            fix=f"Add it under Admin > Connections, or name another in the consumer's file: connections: {{{kind}: ...}}.",
        ) from error

"""The addresses of Postgres, Kafka and Spark, from environment variables.

``tidemark local env`` prints these variables for the embedded stack. The Airflow operator sets them for the driver that it starts, from the
consumer's connections. Credentials travel only this way, or in the files that `FILES` name: never as arguments, never through XCom.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from tidemark import secret
from tidemark.db import PASSWORD_CALLABLE, PASSWORD_COMMAND, DatabaseUrl, read_url, with_parameter
from tidemark.errors import BadInput
from tidemark.formats.registry import RegistryConfig
from tidemark.kafka.config import KafkaConfig, checked

DATABASE_URL = "TIDEMARK_DATABASE_URL"
PASSWORD_VARIABLES = {
    "TIDEMARK_DATABASE_PASSWORD_COMMAND": PASSWORD_COMMAND,
    "TIDEMARK_DATABASE_PASSWORD_CALLABLE": PASSWORD_CALLABLE,
}
"""The variables that say where the database's password comes from, with the parameter of the URL in which they travel on."""
BOOTSTRAP_SERVERS = "TIDEMARK_KAFKA_BOOTSTRAP_SERVERS"
KAFKA_CONFIG = "TIDEMARK_KAFKA_CONFIG"
SPARK_MASTER = "TIDEMARK_SPARK_MASTER"
SPARK_CONF = "TIDEMARK_SPARK_CONF"
REGISTRY_URL = "TIDEMARK_REGISTRY_URL"
REGISTRY_CONFIG = "TIDEMARK_REGISTRY_CONFIG"
FILES = {
    DATABASE_URL: "TIDEMARK_DATABASE_URL_FILE",
    KAFKA_CONFIG: "TIDEMARK_KAFKA_CONFIG_FILE",
    SPARK_CONF: "TIDEMARK_SPARK_CONF_FILE",
    REGISTRY_CONFIG: "TIDEMARK_REGISTRY_CONFIG_FILE",
}
"""The variables that name a file with the value instead. A driver rereads the first two files for each batch and each session."""

DEPLOY_MODE = "spark.submit.deployMode"
"""The Spark setting that says where drivers run: ``client``, beside their caller (the default), or ``cluster``."""

_ADDRESS_FIX = 'Set it, or point every command at the embedded stack: tidemark local up && eval "$(tidemark local env)"'


@dataclass(frozen=True, slots=True)
class Connections:
    """Addresses and credentials of one consumer. Its `repr` shows no credentials."""

    database_url: DatabaseUrl = field(repr=False)
    kafka: KafkaConfig = field(repr=False)
    spark_master: str = "local[*]"
    spark_conf: Mapping[str, str] = field(default_factory=dict, repr=False)
    registry: RegistryConfig | None = field(default=None, repr=False)
    kafka_file: Path | None = None
    """The file from which `kafka` was read."""

    def env(self) -> dict[str, str]:
        """The variables from which `from_env` reads these connections. Empty values override inherited variables."""
        sources = {
            DATABASE_URL: self.database_url,
            KAFKA_CONFIG: self.kafka_file or _as_json({key: value for key, value in self.kafka.items() if key != "bootstrap.servers"}),
            SPARK_CONF: _as_json(self.spark_conf),
            REGISTRY_CONFIG: _as_json({key: value for key, value in (self.registry or {}).items() if key != "url"}),
        }
        values = {name: "" if isinstance(value, Path) else value for name, value in sources.items()}
        files = {FILES[name]: str(value) if isinstance(value, Path) else "" for name, value in sources.items()}
        registry = {REGISTRY_URL: "" if self.registry is None else self.registry["url"]}
        passwords = dict.fromkeys(PASSWORD_VARIABLES, "")  # the URL has them
        return {
            **values,
            **files,
            **passwords,
            **registry,
            BOOTSTRAP_SERVERS: self.kafka["bootstrap.servers"],
            SPARK_MASTER: self.spark_master,
        }

    def read(self) -> Connections:
        """Rereads the files. The result names no file."""
        kafka = self.kafka if self.kafka_file is None else kafka_config(self.env())
        return replace(self, database_url=read_url(self.database_url), kafka=kafka, kafka_file=None)


def database_url(env: Mapping[str, str] = os.environ) -> DatabaseUrl:
    """The database that holds the sinks and the ``tidemark`` schema, with the source of its password. Raises `BadInput`."""
    url = env.get(DATABASE_URL)
    if file := _file(env, DATABASE_URL):
        for name in filter(env.get, PASSWORD_VARIABLES):
            fix = f"Set {DATABASE_URL} to the URL without a password."
            raise BadInput(what=name, found=f"{FILES[DATABASE_URL]} is set too", fix=fix)
        return file
    if not url:
        raise BadInput(what=DATABASE_URL, found="it is not set", fix=_ADDRESS_FIX)
    for name, parameter in PASSWORD_VARIABLES.items():
        if value := env.get(name):
            url = with_parameter(url, parameter, value)
    return url


def kafka_config(env: Mapping[str, str] = os.environ) -> dict[str, str]:
    """librdkafka's settings. Raises `BadInput` for settings that are missing, invalid or reserved for Tidemark."""
    settings = _json(env, KAFKA_CONFIG)
    if servers := env.get(BOOTSTRAP_SERVERS):
        settings["bootstrap.servers"] = servers
    if not settings.get("bootstrap.servers"):
        raise BadInput(what=BOOTSTRAP_SERVERS, found="it is not set", fix=_ADDRESS_FIX)
    return checked(settings)


def from_env(env: Mapping[str, str] = os.environ) -> Connections:
    """All connections. Raises `BadInput` with the variable's name, and `SecretUnreadable`."""
    conf = {key: str(value) for key, value in _json(env, SPARK_CONF).items()}
    master = env.get(SPARK_MASTER) or "local[*]"
    return Connections(database_url(env), kafka_config(env), master, conf, registry_config(env), _file(env, KAFKA_CONFIG))


def registry_config(env: Mapping[str, str] = os.environ) -> dict[str, object] | None:
    """The settings of the schema registry's client; None without a URL. Raises `BadInput`."""
    settings = _json(env, REGISTRY_CONFIG)
    if url := env.get(REGISTRY_URL):
        settings["url"] = url
    return settings if settings.get("url") else None


def on_cluster(master: str, conf: Mapping[str, str], what: str = DEPLOY_MODE) -> bool:
    """Whether drivers with these settings run on the cluster. ``what`` names the settings in an error. Raises `BadInput`."""
    mode = conf.get(DEPLOY_MODE) or "client"
    if mode not in ("client", "cluster"):
        raise BadInput(what=what, found=f"its deploy mode is {mode}", fix="Write client or cluster.")
    master = conf.get("spark.master", master)
    if mode == "cluster" and master != "yarn" and not master.startswith("k8s://"):
        fix = "Set the master to yarn or k8s://https://host:port, or the deploy mode to client."
        raise BadInput(what=what, found=f"its deploy mode is cluster, and {master} cannot run drivers", fix=fix)
    return mode == "cluster"


def _file(env: Mapping[str, str], name: str) -> Path | None:
    """The file that holds the variable's value, if any. Raises `BadInput` if the variable is set too."""
    path = env.get(FILES[name])
    if path and env.get(name):
        raise BadInput(what=FILES[name], found=f"{name} is set too", fix="Set one of them.")
    return Path(path).absolute() if path else None


def _json(env: Mapping[str, str], name: str) -> dict[str, object]:
    file = _file(env, name)
    text = env.get(name) if file is None else secret.read(file)
    what = name if file is None else f"{FILES[name]} ({file})"
    if not text:
        return {}
    try:
        value = json.loads(text)
    except ValueError as error:
        raise BadInput(what=what, found=f"it is not JSON ({error})", fix='Write an object of settings: {"client.id": "loader"}') from None
    if not isinstance(value, dict):
        raise BadInput(what=what, found="it is JSON, but not an object", fix='Write an object of settings: {"client.id": "loader"}')
    return value


def _as_json(settings: Mapping[str, str]) -> str:
    return json.dumps(dict(settings))

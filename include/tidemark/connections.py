"""The addresses of Postgres, Kafka and Spark, from environment variables.

``tidemark local env`` prints these variables for the embedded stack. The Airflow operator sets them for the driver that it starts, from the
consumer's connections. Credentials travel only this way: never as arguments, never through XCom.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from tidemark.errors import BadInput
from tidemark.kafka.config import KafkaConfig, checked

DATABASE_URL = "TIDEMARK_DATABASE_URL"
BOOTSTRAP_SERVERS = "TIDEMARK_KAFKA_BOOTSTRAP_SERVERS"
KAFKA_CONFIG = "TIDEMARK_KAFKA_CONFIG"
SPARK_MASTER = "TIDEMARK_SPARK_MASTER"
SPARK_CONF = "TIDEMARK_SPARK_CONF"

_POINT_AT = 'Set it, or point every command at the embedded stack: tidemark local up && eval "$(tidemark local env)"'


@dataclass(frozen=True, slots=True)
class Connections:
    """Addresses and credentials of one consumer. Its `repr` shows no credentials."""

    database_url: str = field(repr=False)
    kafka: KafkaConfig = field(repr=False)
    spark_master: str = "local[*]"
    spark_conf: Mapping[str, str] = field(default_factory=dict, repr=False)

    def env(self) -> dict[str, str]:
        """The variables from which `from_env` reads these connections."""
        return {
            DATABASE_URL: self.database_url,
            BOOTSTRAP_SERVERS: self.kafka["bootstrap.servers"],
            KAFKA_CONFIG: json.dumps({key: value for key, value in self.kafka.items() if key != "bootstrap.servers"}),
            SPARK_MASTER: self.spark_master,
            SPARK_CONF: json.dumps(dict(self.spark_conf)),
        }


def database_url(env: Mapping[str, str] = os.environ) -> str:
    """The database that holds the sinks and the ``tidemark`` schema. Raises `BadInput` if it is not set."""
    url = env.get(DATABASE_URL)
    if not url:
        raise BadInput(what=DATABASE_URL, found="it is not set", fix=_POINT_AT)
    return url


def kafka_config(env: Mapping[str, str] = os.environ) -> dict[str, str]:
    """librdkafka's settings. Raises `BadInput` for settings that are missing, invalid or reserved for Tidemark."""
    settings = _json(env, KAFKA_CONFIG)
    if servers := env.get(BOOTSTRAP_SERVERS):
        settings["bootstrap.servers"] = servers
    if not settings.get("bootstrap.servers"):
        raise BadInput(what=BOOTSTRAP_SERVERS, found="it is not set", fix=_POINT_AT)
    return checked(settings)


def from_env(env: Mapping[str, str] = os.environ) -> Connections:
    """All connections. Raises `BadInput` with the variable's name."""
    conf = {key: str(value) for key, value in _json(env, SPARK_CONF).items()}
    return Connections(database_url(env), kafka_config(env), env.get(SPARK_MASTER) or "local[*]", conf)


def _json(env: Mapping[str, str], name: str) -> dict[str, object]:
    text = env.get(name)
    if not text:
        return {}
    try:
        value = json.loads(text)
    except ValueError as error:
        raise BadInput(what=name, found=f"it is not JSON ({error})", fix='Write an object of settings: {"client.id": "loader"}') from None
    if not isinstance(value, dict):
        raise BadInput(what=name, found="it is JSON, but not an object", fix='Write an object of settings: {"client.id": "loader"}')
    return value

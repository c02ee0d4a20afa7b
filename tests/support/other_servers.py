"""Servers of other versions than ``tidemark local`` starts, for the matrix (`tests.matrix`).

``TIDEMARK_TEST_POSTGRES_PROGRAMS`` names the folder of Postgres' programs, ``TIDEMARK_TEST_KAFKA_JARS`` a folder with a broker's jars.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

from tidemark.local import ports, stack
from tidemark.local.kafka import Kafka
from tidemark.local.postgres import Postgres
from tidemark.local.server import Report

VARIABLES = {"postgres": "TIDEMARK_TEST_POSTGRES_PROGRAMS", "kafka": "TIDEMARK_TEST_KAFKA_JARS"}
BUILTIN_COLLATIONS = 17
"""The first Postgres that has collations of its own; before it, those of the C library are the same for the tests."""
KRAFT = 3
"""The first Kafka whose brokers have transactions without ZooKeeper."""
KRAFT_SETTINGS = ("process.roles", "node.id", "controller.", "listener")
TIMESTAMPS_AFTER = (3, 6)
"""The first Kafka with the topic setting ``message.timestamp.after.max.ms``."""


class OtherPostgres(Postgres):
    def programs(self) -> Path:
        return Path(os.environ[VARIABLES["postgres"]])


class OtherKafka(Kafka):
    def jars(self, report: Report | None = None) -> list[Path]:
        return sorted(Path(os.environ[VARIABLES["kafka"]]).glob("*.jar"))

    def version(self) -> str | None:
        (jar,) = (jar for jar in self.jars() if jar.name.startswith("kafka_2.13-"))
        return jar.stem.removeprefix("kafka_2.13-")


class KafkaWithZooKeeper(OtherKafka):
    """One JVM runs the broker and its ZooKeeper."""

    program = str(Path(__file__).with_name("KafkaWithZooKeeper.java"))

    def _initialise(self, fresh: Path) -> str | None:
        fresh.mkdir()
        return None

    def settings(self, port: int, controller_port: int) -> dict[str, str]:
        kept = {key: value for key, value in super().settings(port, controller_port).items() if not key.startswith(KRAFT_SETTINGS)}
        return kept | {
            "broker.id": "1",
            "zookeeper.connect": f"{ports.HOST}:{controller_port}",
            "zookeeper.session.timeout.ms": "6000",
            "listeners": f"PLAINTEXT://{ports.HOST}:{port}",
        }


def known(settings: Mapping[str, str]) -> dict[str, str]:
    """The topic settings that the brokers know. Without the one on timestamps they have no limit, which is what the tests ask for."""
    if not os.environ.get(VARIABLES["kafka"]):
        return dict(settings)
    version = tuple(map(int, (OtherKafka(Path(), None).version() or "0").split(".")))
    return {name: value for name, value in settings.items() if version >= TIMESTAMPS_AFTER or name != "message.timestamp.after.max.ms"}


def use() -> None:
    """From now on, each `LocalStack` has the servers that the environment names."""
    if programs := os.environ.get(VARIABLES["postgres"]):
        answer = subprocess.run([Path(programs) / "postgres", "--version"], capture_output=True, text=True, check=True).stdout
        if int(answer.split()[2].partition(".")[0]) < BUILTIN_COLLATIONS:
            OtherPostgres.collation = ("--locale=C.UTF-8",)
        stack.Postgres = OtherPostgres  # type: ignore[attr-defined]
    if os.environ.get(VARIABLES["kafka"]):
        version = OtherKafka(Path(), None).version() or ""
        stack.Kafka = OtherKafka if int(version.partition(".")[0]) >= KRAFT else KafkaWithZooKeeper  # type: ignore[attr-defined]

"""One Kafka 4 process, broker and controller (KRaft), on loopback, sized for a laptop.

It runs in its folder, and its settings use relative paths, so that no character in the path can break them.
"""

from __future__ import annotations

import base64
import secrets
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import ClassVar

from tidemark.jvm.jars import KAFKA, broker_jars
from tidemark.jvm.java import LIGHT, find_java
from tidemark.local import ports, processes
from tidemark.local.server import Report, Server

_HEAP = "-Xmx512m"
_FORMAT_LIMIT_S = 120
_ANSWER_S = 2.0

_SETTINGS = {
    "process.roles": "broker,controller",
    "node.id": "1",
    "controller.listener.names": "CONTROLLER",
    "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT",
    # one broker can hold one replica
    "offsets.topic.replication.factor": "1",
    "transaction.state.log.replication.factor": "1",
    "transaction.state.log.min.isr": "1",
    "share.coordinator.state.topic.replication.factor": "1",
    "share.coordinator.state.topic.min.isr": "1",
    # 50 each by default, all created when the first offset or transaction is stored
    "offsets.topic.num.partitions": "4",
    "transaction.state.log.num.partitions": "4",
    "share.coordinator.state.topic.num.partitions": "4",
    # do not wait for further members of a new group
    "group.initial.rebalance.delay.ms": "0",
    # 9 s by default. After kill -9, the broker registers again when its old session has expired, which must precede its check for timed-out
    # transactions, 10 s after its start: without leaders, it drops the markers of the transactions that it ends, and they stay open
    "broker.session.timeout.ms": "6000",
    "broker.heartbeat.interval.ms": "500",
    # a mistyped topic is an error, not a new topic
    "auto.create.topics.enable": "false",
    # 128 MB by default, a quarter of the heap
    "log.cleaner.dedupe.buffer.size": str(16 * 1024 * 1024),
}


def cluster_id() -> str:
    """16 random bytes in Kafka's encoding. As in Kafka's ``Uuid.randomUuid``, never with a leading dash, which would begin an option."""
    random = secrets.token_bytes(16)
    return base64.urlsafe_b64encode(bytes([random[0] & 0x7F]) + random[1:]).decode().rstrip("=")


class Kafka(Server):
    name = "Kafka"
    option = "--kafka-port"
    stop_limit_s: ClassVar[float] = 30
    program: ClassVar[str] = "kafka.Kafka"
    """The class that runs the broker."""

    @property
    def signature(self) -> processes.Signature:
        return processes.Signature(program="java", argument=f"-Dtidemark.kafka={self.folder}")

    def prepare(self, report: Report) -> None:
        find_java()
        self.jars(report)

    def jars(self, report: Report | None = None) -> list[Path]:
        return broker_jars(report)

    def bootstrap_servers(self) -> str:
        """The clients' address. Raises `NotUp` if the broker does not run."""
        return f"{ports.HOST}:{self.port()}"

    def _answers(self, port: int) -> bool:
        from confluent_kafka import KafkaException
        from confluent_kafka.admin import AdminClient

        client = AdminClient({"bootstrap.servers": f"{ports.HOST}:{port}", "log_level": 0, "socket.timeout.ms": int(_ANSWER_S * 1000)})
        try:
            return len(client.list_topics(timeout=_ANSWER_S).brokers) == 1
        except KafkaException:
            return False

    def version(self) -> str | None:
        return KAFKA.revision("kafka_2.13")

    def _initialise(self, fresh: Path) -> str | None:
        settings = f"{fresh.name}.properties"
        self._write_settings(settings, 9092, 9093, fresh.name)
        command = [*self._java(), "kafka.tools.StorageTool", "format", "-t", cluster_id(), "-c", settings]
        return processes.run(command, folder=self.folder, limit_s=_FORMAT_LIMIT_S)

    def _launch(self, port: int) -> int:
        saved = self.remembered()
        controller_port = saved.controller_port
        if controller_port is None or controller_port == port or not ports.is_free(controller_port):
            controller_port = ports.find_free(exclude={port})
        self.remember(replace(saved, controller_port=controller_port))
        self._write_settings("server.properties", port, controller_port, self.data.name)
        command = [*self._java(_HEAP, self.signature.argument), self.program, "server.properties"]
        return processes.spawn(command, log=self.log, folder=self.folder)

    def _java(self, *options: str) -> list[str]:
        (self.folder / "log4j2.properties").write_text(resources.files("tidemark.local").joinpath("log4j2.properties").read_text())
        classes = str(self.jars()[0].parent / "*")
        return [str(find_java()), *options, *LIGHT, self.own_tmp(), "-Dlog4j2.configurationFile=log4j2.properties", "-cp", classes]

    def _write_settings(self, name: str, port: int, controller_port: int, data: str) -> None:
        settings = self.settings(port, controller_port) | {"log.dirs": data}
        (self.folder / name).write_text("".join(f"{key}={value}\n" for key, value in settings.items()))

    def settings(self, port: int, controller_port: int) -> dict[str, str]:
        """The broker's settings, without the folder of its data."""
        return {
            **_SETTINGS,
            "listeners": f"PLAINTEXT://{ports.HOST}:{port},CONTROLLER://{ports.HOST}:{controller_port}",
            "advertised.listeners": f"PLAINTEXT://{ports.HOST}:{port}",
            "controller.quorum.voters": f"1@{ports.HOST}:{controller_port}",
        }

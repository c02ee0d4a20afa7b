"""One of three Kafka brokers is unavailable: lookups continue with the other two."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import AdminClient, NewTopic
from tests.support.kafka_topics import TRY_S, administer
from tests.support.waiting import until

from tidemark.kafka.cluster import Cluster
from tidemark.local import ports, processes
from tidemark.local.kafka import Kafka, cluster_id

HEAP = "-Xmx256m"


class Node(Kafka):
    """One of the three brokers. ``voters`` lists all of them."""

    def __init__(self, folder: Path, number: int, port: int, controller_port: int, voters: str, cluster: str) -> None:
        super().__init__(folder, port)
        self.number, self._voters, self._cluster = number, voters, cluster
        folder.mkdir()
        self.remember(replace(self.remembered(), controller_port=controller_port))

    def answers(self) -> bool:
        return ports.accepts(self.requested_port)

    def freeze(self) -> None:
        """Stops the process, which keeps its connections but no longer responds."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def revive(self) -> None:
        """Starts or thaws the broker after a kill or freeze. Returns when it runs."""
        if self.process() is None:
            self.start(lambda _: None)
        self.thaw()
        self.wait(lambda _: None)

    def _signal(self, number: int) -> None:
        process = self.process()
        if process is not None:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def _initialise(self, fresh: Path) -> str | None:
        settings = f"{fresh.name}.properties"
        self._write_settings(settings, 9092, 9093, fresh.name)
        command = [*self._java(), "kafka.tools.StorageTool", "format", "-t", self._cluster, "-c", settings]
        return processes.run(command, folder=self.folder, limit_s=120)

    def _java(self, *options: str) -> list[str]:
        return super()._java(*(HEAP if option.startswith("-Xmx") else option for option in options))

    def settings(self, port: int, controller_port: int) -> dict[str, str]:
        own = {"node.id": str(self.number), "controller.quorum.voters": self._voters, "log.cleaner.dedupe.buffer.size": "4194304"}
        return super().settings(port, controller_port) | own


class Trio:
    def __init__(self, nodes: list[Node]) -> None:
        self.nodes = nodes

    @property
    def servers(self) -> str:
        return ",".join(f"{ports.HOST}:{node.requested_port}" for node in self.nodes)

    def create(self, name: str, partitions: int) -> str:
        """Creates a topic with a replica on each broker. Returns when the brokers list its partitions."""
        wanted = NewTopic(name, partitions, 3)
        administer(self.servers, lambda admin: admin.create_topics([wanted], request_timeout=TRY_S), done=KafkaError.TOPIC_ALREADY_EXISTS)
        admin = AdminClient({"bootstrap.servers": self.servers, "log_level": 0})
        until(lambda: len(admin.list_topics(name, timeout=10).topics[name].partitions) == partitions, "the topic is there")
        return name

    @property
    def is_complete(self) -> bool:
        """Whether each broker knows all three."""
        return all(_brokers_known_to(node) == 3 for node in self.nodes)

    def has_lost(self, lost: Node) -> bool:
        """Whether the two others no longer list this broker. Until then, they may name it as controller even to a new client."""
        return all(_brokers_known_to(node) == 2 for node in self.nodes if node is not lost)


@pytest.fixture(scope="module")
def trio(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trio]:
    """Three brokers on loopback that are also controllers: a cluster that can lose one of them and continue."""
    folder = tmp_path_factory.mktemp("trio")
    taken: list[int] = []
    while len(taken) < 6:
        taken.append(ports.find_free(exclude=taken))
    voters = ",".join(f"{number + 1}@{ports.HOST}:{taken[2 * number + 1]}" for number in range(3))
    cluster = cluster_id()
    nodes = [Node(folder / f"kafka-{n + 1}", n + 1, taken[2 * n], taken[2 * n + 1], voters, cluster) for n in range(3)]
    try:
        for node in nodes:
            node.prepare(lambda _: None)
            node.start(lambda _: None)
        for node in nodes:
            node.wait(lambda _: None)
        trio = Trio(nodes)
        until(lambda: trio.is_complete, "three brokers have found each other", within_s=90)
        yield trio
    finally:
        for node in nodes:
            node.thaw()
            node.kill()


def _brokers_known_to(node: Node) -> int:
    try:
        client = AdminClient({"bootstrap.servers": f"{ports.HOST}:{node.requested_port}", "log_level": 0})
        return len(client.list_topics(timeout=5).brokers)
    except KafkaException:
        return 0


def controller(cluster: Cluster, trio: Trio) -> Node:
    """The broker that the client's metadata names as controller. In KRaft it may be any broker that is up."""
    number = cluster.admin().list_topics(timeout=10).controller_id
    return next(node for node in trio.nodes if node.number == number)


@pytest.mark.thorough
@pytest.mark.sampled
@pytest.mark.parametrize("strike", [Node.freeze, Node.kill], ids=["frozen", "killed"])
def test_client_that_lives_long_describes_topics_while_its_controller_is_away(trio: Trio, strike: Callable[[Node], None]) -> None:
    """Two of three brokers are healthy, so every look-up succeeds, although this client keeps asking the third."""
    topic = trio.create(f"orders-{strike.__name__}", 3)
    cluster = Cluster({"bootstrap.servers": trio.servers})
    (before,) = until(lambda: cluster.topics([topic], missing_ok=True), "the topic is known")
    node = controller(cluster, trio)
    strike(node)
    try:
        until(lambda: trio.has_lost(node), "the others have noticed")
        for _ in range(2):
            assert [one.kafka_uuid for one in cluster.topics([topic])] == [before.kafka_uuid]
    finally:
        node.revive()
        until(lambda: trio.is_complete, "it is back")


@pytest.mark.thorough
def test_new_clients_describe_topics_while_brokers_still_name_the_killed_controller(trio: Trio) -> None:
    """Until the cluster has noticed, its metadata names the killed broker to some new clients, which would wait for it in vain."""
    topic = trio.create("orders-next", 3)
    node = controller(Cluster({"bootstrap.servers": trio.servers}), trio)
    node.kill()
    try:
        with ThreadPoolExecutor(16) as pool:
            clusters = [Cluster({"bootstrap.servers": trio.servers}, timeout_s=60) for _ in range(16)]
            asked = [pool.submit(cluster.topics, [topic]) for cluster in clusters]
            assert {one.name for future in asked for one in future.result()} == {topic}
    finally:
        node.revive()
        until(lambda: trio.is_complete, "it is back")

"""One of three Kafka brokers is unavailable: lookups continue with the other two."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.support import kafka_trio
from tests.support.kafka_trio import Node, Trio
from tests.support.waiting import until

from tidemark.kafka.cluster import Cluster


@pytest.fixture(scope="module")
def trio() -> Iterator[Trio]:
    with tempfile.TemporaryDirectory(prefix="tidemark-trio-") as folder, kafka_trio.running(Path(folder)) as trio:
        yield trio


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

"""An address that no broker has is named at once, and so is what to look at."""

from __future__ import annotations

import time

import pytest
from tests.support.ports import closed_port

from tidemark.errors import BrokerUnavailable
from tidemark.kafka.cluster import Cluster


@pytest.mark.parametrize(
    ("host", "problem"), [("127.0.0.1", "Connection refused"), ("no.such.host.invalid", "Name or service not known")], ids=["port", "host"]
)
def test_address_that_accepts_no_connection_is_named_with_the_reason(host: str, problem: str) -> None:
    with closed_port() as port:
        servers = f"{host}:{port}"
        since = time.monotonic()
        for _ in range(2):  # the second one does not wait again
            with pytest.raises(
                BrokerUnavailable, match=rf"no broker accepts a connection: {servers} \({problem}\)\. Look at TIDEMARK_KAFKA_"
            ):
                Cluster({"bootstrap.servers": servers}).matching("x")
        assert time.monotonic() - since < 28, "librdkafka alone takes 15 s for each"

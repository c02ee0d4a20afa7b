"""The local schema registry: a server that runs alone. Every test of Avro uses it with Confluent's clients."""

from __future__ import annotations

import json
import socket
import tempfile
from pathlib import Path
from urllib.request import ProxyHandler, Request, build_opener

import psutil
import pytest
from tests.support.ports import closed_port
from tests.support.private_files import assert_own_files

from tidemark.jvm.errors import JarsUnavailable
from tidemark.local import LocalStack
from tidemark.local.errors import NotUp
from tidemark.local.processes import gone


def asked(url, body=None):
    """Returns the registry's answer to a GET, or to a POST if there is a body."""
    sent = None if body is None else json.dumps(body).encode()
    request = Request(url, data=sent, headers={"Content-Type": "application/vnd.schemaregistry.v1+json"})
    with build_opener(ProxyHandler({})).open(request, timeout=60) as answer:
        return json.load(answer)


@pytest.fixture
def alone():
    """A stack in which only the registry runs."""
    with tempfile.TemporaryDirectory(prefix="tidemark-registry-") as folder:
        stack = LocalStack(Path(folder))
        stack.start(stack.registry)
        try:
            yield stack
        finally:
            stack.stop(stack.registry)


def test_registry_runs_alone_on_loopback_and_keeps_its_schemas(alone):
    """It requires no password, so it must not be reachable from outside. If its port is taken before it listens, it gets another one."""
    process = alone.registry.process()
    sockets = psutil.Process(process.pid).net_connections(kind="inet")
    listening = {connection.laddr.ip.removeprefix("::ffff:") for connection in sockets if connection.status == psutil.CONN_LISTEN}
    assert listening == {"127.0.0.1"}
    assert [server.name for server in alone.status() if server.pid is not None] == ["Registry"]
    url = alone.registry.url()
    asked(f"{url}/subjects/kept/versions", {"schema": json.dumps({"type": "record", "name": "kept", "fields": []})})
    assert asked(f"{url}/subjects") == ["kept"]
    assert_own_files(alone.registry)
    alone.stop(alone.registry)
    assert gone(process)
    with pytest.raises(NotUp, match="Registry of the stack"):
        alone.registry.url()
    told = []
    alone.registry.start(told.append)
    with socket.create_server(("127.0.0.1", alone.registry.port())):  # its JVM needs a second or more before it listens
        alone.registry.wait(told.append)
    assert [step for step in told if "now in use by another program" in step] != []
    assert alone.registry.url() != url
    assert asked(f"{alone.registry.url()}/subjects") == ["kept"]


def test_registry_that_cannot_be_fetched_is_an_error_not_a_wait(tmp_path, monkeypatch):
    """A real Ivy, a mirror that refuses connections, and an empty cache. Nothing is started."""
    monkeypatch.setenv("TIDEMARK_CACHE", str(tmp_path / "cache"))
    with closed_port() as port:
        monkeypatch.setenv("TIDEMARK_MAVEN_MIRROR", f"http://127.0.0.1:{port}/maven")
        stack = LocalStack(tmp_path / "state")
        with pytest.raises(JarsUnavailable, match=r"jars of the schema registry are not in .*(?s:.)*TIDEMARK_MAVEN_MIRROR"):
            stack.start(stack.registry)
    assert stack.registry.process() is None
    assert list((tmp_path / "state" / "registry").iterdir()) == []

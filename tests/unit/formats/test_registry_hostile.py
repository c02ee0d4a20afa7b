"""A schema registry may be slow, broken or hostile: a question to it takes limited time and memory, and its error says what it answered."""

from __future__ import annotations

import contextlib
import gc
import json
import socketserver
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemark.errors import BadInput
from tidemark.formats import limits
from tidemark.formats.registry import MAX_BYTES, Registry, RegistryUnavailable
from tidemark.formats.schema import BadSchema, Node, parse
from tidemark.jvm.errors import without_password

HEAD = "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
Answer = Callable[[str], Iterator[bytes]]
"""The bytes of the answer to a request for this path."""


@contextlib.contextmanager
def serving(answer: Answer) -> Iterator[str]:
    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            path = self.rfile.readline().split()[1].decode()
            while self.rfile.readline().strip():
                pass
            with contextlib.suppress(OSError):
                for piece in answer(path):
                    self.wfile.write(piece)
                    self.wfile.flush()

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads = True
        block_on_close = False

    with Server(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def whole(body: bytes, *headers: str) -> bytes:
    return f"{HEAD}{''.join(each + chr(13) + chr(10) for each in headers)}Content-Length: {len(body)}\r\n\r\n".encode() + body


def slowly(pieces: bytes) -> Iterator[bytes]:
    for each in pieces:
        time.sleep(0.05)
        yield bytes([each])


def endless_head(_: str) -> Iterator[bytes]:
    yield HEAD.encode()
    yield from slowly(b"X-More: " + b"x" * 10_000)


def endless_body(_: str) -> Iterator[bytes]:
    yield f"{HEAD}Content-Length: 10000\r\n\r\n".encode()
    yield from slowly(b" " * 10_000)


def huge_body(_: str) -> Iterator[bytes]:
    yield f"{HEAD}Connection: close\r\n\r\n".encode()
    for _ in range(2_000):
        yield b" " * 1_000_000


@pytest.mark.parametrize(
    ("answer", "cause"),
    [
        (endless_head, "it has not answered completely within 4 s"),
        (endless_body, "it has not answered completely within 4 s"),
        (huge_body, f"its answer has more than {MAX_BYTES:,} bytes"),
        (lambda _: iter([whole(b"\x1f\x8b", "Content-Encoding: gzip")]), "its answer is compressed"),
        *(
            (lambda _, body=body: iter([whole(body)]), "its answer is not that of a schema registry")
            for body in (b"", b"no JSON", b"\xff\xfe", b"[" * 100_000, b"[]", b"7", b'"text"', b"null", b'{"id": {}, "schema": 7}',
                         b'{"id": 1, "version": 1, "subject": "s", "schema": "\\"int\\"", "references": 7}')
        ),
    ],
)  # fmt: skip
def test_answer_without_end_or_meaning_is_an_outage_with_its_cause(answer: Answer, cause: str) -> None:
    timeout_s = 2 if "within" in cause else 20
    with serving(answer) as url, Registry({"url": url, "timeout": timeout_s, "max.retries": 0}) as registry:
        begun = time.monotonic()
        with pytest.raises(RegistryUnavailable) as caught:
            registry.newest("orders-value")
        assert cause in caught.value.cause
        assert time.monotonic() - begun < 30


def registered(schemas: Mapping[str, Mapping[str, Any]]) -> Answer:
    """Answers with the schema of the subject in the path."""

    def answer(path: str) -> Iterator[bytes]:
        subject = path.split("/")[2]
        yield whole(json.dumps({"id": 1, "version": 1, "subject": subject, "schema": '"int"', **schemas[subject]}).encode())

    return answer


def refers(*subjects: str) -> dict[str, Any]:
    return {"references": [{"name": each, "subject": each, "version": 1} for each in subjects]}


@pytest.mark.parametrize(
    ("schemas", "problem"),
    [
        ({"a": refers("b"), "b": refers("a"), "t": refers("a")}, "refers in a circle to a version 1"),
        ({"t": refers("t")}, "refers in a circle to t version 1"),
        (
            {"t": refers(*(f"s{number}" for number in range(101))), **{f"s{number}": {} for number in range(101)}},
            "more than 100 references",
        ),
    ],
)
def test_references_in_a_circle_or_without_end_are_refused(schemas: Mapping[str, Mapping[str, Any]], problem: str) -> None:
    with serving(registered(schemas)) as url, Registry({"url": url}) as registry, pytest.raises(BadSchema, match=problem):
        registry.newest("t")


def test_schema_that_several_refer_to_is_asked_for_once() -> None:
    asked: list[str] = []
    answer = registered({"t": refers("a", "b"), "a": refers("c"), "b": refers("c"), "c": {}})

    def noted(path: str) -> Iterator[bytes]:
        asked.append(path)
        return answer(path)

    with serving(noted) as url, Registry({"url": url}) as registry:
        assert registry.newest("t") == (1, Node("int"))
    assert sorted(path.split("/")[2] for path in asked) == ["a", "b", "c", "t"]


def nested(deep: int) -> str:
    return '{"type": "array", "items": ' * deep + '"int"' + "}" * deep


def doubled(times: int) -> str:
    """Each record has two fields of the next one's type."""
    inner: Any = "int"
    for number in range(times):
        again = f"r{number - 1}" if number else "int"
        inner = {"type": "record", "name": f"r{number}", "fields": [{"name": "a", "type": inner}, {"name": "b", "type": again}]}
    return json.dumps(inner)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (nested(51), "nests types more than 50 deep"),
        ("[" * 100_000, "nests types more than 50 deep"),
        (doubled(40), "has more than 5,000 types"),
        (json.dumps("x" * 1_000_000), "the limit is 1,000,000"),
        ('{"type": "record", "name": "r", "fields": 7}', "does not have the form of an Avro schema"),
        ('{"type": "record", "name": "r", "fields": ["int"]}', "does not have the form of an Avro schema"),
        ('{"type": "bytes", "logicalType": "decimal", "precision": "9", "scale": 2}', 'has "9" as precision'),
    ],
)
def test_schema_that_would_take_too_much_or_is_none_is_refused(text: str, problem: str) -> None:
    with pytest.raises(BadSchema, match=problem):
        parse(text)


NAMES = (
    *("type", "name", "fields", "items", "values", "symbols", "size", "logicalType", "precision", "scale", "aliases", "namespace"),
    "default",
)
WORDS = ("record", "enum", "fixed", "array", "map", "int", "bytes", "string", "null", "r", "decimal")
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 99) | st.sampled_from(WORDS) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=5),
)


@given(JSON)
def test_any_json_is_a_schema_or_is_refused(schema: Any) -> None:
    with contextlib.suppress(BadSchema):
        assert isinstance(parse(json.dumps(schema)), Node)


def test_server_that_gives_out_tokens_has_the_same_limits() -> None:
    oauth = {
        "bearer.auth.credentials.source": "OAUTHBEARER", "bearer.auth.client.id": "a", "bearer.auth.client.secret": "s3cr3t",
        "bearer.auth.scope": "s", "bearer.auth.logical.cluster": "l", "bearer.auth.identity.pool.id": "p", "timeout": 0.5, "max.retries": 0,
    }  # fmt: skip
    for answer in (endless_body, huge_body, lambda _: iter([whole(b"<html>")])):
        with serving(answer) as url:
            before = time.monotonic()
            settings = {"url": url, "bearer.auth.issuer.endpoint.url": f"{url}/token", **oauth}
            with pytest.raises(RegistryUnavailable), Registry(settings) as registry:
                registry.newest("t")
            assert time.monotonic() - before < 20


def test_connection_that_comes_too_late_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 0.0])  # when the question begins, and its request
    monkeypatch.setattr(limits, "time", SimpleNamespace(monotonic=lambda: next(clock, 10.0**9)))
    gc.disable()
    try:
        with serving(endless_head) as url:
            with (
                pytest.raises(RegistryUnavailable, match="has not answered completely"),
                Registry({"url": url, "max.retries": 0}) as registry,
            ):
                registry.newest("t")
            assert to_port(url) == 0
    finally:
        gc.enable()


def to_port(url: str) -> int:
    """How many connections this process has to the server."""
    port = int(url.rpartition(":")[2])
    return sum(bool(each.raddr) and each.raddr[1] == port for each in psutil.Process().net_connections("tcp4"))


def test_references_together_have_the_limit_of_a_schema() -> None:
    text = json.dumps({"type": "record", "name": "r", "doc": "x" * 400_000, "fields": [{"name": "a", "type": "int"}]})
    asked = []

    def answer(path: str) -> Iterator[bytes]:
        asked.append(path)
        references = [{"name": f"n{n}", "subject": f"s{n}", "version": 1} for n in range(50)] if path.endswith("/latest") else []
        body = {"subject": "t", "version": 1, "id": 1, "schema": text, "schemaType": "AVRO", "references": references}
        yield whole(json.dumps(body).encode())

    with serving(answer) as url, Registry({"url": url}) as registry, pytest.raises(BadSchema, match="the limit is"):
        registry.newest("t")
    assert len(asked) < 6


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("https://u:s3cr3t@host", "https://host"),
        ("https://u:p@s3cr3t@host", "https://host"),
        ("https://u:p/s3cr3t@host/", "https://host/"),
        ("u:s3cr3t@host", "host"),
        ("https://host/x?token=s3cr3t&a=1", "https://host/x?token=…&a=1"),
        ("https://host:8081/x", "https://host:8081/x"),
    ],
)
def test_no_url_is_shown_with_a_password(url: str, shown: str) -> None:
    assert without_password(url) == shown


@pytest.mark.parametrize(
    "settings", [{"url": "ftp://u:s3cr3t@h"}, {"url": "u:s3cr3t@h"}, {"url": 7}, {"url": "http://h", "timeout": "s3cr3t"},
                 {"url": "http://h", "timeout": float("inf")}, {"url": "http://h", "timeout": -1}, {"url": "http://a\0b"}]
)  # fmt: skip
def test_settings_that_cannot_be_used_are_refused_without_quoting_them(settings: Mapping[str, Any]) -> None:
    with pytest.raises(BadInput, match="its settings cannot be used") as caught, Registry(settings) as registry:
        registry.newest("t")
    assert "s3cr3t" not in str(caught.value)


def test_client_gets_the_user_of_the_url_as_a_setting() -> None:
    """Its library logs the URL of each request."""
    with Registry({"url": "http://u%40x:s3cr3t@h:1,http://u%40x:s3cr3t@i:2"}) as registry:
        rest = registry._client._rest_client
        assert rest.base_urls == ["http://h:1", "http://i:2"]
        assert "s3cr3t" not in registry._url

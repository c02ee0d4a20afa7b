"""A schema registry may be slow, broken or hostile: a question to it takes limited time and memory, and its error says what it answered."""

from __future__ import annotations

import contextlib
import json
import socketserver
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemark.formats.registry import MAX_BYTES, Registry, RegistryUnavailable
from tidemark.formats.schema import BadSchema, Node, parse

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
        (endless_head, "it has not answered completely within 1 s"),
        (endless_body, "it has not answered completely within 1 s"),
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
    with serving(answer) as url, Registry({"url": url, "timeout": 0.5, "max.retries": 0}) as registry:
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
    "type",
    "name",
    "fields",
    "items",
    "values",
    "symbols",
    "size",
    "logicalType",
    "precision",
    "scale",
    "aliases",
    "namespace",
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

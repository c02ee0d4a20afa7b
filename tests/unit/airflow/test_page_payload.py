"""Whatever a record holds, its page answers within a megabyte, and says what it leaves out."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic_core import to_json

from tidemark.airflow.web.payload import MOST_BYTES, Room
from tidemark.retry.admin import Payload
from tidemark.worker.decoding import Shown

MEGABYTE = 1_000_000


def shown(value: bytes | None, key: bytes | None = None, headers: Any = (), decoded: str | None = None) -> dict[str, Any]:
    payload = Payload(key=key, value=value, headers=headers)
    begun = time.process_time()
    found = Room().payload(payload, {} if decoded is None else {"value": Shown(decoded, None)})
    assert len(to_json(found)) < MEGABYTE
    assert time.process_time() - begun < 5
    return found


def test_record_of_usual_size_is_shown_whole() -> None:
    found = shown(b'{"city": "Ulm"}', b"\xff\x00", [("h", None), ("h", "ü".encode())])
    assert found["value"] == {
        "bytes": 15, "cut": False, "text": '{"city": "Ulm"}', "json": '{\n  "city": "Ulm"\n}', "not_laid_out": False,
        "hex": b'{"city": "Ulm"}'.hex(" "), "problem": None,
    }  # fmt: skip
    assert (found["key"]["text"], found["key"]["hex"], found["key"]["json"]) == (None, "ff 00", None)
    assert [(one["name"], one["value"] and one["value"]["text"]) for one in found["headers"]] == [("h", None), ("h", "ü")]
    assert found["more_headers"] == 0


@pytest.mark.parametrize(
    ("value", "not_laid_out", "cut"),
    [
        (b"[" * 100_000, True, False),
        (b"[" * 600 + b"1," * 100_000 + b"1" + b"]" * 600, True, False),
        (b"[" * 49 + b"[1]," * 50_000 + b"1" + b"]" * 49, True, False),
        (b'{"a": "\\ud800"}', False, False),
        (b'["' + b"\\u0000" * 40_000 + b'"]', False, False),
        (b"\0" * 10_000_000, False, True),
        ("é".encode() * 10_000_000, False, True),
        (b"1" * 100_000, False, False),
        (b"[" + b"1e999," * 1000 + b"NaN]", False, False),
    ],
    ids=lambda value: repr(value[:12]) if isinstance(value, bytes) else None,
)
def test_value_that_would_become_a_long_answer_is_cut_and_says_so(value: bytes, *, not_laid_out: bool, cut: bool) -> None:
    found = shown(value, key=value, headers=[("h", value)] * 100)
    assert (found["value"]["not_laid_out"], found["value"]["cut"]) == (not_laid_out, cut)
    assert found["value"]["bytes"] == len(value)
    assert found["value"]["text"]
    assert value.startswith(found["value"]["text"].encode())


def test_text_is_cut_between_two_characters() -> None:
    assert shown(b"x" + "é".encode() * MOST_BYTES)["value"]["text"].endswith("é")


def test_headers_without_room_are_counted() -> None:
    found = shown(b"", headers=[(f"h{number}", b"x" * 10_000) for number in range(500)])
    assert 10 < len(found["headers"]) < 500
    assert found["more_headers"] == 500 - len(found["headers"])


def test_decoded_value_that_is_too_long_is_left_out() -> None:
    found = shown(b"\0" * 10, decoded=json.dumps(["\0" * 200_000]))
    assert (found["value"]["json"], found["value"]["not_laid_out"], found["value"]["text"]) == (None, True, "\0" * 10)


DATA = st.none() | st.binary(max_size=50) | st.text(max_size=50).map(lambda text: text.encode("utf-8", "surrogatepass"))
BIG = st.tuples(st.binary(min_size=1, max_size=4), st.integers(1, 400_000)).map(lambda both: both[0] * both[1])


@given(DATA | BIG, DATA, st.lists(st.tuples(st.text(max_size=9) | st.just("\ud800"), DATA | BIG), max_size=20))
def test_any_record_has_an_answer(value: bytes | None, key: bytes | None, headers: list[tuple[str, bytes | None]]) -> None:
    shown(value, key, headers)

"""What a run says about the schemas that it cannot find or read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tidemark import project
from tidemark.errors import BadInput
from tidemark.spec import SpecInvalid, load_consumer
from tidemark.worker.decoding import Decoding

ORDER = 'syntax = "proto3";\nmessage Order { string id = 1; }\n'


@pytest.fixture
def decoding_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Decoding]:
    """The decoding of a consumer of one topic with this format, without a registry. `ORDER` is in ``order.proto``."""
    monkeypatch.setenv("TIDEMARK_HOME", str(tmp_path))
    project.schemas().mkdir(parents=True)
    (project.schemas() / "order.proto").write_text(ORDER)

    def make(format_: str) -> Decoding:
        (tmp_path / "orders.yaml").write_text(f"topics: [orders]\nsink: {{table: a.b}}\ntransform: t:t\nformat: {{{format_}}}\n")
        return Decoding(load_consumer(tmp_path / "orders.yaml"), None, lambda: ["orders"])

    return make


@pytest.mark.parametrize(
    ("given", "reads", "file"),
    [
        ("value: avro", "Avro", "value: avro, value_schema: order.avsc"),
        ("value: protobuf", "Protobuf", "value: protobuf, value_schema: order.proto"),
        ("value: json, key: protobuf", "Protobuf", "key: protobuf, key_schema: order.proto"),
        ("value: protobuf, value_schema: order.proto, key: avro", "Avro", "key: avro, key_schema: order.avsc"),
    ],
)
def test_missing_registry_is_named_with_a_schema_file_of_the_consumers_encoding(
    decoding_of: Callable[[str], Decoding], given: str, reads: str, file: str
) -> None:
    with pytest.raises(BadInput) as raised:
        decoding_of(given).input_schema()
    assert raised.value.found == f"it is not set; orders reads {reads}"
    assert raised.value.fix == f"Set it, or give orders a schema file: format: {{{file}}}."


def test_schema_file_that_cannot_be_read_is_named_whatever_it_is_read_for(decoding_of: Callable[[str], Decoding]) -> None:
    """The compiler gets all Protobuf files of the folder, because one may import others."""
    decoding = decoding_of("value: protobuf, value_schema: order.proto")
    (project.schemas() / "a" / "b.proto").mkdir(parents=True)  # a folder of this name is no file
    (project.schemas() / ".#order.proto").symlink_to("ann@host.1234:1700000000")
    assert "value_bytes" in decoding.input_schema().names
    (project.schemas() / "a" / "other.proto").write_bytes(b"// caf\xe9")
    for format_, problem in (
        ("value: protobuf, value_schema: order.proto", "schema file a/other.proto is not UTF-8"),
        ("value: protobuf, value_schema: none.proto", f"schema file none.proto not found in {project.schemas()}"),
        ("value: avro, value_schema: none.avsc", f"schema file none.avsc not found in {project.schemas()}"),
    ):
        with pytest.raises(SpecInvalid, match=problem):
            decoding_of(format_).input_schema()

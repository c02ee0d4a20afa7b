"""A Protobuf schema comes from a registry or a user. It is only ever data: nothing of it runs, and it takes limited time and memory."""

from __future__ import annotations

import base64
import os
from collections.abc import Mapping
from pathlib import Path

import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from hypothesis import given
from hypothesis import strategies as st

from tidemark.formats import protobuf
from tidemark.formats.protobuf import compiled
from tidemark.formats.schema import MAX_CHARACTERS, BadSchema

PROTO = 'syntax = "proto3"; message A { int32 a = 1; }'
PYTHON = "import pathlib; pathlib.Path({mark!r}).touch()"
MODULES = ("grpc_tools/__init__", "grpc_tools/protoc", "google/__init__", "sitecustomize", "usercustomize", "encodings/__init__", "pathlib",
           "resource")  # fmt: skip


def refused(text: str, references: Mapping[str, str]) -> str:
    with pytest.raises(BadSchema) as caught:
        compiled(text, references)
    return caught.value.problem


@pytest.mark.parametrize("suffix", [".py", ".proto"])
@pytest.mark.parametrize("module", MODULES)
def test_no_reference_is_imported(tmp_path: Path, module: str, suffix: str) -> None:
    mark = tmp_path / "ran"
    problem = refused(f'import "{module}{suffix}"; {PROTO}', {f"{module}{suffix}": PYTHON.format(mark=str(mark))})
    assert "is not a .proto file" in problem or "cannot be compiled" in problem
    assert not mark.exists()


def test_compiler_has_neither_the_environment_nor_a_folder_of_the_schema_to_import_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "grpc_tools.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert compiled(PROTO, {}).name == "A"
    assert not (tmp_path / "ran").exists()


@given(st.text(min_size=1, max_size=40) | st.from_regex(r"[./a\\\x00-]{1,20}(\.proto)?", fullmatch=True))
def test_reference_with_any_name_stays_inside_or_is_refused(name: str) -> None:
    """All names pass the same check, before any file is written."""
    try:
        protobuf._check_files({name: PROTO}, PROTO)
    except BadSchema:
        return
    folder = Path("/a/folder")
    path = Path(os.path.normpath(folder / name))
    assert path.is_relative_to(folder)
    assert path.suffix == ".proto"
    assert name.isascii()


def test_descriptor_imports_only_from_the_list_of_googles_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that a schema gives is never the name of a module."""
    (tmp_path / "planted_pb2.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in (
        "google/protobuf/../../planted.proto",
        "google/protobuf/planted.proto",
        "google/protobuf/compiler/plugin.proto",
        "planted.proto",
    ):
        file = FileDescriptorProto(name="a.proto", dependency=[name])
        assert "which it does not refer to" in refused(base64.b64encode(file.SerializeToString()).decode(), {})
    assert not (tmp_path / "ran").exists()


def test_descriptors_that_import_each_other_are_refused() -> None:
    def encoded(name: str, *imports: str) -> str:
        return base64.b64encode(FileDescriptorProto(name=name, dependency=imports).SerializeToString()).decode()

    assert "in a circle" in refused(encoded("m", "a.proto"), {"a.proto": encoded("a", "b.proto"), "b.proto": encoded("b", "a.proto")})


def test_invalid_descriptor_is_refused() -> None:
    file = FileDescriptorProto(name="a.proto")
    file.message_type.add(name="A").field.add(name="a", number=1, type_name=".Missing", type=11)
    assert "is not valid" in refused(base64.b64encode(file.SerializeToString()).decode(), {})


def test_message_that_would_become_millions_of_columns_is_refused() -> None:
    """Thirty messages, each of which contains the next one twice, are a thousand million fields."""
    messages = "".join(f"message M{n} {{ M{n + 1} a = 1; M{n + 1} b = 2; }} " for n in range(30)) + "message M30 { int32 a = 1; }"
    assert "more than 5,000 fields" in refused(f'syntax = "proto3"; {messages}', {})
    deep = "".join(f"message M{n} {{ M{n + 1} a = 1; }} " for n in range(300)) + "message M300 { int32 a = 1; }"
    assert "more than 50 deep" in refused(f'syntax = "proto3"; {deep}', {})


def test_schema_of_any_size_or_form_ends_in_an_error() -> None:
    assert "the limit is 1,000,000" in refused(PROTO + " " * MAX_CHARACTERS, {})
    assert "cannot be written" in refused(PROTO + "// \ud800", {})
    assert "cannot be compiled" in refused(PROTO + "\0", {})
    assert "cannot be written" in refused(PROTO, {"a.proto": PROTO, "a.proto/b.proto": PROTO})
    assert "cannot be compiled" in refused('syntax = "proto3"; ' + "message A { " * 3_000, {})


def test_compiler_that_takes_too_long_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protobuf, "COMPILE_LIMIT_S", 0.001)
    assert "within 0.001 s" in refused(PROTO, {})

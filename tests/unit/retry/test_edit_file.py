"""The file of ``tidemark retries edit --from``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from tidemark.cli import retries
from tidemark.errors import BadInput

LINE = '{"number": 7, "key": null, "value": "eA==", "headers": [["\u2028", null]]}'


def edit(path: Path) -> Any:
    return CliRunner().invoke(retries.app, ["edit", "departures", "--from", str(path), "--reason", "wrong unit of distance"])


def test_file_that_is_not_utf_8_is_refused(tmp_path: Path) -> None:
    """Before the database is used. Windows' shells write UTF-16."""
    path = tmp_path / "records.jsonl"
    path.write_bytes(LINE.encode("utf-16"))
    error = edit(path).exception
    assert isinstance(error, BadInput)
    assert str(error).endswith("records.jsonl is not UTF-8 text. Save it as UTF-8.")


def test_folder_is_refused(tmp_path: Path) -> None:
    assert edit(tmp_path).exit_code == 2


def test_lines_end_at_newlines_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not at a line separator within a text, which editors and jq write unescaped. A byte order mark is no part of the first line."""
    edited: list[int] = []

    @contextlib.contextmanager
    def opened(name: str) -> Iterator[Any]:
        yield None, SimpleNamespace(group=name)

    def store(_: Any, group: str, edits: Any, **__: str) -> dict[int, int | None]:
        edited.extend(number for number, _ in edits)
        return dict.fromkeys(edited)

    monkeypatch.setattr(retries, "_opened", opened)
    monkeypatch.setattr(retries.admin, "edit", store)
    path = tmp_path / "records.jsonl"
    path.write_text(f"\ufeff{LINE}\r\n{LINE}\n\n", encoding="utf-8", newline="")
    assert edit(path).exit_code == 0
    assert edited == [7, 7]

"""The parts of ``tidemark local`` that need no server: refusals, quoting, and the format of the output."""

from __future__ import annotations

import json
import subprocess

import pytest
from typer.testing import CliRunner

from tidemark.cli.main import app
from tidemark.local import LocalStack
from tidemark.local.errors import NotUp


def local(folder, *words, **options):
    return CliRunner().invoke(app, ["local", *words], env={"TIDEMARK_STATE": str(folder)}, **options)


def test_env_of_a_stack_that_is_down_is_refused_and_prints_nothing(tmp_path):
    """``eval`` of empty output changes nothing."""
    result = local(tmp_path, "env")
    assert isinstance(result.exception, NotUp)
    assert "tidemark local up" in str(result.exception)
    assert result.stdout == ""


def test_env_is_quoted_for_the_shell(tmp_path, monkeypatch):
    """``eval`` sets exactly the given value, whatever characters it contains."""
    monkeypatch.setattr(LocalStack, "env", lambda self: {"TIDEMARK_DATABASE_URL": "postgresql://a'b $c"})
    printed = local(tmp_path, "env").stdout
    shell = subprocess.run(["sh", "-c", f'{printed}\nprintf %s "$TIDEMARK_DATABASE_URL"'], capture_output=True, text=True, check=True)
    assert shell.stdout == "postgresql://a'b $c"
    as_json = local(tmp_path, "env", "--output", "json").stdout
    assert json.loads(as_json) == {"TIDEMARK_DATABASE_URL": "postgresql://a'b $c"}


def test_status_of_a_folder_without_a_stack_is_stopped_and_makes_nothing(tmp_path):
    """``status`` creates no files, and its JSON has every field."""
    result = local(tmp_path / "none", "status", "--output", "json")
    shown = [(server["name"], server["state"], server["pid"], server["data_bytes"]) for server in json.loads(result.stdout)]
    assert shown == [("Postgres", "stopped", None, 0), ("Kafka", "stopped", None, 0)]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["down", "reset"])
def test_stopping_what_never_was_is_done_and_makes_nothing(tmp_path, command):
    assert local(tmp_path / "none", command, *(["--yes"] if command == "reset" else [])).exit_code == 0
    assert list(tmp_path.iterdir()) == []


def test_reset_asks_and_no_is_no(tmp_path):
    result = local(tmp_path, "reset", input="n\n")
    assert result.exit_code == 1
    assert f"stack in {tmp_path}?" in result.stderr


def test_reset_leaves_folders_that_only_have_our_names(tmp_path):
    """A wrong ``TIDEMARK_STATE`` must not delete an unrelated folder that happens to be called postgres."""
    (tmp_path / "postgres").mkdir()
    (tmp_path / "postgres" / "notes.txt").touch()
    LocalStack(tmp_path).reset()
    assert (tmp_path / "postgres" / "notes.txt").exists()

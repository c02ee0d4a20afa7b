"""Common options exist for every command to which they apply."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import metadata
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from tidemark.cli.main import app

WITHOUT_RESULT = {"sink ddl", "retries export", "metrics serve", "local down", "local reset", "local airflow down"}
"""Commands that print SQL, print JSON anyway, serve until they are stopped, or have no result."""


def commands(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, set[str]]]:
    if hasattr(command, "commands"):
        for name, each in command.commands.items():
            yield from commands(each, (*path, name))
    else:
        yield " ".join(path), {parameter.name for parameter in command.params}


COMMANDS = dict(commands(typer.main.get_command(app)))


@pytest.mark.parametrize("command", COMMANDS)
def test_command_has_the_common_options(command: str) -> None:
    """It has ``--output`` if it has a result, and ``--consumers`` if it takes the name of a consumer."""
    if command not in WITHOUT_RESULT:
        assert "output" in COMMANDS[command]
    histories = {"erase list", "rewind list"}  # they also show consumers whose files are gone
    if {"name", "names"} & COMMANDS[command] and command not in histories:
        assert "consumers" in COMMANDS[command]


def test_version_is_the_packages() -> None:
    done = CliRunner().invoke(app, ["--version"])
    assert (done.exit_code, done.stdout) == (0, f"tidemark {metadata.version('tidemark')}\n")

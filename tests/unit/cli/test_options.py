"""Common options exist for every command to which they apply."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib import metadata
from typing import Any

import pytest
import typer
from tests.support.json_output import OUTPUTS, mismatches
from typer.testing import CliRunner

from tidemark.cli import main
from tidemark.cli.main import app

WITHOUT_RESULT = {"sink ddl", "retries export", "metrics serve", "local psql", "local down", "local reset", "local airflow down"}
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
    """It has ``--output`` if it has a result."""
    assert ("output" in COMMANDS[command]) == (command not in WITHOUT_RESULT)


def test_json_of_each_command_is_documented() -> None:
    """In ``docs/json_output.py``, whose shapes the tests of the commands compare with what is printed."""
    assert set(OUTPUTS) == set(COMMANDS) - WITHOUT_RESULT


@pytest.mark.parametrize(
    ("printed", "problems"),
    [
        ({"deleted": "orders"}, []),
        ({"deleted": None}, [".deleted is None, not text"]),
        ({}, [".deleted is missing"]),
        ({"deleted": "orders", "mirror": True}, [".mirror is not documented"]),
        ([], [" is [], not {'deleted': 'text'}"]),
    ],
)
def test_output_that_is_not_as_documented_is_noticed(printed: object, problems: list[str]) -> None:
    assert mismatches("groups delete", json.dumps(printed)) == problems


def test_list_of_commands_imports_none_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(main, "_imported", None)
    done = CliRunner().invoke(main.app, ["--help"])
    assert done.exit_code == 0
    assert {name for name in main.COMMANDS if f"│ {name} " in done.stdout} == set(main.COMMANDS)


@pytest.mark.parametrize("words", [[], ["try"], ["rewind", "apply"]], ids=" ".join)
def test_help_of_a_flag_names_no_type(words: list[str]) -> None:
    """A flag takes no value."""
    done = CliRunner().invoke(app, [*words, "--help"])
    assert (done.exit_code, "bool" in done.stdout.lower()) == (0, False)


def test_version_is_the_packages() -> None:
    done = CliRunner().invoke(app, ["--version"])
    assert (done.exit_code, done.stdout) == (0, f"tidemark {metadata.version('tidemark-kafka')}\n")

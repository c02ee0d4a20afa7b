"""The app: its top-level commands, and how errors are reported."""

from __future__ import annotations

import functools
import importlib
import itertools
import os
import sys
from collections import UserDict
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

from tidemark.cli.common import Interrupted, print_json, print_note
from tidemark.driver.environment import driver_env, interpreter, require_same_version, separate
from tidemark.errors import TidemarkError
from tidemark.packages import optional
from tidemark.packages import version as installed_version

COMMANDS = {
    "init": ("init:init", "Add Tidemark to an Airflow project, or write a new project with a consumer, DAG files and a compose file."),
    "migrate": ("migrate:migrate", "Migrate the database to this version's schema, and renew the grants of roles."),
    "explain": (
        "explain:explain",
        "Explain in sentences what a consumer does, what it guarantees and what it needs. Reads its file, and asks no server.",
    ),
    "doctor": (
        "doctor:doctor",
        "Report what will make runs fail or lose records, with the fix. Exits with 1 if something will fail.",
    ),
    "try": (
        "trial:try_",
        "Show which rows a consumer would write for its topics' latest records. Writes nothing. Constraints and triggers are not checked.",
    ),
    "consume": ("consume:consume", "Load the records that are in the topics now, then stop."),
    "validate": (
        "validate:validate",
        "Validate the rows of runs outside Airflow that have not passed validation yet. Advances the validated offsets.",
    ),
    "backfill": (
        "backfill:backfill",
        "Load the records that rewinds with --backfill skipped into the same table. May run beside the consumer's own runs.",
    ),
    "offsets": ("offsets:offsets", "Show position, end, lag, owner and epoch of each partition."),
    "lag": ("lag:lag", "Show how far groups are behind, and whether that is a problem. Worst first."),
    "assign": (
        "assign:assign",
        "Show which member would get which partition, and which partitions would move. Changes nothing.",
    ),
    "pause": ("flow:pause", "Pause a consumer, or some of its topics or partitions, from the next batch on. `resume` ends the pause."),
    "resume": ("flow:resume", "End pauses of a consumer (default: all of them)."),
    "flow": (
        "flow:change",
        "Show a consumer's pauses, topic priorities and maximum lead between topics, or change the last two.",
    ),
    "audit": ("audit:audit", "Show where every record of a consumer is, and whether all records are accounted for."),
    "audit-log": (
        "audit_log:audit_log",
        (
            "Show who did what, oldest first: "
            "rewinds, redrives, discards, edits, pauses, removals, deletions, maintenance, migrations, grants."
        ),
    ),
    "seek": ("rewind:seek", "Rewind one partition: plan and apply in one step."),
    "maintain": (
        "maintain:maintain",
        (
            "Remove the archived rows of old rewinds and the payloads of failed records settled long ago. "
            "These rewinds can then be neither undone nor verified."
        ),
    ),
    "consumers": ("consumers:app", "Check the consumers that YAML files declare, and start new ones."),
    "sink": ("sink:app", "The tables that consumers write to."),
    "groups": ("groups:app", "Show and change consumer groups and their members."),
    "rewind": ("rewind:app", "Move a running group to any offset, together with its rows: plan, apply, undo."),
    "retries": ("retries:app", "Show, retry and settle records that were not loaded."),
    "redrive": ("redrive:app", "Retry failed records: plan, apply, stop."),
    "erase": ("erase:app", "Remove a person's rows from a sink, and every stored copy of them: plan, apply."),
    "metrics": ("metrics:app", "Metrics for Prometheus."),
    "local": ("local:app", "The embedded stack: Postgres and Kafka on loopback, all state in one folder."),
}
"""Each command's function or app (``module:name``) and its help."""


@functools.cache
def _imported(name: str) -> Any:
    target, text = COMMANDS[name]
    module, _, attribute = target.partition(":")
    found = getattr(importlib.import_module(f"tidemark.cli.{module}"), attribute)
    if isinstance(found, typer.Typer):
        command: Any = typer.main.get_group(found)
        command.name, command.help = name, text
    else:
        alone = typer.Typer(add_completion=False)
        alone.command(name, help=text)(found)
        command = typer.main.get_command(alone)
    _omit_types_of_flags(command)
    return command


def _omit_types_of_flags(command: Any) -> None:
    """Makes the help of a flag say ``--yes`` and not ``--yes <bool>``."""
    for option in command.get_params(typer.Context(command)):
        if getattr(option, "is_flag", False):
            option.metavar = ""
    for nested in getattr(command, "commands", {}).values():
        _omit_types_of_flags(nested)


class _Commands(UserDict[str, Any]):
    """Imports a command's module when the command is looked up, so that no command waits for the imports of the others."""

    def __getitem__(self, name: str) -> Any:
        return _imported(name)


class _Group(TyperGroup):
    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = _Commands(COMMANDS)

    def invoke(self, ctx: Any) -> Any:
        """Raises `Interrupted` instead of `KeyboardInterrupt`, on which Typer would exit without a word."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as error:
            raise Interrupted from error

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Imports no command."""
        self.commands = {name: TyperCommand(name, help=text) for name, (_, text) in COMMANDS.items()}
        _omit_types_of_flags(self)
        super().format_help(ctx, formatter)


app = typer.Typer(
    cls=_Group,
    help="Kafka consumer groups for PySpark and Airflow, with offsets in Postgres.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _version(requested: bool) -> None:
    if requested:
        typer.echo(f"tidemark {installed_version()}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_version)] = False,
) -> None: ...


def main() -> None:
    """Entry point of the ``tidemark`` command. Prints a `TidemarkError`, or a data exception of Postgres, to stderr and exits with 1.

    With ``--output json``, also prints ``{"error": {"type": ..., "text": ...}}`` to stdout.
    """
    try:
        if separate() and not {"local", "init", "--version"}.intersection(sys.argv[1:2]):
            os.execve(interpreter(), [interpreter(), "-m", "tidemark.cli.main", *sys.argv[1:]], driver_env(os.environ))  # noqa: S606 - the same command, there
        require_same_version()
        with optional():
            app()
    except (Interrupted, KeyboardInterrupt) as interrupt:
        print_note(str(interrupt) or "Interrupted. What was committed stays.")
        sys.exit(130)
    except TidemarkError as error:
        _end(getattr(error, "type", type(error).__name__), str(error))
    except Exception as error:
        if (getattr(error, "pgcode", None) or "")[:2] != "22":  # a data exception of Postgres
            raise
        _end(
            type(error).__name__,
            f"Postgres cannot compute this from what is stored: {error}. A role has stored a value that Tidemark does not store.",
        )


def _end(kind: str, text: str) -> NoReturn:
    print_note(text, style="red")
    if "json" in (value for flag, value in _options(sys.argv) if flag in ("--output", "-o")):
        print_json({"error": {"type": kind, "text": text}})
    sys.exit(1)


def _options(arguments: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yields each argument as a flag with its value, for ``--flag value`` and ``--flag=value``."""
    for argument, following in itertools.zip_longest(arguments, arguments[1:], fillvalue=""):
        flag, equals, value = argument.partition("=")
        yield flag, value if equals else following


if __name__ == "__main__":
    main()

"""Shared by the commands: common options and output. Every command waits for its imports."""

from __future__ import annotations

import dataclasses
import functools
import getpass
import inspect
import json
import os
import socket
import sys
from collections.abc import Callable, Container, Iterable, Sequence
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Annotated, Any, get_type_hints

import typer
from rich import box
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from tidemark.cli import completion
from tidemark.text.wording import one_line, visible


class SafeConsole(Console):
    """Prints texts that may come from records. Characters that a terminal would obey or hide are printed as escapes, such as ``\\x1b``."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            style = segment.style.update_link(None) if segment.style and segment.style.link else segment.style
            yield segment if segment.control else Segment(visible(segment.text), style)


stdout = SafeConsole(soft_wrap=True, width=None if sys.stdout.isatty() else 200, emoji=False)
"""Without a terminal, tables keep their full width."""
stderr = SafeConsole(stderr=True, emoji=False)


class Interrupted(Exception):
    """Ctrl-C ended a command. The text says what stays."""


class OutputFormat(StrEnum):
    TABLE = "table"
    JSON = "json"


Name = Annotated[str, typer.Argument(help="The consumer's name: its file name without .yaml.", autocompletion=completion.consumers)]
AnyName = Annotated[str | None, typer.Argument(help="The consumer (default: all).", autocompletion=completion.consumers)]
Reason = Annotated[str, typer.Option(help="Reason, at least 10 characters; kept permanently.", show_default=False)]
Output = Annotated[OutputFormat, typer.Option("--output", "-o", help="Output format.")]


def option_of(panel: str, name: str, kind: Any, text: str, metavar: str | None = None, **limits: Any) -> inspect.Parameter:
    """An option for `with_options`: in this panel of the help, False or None by default."""
    option = typer.Option(f"--{name.replace('_', '-')}", help=text, metavar=metavar, show_default=False, rich_help_panel=panel, **limits)
    default = False if kind is bool else None
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option])


def with_options(
    argument: str, options: Sequence[inspect.Parameter], build: Callable[[dict[str, Any]], Any]
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Adds these options to a command, which gets what ``build`` makes of their values as one argument."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        hints = get_type_hints(command, include_extras=True)
        own = [
            parameter.replace(annotation=hints[parameter.name], kind=inspect.Parameter.KEYWORD_ONLY)
            for parameter in inspect.signature(command).parameters.values()
            if parameter.name != argument
        ]

        @functools.wraps(command)
        def with_argument(**values: Any) -> None:
            command(**{argument: build({option.name: values.pop(option.name) for option in options})}, **values)

        with_argument.__signature__ = inspect.Signature([*own, *options])  # type: ignore[attr-defined]  # read by Typer
        with_argument.__annotations__ = {parameter.name: parameter.annotation for parameter in (*own, *options)}
        return with_argument

    return decorate


def plain_table(title: str, *headings: str, left: Container[int] = (0,)) -> Table:
    """A narrow table. The columns in ``left`` are left-aligned text, the others are right-aligned numbers."""
    table = Table(*headings, title=title, title_justify="left", box=box.SIMPLE, show_edge=False, padding=(0, 0, 0, 1), pad_edge=False)
    for index, column in enumerate(table.columns):
        column.no_wrap = True
        column.justify = "left" if index in left else "right"
    return table


def print_json(value: Any) -> None:
    """Prints ``value`` as JSON on stdout: dataclasses as objects, times in ISO 8601, durations in seconds."""
    print_raw(json.dumps(value, default=json_value, indent=2))


def print_raw(text: str, end: str = "\n") -> None:
    """Prints a text for programs on stdout: no markup, no wrapping. Control characters become escapes."""
    typer.echo(f"{visible(text)}{end}", nl=False)


def json_value(value: Any) -> Any:
    """Converts values that `json` cannot serialize, for `print_json`."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, timedelta):
        return value.total_seconds()
    raise TypeError(type(value))


def who() -> str:
    """``user@host``, for the audit."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a uid without a name, as in some containers
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"


def plain(text: str) -> Text:
    """Makes rich print the text verbatim, without markup."""
    return Text(text)


def print_text(text: str, *, style: str | None = None) -> None:
    """Prints a text as it is on stdout."""
    stdout.print(text, style=style, markup=False, highlight=False)


def print_labelled(label: str, text: str, *, style: str | None = None) -> None:
    """Prints a text in a column of its own, after its label."""
    print_text(f"  {label:<10} {text}", style=style)


def print_note(text: str, *, style: str | None = None) -> None:
    """Prints a text as it is on stderr."""
    stderr.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def print_line(text: str, *, style: str | None = None) -> None:
    """Prints a text that may come from a record on a single line, so that it cannot imitate a line of Tidemark's."""
    print_text(one_line(text), style=style)


def print_lines(headings: Sequence[str], lines: Sequence[Sequence[str]], *, left: Sequence[int] = ()) -> None:
    """Prints a table whose last column is text, truncated to the terminal's width. ``left`` lists other text columns."""
    widths = [max(len(heading), *(len(line[index]) for line in lines)) if lines else 0 for index, heading in enumerate(headings[:-1])]
    width = max(10, stdout.width - sum(widths) - 2 * len(headings))
    table = plain_table("", *headings, left=(*left, len(headings) - 1))
    for *cells, last in lines:
        text = one_line(last)
        table.add_row(*(plain(one_line(cell)) for cell in cells), plain(text if len(text) <= width else f"{text[: width - 1]}…"))
    stdout.print(table)


def minute(moment: datetime) -> str:
    return f"{moment.astimezone(UTC):%Y-%m-%d %H:%M}"

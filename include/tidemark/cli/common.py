"""Shared by the commands: consoles, common options, and access to Postgres, Kafka and the consumers' files."""

from __future__ import annotations

import contextlib
import dataclasses
import getpass
import json
import os
import socket
import sys
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from tidemark import project
from tidemark.profiles import Profile
from tidemark.text.wording import one_line, visible

if TYPE_CHECKING:
    from tidemark.db import Connection
    from tidemark.kafka.cluster import Cluster
    from tidemark.spec import ConsumerSpec


class SafeConsole(Console):
    """Prints texts that may come from records. Characters that a terminal would obey or hide are printed as escapes, such as ``\\x1b``."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            style = segment.style.update_link(None) if segment.style and segment.style.link else segment.style
            yield segment if segment.control else Segment(visible(segment.text), style)


stdout = SafeConsole(soft_wrap=True, width=None if sys.stdout.isatty() else 200, emoji=False)
"""Without a terminal, tables keep their full width."""
stderr = SafeConsole(stderr=True, emoji=False)


class OutputFormat(StrEnum):
    TABLE = "table"
    JSON = "json"


class EventFormat(StrEnum):
    TABLE = "table"
    JSON = "json"
    CSV = "csv"


Name = Annotated[str, typer.Argument(help="The consumer's name: its file name without .yaml.")]
Consumers = Annotated[
    Path | None, typer.Option("--consumers", metavar="DIR", help="Folder of the consumers' files (default: include/consumers).")
]
Transforms = Annotated[
    list[Path] | None, typer.Option("--transforms", metavar="DIR", help="Folder of transforms to search before spark_jobs/transforms.")
]
Reason = Annotated[str, typer.Option(help="Reason, at least 10 characters; kept permanently.", show_default=False)]
Output = Annotated[OutputFormat, typer.Option("--output", help="Output format.")]


def folders(transforms: Sequence[Path] | None) -> list[Path]:
    """The folders to search for transforms, in order."""
    return [*(transforms or []), project.transforms()]


def plain_table(title: str, *headings: str) -> Table:
    """A narrow table. The first column is left-aligned text, the others are right-aligned numbers."""
    table = Table(*headings, title=title, title_justify="left", box=box.SIMPLE, show_edge=False, padding=(0, 0, 0, 1), pad_edge=False)
    for column in table.columns:
        column.no_wrap = True
        column.justify = "right" if column is not table.columns[0] else "left"
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


@contextlib.contextmanager
def connected(application: str = "tidemark", *, needs: Profile = Profile.READER) -> Iterator[Connection]:
    """Opens a database session. Raises `SchemaMismatch` if the schema is not this version's, and `RoleLacks` unless the role has all
    rights of the profile ``needs``."""
    from tidemark import migrations, roles
    from tidemark.connections import database_url
    from tidemark.db import session

    with session(database_url(), application=application) as connection:
        migrations.require_current(connection)
        roles.require(connection, needs)
        yield connection


def spec_of(name: str, consumers: Path | None) -> ConsumerSpec:
    """Reads a consumer's file by the consumer's name."""
    from tidemark.spec import find_consumer

    return find_consumer(name, consumers or project.consumers())


def kafka_cluster() -> Cluster:
    """The Kafka cluster that the environment names. All consumers of a command use the same one."""
    from tidemark.connections import kafka_config
    from tidemark.kafka.cluster import Cluster

    return Cluster(kafka_config())


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


def print_line(text: str, *, style: str | None = None) -> None:
    """Prints a text that may come from a record on a single line, so that it cannot imitate a line of Tidemark's."""
    stdout.print(one_line(text), style=style, markup=False, highlight=False)


def print_lines(headings: Sequence[str], lines: Sequence[Sequence[str]], *, left: Sequence[int] = ()) -> None:
    """Prints a table whose last column is text, truncated to the terminal's width. ``left`` lists other text columns."""
    widths = [max(len(heading), *(len(line[index]) for line in lines)) if lines else 0 for index, heading in enumerate(headings[:-1])]
    width = max(10, stdout.width - sum(widths) - 2 * len(headings))
    table = plain_table("", *headings)
    for index, column in enumerate(table.columns):
        column.justify = "left" if index in left or index == len(headings) - 1 else "right"
    for *cells, last in lines:
        text = one_line(last)
        table.add_row(*(plain(one_line(cell)) for cell in cells), plain(text if len(text) <= width else f"{text[: width - 1]}…"))
    stdout.print(table)


def minute(moment: datetime) -> str:
    return f"{moment.astimezone(UTC):%Y-%m-%d %H:%M}"

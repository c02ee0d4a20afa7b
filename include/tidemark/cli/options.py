"""What the commands share: consoles, and options that mean the same everywhere."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from datetime import datetime, timedelta
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from tidemark import project

stdout = Console(soft_wrap=True, width=None if sys.stdout.isatty() else 200)
"""Tables keep their full width where no terminal limits it."""
stderr = Console(stderr=True)


class OutputFormat(StrEnum):
    TABLE = "table"
    JSON = "json"


Name = Annotated[str, typer.Argument(help="The consumer: its file's name without .yaml.")]
Consumers = Annotated[
    Path | None, typer.Option("--consumers", metavar="DIR", help="Where the consumers' files are; include/consumers if left out.")
]
Transforms = Annotated[
    list[Path] | None, typer.Option("--transforms", metavar="DIR", help="A further folder of transforms, before spark_jobs/transforms.")
]
Output = Annotated[OutputFormat, typer.Option("--output", help="How to print the result.")]


def folders(transforms: Sequence[Path] | None) -> list[Path]:
    """Where transforms are looked for, in order."""
    return [*(transforms or []), project.transforms()]


def plain_table(title: str, *headings: str) -> Table:
    """A narrow table: the first column is text, the others numbers to the right."""
    table = Table(*headings, title=title, title_justify="left", box=box.SIMPLE, show_edge=False, padding=(0, 0, 0, 1), pad_edge=False)
    for column in table.columns:
        column.no_wrap = True
        column.justify = "right" if column is not table.columns[0] else "left"
    return table


def print_json(value: Any) -> None:
    """``value`` as JSON on stdout; dataclasses as objects, times in ISO 8601, lengths of time in seconds."""
    typer.echo(json.dumps(value, default=_plain, indent=2))


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, timedelta):
        return value.total_seconds()
    raise TypeError(type(value))

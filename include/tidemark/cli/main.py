"""The commands, and how an error is told."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from tidemark.cli.options import Consumers, Name, Output, OutputFormat, Transforms, folders, stderr
from tidemark.errors import TidemarkError
from tidemark.local.cli import app as local_app

app = typer.Typer(
    help="Kafka consumer groups for PySpark and Airflow whose offsets live in Postgres.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
consumers_app = typer.Typer(help="Consumers, as their YAML files declare them.", no_args_is_help=True)
sink_app = typer.Typer(help="The tables that consumers write.", no_args_is_help=True)
app.add_typer(consumers_app, name="consumers")
app.add_typer(sink_app, name="sink")
app.add_typer(local_app, name="local")


@app.command()
def migrate() -> None:
    """Bring the database to this version's schema."""
    from tidemark import schema
    from tidemark.connections import database_url

    done = schema.migrate(database_url())
    stderr.print("\n".join(f"applied {name}" for name in done) or "nothing to apply: the database is current")


@consumers_app.command("check")
def consumers_check(
    name: Annotated[str | None, typer.Argument(help="One consumer; all of them if left out.")] = None,
    consumers: Consumers = None,
    transforms: Transforms = None,
    output: Output = OutputFormat.TABLE,
) -> None:
    """Report everything that is wrong with consumers, before they run."""
    from tidemark.cli.check import check_consumers

    if not check_consumers(name, consumers, folders(transforms), output):
        raise typer.Exit(1)


@sink_app.command("ddl")
def sink_ddl(
    name: Name,
    consumers: Consumers = None,
    transforms: Transforms = None,
    partitions: Annotated[
        int | None, typer.Option(min=1, help="LIST-partition the table for this many Kafka partitions: each writer has its own index.")
    ] = None,
) -> None:
    """Print the DDL of a consumer's table, from what its transform returns."""
    from tidemark.cli.check import print_ddl

    print_ddl(name, consumers, folders(transforms), partitions)


@app.command()
def consume(name: Name, consumers: Consumers = None, transforms: Transforms = None, output: Output = OutputFormat.TABLE) -> None:
    """Read what is in the topics now, load it, stop."""
    from tidemark.cli.consume import consume_once

    consume_once(name, consumers, transforms or [], output)


@app.command()
def offsets(name: Name, consumers: Consumers = None, output: Output = OutputFormat.TABLE) -> None:
    """Show position, end, lag, owner and epoch of each partition."""
    from tidemark.cli.offsets import show_offsets

    show_offsets(name, consumers, output)


def main() -> None:
    """Entry point of the ``tidemark`` command: a `TidemarkError` is one text on stderr and exit status 1."""
    try:
        app()
    except TidemarkError as error:
        stderr.print(str(error), style="red", markup=False, highlight=False, soft_wrap=True)
        sys.exit(1)
    except KeyboardInterrupt:
        stderr.print("interrupted")
        sys.exit(130)


if __name__ == "__main__":
    main()

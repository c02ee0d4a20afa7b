"""The commands ``tidemark local up | down | status | reset | env`` and ``tidemark local airflow up | down | status``."""

from __future__ import annotations

import os
import shlex
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.filesize import decimal
from rich.table import Table

from tidemark.cli.common import Output, OutputFormat, print_json, print_note, print_text, stderr, stdout
from tidemark.connections import DATABASE_URL, FILES, database_url
from tidemark.packages import require

if TYPE_CHECKING:
    from tidemark.local.stack import LocalStack

app = typer.Typer(no_args_is_help=True)

airflow_app = typer.Typer(help="A local Airflow on the stack: four processes, metadata in the stack's Postgres.", no_args_is_help=True)
app.add_typer(airflow_app, name="airflow")

Port = Annotated[int | None, typer.Option(min=1, max=65535, show_default="the last one, or a free one")]


@app.command()
def up(
    postgres_port: Port = None,
    kafka_port: Port = None,
    registry: Annotated[
        bool, typer.Option("--registry", help="Also start a schema registry with Confluent's API. The first start downloads 140 MB.")
    ] = False,
    output: Output = OutputFormat.TABLE,
) -> None:
    """Start Postgres and Kafka, and print their addresses. The first start downloads Kafka and creates the data."""
    stack = _stack(postgres_port, kafka_port)
    with stderr.status("starting the servers"):
        stack.up(print_note, registry=registry)
    if output is OutputFormat.JSON:
        print_json(_servers(stack))
        return
    for server in stack.status():
        if server.pid is not None:  # otherwise a registry that was not requested this time
            print_text(f"{server.name} {server.version} at {server.address}, process {server.pid}")
    print_note('To use it in this shell: eval "$(tidemark local env)"')


@app.command()
def down() -> None:
    """Stop the servers and keep their data."""
    stack = _stack()
    was_running = any(server.pid is not None for server in stack.status())
    with stderr.status("stopping the servers"):
        stack.down()
    print_note("The servers are stopped; their data is kept." if was_running else f"No server was running in {stack.folder}.")


@app.command()
def status(output: Output = OutputFormat.TABLE) -> None:
    """Show each server's state, address, version and data size."""
    stack = _stack()
    if output is OutputFormat.JSON:
        print_json(_servers(stack))
        return
    table = Table("server", "state", "pid", "address", "version", "data", "log", box=box.SIMPLE_HEAD)
    for server in stack.status():
        facts = (server.pid, server.address, server.version)
        table.add_row(
            server.name, server.state, *("" if fact is None else str(fact) for fact in facts), decimal(server.data_bytes), str(server.log)
        )
    stdout.print(table)


@app.command()
def reset(yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False) -> None:
    """Stop the servers and delete their data: databases, topics, password and ports."""
    stack = _stack()
    if not yes:
        typer.confirm(f"Delete all databases and topics of the stack in {stack.folder}?", abort=True, err=True)
    with stderr.status("deleting the stack"):
        stack.reset()
    print_note("The stack's data is deleted.")


@app.command()
def env(output: Output = OutputFormat.TABLE) -> None:
    """Print the environment variables of the stack. Use with: eval "$(tidemark local env)"."""
    variables = _stack().env()
    if output is OutputFormat.JSON:
        print_json(variables)
    else:
        typer.echo("\n".join(f"export {name}={shlex.quote(value)}" for name, value in variables.items()))


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def psql(ctx: typer.Context) -> None:
    """Open psql on TIDEMARK_DATABASE_URL, by default on the stack's database. Takes psql's own arguments: -c "SELECT 1"."""
    from tidemark.db import with_password

    stack = _stack()
    program = stack.postgres.programs() / "psql"
    named = os.environ.get(DATABASE_URL) or os.environ.get(FILES[DATABASE_URL])
    parts = with_password(database_url(os.environ if named else stack.env()))
    if "dbname" in parts:
        parts["database"] = parts.pop("dbname")
    variables = {f"PG{name.replace('_', '').upper()}": value for name, value in parts.items()}  # a password is no argument
    os.execve(program, [str(program), *ctx.args], os.environ | variables)  # noqa: S606 - the program of the stack


@airflow_app.command("up")
def airflow_up(
    port: Port = None,
    spark_master: Annotated[str, typer.Option(help="Spark master, stored as the host of the connection tidemark_spark.")] = "local[2]",
    output: Output = OutputFormat.TABLE,
) -> None:
    """Start Airflow on the stack, or repair it, and print its address and login."""
    from tidemark.local.airflow import LocalAirflow

    stack = _stack()
    airflow = LocalAirflow.on(stack, stack.folder / "airflow", port=port, spark_master=spark_master)
    with stderr.status("starting Airflow"):
        airflow.up(print_note)
    if output is OutputFormat.JSON:
        print_json({"url": airflow.url, "user": airflow.user, "password": airflow.password})
        return
    typer.echo(f"url={airflow.url}\nuser={airflow.user}\npassword={airflow.password}")


@airflow_app.command("down")
def airflow_down() -> None:
    """Stop Airflow and everything that it started."""
    from tidemark.local.airflow import LocalAirflow

    with stderr.status("stopping Airflow"):
        LocalAirflow.at(_stack().folder / "airflow").down(print_note)


@airflow_app.command("status")
def airflow_status(output: Output = OutputFormat.TABLE) -> None:
    """Show the four processes. Exits with 1 unless all are healthy."""
    from tidemark.local.airflow import LocalAirflow

    status = LocalAirflow.at(_stack().folder / "airflow").status()
    if output is OutputFormat.JSON:
        print_json(status)
    else:
        typer.echo(f"url={status.url or 'never started'}")
        for process in status.processes:
            health = "healthy" if process.healthy else "not healthy" if process.pid else "stopped"
            typer.echo(f"{process.name} pid={process.pid or '-'} {health}")
    if not status.healthy:
        raise typer.Exit(1)


def _servers(stack: LocalStack) -> list[dict[str, Any]]:
    return [asdict(server) | {"log": str(server.log)} for server in stack.status()]


def _stack(postgres_port: int | None = None, kafka_port: int | None = None) -> LocalStack:
    """Raises `ExtraMissing` if Tidemark is installed without the stack's packages."""
    require(["local"])
    from tidemark.local.stack import LocalStack

    return LocalStack(postgres_port=postgres_port, kafka_port=kafka_port)

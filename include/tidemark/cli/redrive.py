"""``tidemark redrive``: failed records are sent round again, in two steps that can be looked at between."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tidemark.cli.common import (
    Consumers,
    Name,
    Output,
    OutputFormat,
    Reason,
    connected,
    kafka_cluster,
    minute,
    one_line,
    print_json,
    print_lines,
    spec_of,
    stderr,
    stdout,
    who,
)
from tidemark.cli.retries import filtered

if TYPE_CHECKING:
    from tidemark.retry.filter import Filter
    from tidemark.retry.redrive import Preview

app = typer.Typer(help="Send failed records round again: plan, apply, stop.", no_args_is_help=True)


class To(StrEnum):
    LADDER = "ladder"
    NOW = "now"


Id = Annotated[int, typer.Argument(metavar="ID", min=1, help="The redrive's number, as `tidemark redrive list` shows it.")]


@app.command()
@filtered
def plan(
    name: Name,
    wanted: Filter,
    reason: Reason,
    to: Annotated[To, typer.Option("--to", help="The first delay and then the ladder, or one try at once.")] = To.LADDER,
    limit: Annotated[int | None, typer.Option(min=1, help="The first ones only.")] = None,
    per_second: Annotated[int | None, typer.Option(min=1, help="Records a second at most.")] = None,
    max_redrives: Annotated[int, typer.Option(min=1, help="Records that were sent round so often already stay where they are.")] = 3,
    consumers: Consumers = None,
    output: Output = OutputFormat.TABLE,
) -> None:
    """Show and store which records would be sent round. Changes none of them; `tidemark redrive apply` does it."""
    from tidemark.retry.redrive import Destination
    from tidemark.retry.redrive import plan as make_plan

    spec = spec_of(name, consumers)
    options: dict[str, Any] = {"limit": limit, "per_second": per_second, "max_redrives": max_redrives, "destination": Destination(to.value)}
    with connected("tidemark redrive") as connection:
        made = make_plan(connection, spec, wanted, reason=reason, by=who(), **options)
    _print(made, output)
    stderr.print(f"nothing has changed yet; to do it: tidemark redrive apply {made.redrive.redrive_id}", markup=False, highlight=False)


@app.command()
def apply(redrive_id: Id, consumers: Consumers = None, output: Output = OutputFormat.TABLE) -> None:
    """Send round what was planned. Goes on where it was stopped, or where its process ended; what is done is only shown."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from tidemark.retry import redrive

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with connected("tidemark redrive") as connection, Progress(*columns, console=stderr, transient=True) as bar:
        task = bar.add_task(f"redrive {redrive_id}", total=None)

        def show_progress(now: redrive.Progress) -> None:
            bar.update(task, total=now.records, completed=now.redriven + now.passed_over)

        done = redrive.apply(
            connection, kafka_cluster(), lambda name: spec_of(name, consumers), redrive_id, by=who(), on_progress=show_progress
        )
    _print(done, output)


@app.command()
def stop(redrive_id: Id, reason: Reason, output: Output = OutputFormat.TABLE) -> None:
    """Have a redrive that is being applied end; `apply` goes on with it."""
    from tidemark.retry import redrive

    with connected("tidemark redrive") as connection:
        redrive.stop(connection, redrive_id, reason=reason, by=who())
        done = redrive.preview(connection, redrive_id)
    _print(done, output)


@app.command()
def show(redrive_id: Id, output: Output = OutputFormat.TABLE) -> None:
    """Show a redrive: what it is made of, and what became of it."""
    from tidemark.retry import redrive

    with connected("tidemark redrive") as connection:
        found = redrive.preview(connection, redrive_id)
    _print(found, output)


@app.command("list")
def list_(
    name: Annotated[str | None, typer.Argument(help="One consumer; all of them if left out.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="The newest ones.")] = 50,
    consumers: Consumers = None,
    output: Output = OutputFormat.TABLE,
) -> None:
    """List redrives, the newest first."""
    from tidemark.retry import redrive

    group = None if name is None else spec_of(name, consumers).group
    with connected("tidemark redrive") as connection:
        found = redrive.history(connection, group, limit=limit)
    if output is OutputFormat.JSON:
        print_json([_as_json(one) for one in found])
        return
    lines = []
    for one in found:
        which = f"{one.consumer}: {one.filter}: {one.reason}"
        lines.append((str(one.redrive_id), one.state.value, minute(one.planned_at), f"{one.records:,}", f"{one.planned:,}", which))
    print_lines(("redrive", "state", "planned (UTC)", "records", "left", "consumer, which, and why"), lines, left=(1,))


def _as_json(one: Any) -> dict[str, Any]:
    import dataclasses

    values = {field.name: getattr(one, field.name) for field in dataclasses.fields(one)}
    return {**values, "filter": one.filter.as_json(), "records": one.records}


def _print(made: Preview, output: OutputFormat) -> None:
    one = made.redrive
    if output is OutputFormat.JSON:
        rest = {"errors": made.errors, "topics": made.topics, "examples": made.examples, "passed_over_because": made.passed_over}
        print_json({**_as_json(one), **rest, "waiting": made.waiting, "worn_out": made.worn_out})
        return

    def say(text: str, **options: Any) -> None:
        stdout.print(text, markup=False, highlight=False, **options)

    cap = "" if one.per_second is None else f", {one.per_second:,} a second at most"
    where = "the first delay" if one.destination == "ladder" else "one try at once"
    say(f"Redrive {one.redrive_id} ({one.state}): {one.records:,} records of {one.consumer} to {where}{cap}", style="bold")
    say(f"Which: {one.filter}")
    say(f"Reason: {one.reason}")
    say(f"Planned by {one.planned_by} at {minute(one.planned_at)} UTC.")
    if one.started_at is not None:
        say(f"{one.redriven:,} sent round, {one.passed_over:,} passed over, {one.planned:,} left.")
    for why, records in made.passed_over.items():
        say(f"  passed over, {why}: {records:,}")
    if made.waiting:
        say(f"Not part of it: {made.waiting:,} that wait for a retry already.")
    if made.worn_out:
        say(f"Not part of it: {made.worn_out:,} that were sent round {one.max_redrives} times.")
    errors = [(f"{error['records']:,}", f"{error['error_type']}: {error['example'] or ''}") for error in made.errors]
    print_lines(("records", "error"), errors)
    for each in made.examples if one.started_at is None else ():
        say(
            one_line(f"  {each['number']}: {each['topic']}/{each['partition']}@{each['offset']} {each['error_type']}: {each['error_text']}")
        )

"""``tidemark redrive``: retries failed records, in two steps, plan and apply."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tidemark.cli.common import (
    AnyName,
    Name,
    Output,
    OutputFormat,
    Reason,
    minute,
    print_json,
    print_line,
    print_lines,
    print_note,
    stderr,
    who,
)
from tidemark.cli.retries import filtered
from tidemark.cli.servers import connected, kafka_cluster
from tidemark.profiles import Profile
from tidemark.retry import redrive
from tidemark.retry.filter import Filter
from tidemark.retry.redrive import Destination, Preview, Redrive, RedriveRequest
from tidemark.retry.redrive_text import heading
from tidemark.spec import find_consumer
from tidemark.text.storable import BIGINT, INTEGER

app = typer.Typer(no_args_is_help=True)

Id = Annotated[int, typer.Argument(metavar="ID", min=1, max=BIGINT, help="The redrive's number, as shown by `tidemark redrive list`.")]


@app.command()
@filtered
def plan(
    name: Name,
    record_filter: Filter,
    reason: Reason,
    to: Annotated[
        Destination | None,
        typer.Option("--to", help="All delays again from the first, or one try at once. Default: ladder, or now without retry delays."),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, max=BIGINT, help="Maximum number of records; takes the first ones.")] = None,
    per_second: Annotated[int | None, typer.Option(min=1, max=INTEGER, help="Maximum records per second.")] = None,
    max_redrives: Annotated[
        int, typer.Option(min=1, max=INTEGER, help="Maximum redrives per record; a record that reached it is left alone.")
    ] = 3,
    output: Output = OutputFormat.TABLE,
) -> None:
    """Plan a redrive: show and store which records it would retry. Changes nothing; run `tidemark redrive apply` next."""
    options: dict[str, Any] = {"limit": limit, "per_second": per_second, "max_redrives": max_redrives, "destination": to}
    request = RedriveRequest(find_consumer(name), record_filter, reason=reason, by=who(), **options)
    with connected("tidemark redrive", needs=Profile.OPERATOR) as connection:
        preview = redrive.plan(connection, request)
    _print(preview, output)
    print_note(f"nothing has changed yet; to apply it: tidemark redrive apply {preview.redrive.redrive_id}")


@app.command()
def apply(redrive_id: Id, output: Output = OutputFormat.TABLE) -> None:
    """Apply a planned redrive, or continue one that was stopped or interrupted. A finished redrive is only shown."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with connected("tidemark redrive", needs=Profile.OPERATOR) as connection, Progress(*columns, console=stderr, transient=True) as bar:
        task = bar.add_task(f"redrive {redrive_id}", total=None)

        def show_progress(progress: redrive.RedriveProgress) -> None:
            bar.update(task, total=progress.records, completed=progress.redriven + progress.passed_over)

        result = redrive.apply(connection, kafka_cluster(), find_consumer, redrive_id, by=who(), on_progress=show_progress)
    _print(result, output)


@app.command()
def stop(redrive_id: Id, reason: Reason, output: Output = OutputFormat.TABLE) -> None:
    """Stop a redrive that is being applied. `apply` continues it."""
    with connected("tidemark redrive", needs=Profile.OPERATOR) as connection:
        redrive.stop(connection, redrive_id, reason=reason, by=who())
        result = redrive.preview(connection, redrive_id)
    _print(result, output)


@app.command()
def show(redrive_id: Id, output: Output = OutputFormat.TABLE) -> None:
    """Show a redrive: its plan and its result."""
    with connected("tidemark redrive", needs=Profile.OPERATOR) as connection:
        preview = redrive.preview(connection, redrive_id)
    _print(preview, output)


@app.command("list")
def list_(
    name: AnyName = None,
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="Maximum number of redrives.")] = 50,
    output: Output = OutputFormat.TABLE,
) -> None:
    """List redrives, newest first."""
    group = None if name is None else find_consumer(name).group
    with connected("tidemark redrive") as connection:
        redrives = redrive.history(connection, group, limit=limit)
    if output is OutputFormat.JSON:
        print_json([_as_json(entry) for entry in redrives])
        return
    lines = []
    for entry in redrives:
        subject = f"{entry.consumer}: {entry.filter}: {entry.reason}"
        lines.append(
            (str(entry.redrive_id), entry.state.value, minute(entry.planned_at), f"{entry.records:,}", f"{entry.planned:,}", subject)
        )
    print_lines(("redrive", "state", "planned (UTC)", "records", "left", "consumer, filter, reason"), lines, left=(1,))


def _as_json(entry: Redrive) -> dict[str, Any]:
    values = {field.name: getattr(entry, field.name) for field in dataclasses.fields(entry)}
    return {**values, "filter": entry.filter.as_json(), "records": entry.records}


def _print(preview: Preview, output: OutputFormat) -> None:
    if output is OutputFormat.JSON:
        details = {
            "errors": preview.errors,
            "topics": preview.topics,
            "examples": preview.examples,
            "passed_over_because": preview.passed_over,
        }
        print_json({**_as_json(preview.redrive), **details, "waiting": preview.waiting, "worn_out": preview.worn_out})
        return

    first, *rest = heading(preview)
    print_line(first, style="bold")
    for text in rest:
        print_line(text)
    errors = [(f"{error['records']:,}", f"{error['error_type']}: {error['example'] or ''}") for error in preview.errors]
    print_lines(("records", "error"), errors)
    for example in preview.examples if preview.redrive.started_at is None else ():
        position = f"{example['topic']}/{example['partition']}@{example['offset']}"
        print_line(f"{example['number']}: {position} {example['error_type']}: {example['error_text']}")

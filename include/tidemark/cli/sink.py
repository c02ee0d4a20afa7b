"""``tidemark sink``: the DDL of a consumer's tables, and how they differ from the consumer's rows."""

from __future__ import annotations

from contextlib import closing
from typing import Annotated, Any

import typer

from tidemark import project
from tidemark.author.alter import alterations_of
from tidemark.author.alter import run as run_alterations
from tidemark.author.check import TableDiff, sink_ddl, sink_diff
from tidemark.author.new_consumer import sketched_table
from tidemark.cli.common import Name, Output, OutputFormat, print_json, print_labelled, print_note, print_raw, stdout
from tidemark.cli.consumers import report_omitted_fields
from tidemark.cli.spark import SmallSpark
from tidemark.spec import find_consumer
from tidemark.text.wording import counted
from tidemark.values.fields import ColumnsUnknown, transform_of

app = typer.Typer(no_args_is_help=True)


@app.command()
def ddl(
    name: Name,
    partitions: Annotated[
        int | None, typer.Option(min=1, help="LIST-partition the table by this many Kafka partitions, one index per writer.")
    ] = None,
) -> None:
    """Print the DDL of a consumer's table, derived from its transform's result, its schema or, for JSON, its latest records."""
    spec = find_consumer(name)
    transform = transform_of(spec, [project.transforms()])
    try:
        with closing(SmallSpark()) as spark:
            statements = sink_ddl(spec, transform, spark.schema, partitions=partitions)
    except ColumnsUnknown:
        sketch = sketched_table(spec, partitions)
        report_omitted_fields(sketch)
        statements = sketch.ddl
    print_raw(statements)


@app.command()
def diff(name: Name, output: Output = OutputFormat.TABLE) -> None:
    """Show how a consumer's tables differ from what its transform or schema returns now, and what evolve: add would add."""
    spec = find_consumer(name)
    with closing(SmallSpark()) as spark:
        diffs = sink_diff(spec, transform_of(spec, [project.transforms()]), spark.schema).values()
    ok = all(table.ok for table in diffs)
    if output is OutputFormat.JSON:
        print_json([_as_json(table) for table in diffs])
    else:
        for table in diffs:
            stdout.print(f"[bold]{table.sink.table}[/bold]  evolve: {table.sink.evolve}", highlight=False)
            for difference in table.differences:
                print_labelled(difference.change.value, difference.problem)
                if difference.ddl:
                    print_labelled("", difference.ddl)
            if not table.differences:
                print_labelled("", "no differences")
        stdout.print("[green]ok[/green]" if ok else "[red]not ready[/red]")
    if not ok:
        raise typer.Exit(1)


@app.command()
def alter(
    name: Name,
    run: Annotated[bool, typer.Option("--run", help="Run the statements, in one transaction.")] = False,
    output: Output = OutputFormat.TABLE,
) -> None:
    """Print the statements for the differences that `sink diff` shows, including those for the view of validated rows."""
    spec = find_consumer(name)
    with closing(SmallSpark()) as spark:
        diffs = sink_diff(spec, transform_of(spec, [project.transforms()]), spark.schema).values()
    alterations = alterations_of(spec, diffs)
    count = sum(len(alteration.statements) for alteration in alterations)
    if output is OutputFormat.TABLE and count:
        print_raw("\n".join(statement for alteration in alterations for statement in alteration.statements))
    if run and count:
        run_alterations(alterations)
        print_note(f"ran {counted(count, 'statement')}")
    if output is OutputFormat.JSON:
        print_json(alterations)
    elif not count:
        print_note("no statement is needed")
    remaining = [f"{alteration.table}: {problem}" for alteration in alterations for problem in alteration.remaining]
    if remaining:
        print_note("\n".join(("no statement fixes:", *remaining)))
        raise typer.Exit(1)


def _as_json(diff: TableDiff) -> dict[str, Any]:
    differences = [
        {"change": difference.change.value, "problem": difference.problem, "ddl": difference.ddl} for difference in diff.differences
    ]
    return {"table": diff.sink.table, "evolve": diff.sink.evolve, "ok": diff.ok, "differences": differences}

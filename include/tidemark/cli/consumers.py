"""``tidemark consumers``: checks consumers, and writes one without code to start from."""

from __future__ import annotations

from contextlib import closing
from typing import Annotated, Any

import typer

from tidemark import project
from tidemark.author.check import CheckReport, Surroundings, try_latest_records
from tidemark.author.check import check as check_consumer
from tidemark.author.new_consumer import Sketch, sketched
from tidemark.cli import completion
from tidemark.cli.common import AnyName, Output, OutputFormat, print_json, print_labelled, print_note, print_raw, print_text, stdout
from tidemark.cli.spark import SmallSpark
from tidemark.kafka.cluster import Cleanup
from tidemark.spec import ConsumerSpec, Problem, SpecInvalid, find_consumer, read_folder
from tidemark.spec.problem import shown
from tidemark.text.duration import format_duration
from tidemark.text.wording import counted, quoted

app = typer.Typer(no_args_is_help=True)


@app.command()
def check(name: AnyName = None, output: Output = OutputFormat.TABLE) -> None:
    """Report all problems of consumers before they run."""
    specs: list[ConsumerSpec] = []
    invalid: list[SpecInvalid] = []
    if name is None:
        good, invalid = read_folder()
        specs = list(good.values())
    else:
        try:
            specs = [find_consumer(name)]
        except SpecInvalid as error:
            invalid = [error]
    with closing(SmallSpark()) as spark:
        surroundings = Surroundings([project.transforms()], spark.schema)
        reports = [check_consumer(spec, surroundings) for spec in specs]
        for report in reports:
            try_latest_records(report, surroundings, spark)
    if output is OutputFormat.JSON:
        print_json([_as_json(report) for report in reports] + [_invalid_as_json(error) for error in invalid])
    else:
        for report in reports:
            _print(report)
        for bad in invalid:
            print_text(str(bad), style="red")
        if not reports and not invalid:
            stdout.print(f"no consumers in {project.consumers()}")
    if invalid or not all(report.ok for report in reports):
        raise typer.Exit(1)


@app.command()
def new(
    topic: Annotated[str, typer.Argument(help="The topic to load.", autocompletion=completion.topics)],
    name: Annotated[str | None, typer.Option(help="The consumer's name (default: the topic's).", show_default=False)] = None,
    table: Annotated[
        str | None, typer.Option(metavar="SCHEMA.TABLE", help="The table (default: public, named after the consumer).")
    ] = None,
    schedule: Annotated[str, typer.Option(metavar="CRON", help="When Airflow starts its runs.")] = "*/5 * * * *",
    create_table: Annotated[bool, typer.Option("--create-table", help="Run the DDL.")] = False,
    sample: Annotated[int, typer.Option(min=1, max=10_000, help="Number of latest records to look at.")] = 100,
    output: Output = OutputFormat.TABLE,
) -> None:
    """Write a consumer without code for a topic of Avro, Protobuf or JSON: its file and a suite. Print the DDL. Overwrite nothing."""
    sketch = sketched(topic, name or topic, table, schedule, sample)
    if create_table:
        sketch.create_table()
    sketch.write()
    for path in sketch.files:
        print_note(f"wrote {path}")
    report_omitted_fields(sketch)
    if output is OutputFormat.JSON:
        print_json({"consumer": sketch.name, "files": [str(path) for path in sketch.files], "ddl": sketch.ddl, "left_out": sketch.left_out})
        return
    print_raw(sketch.ddl)
    if sketch.objects:
        print_note(_about_objects(sketch))
    if create_table:
        print_note(f"created {sketch.table}")
    first = "" if create_table else "read the DDL and run it, then "
    print_note(f"Next: {first}`tidemark consumers check {sketch.name}` and `tidemark try {sketch.name}`")


def _about_objects(sketch: Sketch) -> str:
    name = sketch.objects[0]
    way = "" if "json" in next(iter(sketch.files.values())) else ", or `flatten: _` for all of them"
    return (
        f"Nested records become JSON columns: {', '.join(map(quoted, sketch.objects))}. For a column of a field's own, write "
        f"`columns: {{{name}_id: {name}.id}}` in the consumer's file{way}, and create the table with `tidemark sink ddl {sketch.name}`."
    )


def report_omitted_fields(sketch: Sketch) -> None:
    for field in sketch.left_out:
        print_note(f"not loaded, because it cannot be the name of a column: {quoted(field)}")


def _print(report: CheckReport) -> None:
    spec = report.spec
    stdout.print(f"[bold]{spec.name}[/bold]  {shown(spec.source.path)}", highlight=False)
    if report.transform is not None:
        print_labelled(
            "transform", f"{spec.transform}, {report.transform.form} form" if spec.transform else f"none, the fields of {spec.format.value}"
        )
    for name, columns in report.columns.items():
        print_labelled("sink", f"{spec.sinks[name].table} takes {', '.join(columns)}")
    for topic in report.topics:
        print_labelled("topic", f"{topic.topic.name}: {counted(topic.topic.partitions, 'partition')}, {_retention_text(topic.cleanup)}")
    for suite, expectations in report.suites.items():
        print_labelled("suite", f"{suite}: {counted(expectations, 'expectation')}")
    for note in report.notes:
        print_labelled("note", note, style="yellow")
    for problem in sorted(report.problems, key=lambda problem: (problem.line, problem.column)):
        print_text(str(problem), style="red")
    for error in report.errors:
        print_text(str(error), style="red")
    if report.ddl:
        print_text(report.ddl)
    stdout.print("[green]ok[/green]" if report.ok else "[red]not ready[/red]")


def _retention_text(cleanup: Cleanup | None) -> str:
    if cleanup is None:
        return "kept for an unknown time"
    text = "kept permanently" if cleanup.retention is None else f"kept for {format_duration(cleanup.retention)}"
    return f"{text}, but compacted: only the newest record of each key" if cleanup.compacted else text


def _as_json(report: CheckReport) -> dict[str, Any]:
    return {
        "consumer": report.spec.name,
        "ok": report.ok,
        "form": report.transform.form if report.transform else None,
        "sinks": [{"table": sink.table, "columns": report.columns.get(name, [])} for name, sink in report.spec.sinks.items()],
        "topics": [
            {
                "name": topic.topic.name,
                "partitions": topic.topic.partitions,
                "retention_s": topic.cleanup and topic.cleanup.retention,
                "compacted": topic.cleanup and topic.cleanup.compacted,
            }
            for topic in report.topics
        ],
        "expectations": sum(report.suites.values()) if report.suites else None,
        "problems": [_problem_as_json(problem) for problem in report.problems],
        "errors": [{"type": type(error).__name__, "text": str(error)} for error in report.errors],
        "notes": report.notes,
        "ddl": report.ddl,
    }


def _invalid_as_json(error: SpecInvalid) -> dict[str, Any]:
    return {"consumer": error.name, "ok": False, "problems": [_problem_as_json(problem) for problem in error.problems]}


def _problem_as_json(problem: Problem) -> dict[str, Any]:
    return {"file": str(problem.file), "line": problem.line, "column": problem.column, "message": problem.message, "fix": problem.fix}

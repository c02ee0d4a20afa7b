"""``tidemark consumers check``, ``tidemark sink ddl`` and ``tidemark sink diff``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tidemark import project
from tidemark.author.check import CheckReport, TableDiff, check, sink_ddl, sink_diff
from tidemark.author.describe import SparkSchema
from tidemark.author.new_consumer import sketched_table
from tidemark.cli.common import OutputFormat, print_json, print_raw, stderr, stdout
from tidemark.cli.sketch import report_omitted_fields
from tidemark.kafka.cluster import Cleanup
from tidemark.spec import ConsumerSpec, SpecInvalid, find_consumer, read_folder
from tidemark.spec.problem import shown
from tidemark.text.duration import format_duration
from tidemark.text.wording import counted
from tidemark.values.fields import ColumnsUnknown, transform_of

if TYPE_CHECKING:
    import pyarrow as pa


def check_consumers(name: str | None, consumers: Path | None, folders: Sequence[Path], output: OutputFormat) -> bool:
    """Checks one consumer or all and prints the findings. Returns whether everything is ok."""
    folder = consumers or project.consumers()
    specs: list[ConsumerSpec] = []
    invalid: list[SpecInvalid] = []
    if name is None:
        good, invalid = read_folder(folder)
        specs = list(good.values())
    else:
        try:
            specs = [find_consumer(name, folder)]
        except SpecInvalid as error:
            invalid = [error]
    with spark_schemas() as spark_schema:
        reports = [check(spec, folders, spark_schema) for spec in specs]
    if output is OutputFormat.JSON:
        print_json([_as_json(report) for report in reports] + [_invalid_as_json(error) for error in invalid])
    else:
        for report in reports:
            _print(report)
        for bad in invalid:
            stdout.print(str(bad), style="red", markup=False, highlight=False)
        if not reports and not invalid:
            stdout.print(f"no consumers in {folder}")
    return not invalid and all(report.ok for report in reports)


def print_ddl(name: str, consumers: Path | None, folders: Sequence[Path], partitions: int | None) -> None:
    """Prints the DDL of a consumer's sink as plain SQL for psql."""
    spec = find_consumer(name, consumers or project.consumers())
    transform = transform_of(spec, folders)
    try:
        with spark_schemas() as spark_schema:
            ddl = sink_ddl(spec, transform, spark_schema, partitions=partitions)
    except ColumnsUnknown:
        sketch = sketched_table(spec, partitions)
        report_omitted_fields(sketch)
        ddl = sketch.ddl
    print_raw(ddl)


def print_diff(name: str, consumers: Path | None, folders: Sequence[Path], output: OutputFormat) -> bool:
    """Prints how a consumer's tables differ from the rows that it would write. Returns whether runs can load all tables."""
    spec = find_consumer(name, consumers or project.consumers())
    with spark_schemas() as spark_schema:
        diffs = sink_diff(spec, transform_of(spec, folders), spark_schema)
    ok = all(diff.ok for diff in diffs.values())
    if output is OutputFormat.JSON:
        print_json([_diff_as_json(diff) for diff in diffs.values()])
        return ok
    for diff in diffs.values():
        stdout.print(f"[bold]{diff.sink.table}[/bold]  evolve: {diff.sink.evolve}", highlight=False)
        for difference in diff.differences:
            _print_line(difference.change.value, difference.problem)
            if difference.ddl:
                _print_line("", difference.ddl)
        if not diff.differences:
            _print_line("", "no differences")
    stdout.print("[green]ok[/green]" if ok else "[red]not ready[/red]")
    return ok


def _diff_as_json(diff: TableDiff) -> dict[str, Any]:
    differences = [
        {"change": difference.change.value, "problem": difference.problem, "ddl": difference.ddl} for difference in diff.differences
    ]
    return {"table": diff.sink.table, "evolve": diff.sink.evolve, "ok": diff.ok, "differences": differences}


class SmallSpark:
    """A `LocalSpark` that uses one session for all calls."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = folders
        self._session: Any = None

    def schema(self, function: Callable[..., Any], input_schema: pa.Schema) -> Mapping[str, pa.Schema]:
        from tidemark.spark.engine import output_schema

        return output_schema(self._running_session("to find out the transform's columns"), function, input_schema)

    def rows(self, function: Callable[..., Any], batch: pa.RecordBatch) -> Mapping[str, pa.Table]:
        from tidemark.spark.engine import rows_of

        return rows_of(self._running_session("to call the transform"), function, batch)

    def stop(self) -> None:
        if self._session is not None:
            self._session.stop()

    def _running_session(self, purpose: str) -> Any:
        from tidemark.spark.session import small_session

        if self._session is None:
            with stderr.status(f"starting Spark {purpose}"):
                self._session = small_session(self._folders)
        return self._session


@contextlib.contextmanager
def spark_schemas() -> Iterator[SparkSchema]:
    """Provides a function that returns a Spark transform's output schema. One Spark session is started at the first call."""
    with small_spark() as spark:
        yield spark.schema


@contextlib.contextmanager
def small_spark(folders: Sequence[Path] = ()) -> Iterator[SmallSpark]:
    """Provides a Spark session that ends with the block. Its workers import the user's transforms from ``folders``."""
    spark = SmallSpark(folders)
    try:
        yield spark
    finally:
        spark.stop()


def _print(report: CheckReport) -> None:
    spec = report.spec
    stdout.print(f"[bold]{spec.name}[/bold]  {shown(spec.source.path)}", highlight=False)
    if report.transform is not None:
        _print_line(
            "transform", f"{spec.transform}, {report.transform.form} form" if spec.transform else f"none, the fields of {spec.format.value}"
        )
    for name, columns in report.columns.items():
        _print_line("sink", f"{spec.tables[name].table} takes {', '.join(columns)}")
    for topic in report.topics:
        _print_line("topic", f"{topic.topic.name}: {counted(topic.topic.partitions, 'partition')}, {_retention_text(topic.cleanup)}")
    for suite, expectations in report.suites.items():
        _print_line("suite", f"{suite}: {counted(expectations, 'expectation')}")
    for note in report.notes:
        _print_line("note", note, "yellow")
    for problem in sorted(report.problems, key=lambda problem: (problem.line, problem.column)):
        stdout.print(str(problem), style="red", markup=False, highlight=False)
    for error in report.errors:
        stdout.print(str(error), style="red", markup=False, highlight=False)
    if report.ddl:
        stdout.print(report.ddl, markup=False, highlight=False)
    stdout.print("[green]ok[/green]" if report.ok else "[red]not ready[/red]")


def _retention_text(cleanup: Cleanup | None) -> str:
    if cleanup is None:
        return "kept for an unknown time"
    text = "kept permanently" if cleanup.retention is None else f"kept for {format_duration(cleanup.retention)}"
    return f"{text}, but compacted: only the newest record of each key" if cleanup.compacted else text


def _print_line(label: str, text: str, style: str = "") -> None:
    stdout.print(f"  {label:<10} {text}", style=style, markup=False, highlight=False)


def _as_json(report: CheckReport) -> dict[str, Any]:
    return {
        "consumer": report.spec.name,
        "ok": report.ok,
        "form": report.transform.form if report.transform else None,
        "sinks": [{"table": sink.table, "columns": report.columns.get(name, [])} for name, sink in report.spec.tables.items()],
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


def _problem_as_json(problem: Any) -> dict[str, Any]:
    return {"file": str(problem.file), "line": problem.line, "column": problem.column, "message": problem.message, "fix": problem.fix}

"""``tidemark consume``: performs one bounded run and prints its progress and result."""

from __future__ import annotations

import collections
import dataclasses
import time
from typing import Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tidemark.cli.common import Name, Output, OutputFormat, plain_table, print_json, print_note, stderr, stdout
from tidemark.connections import Connections, from_env
from tidemark.consume.assignment import narrowed
from tidemark.consume.run import open_attempt
from tidemark.db import session, transaction
from tidemark.driver import launch
from tidemark.driver.on_cluster import run_on_cluster
from tidemark.driver.submission import cluster_settings
from tidemark.errors import Fenced, TidemarkError
from tidemark.offsets import store
from tidemark.offsets.store import TaskIdentity
from tidemark.retry.pending import relay_at_end
from tidemark.spec import ConsumerSpec, find_consumer

LOG_TAIL = 30


@dataclasses.dataclass(kw_only=True, eq=False)
class TakenOver(Fenced):
    """A newer run reads the rest of this run's records. Exit status 1, because they are not loaded yet and a script must not continue."""

    consumer: str

    def __str__(self) -> str:
        return (
            f"A newer run of {self.consumer} has taken over. What this run committed stays, and the newer run continues from there. "
            "There is nothing to do."
        )


HEADINGS = {
    "loaded": "loaded", "skipped": "skipped", "retried": "retry", "failed": "failed", "unaccounted": "other", "sink_rows": "rows",
    "deleted": "deletes",
}  # fmt: skip
"""Headings of counts, short enough for a terminal. "other" is compaction gaps, transaction markers and filtered rows."""


def consume(
    name: Name,
    partition: Annotated[list[str] | None, typer.Option(metavar="TOPIC[:0,1,5-9]", help="Read only these partitions. Repeatable.")] = None,
    output: Output = OutputFormat.TABLE,
) -> None:
    """Raises as `narrowed` and `run_with_progress` do."""
    spec = narrowed(find_consumer(name), partition or [])
    print_result(spec.group, run_with_progress(spec, from_env()), output)


def run_with_progress(
    spec: ConsumerSpec, connections: Connections, *, drain: bool = False, backfill_of: int | None = None
) -> launch.Progress:
    """Performs one run with a progress bar, then publishes the records that it handed off. Prints lost ranges and publishing problems.

    Raises the run's error, after printing the driver's last log lines to stderr.
    """
    cluster = cluster_settings(spec, connections)
    attempt_id = open_attempt(
        connections.database_url, spec.group, TaskIdentity(task_id="drain" if drain else None), backfill_of=backfill_of
    )
    title = spec.name if backfill_of is None else f"{spec.name}, rewind {backfill_of}"
    lines: collections.deque[str] = collections.deque(maxlen=LOG_TAIL)
    bar_columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]} records/s, lag {task.fields[lag]}"),
        TimeElapsedColumn(),
    )
    started: list[float] = []
    with Progress(*bar_columns, console=stderr) as bar:
        task = bar.add_task(f"{title}: planning", total=None, rate="-", lag="-")

        def show(progress: launch.Progress) -> None:
            if progress.planned:
                if not started:
                    started.append(time.monotonic())
                rate = progress.records / max(time.monotonic() - started[0], launch.POLL_S)  # over the whole run, including Spark's start
                bar.update(
                    task,
                    description=f"{title}: {'loading' if progress.records else 'starting Spark'}",
                    total=progress.total,
                    completed=progress.records,
                    rate=f"{rate:,.0f}",
                    lag=f"{progress.total - progress.records:,}",
                )

        arguments = launch.DriverArguments(spec.name, attempt_id, partitions=[str(item) for item in spec.only.items], drain=drain)
        try:
            if cluster is not None:
                result = run_on_cluster(arguments, connections, cluster, on_log=print_note, on_progress=show)
            else:
                result = launch.run_attempt(
                    arguments,
                    connections,
                    on_log=lines.append,
                    on_progress=show,
                    on_silence=lambda text: print_note(text, style="yellow"),
                )
        except launch.AttemptFenced as error:
            bar.stop()
            with session(connections.database_url) as connection, transaction(connection) as cur:
                newer = store.has_newer_attempt(cur, attempt_id)
            if not newer:
                raise
            raise TakenOver(consumer=spec.name) from error
        except TidemarkError as error:
            bar.stop()
            for line in _without_error(list(lines), str(error).splitlines()):
                print_note(line, style="dim")
            raise
        show(result)
    for lost in result.lost:
        end = "?" if lost.end is None else lost.end
        print_note(f"lost: {lost.topic}/{lost.partition} [{lost.start}, {end}) ({lost.reason})", style="yellow")
    for obstacle in relay_at_end(connections, spec):
        print_note(obstacle, style="yellow")
    return result


def headings(*, deletes: bool) -> dict[str, str]:
    """The counts in a table, with their headings. ``deletes``: whether any record was a delete."""
    return {name: heading for name, heading in HEADINGS.items() if deletes or name != "deleted"}


def _without_error(lines: list[str], error: list[str]) -> list[str]:
    """The driver's lines without its final error, which `main` prints."""
    return lines[: -len(error)] if error and lines[-len(error) :] == error else lines


def print_result(group: str, result: launch.Progress, output: OutputFormat) -> None:
    totals = result.counts
    if output is OutputFormat.JSON:
        print_json(
            {
                "group": group,
                "attempt": result.attempt_id,
                "state": result.state,
                "records": result.records,
                **totals,
                "partitions": [dataclasses.asdict(part) for part in result.partitions],
                "lost": [dataclasses.asdict(lost) for lost in result.lost],
            }
        )
        return
    if not result.partitions:
        stdout.print(f"{group}: nothing to read")
        return
    columns = headings(deletes=totals["deleted"] > 0)
    table = plain_table(f"{group}, attempt {result.attempt_id}", "partition", "from", "to", *columns.values())
    table.show_footer = True
    table.columns[0].footer = "total"
    for column, name in zip(table.columns[3:], columns, strict=True):
        column.footer = f"{totals[name]:,}"
    for part in result.partitions:
        counts = [f"{getattr(part, name):,}" for name in columns]
        table.add_row(f"{part.topic}/{part.partition}", f"{part.start:,}", f"{part.end:,}", *counts)
    stdout.print(table)

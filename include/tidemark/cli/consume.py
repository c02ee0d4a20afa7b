"""``tidemark consume``: performs one bounded run and prints its progress and result."""

from __future__ import annotations

import collections
import dataclasses
import re
import time
from enum import StrEnum
from typing import Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tidemark.cli.common import Interrupted, Name, Output, OutputFormat, plain_table, print_json, print_note, stderr, stdout
from tidemark.connections import Connections, from_env
from tidemark.consume.assignment import narrowed
from tidemark.consume.run import open_attempt
from tidemark.db import session, transaction
from tidemark.driver import launch
from tidemark.driver.on_cluster import follow, start
from tidemark.driver.submission import cluster_settings
from tidemark.errors import Fenced, TidemarkError
from tidemark.offsets import store
from tidemark.offsets.store import TaskIdentity
from tidemark.retry.pending import relay_at_end
from tidemark.spec import ConsumerSpec, RunMode, find_consumer

LOG_TAIL = 30
READING_LINE = re.compile(r" INFO tidemark\.consume\.run reading group=")
"""The driver's log line at the beginning of a batch."""


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
    spec: ConsumerSpec, connections: Connections, *, drain: bool = False, of_rewind: int | None = None
) -> launch.Progress:
    """Performs one run with a progress bar, then publishes the records that it handed off. Prints lost ranges and publishing problems.

    Raises the run's error, after printing the driver's last log lines to stderr, and `Interrupted`.
    """
    starts_first = spec.run is RunMode.CONTINUOUS and not drain and of_rewind is None
    with RunBar(spec.name if of_rewind is None else f"{spec.name}, rewind {of_rewind}", starts_first=starts_first) as bar:
        cluster = cluster_settings(spec, connections)
        task = TaskIdentity(task_id="drain" if drain else None)
        attempt_id = open_attempt(connections.database_url, spec.group, task, of_rewind=of_rewind)
        arguments = launch.DriverArguments(spec.name, attempt_id, partitions=[str(item) for item in spec.only.items], drain=drain)
        try:
            if cluster is not None:
                bar.enter(Phase.WAITING)
                start(arguments, connections, cluster, on_log=print_note)
                result = follow(attempt_id, connections, cluster.start_limit, on_log=print_note, on_progress=bar.show)
            else:
                result = launch.run_attempt(
                    arguments,
                    connections,
                    on_log=bar.note_line,
                    on_progress=bar.show,
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
            for line in _without_error(list(bar.lines), str(error).splitlines()):
                print_note(line, style="dim")
            raise
        except KeyboardInterrupt as error:
            text = f"Interrupted. The driver of attempt {attempt_id} was killed. Its commits stay; the next run continues from there."
            raise Interrupted(text) from error
        bar.show(result)
    for lost in result.lost:
        end = "?" if lost.end is None else lost.end
        print_note(f"lost: {lost.topic}/{lost.partition} [{lost.start}, {end}) ({lost.reason})", style="yellow")
    for obstacle in relay_at_end(connections, spec):
        print_note(obstacle, style="yellow")
    return result


class Phase(StrEnum):
    """What a run does, in the order in which it enters the phases. On a cluster, Spark starts before the driver plans."""

    PLANNING = "planning"
    STARTING = "starting Spark"
    WAITING = "waiting for the cluster"
    READING = "reading"
    COMMITTING = "committing"
    DONE = "done"


class RunBar:
    """The progress bar of a run, with its phase. ``starts_first``: Spark starts before the run is planned."""

    def __init__(self, title: str, *, starts_first: bool) -> None:
        self.lines: collections.deque[str] = collections.deque(maxlen=LOG_TAIL)
        """The driver's last log lines."""
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]} records/s, lag {task.fields[lag]}"),
            TimeElapsedColumn(),
        )
        self._title, self._planned_at = title, 0.0
        self.phase = Phase.STARTING if starts_first else Phase.PLANNING
        self._bar = Progress(*columns, console=stderr)
        self._task = self._bar.add_task(f"{title}: {self.phase}", total=None, rate="-", lag="-")

    def __enter__(self) -> RunBar:
        self._bar.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Leaves the bar as it is, above what is printed next."""
        if self._bar.live.is_started:  # a second time, it would print an empty line
            self._bar.stop()

    def enter(self, phase: Phase) -> None:
        """Shows the phase. Ignores phases before the current one: a run that reads its second batch has committed its first."""
        if list(Phase).index(phase) > list(Phase).index(self.phase):
            self.phase = phase
            self._bar.update(self._task, description=f"{self._title}: {phase}")

    def note_line(self, line: str) -> None:
        """Keeps a line of the driver's log, which shows when the driver begins to read."""
        self.lines.append(line)
        if READING_LINE.search(line):
            self.enter(Phase.READING)

    def show(self, progress: launch.Progress) -> None:
        if not progress.planned:
            return
        self._planned_at = self._planned_at or time.monotonic()
        done = progress.state == "COMMITTED"
        self.enter(Phase.DONE if done else Phase.COMMITTING if progress.records else Phase.READING if progress.driver else Phase.STARTING)
        rate = progress.records / max(time.monotonic() - self._planned_at, launch.POLL_S)  # over the whole run, including Spark's start
        lag = f"{progress.total - progress.records:,}"
        self._bar.update(self._task, total=progress.total, completed=progress.records, rate=f"{rate:,.0f}", lag=lag)


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

"""``tidemark lag``: how far groups are behind, and whether that is a problem."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import UTC
from typing import Annotated

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from tidemark import project
from tidemark.cli.common import Output, OutputFormat, plain, plain_table, print_json, print_note, stdout
from tidemark.cli.servers import connected, kafka_cluster
from tidemark.db import Connection, transaction
from tidemark.errors import BadInput, TidemarkError
from tidemark.offsets import samples
from tidemark.offsets.lag import GroupLag, Lag
from tidemark.offsets.lag import group as lag_of
from tidemark.offsets.lag import groups as all_lags
from tidemark.offsets.sampling import sample_all
from tidemark.spec import ConsumerSpec, find_consumer, read_folder
from tidemark.text.wording import about, counted

EVERY_S = 5.0
"""How often ``--watch`` takes a sample."""


def lag(
    name: Annotated[str | None, typer.Argument(help="The consumer's name (default: all groups).", show_default=False)] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Show it until interrupted, with a new sample every 5 s.")] = False,
    output: Output = OutputFormat.TABLE,
) -> None:
    """As of a new sample, if the role may store one. A consumer's partitions are shown if it is named."""
    if watch and (output is OutputFormat.JSON or not stdout.is_terminal):
        raise BadInput(what="--watch", found="the output is not a terminal", fix="Run it without --watch, as often as you need it.")
    folder = project.consumers()
    specs = [find_consumer(name)] if name is not None else list(read_folder(folder)[0].values()) if folder.is_dir() else []
    with connected() as connection:
        if not watch:
            lags, not_sampled = _sample_and_read(connection, specs, name)
            for problem in not_sampled:
                print_note(f"not sampled: {problem}")
            if output is OutputFormat.JSON:
                print_json(lags)
            else:
                stdout.print(_rendered(lags, single=name is not None))
            return
        with Live(console=stdout, screen=True, auto_refresh=False) as live:
            try:
                while True:
                    lags, not_sampled = _sample_and_read(connection, specs, name)
                    notes = [plain(f"not sampled: {problem}") for problem in not_sampled]
                    live.update(Group(_rendered(lags, single=name is not None), *notes), refresh=True)
                    time.sleep(EVERY_S)
            except KeyboardInterrupt:
                raise typer.Exit from None


def _sample_and_read(connection: Connection, specs: Sequence[ConsumerSpec], name: str | None) -> tuple[list[GroupLag], list[str]]:
    """Samples, then reads the lag. Returns it worst first, with the reasons why consumers were not sampled."""
    not_sampled = try_sample(connection, specs)
    with transaction(connection) as cur:
        if name is None:
            return all_lags(cur), not_sampled
        group_lag = lag_of(cur, specs[0].group)
    return [] if group_lag is None else [group_lag], not_sampled


def try_sample(connection: Connection, specs: Sequence[ConsumerSpec]) -> list[str]:
    """Samples the consumers if the role may. Returns why some were not sampled."""
    with transaction(connection) as cur:
        if not samples.may_write(cur):
            return ["this role may not store samples; these are the last ones"]
    try:
        return [f"{consumer}: {error}" for consumer, error in sample_all(connection, kafka_cluster(), specs).items()]
    except TidemarkError as error:
        return [str(error)]


def _rendered(lags: Sequence[GroupLag], *, single: bool) -> RenderableType:
    if not single:
        return Group(_table("", [group_lag.lag for group_lag in lags]), *[_reason(group_lag.lag) for group_lag in lags])
    parts: list[RenderableType] = []
    for group_lag in lags:
        partitions = sorted(
            group_lag.partitions, key=lambda part: (-(part.seconds or 0), -part.known_records, part.topic or "", part.partition or 0)
        )
        totals = [group_lag.lag, *(group_lag.topics if len(group_lag.topics) > 1 else ())]
        parts += [_table(group_lag.lag.group, [*totals, *partitions]), _reason(group_lag.lag)]
        if group_lag.lag.replay_records:
            left = "" if group_lag.lag.replay_s is None else f", about {about(group_lag.lag.replay_s)}"
            parts.append(f"replaying: {counted(group_lag.lag.replay_records, 'record')} left{left}")
        if group_lag.lost_ranges:
            parts.append(f"lost: {_lost(group_lag)}")
        if group_lag.lag.clock_ahead or any(part.clock_ahead for part in group_lag.partitions):
            parts.append("timestamps of records are later than the database's clock: their age is shown as 0")
    return Group(*parts) if parts else "no group: the consumer has never run"


def _lost(group_lag: GroupLag) -> str:
    counted_ranges = group_lag.lost_ranges - group_lag.lost_unknown
    counted_loss = [f"{counted(group_lag.lost_records, 'record')} in {counted(counted_ranges, 'range')}"] if counted_ranges else []
    unknown_loss = [f"an unknown number of records in {counted(group_lag.lost_unknown, 'range')}"] if group_lag.lost_unknown else []
    return " and ".join([*counted_loss, *unknown_loss])


def _reason(row: Lag) -> Text:
    return plain(" ".join(filter(None, (f"{row.group}: {row.health}: {row.why}", row.fix))))


def _table(title: str, rows: Sequence[Lag]) -> Table:
    headings = ("what", "records", "open", "age", "in/s", "out/s", "catch up", "retention", "health", "sampled (UTC)")
    table = plain_table(title, *headings, left=(0, 8))
    for row in rows:
        table.add_row(
            plain(row.group if row.topic is None else row.topic if row.partition is None else f"{row.topic}/{row.partition}"),
            records_of(row),
            "-" if row.open is None else f"{row.open:,}",
            age_of(row),
            _rate(row.produced_per_s),
            _rate(row.consumed_per_s),
            "never" if row.never else "-" if row.catch_up_s is None else about(row.catch_up_s) if row.catch_up_s else "0 s",
            "-" if row.retention_used is None else f"{row.retention_used:.0%}",
            row.health,
            sampled_of(row),
        )
    return table


def records_of(row: Lag) -> str:
    if row.records is not None:
        return f"{row.records:,}"
    return f"≥ {row.known_records:,}" if row.known_records else "-"


def sampled_of(row: Lag) -> str:
    """The time of the oldest sample."""
    return "-" if row.sampled_at is None else f"{row.sampled_at.astimezone(UTC):%m-%d %H:%M:%S}"


def age_of(row: Lag) -> str:
    """The age of the first unread record."""
    return "-" if row.seconds is None else about(row.seconds) if row.seconds else "0 s"


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}" if value >= 10 or not value else f"{value:.1f}"

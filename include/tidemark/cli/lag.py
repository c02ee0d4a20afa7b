"""``tidemark lag``: how far groups are behind, and whether that is a problem."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import UTC
from pathlib import Path

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from tidemark import project
from tidemark.cli.common import OutputFormat, connected, kafka_cluster, plain, plain_table, print_json, spec_of, stderr, stdout
from tidemark.db import Connection, transaction
from tidemark.errors import BadInput, TidemarkError
from tidemark.offsets import lag, samples
from tidemark.offsets.lag import GroupLag, Lag
from tidemark.offsets.sampling import sample_all
from tidemark.spec import ConsumerSpec, read_folder
from tidemark.text.wording import about, counted

EVERY_S = 5.0
"""How often ``--watch`` takes a sample."""


def show_lag(name: str | None, consumers: Path | None, output: OutputFormat, *, watch: bool) -> None:
    """Prints the lag of all groups, or of one consumer with its partitions, as of a new sample if the role may store one."""
    if watch and (output is OutputFormat.JSON or not stdout.is_terminal):
        raise BadInput(what="--watch", found="the output is not a terminal", fix="Run it without --watch, as often as you need it.")
    if name is not None:
        specs = [spec_of(name, consumers)]
    else:
        folder = consumers or project.consumers()
        specs = list(read_folder(folder)[0].values()) if folder.is_dir() else []
    with connected() as connection:
        if not watch:
            found, why = _look(connection, specs, name)
            for text in why:
                stderr.print(f"not sampled: {text}", markup=False, highlight=False)
            if output is OutputFormat.JSON:
                print_json(found)
            else:
                stdout.print(_shown(found, single=name is not None))
            return
        with Live(console=stdout, screen=True, auto_refresh=False) as live:
            try:
                while True:
                    found, why = _look(connection, specs, name)
                    below = [plain(f"not sampled: {text}") for text in why]
                    live.update(Group(_shown(found, single=name is not None), *below), refresh=True)
                    time.sleep(EVERY_S)
            except KeyboardInterrupt:
                raise typer.Exit from None


def _look(connection: Connection, specs: Sequence[ConsumerSpec], name: str | None) -> tuple[list[GroupLag], list[str]]:
    """The lag, worst first, and why there is no new sample."""
    why = try_sample(connection, specs)
    with transaction(connection) as cur:
        if name is None:
            return lag.groups(cur), why
        found = lag.group(cur, specs[0].group)
    return [] if found is None else [found], why


def try_sample(connection: Connection, specs: Sequence[ConsumerSpec]) -> list[str]:
    """Samples the consumers if the role may; returns why some were not sampled."""
    with transaction(connection) as cur:
        if not samples.may_write(cur):
            return ["this role may not store samples; these are the last ones"]
    try:
        return [f"{consumer}: {error}" for consumer, error in sample_all(connection, kafka_cluster(), specs).items()]
    except TidemarkError as error:
        return [str(error)]


def _shown(found: Sequence[GroupLag], *, single: bool) -> RenderableType:
    if not single:
        return Group(_table("", [one.lag for one in found]), *[_reason(one.lag) for one in found])
    parts: list[RenderableType] = []
    for one in found:
        lines = sorted(one.partitions, key=lambda part: (-(part.seconds or 0), -part.known_records, part.topic or "", part.partition or 0))
        whole = [one.lag, *(one.topics if len(one.topics) > 1 else ())]
        parts += [_table(one.lag.group, [*whole, *lines]), _reason(one.lag)]
        if one.lag.replay_records:
            left = "" if one.lag.replay_s is None else f", about {about(one.lag.replay_s)}"
            parts.append(f"replaying: {counted(one.lag.replay_records, 'record')} left{left}")
        if one.lost_ranges:
            parts.append(f"lost: {_lost(one)}")
        if one.lag.clock_ahead or any(part.clock_ahead for part in one.partitions):
            parts.append("timestamps of records are later than the database's clock: their age is shown as 0")
    return Group(*parts) if parts else "no group: the consumer has never run"


def _lost(one: GroupLag) -> str:
    known = one.lost_ranges - one.lost_unknown
    numbers = [f"{counted(one.lost_records, 'record')} in {counted(known, 'range')}"] if known else []
    unknown = [f"an unknown number of records in {counted(one.lost_unknown, 'range')}"] if one.lost_unknown else []
    return " and ".join([*numbers, *unknown])


def _reason(one: Lag) -> Text:
    return plain(" ".join(filter(None, (f"{one.group}: {one.health}: {one.why}", one.fix))))


def _table(title: str, lines: Sequence[Lag]) -> Table:
    table = plain_table(title, "what", "records", "open", "age", "in/s", "out/s", "catch up", "retention", "health", "sampled (UTC)")
    table.columns[8].justify = "left"
    for one in lines:
        table.add_row(
            plain(one.group if one.topic is None else one.topic if one.partition is None else f"{one.topic}/{one.partition}"),
            records_of(one),
            "-" if one.open is None else f"{one.open:,}",
            age_of(one),
            _rate(one.produced_per_s),
            _rate(one.consumed_per_s),
            "never" if one.never else "-" if one.catch_up_s is None else about(one.catch_up_s) if one.catch_up_s else "0 s",
            "-" if one.retention_used is None else f"{one.retention_used:.0%}",
            one.health,
            "-" if one.sampled_at is None else f"{one.sampled_at.astimezone(UTC):%m-%d %H:%M:%S}",
        )
    return table


def records_of(one: Lag) -> str:
    if one.records is not None:
        return f"{one.records:,}"
    return f"≥ {one.known_records:,}" if one.known_records else "-"


def age_of(one: Lag) -> str:
    """The age of the first unread record."""
    return "-" if one.seconds is None else about(one.seconds) if one.seconds else "0 s"


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}" if value >= 10 or not value else f"{value:.1f}"

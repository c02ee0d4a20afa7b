"""How a measurement is declared: a name, what it needs, how it is run, its tables of figures, and the bars of its figures.

``run`` gets a `Bench` and the extent, full or quick, and returns its figures: a mapping that ``bench.json`` holds under the measurement's
name. Lists in it are rows of tables. Tables and bars read this mapping, so they can be printed again without measuring.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.harness.site import PARTITIONS, Site, Topic
from benchmarks.harness.stage import Stage
from benchmarks.harness.turns import Harness
from benchmarks.throughput.contestants import Contestant

Figures = Mapping[str, Any]
Printed = tuple[str, list[str], list[list[str]]]
"""A table's title, columns and rows."""


@dataclass(slots=True)
class Bench:
    """What every measurement gets: running servers, warm contestants, and the options of the command line."""

    stage: Stage
    site: Site
    harness: Harness
    contestants: Sequence[Contestant]
    records: int
    rounds: int
    width: int
    report: Callable[[str], None]

    def events(self, records: int | None = None) -> Topic:
        """A filled topic with the events, by default as many as the command line asks for, but at most a million."""
        records = records or min(self.records, 1_000_000)
        return self.stage.topic(Topic(f"events-{records}", PARTITIONS, records, self.width))


@dataclass(frozen=True, slots=True)
class Table:
    """``title`` and ``columns``: format strings over the figures. ``columns`` and ``cells`` are lines as on the page, with ``|`` between;
    each cell is a format string over a row of ``rows``, and empty if the row lacks the figure."""

    title: str
    columns: str
    cells: str
    rows: str = "rows"

    def printed(self, figures: Figures) -> Printed:
        columns, cells = ([cell.strip() for cell in line.split("|")] for line in (self.columns, self.cells))
        columns = [column.format_map(figures) for column in columns]
        return self.title.format_map(figures), columns, [[_cell(form, row) for form in cells] for row in figures[self.rows]]


@dataclass(frozen=True, slots=True)
class Bar:
    """``value`` reads a figure from a row of ``rows``, or from the mapping itself; `None` if it was not measured. ``figure``: a format
    string, over a row if there are rows."""

    figure: str
    value: Callable[[Figures], float | None]
    rows: str = ""
    at_least: float | None = None
    at_most: float | None = None

    def judged(self, figures: Figures) -> Iterable[Judged]:
        for row in figures.get(self.rows, ()) if self.rows else [figures]:
            if (value := self.value(row)) is not None:
                yield Judged(self.figure.format_map(row), value, self)


@dataclass(frozen=True, slots=True)
class Judged:
    """A figure and its bar."""

    figure: str
    measured: float
    bar: Bar

    @property
    def met(self) -> bool:
        low, high = self.bar.at_least, self.bar.at_most
        return (low is None or self.measured >= low) and (high is None or self.measured <= high)

    @property
    def cells(self) -> list[str]:
        low, high = self.bar.at_least, self.bar.at_most
        bound = f"at least {_short(low)}" if low is not None else f"at most {_short(high or 0)}"
        return [self.figure, _short(self.measured), bound, "yes" if self.met else "**no**"]


class Measurement:
    """``needs``: contestants that stay warm while it runs; those that it does not need are ended before, to free their memory. ``full`` and
    ``quick``: the extents, as parameters of ``run``."""

    def __init__(
        self,
        name: str,
        run: Callable[..., Figures],
        *tables: Table,
        bars: Sequence[Bar] = (),
        needs: Sequence[str] = (),
        full: Mapping[str, Any] = {},
        quick: Mapping[str, Any] = {},
    ) -> None:
        self.name, self.run, self.tables, self.bars, self.needs, self.full, self.quick = name, run, tables, bars, needs, full, quick


def _cell(form: str, row: Figures) -> str:
    try:
        return form.format_map(row)
    except (KeyError, TypeError):
        return ""


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1_000 or value == int(value) else f"{value:.2f}"

"""``make demo-changes``: a table in one database becomes equal to a changing table in another one.

Debezium writes each change of a shop's table to Kafka. A consumer without code loads the changes into a table with the same columns. Its
driver is killed with SIGKILL in the middle of a commit, and the group is rewound to the first change, while the shop's table keeps
changing. At the end, both tables are compared row by row and column by column.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
from pathlib import Path

from demo.__main__ import console, step
from rich.table import Table

from tests.support import change_data
from tests.support.change_load import TYPES, differences
from tests.support.change_story import Story, story
from tests.support.kafka_topics import Topics
from tests.support.scenario import Scenario
from tidemark import migrations, project
from tidemark.errors import TidemarkError
from tidemark.local.stack import LocalStack
from tidemark.rewind.plan_model import ToEarliest

TRANSACTIONS = 150
"""Transactions of the shop in each step of the demo. Each has one to four changes."""


def run(folder: Path, transactions: int = TRANSACTIONS) -> bool:
    """Runs the demo in ``folder``, which is emptied first, and returns whether both tables are equal. Stops everything it started at the
    end."""
    stack = LocalStack(folder)
    try:
        with step("Kafka, and a Postgres for the consumer, on loopback"):
            stack.reset()
            stack.up(console.print)
            env = stack.env()
            migrations.migrate(env["TIDEMARK_DATABASE_URL"])
        with contextlib.ExitStack() as running:
            told = _begun(running, folder / "project", env["TIDEMARK_DATABASE_URL"], env["TIDEMARK_KAFKA_BOOTSTRAP_SERVERS"])
            return _told(told, transactions)
    finally:
        stack.down()


def _begun(running: contextlib.ExitStack, home: Path, url: str, servers: str) -> Story:
    shutil.rmtree(home, ignore_errors=True)
    scenario = Scenario(home, url, Topics(servers))
    scenario.name, scenario.table = "accounts", "lake.accounts"
    with step(f"a Postgres for the shop, its table with {len(TYPES) + 1} columns, and Debezium, which writes each change to Kafka"):
        source = running.enter_context(change_data.running(servers))
        batch = {"max_records": 200}
        told = running.enter_context(story(source, scenario, partitions=3, table="accounts", prefix="shop", batch=batch))
        console.print(f"  topic {told.topic}: 3 partitions, keyed by the table's primary key")
        console.print(f"  {len(source.rows(told.load.table))} rows are there already")
    console.print("[bold]The consumer. It has no code:[/bold]")
    console.print(scenario.spec_file.read_text(), markup=False, highlight=False)
    return told


def _told(told: Story, transactions: int) -> bool:
    with step("Tidemark loads, run after run, while the shop's table changes"):
        with told.changing(transactions) as load:
            while not load.done():
                told.run()
        _tell(told)
    with step("it loads again, and is killed in the middle of a commit"):
        told.change(transactions)
        told.followed.catch_up()
        with told.changing(transactions):
            console.print(f"  [red]kill -9 {told.kill()}[/red]: what its open transaction had written is gone")
        _tell(told)
        told.run()
        console.print("  the next run continues after the last commit")
        _tell(told)
    with step("a rewind to the first change: all rows are taken out and loaded again, while the shop's table changes"):
        with told.changing(transactions):
            told.rewind(ToEarliest())
            told.run()
        _tell(told)
    with step("the shop closes, and the last run reads the rest"):
        told.followed.catch_up()
        told.run()
        _tell(told)
    return _compared(told)


def _tell(told: Story) -> None:
    read, there = sum(told.scenario.positions().values()), len(told.records())
    ((rows,),) = told.scenario.sql(f"SELECT count(*) FROM {told.scenario.table}")
    console.print(f"  {read:,} of {there:,} records in the topic are read; {rows:,} rows in {told.scenario.table}")


def _compared(told: Story) -> bool:
    """Prints what happened to the shop's table, and whether both tables are equal."""
    source, sink = told.source.rows(told.load.table), told.rows()
    happened = Table("what happened in the shop", "")
    happened.columns[1].justify = "right"
    for kind, count in sorted(told.changes.items()):
        happened.add_row(kind, f"{count:,}")
    happened.add_row("all changes", f"{sum(told.changes.values()):,}", style="bold")
    console.print(happened)
    columns = {name for row in source.values() for name in row}
    differing = len({difference[0] for difference in differences(sink, source)})
    console.print(f"Rows in the shop's table: {len(source):,}. Rows in {told.scenario.table}: {len(sink):,}. Columns: {len(columns)}.")
    if differing:
        console.print(f"[red]The tables differ in {differing:,} rows.[/red] The load's seed: {told.seed}.")
        return False
    console.print("[green]Both tables are equal[/green], although the consumer was killed and rewound: no change is lost, none is doubled.")
    return True


if __name__ == "__main__":
    try:
        sys.exit(0 if run(project.state() / "demo-changes") else 1)
    except TidemarkError as error:
        console.print(str(error), style="red", markup=False)
        sys.exit(1)

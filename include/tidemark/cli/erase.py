"""``tidemark erase``: remove a person's rows in two steps, plan and apply."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from tidemark.cli.common import (
    Consumers,
    Name,
    Output,
    OutputFormat,
    Reason,
    connected,
    minute,
    plain,
    plain_table,
    print_json,
    spec_of,
    stderr,
    stdout,
    who,
)
from tidemark.profiles import Profile
from tidemark.text.wording import counted

if TYPE_CHECKING:
    from tidemark.erase.erasure import Erasure

app = typer.Typer(help="Remove a person's rows from a sink and from all that is kept of them: plan, apply.", no_args_is_help=True)

Number = Annotated[int, typer.Argument(metavar="ID", min=1, help="The erasure's number, as shown by `tidemark erase list`.")]
Where = Annotated[str, typer.Option(metavar="SQL", help="Condition over the sink's columns: 'customer_id = 42'.", show_default=False)]


@app.command()
def plan(name: Name, where: Where, reason: Reason, consumers: Consumers = None, output: Output = OutputFormat.TABLE) -> None:
    """Plan an erasure: count and store what it would remove. Removes nothing; run `tidemark erase apply` next."""
    from tidemark.db import transaction
    from tidemark.erase.erasure import not_searched
    from tidemark.erase.erasure import plan as make_plan
    from tidemark.text.problems import check_reason

    spec, why = spec_of(name, consumers), check_reason(reason)
    with connected(needs=Profile.REWINDER) as connection:
        made = make_plan(connection, spec, where, reason=why, by=who())
        with transaction(connection) as cur:
            left = not_searched(cur, made.group_id)
    _print(made, output)
    _say(f"not searched: {counted(left, 'record')} without rows (tidemark retries list {name}), and the topics in Kafka")
    _say(f"nothing has changed yet; to erase it permanently: tidemark erase apply {made.erasure_id} --where SQL, with the same condition")


@app.command()
def apply(erasure_id: Number, where: Where, consumers: Consumers = None, output: Output = OutputFormat.TABLE) -> None:
    """Erase permanently, in one transaction while the group runs. Needs the plan's condition, which is not stored."""
    from tidemark.erase.erasure import apply as apply_plan

    with connected(needs=Profile.REWINDER) as connection:
        _print(apply_plan(connection, lambda name: spec_of(name, consumers), erasure_id, where, by=who()), output)


@app.command()
def show(erasure_id: Number, output: Output = OutputFormat.TABLE) -> None:
    """Show an erasure: how much it found or removed, who asked for it, and why."""
    from tidemark.db import transaction
    from tidemark.erase.erasure import read

    with connected() as connection, transaction(connection) as cur:
        found = read(cur, erasure_id)
    _print(found, output)


@app.command("list")
def list_(
    name: Annotated[str | None, typer.Argument(help="The consumer (default: all).")] = None,
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="Maximum number of erasures.")] = 50,
    output: Output = OutputFormat.TABLE,
) -> None:
    """List erasures, newest first."""
    from tidemark.erase.erasure import history

    with connected() as connection:
        found = history(connection, name, limit=limit)
    if output is OutputFormat.JSON:
        print_json(found)
        return
    table = plain_table("", "erasure", "state", "planned at (UTC)", "by", "consumer", "rows")
    for column in table.columns:
        column.justify = "left"
    for one in found:
        count = one.sink_rows + one.archived_rows + one.overwritten_rows
        table.add_row(str(one.erasure_id), one.state, minute(one.planned_at), plain(one.planned_by), plain(one.consumer), f"{count:,}")
    stdout.print(table)


def _print(one: Erasure, output: OutputFormat) -> None:
    if output is OutputFormat.JSON:
        print_json(one)
        return
    applied = f" by {one.applied_by} at {minute(one.applied_at)} UTC" if one.applied_at else ""
    for text in (
        f"erasure {one.erasure_id} of {one.consumer}: {one.state}{applied}",
        f"  {counted(one.sink_rows, 'row')} in {one.sink}",
        f"  {counted(one.archived_rows, 'row')} in archives of rewinds, {counted(one.overwritten_rows, 'overwritten row')}",
        f"  {counted(one.failed_records, 'payload')} of failed records, the examples of {counted(one.examples, 'validation result')}",
        f"  reason: {one.reason} ({one.planned_by}, {minute(one.planned_at)} UTC)",
    ):
        stdout.print(text, markup=False, highlight=False)


def _say(text: str) -> None:
    stderr.print(text, markup=False, highlight=False)

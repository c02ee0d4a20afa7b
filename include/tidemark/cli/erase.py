"""``tidemark erase``: remove a person's rows in two steps, plan and apply."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated

import typer

from tidemark.cli.common import (
    Consumers,
    Name,
    Output,
    OutputFormat,
    Reason,
    connected,
    kafka_cluster,
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
from tidemark.text.storable import BIGINT
from tidemark.text.wording import counted

if TYPE_CHECKING:
    from tidemark.erase.erasure import Erasure, Person
    from tidemark.erase.kafka_records import Keyed
    from tidemark.spec import ConsumerSpec

app = typer.Typer(help="Remove a person's rows from a sink and from all that is kept of them: plan, apply.", no_args_is_help=True)

Number = Annotated[int, typer.Argument(metavar="ID", min=1, max=BIGINT, help="The erasure's number, as shown by `tidemark erase list`.")]
Where = Annotated[
    str | None, typer.Option(metavar="SQL", help="Condition over the sink's columns: 'customer_id = 42'.", show_default=False)
]
Key = Annotated[
    str | None, typer.Option(metavar="TEXT", help="The key of the person's messages as text. Reads the topics.", show_default=False)
]
KeyHex = Annotated[str | None, typer.Option(metavar="HEX", help="The key in hex.", show_default=False)]


@app.command()
def plan(
    name: Name,
    reason: Reason,
    where: Where = None,
    key: Key = None,
    key_hex: KeyHex = None,
    consumers: Consumers = None,
    output: Output = OutputFormat.TABLE,
) -> None:
    """Plan an erasure: count and store what it would remove. Removes nothing; run `tidemark erase apply` next.

    Give --where, --key or --key-hex.
    """
    from tidemark.erase.erasure import plan as make_plan
    from tidemark.text.problems import check_reason

    spec, why, person = spec_of(name, consumers), check_reason(reason), _person(where, key, key_hex)
    with connected(needs=Profile.REWINDER) as connection:
        made = make_plan(connection, kafka_cluster(), spec, person, _read_kafka, reason=why, by=who())
    one = made.erasure
    if output is OutputFormat.JSON:
        told = {"in_kafka": made.in_kafka, "not_searched": made.not_searched, "older_rows": made.older_rows}
        print_json({**dataclasses.asdict(one), **told})
    else:
        _print(one, output)
        for held in made.in_kafka:
            stdout.print(f"  Kafka still holds {held}", markup=False, highlight=False)
    if person.key is None:
        _say(f"not searched: {counted(made.not_searched, 'record')} without rows (tidemark retries list {name}); --key finds the person's")
    if made.older_rows:
        _say(
            f"not found: {counted(made.older_rows, 'row')} from before the start of the topics cannot be found by key; use --where for them"
        )
    if one.not_suppressed:
        again = counted(one.not_suppressed, "record")
        _say(f"a replay makes the rows of {again} again: they keep other rows, or their rows are aggregates of a batch")
    _say(f"nothing has changed yet; to erase it permanently: tidemark erase apply {one.erasure_id}, with the same --where or --key")


@app.command()
def apply(
    erasure_id: Number,
    where: Where = None,
    key: Key = None,
    key_hex: KeyHex = None,
    consumers: Consumers = None,
    output: Output = OutputFormat.TABLE,
) -> None:
    """Erase permanently, in one transaction while the group runs. Needs the plan's condition or key, which is not stored."""
    from tidemark.erase.erasure import apply as apply_plan

    person = _person(where, key, key_hex)
    with connected(needs=Profile.REWINDER) as connection:
        _print(apply_plan(connection, lambda name: spec_of(name, consumers), erasure_id, person, _read_kafka, by=who()), output)


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


def _person(where: str | None, key: str | None, key_hex: str | None) -> Person:
    from tidemark.erase.erasure import Person

    if sum(given is not None for given in (where, key, key_hex)) != 1:
        raise typer.BadParameter("give exactly one of --where, --key and --key-hex")
    try:
        return Person(where, bytes.fromhex(key_hex) if key_hex is not None else None if key is None else key.encode())
    except ValueError:
        raise typer.BadParameter(f'"{key_hex}" is not hex: write two hex digits per byte: 00ff', param_hint="--key-hex") from None


def _read_kafka(spec: ConsumerSpec, key: bytes) -> Keyed:
    from tidemark.connections import kafka_config
    from tidemark.erase.kafka_records import records_of

    return records_of(kafka_cluster(), kafka_config(), spec, key, _say)


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
        f"  {counted(one.suppressed, 'record or key', 'records or keys')} that no replay loads again",
        f"  reason: {one.reason} ({one.planned_by}, {minute(one.planned_at)} UTC)",
    ):
        stdout.print(text, markup=False, highlight=False)


def _say(text: str) -> None:
    stderr.print(text, markup=False, highlight=False)

"""``tidemark erase``: remove a person's rows in two steps, plan and apply."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer

from tidemark.cli.common import (
    AnyName,
    Name,
    Output,
    OutputFormat,
    Reason,
    minute,
    plain,
    plain_table,
    print_json,
    print_note,
    print_text,
    stdout,
    who,
)
from tidemark.cli.servers import connected, kafka_cluster
from tidemark.connections import kafka_config
from tidemark.db import transaction
from tidemark.erase import erasure as erasures
from tidemark.erase.erasure import Erasure, Person
from tidemark.erase.kafka_records import Keyed, records_of
from tidemark.profiles import Profile
from tidemark.retry.filter import parse_key
from tidemark.spec import ConsumerSpec, find_consumer
from tidemark.text.problems import check_reason
from tidemark.text.storable import BIGINT
from tidemark.text.wording import counted

app = typer.Typer(no_args_is_help=True)

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
    output: Output = OutputFormat.TABLE,
) -> None:
    """Plan an erasure: count and store what it would remove. Removes nothing; run `tidemark erase apply` next.

    Give --where, --key or --key-hex.
    """
    spec, checked_reason, person = find_consumer(name), check_reason(reason), _person(where, key, key_hex)
    with connected(needs=Profile.REWINDER) as connection:
        planned = erasures.plan(connection, kafka_cluster(), spec, person, _read_kafka, reason=checked_reason, by=who())
    erasure = planned.erasure
    if output is OutputFormat.JSON:
        findings = {"in_kafka": planned.in_kafka, "not_searched": planned.not_searched, "older_rows": planned.older_rows}
        print_json({**dataclasses.asdict(erasure), **findings})
    else:
        _print(erasure, output)
        for records in planned.in_kafka:
            print_text(f"  Kafka still holds {records}")
    if person.key is None:
        unsearched = counted(planned.not_searched, "record")
        print_note(f"not searched: {unsearched} without rows (tidemark retries list {name}); use --key to find the person's")
    if planned.older_rows:
        older = counted(planned.older_rows, "row")
        print_note(f"not found: {older} from before the start of the topics cannot be found by key; use --where for them")
    if erasure.not_suppressed:
        replayed = counted(erasure.not_suppressed, "record")
        print_note(f"a replay writes the rows of {replayed} again: they also have other rows, or their rows are aggregates of a batch")
    print_note(
        f"nothing has changed yet; to erase it permanently: tidemark erase apply {erasure.erasure_id}, with the same --where or --key"
    )


@app.command()
def apply(
    erasure_id: Number,
    where: Where = None,
    key: Key = None,
    key_hex: KeyHex = None,
    output: Output = OutputFormat.TABLE,
) -> None:
    """Erase permanently, in one transaction while the group runs. Needs the plan's condition or key, which is not stored."""
    person = _person(where, key, key_hex)
    with connected(needs=Profile.REWINDER) as connection:
        _print(erasures.apply(connection, find_consumer, erasure_id, person, _read_kafka, by=who()), output)


@app.command()
def show(erasure_id: Number, output: Output = OutputFormat.TABLE) -> None:
    """Show an erasure: how much it found or removed, who requested it, and why."""
    with connected() as connection, transaction(connection) as cur:
        erasure = erasures.read(cur, erasure_id)
    _print(erasure, output)


@app.command("list")
def list_(
    name: AnyName = None,
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="Maximum number of erasures.")] = 50,
    output: Output = OutputFormat.TABLE,
) -> None:
    """List erasures, newest first."""
    with connected() as connection:
        history = erasures.history(connection, name, limit=limit)
    if output is OutputFormat.JSON:
        print_json(history)
        return
    table = plain_table("", "erasure", "state", "planned at (UTC)", "by", "consumer", "rows", left=range(6))
    for erasure in history:
        rows = erasure.sink_rows + erasure.archived_rows + erasure.overwritten_rows
        table.add_row(
            str(erasure.erasure_id),
            erasure.state,
            minute(erasure.planned_at),
            plain(erasure.planned_by),
            plain(erasure.consumer),
            f"{rows:,}",
        )
    stdout.print(table)


def _person(where: str | None, key: str | None, key_hex: str | None) -> Person:
    if sum(option is not None for option in (where, key, key_hex)) != 1:
        raise typer.BadParameter("give exactly one of --where, --key and --key-hex")
    return Person(where, parse_key(key, key_hex))


def _read_kafka(spec: ConsumerSpec, key: bytes) -> Keyed:
    return records_of(kafka_cluster(), kafka_config(), spec, key, print_note)


def _print(erasure: Erasure, output: OutputFormat) -> None:
    if output is OutputFormat.JSON:
        print_json(erasure)
        return
    applied = f" by {erasure.applied_by} at {minute(erasure.applied_at)} UTC" if erasure.applied_at else ""
    for text in (
        f"erasure {erasure.erasure_id} of {erasure.consumer}: {erasure.state}{applied}",
        f"  {counted(erasure.sink_rows, 'row')} in {erasure.sink}",
        f"  {counted(erasure.archived_rows, 'row')} in archives of rewinds, {counted(erasure.overwritten_rows, 'overwritten row')}",
        f"  {counted(erasure.failed_records, 'payload')} of failed records, examples of {counted(erasure.examples, 'validation result')}",
        f"  {counted(erasure.suppressed, 'record or key', 'records or keys')} that no replay loads again",
        f"  reason: {erasure.reason} ({erasure.planned_by}, {minute(erasure.planned_at)} UTC)",
    ):
        print_text(text)

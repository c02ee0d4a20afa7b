"""``tidemark rewind``, ``seek`` and ``groups adopt``: move a group in two steps, plan and apply, or one partition in a single step."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tidemark.cli.common import (
    Consumers,
    Name,
    Output,
    OutputFormat,
    Reason,
    connected,
    kafka_cluster,
    plain,
    plain_table,
    print_json,
    print_raw,
    stderr,
    stdout,
    who,
)
from tidemark.profiles import Profile
from tidemark.text.storable import BIGINT

if TYPE_CHECKING:
    from tidemark.rewind.plan_model import Plan, Scenario

POSITION = re.compile(r"(?P<topic>[A-Za-z0-9._-]+)/(?P<partition>\d{1,9})", re.ASCII)

app = typer.Typer(help="Move a running group to any offset, together with its rows: plan, apply, undo.", no_args_is_help=True)


class PlanFormat(StrEnum):
    TABLE = "table"
    JSON = "json"
    MARKDOWN = "markdown"


Number = Annotated[int, typer.Argument(metavar="ID", min=1, max=BIGINT, help="The rewind's number, as shown by `tidemark rewind list`.")]
Form = Annotated[PlanFormat, typer.Option("--output", help="Output format.")]
ExpiresIn = Annotated[str | None, typer.Option(metavar="DURATION", help="How long the plan can be applied, such as 30m (default: 4h).")]
AllowLoss = Annotated[
    bool,
    typer.Option(
        "--allow-loss",
        help="If the target offset is gone, continue at the log start offset and record the gap as lost. Rewind compacted topics.",
    ),
]


def _target(name: str, text: str, metavar: str | None = None) -> Any:
    return typer.Option(name, help=text, metavar=metavar, show_default=False, rich_help_panel="Where to (exactly one)")


@app.command()
def plan(
    names: Annotated[list[str], typer.Argument(metavar="NAME", help="The consumers. Several are moved together or not at all.")],
    reason: Reason,
    to_earliest: Annotated[bool, _target("--to-earliest", "The first record that Kafka still has.")] = False,
    to_latest: Annotated[bool, _target("--to-latest", "After the last stable record.")] = False,
    to_current: Annotated[bool, _target("--to-current", "Moves nothing; the current readers are fenced and claim again.")] = False,
    to_offset: Annotated[str | None, _target("--to-offset", "This offset of each partition.", "OFFSET")] = None,
    shift_by: Annotated[str | None, _target("--shift-by", "N offsets forward, or back if negative.", "N")] = None,
    to_datetime: Annotated[
        str | None,
        _target(
            "--to-datetime", "The first record at or after this time: 2026-03-29T14:00:00+02:00, or 2026-03-29 14:00 with --zone.", "TIME"
        ),
    ] = None,
    by_duration: Annotated[
        str | None,
        _target("--by-duration", "The first record at or after now minus this ISO 8601 duration: PT2H, P1DT12H.", "DURATION"),
    ] = None,
    from_file: Annotated[
        str | None, _target("--from-file", "The offsets in a file: CSV from kafka-consumer-groups --export, or JSON.", "FILE")
    ] = None,
    from_group: Annotated[
        str | None,
        _target("--from-group", "The positions of another group; kafka:NAME for a group's offsets committed to Kafka.", "GROUP"),
    ] = None,
    to_validated: Annotated[bool, _target("--to-validated", "The end of the validated rows.")] = False,
    to_batch: Annotated[
        str | None,
        _target("--to-batch", "Just before a batch of the ledger, or before all that an Airflow run committed.", "ID|DAG/RUN"),
    ] = None,
    zone: Annotated[str | None, typer.Option(help="Time zone of a local --to-datetime: Europe/Berlin.", show_default=False)] = None,
    topic: Annotated[list[str] | None, typer.Option(metavar="TOPIC[:0,1,5-9]", help="Only these topics or partitions. Repeatable.")] = None,
    allow_loss: AllowLoss = False,
    backfill: Annotated[
        bool, typer.Option("--backfill", help="Let `tidemark backfill` load the skipped records later, into the same table.")
    ] = False,
    expires_in: ExpiresIn = None,
    consumers: Consumers = None,
    output: Form = PlanFormat.TABLE,
) -> None:
    """Plan a rewind: show and store what it would do. Changes nothing; run `tidemark rewind apply` next."""
    values = {
        "to-earliest": to_earliest,
        "to-latest": to_latest,
        "to-current": to_current,
        "to-offset": to_offset,
        "shift-by": shift_by,
        "to-datetime": to_datetime,
        "by-duration": by_duration,
        "from-file": from_file,
        "from-group": from_group,
        "to-validated": to_validated,
        "to-batch": to_batch,
    }
    targets = [(name, value) for name, value in values.items() if value not in (None, False)]
    if len(targets) != 1:
        flags = " and ".join(f"--{name}" for name, _ in targets) or "none"
        raise typer.BadParameter(f"give exactly one target, not {flags}: " + ", ".join(f"--{name}" for name in values))
    ((name, value),) = targets

    def parse_scenario(groups: Sequence[str]) -> Scenario:
        from tidemark.rewind.scenarios.offsets_file import read_text
        from tidemark.rewind.scenarios.scenario import parse

        contents = read_text(Path(from_file)) if from_file is not None else None
        return parse(name, value if isinstance(value, str) else None, zone=zone, groups=groups, contents=contents)

    new_plan = _make_plan(
        names, topic or [], parse_scenario, reason, consumers, allow_loss=allow_loss, backfill=backfill, expires_in=expires_in
    )
    _print(new_plan, output)
    _print_next_step(new_plan)


@app.command()
def show(rewind_id: Number, output: Form = PlanFormat.TABLE) -> None:
    """Show a rewind: its plan and its result."""
    from tidemark.rewind import store

    with connected() as connection:
        _print(store.read(connection, rewind_id), output)


@app.command()
def apply(rewind_id: Number, consumers: Consumers = None, output: Form = PlanFormat.TABLE) -> None:
    """Apply a plan in one transaction while the group runs. A plan that was already applied is only shown."""
    _print(_apply(rewind_id, consumers), output)


@app.command()
def undo(
    rewind_id: Number,
    reason: Reason,
    allow_loss: AllowLoss = False,
    expires_in: ExpiresIn = None,
    consumers: Consumers = None,
    output: Form = PlanFormat.TABLE,
) -> None:
    """Plan to undo a rewind: restore its offsets and rows. Changes nothing; run `tidemark rewind apply` next."""
    from tidemark.rewind import store
    from tidemark.rewind.plan_model import Undo

    with connected(needs=Profile.REWINDER) as connection:
        names = [group.consumer for group in store.read(connection, rewind_id).groups]
    new_plan = _make_plan(names, [], lambda _: Undo(rewind_id), reason, consumers, allow_loss=allow_loss, expires_in=expires_in)
    _print(new_plan, output)
    _print_next_step(new_plan)


@app.command("list")
def list_(
    name: Annotated[str | None, typer.Argument(help="The consumer (default: all).")] = None,
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="Maximum number of rewinds.")] = 50,
    output: Output = OutputFormat.TABLE,
) -> None:
    """List rewinds, newest first, whether planned, applied, undone or rejected."""
    from tidemark.rewind import store
    from tidemark.rewind.plan_text import as_json
    from tidemark.rewind.scenarios.scenario import describe

    with connected() as connection:
        rewinds = store.history(connection, name, limit=limit)
    if output is OutputFormat.JSON:
        print_json([as_json(rewind) for rewind in rewinds])
        return
    table = plain_table("", "rewind", "state", "planned at (UTC)", "by", "consumers", "what")
    for column in table.columns:
        column.justify = "left"
    for rewind in rewinds:
        groups = ", ".join(group.consumer for group in rewind.groups)
        table.add_row(
            str(rewind.rewind_id),
            rewind.state,
            f"{rewind.planned_at:%Y-%m-%d %H:%M}",
            plain(rewind.planned_by),
            groups,
            plain(describe(rewind.scenario)),
        )
    stdout.print(table)


@app.command()
def verify(rewind_id: Number, consumers: Consumers = None, output: Output = OutputFormat.TABLE) -> None:
    """Compare the rows that a rewind took out with those that the replay has written since."""
    import dataclasses

    from tidemark import project
    from tidemark.rewind import store
    from tidemark.rewind.plan_text import verified_table
    from tidemark.rewind.verify import verify as compare_rows
    from tidemark.spec import find_consumer

    folder = consumers or project.consumers()
    with connected(needs=Profile.REWINDER) as connection:
        names = [group.consumer for group in store.read(connection, rewind_id).groups]
        comparisons = compare_rows(connection, rewind_id, {name: find_consumer(name, folder).keys for name in names})
    if output is OutputFormat.JSON:
        print_json([dataclasses.asdict(comparison) for comparison in comparisons])
    else:
        stdout.print(verified_table(comparisons))


def adopt(
    name: Name,
    from_kafka: Annotated[
        str, typer.Option("--from-kafka", metavar="GROUP", help="The group in Kafka. Stop its consumers first.", show_default=False)
    ],
    reason: Annotated[str | None, typer.Option(help="Reason, at least 10 characters; kept permanently.", show_default=False)] = None,
    allow_loss: AllowLoss = False,
    expires_in: ExpiresIn = None,
    consumers: Consumers = None,
    output: Form = PlanFormat.TABLE,
) -> None:
    """Plan to start a consumer without positions where a group has committed in Kafka. Run `tidemark rewind apply` next."""
    from tidemark.rewind.plan_model import Adopt

    why = reason or f"adopts what group {from_kafka} has committed in Kafka"
    new_plan = _make_plan([name], [], lambda _: Adopt(from_kafka), why, consumers, allow_loss=allow_loss, expires_in=expires_in)
    _print(new_plan, output)
    _print_next_step(new_plan)


def seek(
    name: Name,
    position: Annotated[str, typer.Argument(metavar="TOPIC/PARTITION", help="The partition, as shown by `tidemark offsets`: flights/0.")],
    offset: Annotated[int, typer.Argument(min=0, max=BIGINT, help="The next offset to read.")],
    reason: Reason,
    allow_loss: AllowLoss = False,
    consumers: Consumers = None,
    output: Form = PlanFormat.TABLE,
) -> None:
    """Rewind one partition: plan and apply in one step."""
    from tidemark.rewind.plan_model import ToOffset

    match = POSITION.fullmatch(position)
    if match is None:
        raise typer.BadParameter(f"{position!r} is not TOPIC/PARTITION; write flights/0")
    scope = [f"{match['topic']}:{match['partition']}"]
    new_plan = _make_plan([name], scope, lambda _: ToOffset(offset), reason, consumers, allow_loss=allow_loss, expires_in=None)
    _print(_apply(new_plan.rewind_id, consumers), output)


def _make_plan(
    names: Sequence[str],
    scope: Sequence[str],
    parse_scenario: Callable[[Sequence[str]], Scenario],
    reason: str,
    consumers: Path | None,
    *,
    allow_loss: bool,
    expires_in: str | None,
    backfill: bool = False,
) -> Plan:
    """Makes and stores a plan. Raises all problems of the arguments at once, before it connects to Postgres or Kafka."""
    from tidemark import project
    from tidemark.rewind.plan import PlanRequest
    from tidemark.rewind.plan import plan as store_plan
    from tidemark.rewind.scenarios.scenario import parse_expiry
    from tidemark.spec import find_consumer
    from tidemark.spec.scope import Scope
    from tidemark.text.problems import Problems, check_reason

    problems, folder = Problems(), consumers or project.consumers()
    specs = [problems.attempt(lambda name=name: find_consumer(name, folder)) for name in dict.fromkeys(names)]  # type: ignore[misc]
    chosen = problems.attempt(lambda: Scope.parse(scope))
    scenario = problems.attempt(lambda: parse_scenario([spec.group for spec in specs if spec]))
    checked_reason = problems.attempt(lambda: check_reason(reason))
    expiry = problems.attempt(lambda: parse_expiry(expires_in))
    problems.end()
    assert chosen is not None
    assert scenario is not None
    assert checked_reason is not None
    assert expiry is not None
    with connected(needs=Profile.REWINDER) as connection:
        return store_plan(
            connection,
            lambda _: kafka_cluster(),
            PlanRequest(
                [spec for spec in specs if spec],
                chosen,
                scenario,
                reason=checked_reason,
                by=who(),
                allow_loss=allow_loss,
                backfill=backfill,
                expires_in=expiry,
            ),
        )


def _apply(rewind_id: int, consumers: Path | None) -> Plan:
    from tidemark import project
    from tidemark.rewind.apply import apply as apply_plan
    from tidemark.spec import find_consumer

    folder = consumers or project.consumers()
    with connected(needs=Profile.REWINDER) as connection:
        result = apply_plan(connection, lambda _: kafka_cluster(), lambda name: find_consumer(name, folder), rewind_id, by=who())
    message = f"rewind {rewind_id} was already applied; nothing was changed now" if result.already else f"applied rewind {rewind_id}"
    stderr.print(message, markup=False, highlight=False)
    return result.plan


def _print(plan: Plan, output: PlanFormat) -> None:
    from tidemark.rewind import plan_text

    if output is PlanFormat.JSON:
        print_json(plan_text.as_json(plan))
    elif output is PlanFormat.MARKDOWN:
        print_raw(plan_text.markdown(plan), end="")
    else:
        stdout.print(plan_text.table(plan))


def _print_next_step(plan: Plan) -> None:
    stderr.print(f"nothing has changed yet; to apply it: tidemark rewind apply {plan.rewind_id}", markup=False, highlight=False)

"""``tidemark rewind``, ``seek`` and ``groups adopt``: move a group in two steps, plan and apply, or one partition in a single step."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from tidemark import project
from tidemark.cli import completion
from tidemark.cli.common import (
    AnyName,
    Name,
    Output,
    OutputFormat,
    Reason,
    minute,
    option_of,
    plain,
    plain_table,
    print_json,
    print_note,
    print_raw,
    stdout,
    who,
    with_options,
)
from tidemark.cli.consume import print_result, run_with_progress
from tidemark.cli.servers import connected, kafka_cluster
from tidemark.connections import from_env
from tidemark.db import DatabaseUrl, transaction
from tidemark.profiles import Profile
from tidemark.rewind import beside, plan_text, store
from tidemark.rewind.apply import apply as apply_plan
from tidemark.rewind.apply import catch_up_and_swap
from tidemark.rewind.plan import PlanRequest
from tidemark.rewind.plan import plan as store_plan
from tidemark.rewind.plan_model import Adopt, Plan, RewindState, Scenario, ToOffset, Undo
from tidemark.rewind.scenarios.offsets_file import read_text
from tidemark.rewind.scenarios.scenario import FROM_FILE, SCENARIO_OPTIONS, describe, parse, parse_expiry
from tidemark.rewind.verify import verify as compare_rows
from tidemark.spec import ConsumerSpec, find_consumer
from tidemark.spec.scope import Scope
from tidemark.spec.user_transform import require_rehearsable
from tidemark.text.problems import Problems, check_reason
from tidemark.text.storable import BIGINT
from tidemark.text.wording import counted

POSITION = re.compile(r"(?P<topic>[A-Za-z0-9._-]+)/(?P<partition>\d{1,9})", re.ASCII)

app = typer.Typer(no_args_is_help=True)


class PlanFormat(StrEnum):
    TABLE = "table"
    JSON = "json"
    MARKDOWN = "markdown"


Number = Annotated[
    int,
    typer.Argument(
        metavar="ID", min=1, max=BIGINT, help="The rewind's number, as shown by `tidemark rewind list`.", autocompletion=completion.rewinds
    ),
]
Form = Annotated[PlanFormat, typer.Option("--output", "-o", help="Output format.")]
ExpiresIn = Annotated[str | None, typer.Option(metavar="DURATION", help="How long the plan can be applied, such as 30m (default: 4h).")]
AllowLoss = Annotated[
    bool,
    typer.Option(
        "--allow-loss",
        help="If the target offset is gone, continue at the log start offset and record the gap as lost. Rewind compacted topics.",
    ),
]


_TARGETS = [
    option_of(
        "Where to (exactly one)",
        option.name.replace("-", "_"),
        str | None if option.value else bool,
        f"{option.does[0].upper()}{option.does[1:]}{f', such as {option.example}' if option.example else ''}.",
        option.value.partition(" ")[2].upper() or None,
    )
    for option in SCENARIO_OPTIONS.values()
    if option.name != "undo"
]


def _target(values: dict[str, Any]) -> tuple[str, str | None]:
    """The chosen target and its value, if it has one."""
    flags = {f"--{name.replace('_', '-')}": value for name, value in values.items()}
    chosen = [(flag, value) for flag, value in flags.items() if value not in (None, False)]
    if len(chosen) != 1:
        given = " and ".join(flag for flag, _ in chosen) or "none"
        raise typer.BadParameter(f"give exactly one target, not {given}: {', '.join(flags)}")
    ((flag, value),) = chosen
    return flag.removeprefix("--"), value if isinstance(value, str) else None


@app.command()
@with_options("target", _TARGETS, _target)
def plan(
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="NAME", help="The consumers. Several are moved together or not at all.", autocompletion=completion.consumers
        ),
    ],
    target: tuple[str, str | None],
    reason: Reason,
    zone: Annotated[str | None, typer.Option(help="Time zone of a local --to-datetime: Europe/Berlin.", show_default=False)] = None,
    topic: Annotated[list[str] | None, typer.Option(metavar="TOPIC[:0,1,5-9]", help="Only these topics or partitions. Repeatable.")] = None,
    allow_loss: AllowLoss = False,
    backfill: Annotated[
        bool, typer.Option("--backfill", help="Let `tidemark backfill` load the skipped records later, into the same table.")
    ] = False,
    read_beside: Annotated[
        bool, typer.Option("--beside", help="Read the records beside the live rows first, and swap them in later: readers never see a gap.")
    ] = False,
    transform: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:FUNCTION",
            help="With --beside: rehearse this transform, for this replay only. Its rows are compared and never swapped in.",
            show_default=False,
        ),
    ] = None,
    expires_in: ExpiresIn = None,
    output: Form = PlanFormat.TABLE,
) -> None:
    """Plan a rewind: show and store what it would do. Changes nothing; run `tidemark rewind apply` next."""
    name, value = target

    def parse_scenario(groups: Sequence[str]) -> Scenario:
        contents = read_text(Path(value or "")) if name == FROM_FILE else None
        return parse(name, value, zone=zone, groups=groups, contents=contents)

    options = {"allow_loss": allow_loss, "backfill": backfill, "read_beside": read_beside}
    new_plan = _make_plan(names, topic, parse_scenario, reason, expires_in, transform=transform, **options)
    _print_new(new_plan, output)


@app.command()
def show(rewind_id: Number, output: Form = PlanFormat.TABLE) -> None:
    """Show a rewind: its plan and its result."""
    with connected() as connection:
        _print(store.read(connection, rewind_id), output)


@app.command()
def apply(rewind_id: Number, output: Form = PlanFormat.TABLE) -> None:
    """Apply a plan in one transaction while the group runs; begin it if it is beside. A plan that was already applied is only shown."""
    _print(_apply(rewind_id), output)


@app.command()
def undo(
    rewind_id: Number,
    reason: Reason,
    allow_loss: AllowLoss = False,
    expires_in: ExpiresIn = None,
    output: Form = PlanFormat.TABLE,
) -> None:
    """Plan to undo a rewind: restore its offsets and rows. Changes nothing; run `tidemark rewind apply` next."""
    with connected(needs=Profile.REWINDER) as connection:
        names = [group.consumer for group in store.read(connection, rewind_id).groups]
    _print_new(_make_plan(names, None, lambda _: Undo(rewind_id), reason, expires_in, allow_loss=allow_loss), output)


@app.command()
def replay(rewind_id: Number, output: Output = OutputFormat.TABLE) -> None:
    """Read a rewind's records beside the live rows, up to where its groups are, and validate them. Repeat it to follow the groups."""
    connections = from_env()
    with connected(needs=Profile.RUNNER) as connection, transaction(connection) as cur:
        replays = beside.require(cur, rewind_id)
    results = []
    for each in replays:
        spec = find_consumer(each.consumer)
        results.append((spec, run_with_progress(spec, connections, of_rewind=rewind_id)))
        if spec.validation is not None:
            _validate_beside(spec, each, connections.database_url)
    with connected(needs=Profile.RUNNER) as connection, transaction(connection) as cur:
        left = {each.group: each.left for each in beside.require(cur, rewind_id)}
    if output is OutputFormat.JSON:
        print_json([
            {"group": spec.group, "attempt": result.attempt_id, "records": result.records, **result.counts, "left": left[spec.group]}
            for spec, result in results
        ])  # fmt: skip
        return
    for spec, result in results:
        print_result(spec.group, result, output)
        behind = left[spec.group]
        print_note(f"{spec.group}: {counted(behind, 'offset')} behind" if behind else f"{spec.group}: level with the group")
    swap_or = "" if replays[0].transform is not None else f"tidemark rewind swap {rewind_id}, or "
    print_note(f"compare: tidemark rewind verify {rewind_id}; then {swap_or}tidemark rewind discard {rewind_id}")


@app.command()
def swap(rewind_id: Number, output: Form = PlanFormat.TABLE) -> None:
    """Swap a replay beside into the tables, in one transaction while the groups run. Reads the last records first."""
    connections = from_env()

    def read_on() -> None:
        with connected(needs=Profile.RUNNER) as connection, transaction(connection) as cur:
            replays = beside.require(cur, rewind_id)
        for each in replays:
            run_with_progress(find_consumer(each.consumer), connections, of_rewind=rewind_id)

    with connected(needs=Profile.REWINDER) as connection:
        result = catch_up_and_swap(connection, lambda _: kafka_cluster(), find_consumer, rewind_id, read_on=read_on, by=who())
    print_note(f"rewind {rewind_id} was already swapped; nothing was changed now" if result.already else f"swapped rewind {rewind_id}")
    _print(result.plan, output)


@app.command()
def discard(rewind_id: Number, reason: Reason, output: Form = PlanFormat.TABLE) -> None:
    """Discard a replay beside. The tables and the groups were not changed, and stay as they are."""
    with connected(needs=Profile.REWINDER) as connection:
        plan = beside.discard(connection, rewind_id, by=who(), reason=check_reason(reason))
    print_note(f"discarded the replay of rewind {rewind_id}")
    _print(plan, output)


def _validate_beside(spec: ConsumerSpec, replay: beside.SideReplay, url: DatabaseUrl) -> None:
    for report in beside.validate_replay(url, spec, replay):
        for result in report.results:
            if not result.success:
                print_note(f"{result.severity}: {result.text}", style="red")
        print_note(f"validation of the replay: {report.verdict.value}")


@app.command("list")
def list_(
    name: AnyName = None,
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="Maximum number of rewinds.")] = 50,
    output: Output = OutputFormat.TABLE,
) -> None:
    """List rewinds, newest first, whether planned, applied, undone or rejected."""
    with connected() as connection:
        rewinds = store.history(connection, name, limit=limit)
    if output is OutputFormat.JSON:
        print_json([plan_text.as_json(rewind) for rewind in rewinds])
        return
    table = plain_table("", "rewind", "state", "planned at (UTC)", "by", "consumers", "what", left=range(6))
    for rewind in rewinds:
        groups = ", ".join(group.consumer for group in rewind.groups)
        table.add_row(
            str(rewind.rewind_id),
            rewind.state,
            minute(rewind.planned_at),
            plain(rewind.planned_by),
            groups,
            plain(describe(rewind.scenario)),
        )
    stdout.print(table)


@app.command()
def verify(rewind_id: Number, output: Output = OutputFormat.TABLE) -> None:
    """Compare the rows that a rewind took out with those that the replay has written since; or, before a swap, the live rows with the
    replay's."""
    with connected(needs=Profile.REWINDER) as connection:
        names = [group.consumer for group in store.read(connection, rewind_id).groups]
        comparisons = compare_rows(connection, rewind_id, {name: find_consumer(name).keys for name in names})
    if output is OutputFormat.JSON:
        print_json([dataclasses.asdict(comparison) for comparison in comparisons])
    else:
        stdout.print(plan_text.verified_table(comparisons))


def adopt(
    name: Name,
    from_kafka: Annotated[
        str, typer.Option("--from-kafka", metavar="GROUP", help="The group in Kafka. Stop its consumers first.", show_default=False)
    ],
    reason: Annotated[str | None, typer.Option(help="Reason, at least 10 characters; kept permanently.", show_default=False)] = None,
    allow_loss: AllowLoss = False,
    expires_in: ExpiresIn = None,
    output: Form = PlanFormat.TABLE,
) -> None:
    """Plan to start a consumer without positions where a group has committed in Kafka. Run `tidemark rewind apply` next."""
    why = reason or f"adopts what group {from_kafka} has committed in Kafka"
    _print_new(_make_plan([name], None, lambda _: Adopt(from_kafka), why, expires_in, allow_loss=allow_loss), output)


def seek(
    name: Name,
    position: Annotated[str, typer.Argument(metavar="TOPIC/PARTITION", help="The partition, as shown by `tidemark offsets`: flights/0.")],
    offset: Annotated[int, typer.Argument(min=0, max=BIGINT, help="The next offset to read.")],
    reason: Reason,
    allow_loss: AllowLoss = False,
    output: Form = PlanFormat.TABLE,
) -> None:
    match = POSITION.fullmatch(position)
    if match is None:
        raise typer.BadParameter(f"{position!r} is not TOPIC/PARTITION; write flights/0")
    scope = [f"{match['topic']}:{match['partition']}"]
    new_plan = _make_plan([name], scope, lambda _: ToOffset(offset), reason, allow_loss=allow_loss)
    _print(_apply(new_plan.rewind_id), output)


def _make_plan(
    names: Sequence[str],
    scope: Sequence[str] | None,
    parse_scenario: Callable[[Sequence[str]], Scenario],
    reason: str,
    expires_in: str | None = None,
    *,
    allow_loss: bool,
    backfill: bool = False,
    read_beside: bool = False,
    transform: str | None = None,
) -> Plan:
    """Makes and stores a plan. Raises all problems of the arguments at once, before it connects to Postgres or Kafka."""
    problems = Problems()
    specs = [problems.attempt(lambda name=name: find_consumer(name)) for name in dict.fromkeys(names)]  # type: ignore[misc]
    chosen = problems.attempt(lambda: Scope.parse(scope or []))
    scenario = problems.attempt(lambda: parse_scenario([spec.group for spec in specs if spec]))
    checked_reason = problems.attempt(lambda: check_reason(reason))
    expiry = problems.attempt(lambda: parse_expiry(expires_in))
    for spec in specs:
        if spec and transform is not None:
            problems.attempt(lambda spec=spec: require_rehearsable(spec, transform, [project.transforms()]))  # type: ignore[misc]
    problems.end()
    assert chosen is not None
    assert scenario is not None
    assert checked_reason is not None
    assert expiry is not None
    request = PlanRequest(
        [spec for spec in specs if spec],
        chosen,
        scenario,
        reason=checked_reason,
        by=who(),
        allow_loss=allow_loss,
        backfill=backfill,
        beside=read_beside,
        transform=transform,
        expires_in=expiry,
    )
    with connected(needs=Profile.REWINDER) as connection:
        return store_plan(connection, lambda _: kafka_cluster(), request)


def _apply(rewind_id: int) -> Plan:
    with connected(needs=Profile.REWINDER) as connection:
        result = apply_plan(connection, lambda _: kafka_cluster(), find_consumer, rewind_id, by=who())
    begun = f"began rewind {rewind_id}; to read its records: tidemark rewind replay {rewind_id}"
    applied = begun if result.plan.state is RewindState.BESIDE else f"applied rewind {rewind_id}"
    print_note(f"rewind {rewind_id} was already applied; nothing was changed now" if result.already else applied)
    return result.plan


def _print(plan: Plan, output: PlanFormat) -> None:
    if output is PlanFormat.JSON:
        print_json(plan_text.as_json(plan))
    elif output is PlanFormat.MARKDOWN:
        print_raw(plan_text.markdown(plan), end="")
    else:
        stdout.print(plan_text.table(plan))


def _print_new(plan: Plan, output: PlanFormat) -> None:
    _print(plan, output)
    print_note(f"nothing has changed yet; to apply it: tidemark rewind apply {plan.rewind_id}")

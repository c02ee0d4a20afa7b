"""``tidemark groups``: shows and changes groups and their members."""

from __future__ import annotations

import dataclasses
from datetime import UTC, datetime
from typing import Annotated

import typer

from tidemark.cli.common import Output, OutputFormat, plain_table, print_json, print_note, stdout, who
from tidemark.cli.lag import age_of, records_of, sampled_of
from tidemark.cli.rewind import adopt
from tidemark.cli.servers import connected, kafka_cluster
from tidemark.db import Connection, transaction
from tidemark.errors import BadInput, TidemarkError
from tidemark.group.coordinator import Coordinator, list_groups
from tidemark.group.errors import GroupIdNotFound
from tidemark.group.requests import GroupDescription, Leaving
from tidemark.group.states import GroupState
from tidemark.kafka.groups import delete as delete_in_kafka
from tidemark.offsets.lag import Lag, groups
from tidemark.profiles import Profile
from tidemark.spec import read_folder

GroupName = Annotated[str, typer.Argument(help="The group's name, which may differ from its consumer's.")]

app = typer.Typer(no_args_is_help=True)


@app.command("list")
def list_(
    state: Annotated[list[GroupState] | None, typer.Option(help="Only groups in this state. Repeatable.")] = None,
    output: Output = OutputFormat.TABLE,
) -> None:
    """List groups and their states."""
    with connected() as connection:
        summaries = list_groups(connection, state or [])
        with transaction(connection) as cur:
            lags = {group_lag.lag.group: group_lag.lag for group_lag in groups(cur)}
    if output is OutputFormat.JSON:
        print_json([dataclasses.asdict(summary) | _lag(lags.get(summary.group)) for summary in summaries])
        return
    table = plain_table("", "group", "state", "generation", "members", "lag", "age", "health", "sampled (UTC)", left=(0, 1, 6))
    for summary in summaries:
        lag = lags.get(summary.group)
        numbers = ("-", "-", "-", "-") if lag is None else (records_of(lag), age_of(lag), lag.health, sampled_of(lag))
        table.add_row(summary.group, summary.state, str(summary.generation), str(summary.members), *numbers)
    stdout.print(table)


def _lag(lag: Lag | None) -> dict[str, object]:
    """The lag as of the last samples."""
    return {name: None if lag is None else getattr(lag, name) for name in ("records", "seconds", "health", "why", "fix", "sampled_at")}


@app.command()
def describe(group: GroupName, output: Output = OutputFormat.TABLE) -> None:
    """Show a group's state, members and assignments."""
    with connected() as connection:
        description = _describe(connection, group)
    if output is OutputFormat.JSON:
        print_json(description)
        return
    since = f"{description.state_since.astimezone(UTC):%Y-%m-%d %H:%M:%S}"
    title = f"{group}: {description.state} since {since} UTC, generation {description.generation}, assignor {description.protocol or '-'}"
    table = plain_table(title, "member", "partitions", "seen before", left=(0, 1))
    now = datetime.now(UTC)
    for member in description.members:
        name = member.instance_id or member.member_id
        flags = [*(["leader"] if member.member_id == description.leader else []), *(["overdue"] if member.overdue else [])]
        assigned = (member.assignment or {}).get("partitions", {})
        partitions = " ".join(f"{topic}:{','.join(map(str, numbers))}" for topic, numbers in sorted(assigned.items()))
        table.add_row(" ".join([name, *flags]), partitions or "-", f"{max(0.0, (now - member.seen_at).total_seconds()):.0f} s")
    stdout.print(table)


@app.command()
def delete(group: GroupName, output: Output = OutputFormat.TABLE) -> None:
    """Delete a group without members, and its mirror in Kafka. Rows and ledger stay. A new group of that name starts without positions."""
    with connected(needs=Profile.OPERATOR) as connection:
        Coordinator(connection, group).delete_group(by=who())
    print_note(f"deleted {group}")
    mirror = _delete_mirror(group)
    if mirror is not None:
        print_note(mirror)
    if output is OutputFormat.JSON:
        print_json({"deleted": group})


def _delete_mirror(group: str) -> str | None:
    """Deletes the group in Kafka if a consumer's file mirrors it. Returns the outcome, or `None` without such a file."""
    try:
        good, _ = read_folder()
        if not any(spec.mirror and spec.group == group for spec in good.values()):
            return None
        return f"deleted {group} in Kafka" if delete_in_kafka(kafka_cluster(), group) else f"{group} does not exist in Kafka"
    except TidemarkError as error:
        return f"not deleted in Kafka: {error} If {group} is mirrored, delete it with kafka-consumer-groups --delete --group {group}"


@app.command("remove-member")
def remove_member(
    group: GroupName,
    member: Annotated[list[str], typer.Argument(help="Instance id or member id, as shown by `groups describe`.")],
    reason: Annotated[str, typer.Option(help="Reason, stored with the group.")] = "removed by an operator",
    output: Output = OutputFormat.TABLE,
) -> None:
    """Remove members from a group. A member that is still running joins again; until then others get its partitions."""
    with connected(needs=Profile.OPERATOR) as connection:
        members = _describe(connection, group).members
        ids = {each.instance_id or "": each for each in members} | {each.member_id: each for each in members}
        if missing := [name for name in member if name not in ids]:
            existing = ", ".join(sorted(each.instance_id or each.member_id for each in members))
            fix = f"Write one of {existing}." if existing else "The group has no members."
            raise BadInput(what=f"member of group {group}", found=", ".join(missing), fix=fix)
        leaving = [Leaving(ids[name].member_id, ids[name].instance_id, reason) for name in member]
        for error in Coordinator(connection, group).leave(leaving, by=who()):
            if error is not None:
                raise error
    print_note(f"removed {', '.join(member)}")
    if output is OutputFormat.JSON:
        print_json({"group": group, "removed": member})


def _describe(connection: Connection, group: str) -> GroupDescription:
    description = Coordinator(connection, group).describe()
    if description is None:
        raise GroupIdNotFound(group=group)
    return description


app.command()(adopt)

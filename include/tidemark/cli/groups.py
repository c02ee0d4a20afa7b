"""``tidemark groups``: shows and changes groups and their members."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from datetime import UTC, datetime

from tidemark import project
from tidemark.cli.common import OutputFormat, connected, kafka_cluster, plain_table, print_json, stderr, stdout, who
from tidemark.cli.lag import age_of, records_of
from tidemark.db import Connection, transaction
from tidemark.errors import BadInput, TidemarkError
from tidemark.group.coordinator import Coordinator, GroupDescription, Leaving, list_groups
from tidemark.group.errors import GroupIdNotFound
from tidemark.group.states import GroupState
from tidemark.kafka.groups import delete
from tidemark.offsets.lag import Lag, groups
from tidemark.profiles import Profile
from tidemark.spec import read_folder


def show_groups(states: Sequence[GroupState], output: OutputFormat) -> None:
    with connected() as connection:
        summaries = list_groups(connection, states)
        with transaction(connection) as cur:
            lags = {group_lag.lag.group: group_lag.lag for group_lag in groups(cur)}
    if output is OutputFormat.JSON:
        print_json([dataclasses.asdict(summary) | _lag(lags.get(summary.group)) for summary in summaries])
        return
    table = plain_table("", "group", "state", "generation", "members", "lag", "age", "health")
    table.columns[1].justify = table.columns[6].justify = "left"
    for summary in summaries:
        lag = lags.get(summary.group)
        numbers = ("-", "-", "-") if lag is None else (records_of(lag), age_of(lag), lag.health)
        table.add_row(summary.group, summary.state, str(summary.generation), str(summary.members), *numbers)
    stdout.print(table)


def _lag(lag: Lag | None) -> dict[str, object]:
    """The lag as of the last samples."""
    return {name: None if lag is None else getattr(lag, name) for name in ("records", "seconds", "health", "why", "fix", "sampled_at")}


def show_group(group: str, output: OutputFormat) -> None:
    with connected() as connection:
        description = _describe(connection, group)
    if output is OutputFormat.JSON:
        print_json(description)
        return
    since = f"{description.state_since.astimezone(UTC):%Y-%m-%d %H:%M:%S}"
    title = f"{group}: {description.state} since {since} UTC, generation {description.generation}, assignor {description.protocol or '-'}"
    table = plain_table(title, "member", "partitions", "seen before")
    table.columns[1].justify = "left"
    now = datetime.now(UTC)
    for member in description.members:
        name = member.instance_id or member.member_id
        flags = [*(["leader"] if member.member_id == description.leader else []), *(["overdue"] if member.overdue else [])]
        assigned = (member.assignment or {}).get("partitions", {})
        partitions = " ".join(f"{topic}:{','.join(map(str, numbers))}" for topic, numbers in sorted(assigned.items()))
        table.add_row(" ".join([name, *flags]), partitions or "-", f"{max(0.0, (now - member.seen_at).total_seconds()):.0f} s")
    stdout.print(table)


def delete_group(group: str, output: OutputFormat) -> None:
    with connected(needs=Profile.OPERATOR) as connection:
        Coordinator(connection, group).delete_group(by=who())
    stderr.print(f"deleted {group}", markup=False, highlight=False)
    mirror = _delete_mirror(group)
    if mirror is not None:
        stderr.print(mirror, markup=False, highlight=False)
    if output is OutputFormat.JSON:
        print_json({"deleted": group})


def _delete_mirror(group: str) -> str | None:
    """Deletes the group in Kafka if a consumer's file mirrors it. Returns the outcome, or `None` without such a file."""
    try:
        good, _ = read_folder(project.consumers())
        if not any(spec.mirror and spec.group == group for spec in good.values()):
            return None
        return f"deleted {group} in Kafka" if delete(kafka_cluster(), group) else f"{group} does not exist in Kafka"
    except TidemarkError as error:
        return f"not deleted in Kafka: {error} If {group} is mirrored, delete it with kafka-consumer-groups --delete --group {group}"


def remove_members(group: str, names: Sequence[str], reason: str, output: OutputFormat) -> None:
    """Removes all of the members, or none if one of them does not exist."""
    with connected(needs=Profile.OPERATOR) as connection:
        members = _describe(connection, group).members
        ids = {member.instance_id or "": member for member in members} | {member.member_id: member for member in members}
        if missing := [name for name in names if name not in ids]:
            existing = ", ".join(sorted(member.instance_id or member.member_id for member in members))
            fix = f"Write one of {existing}." if existing else "The group has no members."
            raise BadInput(what=f"member of group {group}", found=", ".join(missing), fix=fix)
        leaving = [Leaving(ids[name].member_id, ids[name].instance_id, reason) for name in names]
        for error in Coordinator(connection, group).leave(leaving, by=who()):
            if error is not None:
                raise error
    stderr.print(f"removed {', '.join(names)}", markup=False, highlight=False)
    if output is OutputFormat.JSON:
        print_json({"group": group, "removed": list(names)})


def _describe(connection: Connection, group: str) -> GroupDescription:
    description = Coordinator(connection, group).describe()
    if description is None:
        raise GroupIdNotFound(group=group)
    return description

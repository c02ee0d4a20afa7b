"""``tidemark assign``: shows which member would get which partition. Changes nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from tidemark.cli.common import OutputFormat, connected, kafka_cluster, plain_table, print_json, spec_of, stdout
from tidemark.consume.membership import instance_id, metadata_of
from tidemark.db import transaction
from tidemark.errors import BadInput
from tidemark.group.assignors import Assignor, Metadata, Subscription, check_assignment, find_assignor
from tidemark.offsets import store
from tidemark.records.ranges import TopicPartition
from tidemark.spec.user_transform import import_from
from tidemark.text.wording import counted

ROUNDS = 4
"""Maximum number of rounds. A cooperative assignor needs two: one to revoke partitions, one to assign them."""


def show_assignment(
    name: str,
    members: int | None,
    assignors: Sequence[str] | None,
    consumers: Path | None,
    transforms: Sequence[Path],
    output: OutputFormat,
) -> None:
    spec = spec_of(name, consumers)
    if spec.partitions is not None:
        raise BadInput(what=name, found="its file fixes the partitions; none are assigned", fix="See their owners with tidemark offsets.")
    import_from(transforms)
    assignor = find_assignor((assignors or spec.assignment)[0])
    with connected() as connection, transaction(connection) as cur:
        now = {position.partition: position.instance_id for position in store.positions(cur, spec.group) if position.instance_id}
    cluster = kafka_cluster()
    metadata = metadata_of(cluster, cluster.subscribed(spec))
    seats = [instance_id(spec.name, number) for number in range(members or spec.members)]
    then = simulate(assignor, metadata, seats, now)
    rows = [
        {"topic": part.topic, "partition": part.partition, "now": now.get(part), "then": seat, "moves": now.get(part) not in (None, seat)}
        for part, seat in sorted(then.items())
    ]
    if output is OutputFormat.JSON:
        print_json({"group": spec.group, "assignor": assignor.name, "members": seats, "partitions": rows})
        return
    moved = sum(bool(row["moves"]) for row in rows)
    moves = f"{moved} of {counted(len(rows), 'partition moves', 'partitions move')}"
    title = f"{spec.group}: {counted(len(seats), 'member')} with {assignor.name}, {moves}"
    table = plain_table(title, "partition", "now", "then")
    for column in table.columns:
        column.justify = "left"
    for row in rows:
        table.add_row(f"{row['topic']}/{row['partition']}", str(row["now"] or "-"), str(row["then"]))
    stdout.print(table)


def simulate(assignor: Assignor, metadata: Metadata, seats: Sequence[str], now: Mapping[TopicPartition, str]) -> dict[TopicPartition, str]:
    """The instance id that owns each partition once the group is stable. A cooperative assignor runs for several rounds."""
    held = {seat: tuple(part for part, owner in now.items() if owner == seat) for seat in seats}
    for _ in range(ROUNDS if assignor.protocol == "cooperative" else 1):
        subscriptions = {
            seat: Subscription(topics=tuple(sorted(metadata.topics)), owned=held[seat], generation=1, instance_id=seat) for seat in seats
        }
        assignment = assignor.assign(metadata, subscriptions)
        check_assignment(assignor, metadata, subscriptions, assignment)
        held = {seat: tuple(sorted(assignment[seat])) for seat in seats}
    return {part: seat for seat, parts in held.items() for part in parts}

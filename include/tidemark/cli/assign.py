"""``tidemark assign``: shows which member would get which partition. Changes nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated

import typer

from tidemark import project
from tidemark.cli.common import Name, Output, OutputFormat, plain_table, print_json, stdout
from tidemark.cli.servers import connected, kafka_cluster
from tidemark.consume.membership import instance_id, metadata_of
from tidemark.db import transaction
from tidemark.errors import BadInput
from tidemark.group.assignors import Assignor, Metadata, Subscription, check_assignment, find_assignor
from tidemark.offsets import store
from tidemark.records.ranges import TopicPartition
from tidemark.spec import find_consumer
from tidemark.spec.user_transform import import_from
from tidemark.text.wording import counted

ROUNDS = 4
"""Maximum number of rounds. A cooperative assignor needs two: one to revoke partitions, one to assign them."""


def assign(
    name: Name,
    members: Annotated[int | None, typer.Option(min=1, help="Number of members (default: from the consumer's file).")] = None,
    with_: Annotated[str | None, typer.Option("--with", help="The assignor (default: from the consumer's file).")] = None,
    output: Output = OutputFormat.TABLE,
) -> None:
    spec = find_consumer(name)
    if spec.partitions is not None:
        raise BadInput(what=name, found="its file fixes the partitions; none are assigned", fix="See their owners with tidemark offsets.")
    import_from([project.transforms()])
    assignor = find_assignor(with_ or spec.assignment[0])
    with connected() as connection, transaction(connection) as cur:
        current = {position.partition: position.instance_id for position in store.positions(cur, spec.group) if position.instance_id}
    cluster = kafka_cluster()
    metadata = metadata_of(cluster, cluster.subscribed(spec))
    instances = [instance_id(spec.name, number) for number in range(members or spec.members)]
    planned = simulate(assignor, metadata, instances, current)
    rows = [
        {
            "topic": partition.topic,
            "partition": partition.partition,
            "now": current.get(partition),
            "then": instance,
            "moves": current.get(partition) not in (None, instance),
        }
        for partition, instance in sorted(planned.items())
    ]
    if output is OutputFormat.JSON:
        print_json({"group": spec.group, "assignor": assignor.name, "members": instances, "partitions": rows})
        return
    moved = sum(bool(row["moves"]) for row in rows)
    moving = f"{moved} of {counted(len(rows), 'partition moves', 'partitions move')}"
    title = f"{spec.group}: {counted(len(instances), 'member')} with {assignor.name}, {moving}"
    table = plain_table(title, "partition", "now", "then", left=range(3))
    for row in rows:
        table.add_row(f"{row['topic']}/{row['partition']}", str(row["now"] or "-"), str(row["then"]))
    stdout.print(table)


def simulate(
    assignor: Assignor, metadata: Metadata, instances: Sequence[str], current: Mapping[TopicPartition, str]
) -> dict[TopicPartition, str]:
    """The instance id that owns each partition once the group is stable. A cooperative assignor runs for several rounds."""
    owned = {instance: tuple(partition for partition, owner in current.items() if owner == instance) for instance in instances}
    for _ in range(ROUNDS if assignor.protocol == "cooperative" else 1):
        subscriptions = {
            instance: Subscription(topics=tuple(sorted(metadata.topics)), owned=owned[instance], generation=1, instance_id=instance)
            for instance in instances
        }
        assignment = assignor.assign(metadata, subscriptions)
        check_assignment(assignor, metadata, subscriptions, assignment)
        owned = {instance: tuple(sorted(assignment[instance])) for instance in instances}
    return {partition: instance for instance, partitions in owned.items() for partition in partitions}

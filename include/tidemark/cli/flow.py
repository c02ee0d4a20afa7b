"""``tidemark pause``, ``resume`` and ``flow``: control what a consumer reads."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated

import typer

from tidemark.cli.common import Name, Output, OutputFormat, print_json, print_note, print_text, who
from tidemark.cli.servers import connected, kafka_cluster
from tidemark.consume.assignment import partitions_of, require_topics
from tidemark.db import Cursor, set_audit_actor, transaction
from tidemark.errors import BadInput
from tidemark.offsets import flow, store
from tidemark.offsets.flow import FlowTarget
from tidemark.profiles import Profile
from tidemark.spec import ConsumerSpec, find_consumer
from tidemark.spec.scope import Item, Scope
from tidemark.text.duration import format_duration, parse_duration

MAX_RANGE = 10_000
"""Maximum number of partitions in a range."""

Targets = Annotated[list[str] | None, typer.Argument(metavar="[TOPIC[:0,1,5-9]]...", help="Topics or partitions (default: all).")]


@contextlib.contextmanager
def _transaction(spec: ConsumerSpec) -> Iterator[tuple[Cursor, int]]:
    with connected(needs=Profile.OPERATOR) as connection, transaction(connection) as cur:
        set_audit_actor(cur, who())
        yield cur, store.ensure_group(cur, spec.group)


def pause(
    name: Name,
    what: Targets = None,
    reason: Annotated[str, typer.Option(help="Reason, stored with the pause.")] = "",
    output: Output = OutputFormat.TABLE,
) -> None:
    spec, scope = find_consumer(name), Scope.parse(what or [])
    targets = _targets(scope)
    _require_subscribed(spec, scope)
    with _transaction(spec) as (cur, group_id):
        flow.pause(cur, group_id, targets, reason)
    print_note(f"paused, starting with the next batch: {_comma_separated(targets)}")
    if output is OutputFormat.JSON:
        print_json({"paused": _as_json(targets)})


def resume(name: Name, what: Targets = None, output: Output = OutputFormat.TABLE) -> None:
    with _transaction(find_consumer(name)) as (cur, group_id):
        ended = flow.resume(cur, group_id, _targets(Scope.parse(what or [])))
        still_paused = flow.read(cur, group_id).paused
    print_note(f"resumed: {_comma_separated(ended)}" if ended else "nothing to resume: it was not paused")
    if still_paused:
        print_note(f"still paused: {_comma_separated(list(still_paused))}")
    if output is OutputFormat.JSON:
        print_json({"resumed": _as_json(ended), "paused": _as_json(still_paused)})


def change(
    name: Name,
    priority: Annotated[list[str] | None, typer.Option(metavar="TOPIC=N", help="Topics with higher N are read first. Repeatable.")] = None,
    max_ahead: Annotated[
        str | None, typer.Option(metavar="DURATION", help="Maximum lead of one topic over another in event time, such as 10m, or none.")
    ] = None,
    output: Output = OutputFormat.TABLE,
) -> None:
    changes = [_priority(text) for text in priority or []]
    limit = None if max_ahead is None or max_ahead == "none" else parse_duration(max_ahead)
    spec = find_consumer(name)
    _require_subscribed(spec, Scope(tuple(Item(topic) for topic, _ in changes)))
    with _transaction(spec) as (cur, group_id):
        for topic, number in changes:
            flow.prioritize(cur, group_id, topic, number)
        if max_ahead is not None:
            flow.limit_ahead(cur, group_id, limit)
        current = flow.read(cur, group_id)
    if output is OutputFormat.JSON:
        print_json({"paused": _as_json(current.paused), "priorities": dict(current.priorities), "max_ahead": current.max_ahead})
        return
    by_priority = sorted(current.priorities.items(), key=lambda item: (-item[1], item[0]))
    facts = {
        "paused": _comma_separated(list(current.paused)) or "nothing",
        "priorities": " ".join(f"{topic}={number}" for topic, number in by_priority) or "none",
        "max ahead": format_duration(current.max_ahead) if current.max_ahead else "any",
    }
    for label, value in facts.items():
        print_text(f"{label:<12}{value}")


def _require_subscribed(spec: ConsumerSpec, scope: Scope) -> None:
    """Raises `BadInput` if the scope names topics or partitions that the consumer does not read.

    Asks Kafka only about partitions without a position, so that reading can be paused while the brokers are unavailable.
    """
    if not scope.items:
        return
    require_topics(spec, scope, what="scope")
    with connected() as connection, transaction(connection) as cur:
        partitions = {position.partition for position in store.positions(cur, spec.group) if spec.names(position.partition)}
    try:
        scope.select(partitions)
    except BadInput:
        cluster = kafka_cluster()
        partitions |= set(partitions_of(spec, cluster.topics(cluster.subscribed(spec), missing_ok=True)))
        scope.select(partitions)


def _targets(scope: Scope) -> list[FlowTarget]:
    """The topics and partitions of the scope; for all of them, the whole consumer."""
    for item in scope.items:
        for first, last in item.partitions:
            if last - first >= MAX_RANGE:
                raise BadInput(
                    what="range of partitions", found=f"{first}-{last}", fix=f"Name at most {MAX_RANGE} partitions, or the whole topic."
                )
    targets = [] if scope.items else [FlowTarget()]
    for item in scope.items:
        numbers = [number for first, last in item.partitions for number in range(first, last + 1)]
        targets += [FlowTarget(item.topic, number) for number in numbers] if numbers else [FlowTarget(item.topic)]
    return targets


def _priority(text: str) -> tuple[str, int]:
    topic, _, number = text.partition("=")
    if not topic or not re.fullmatch(r"-?\d{1,6}", number):
        raise BadInput(what="priority", found=text, fix="Write flights=10; higher numbers are read first.")
    return topic, int(number)


def _as_json(targets: Iterable[FlowTarget]) -> list[dict[str, str | int | None]]:
    return [{"topic": target.topic, "partition": target.partition} for target in sorted(targets, key=str)]


def _comma_separated(targets: Sequence[FlowTarget]) -> str:
    return ", ".join(sorted(map(str, targets)))

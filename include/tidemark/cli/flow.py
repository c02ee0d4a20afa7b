"""``tidemark pause``, ``resume`` and ``flow``: control what a consumer reads."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from tidemark.cli.common import OutputFormat, connected, kafka_cluster, print_json, spec_of, stderr, stdout, who
from tidemark.consume.assignment import partitions_of, require_topics
from tidemark.db import Cursor, set_audit_actor, transaction
from tidemark.errors import BadInput
from tidemark.offsets import flow, store
from tidemark.offsets.flow import FlowTarget
from tidemark.profiles import Profile
from tidemark.spec import ConsumerSpec
from tidemark.spec.scope import Item, Scope
from tidemark.text.duration import format_duration, parse_duration

MAX_RANGE = 10_000
"""Maximum number of partitions in a range."""


@contextlib.contextmanager
def _transaction(spec: ConsumerSpec) -> Iterator[tuple[Cursor, int]]:
    with connected(needs=Profile.OPERATOR) as connection, transaction(connection) as cur:
        set_audit_actor(cur, who())
        yield cur, store.ensure_group(cur, spec.group)


def pause_reading(name: str, scopes: Sequence[str], reason: str, consumers: Path | None, output: OutputFormat) -> None:
    spec, targets = spec_of(name, consumers), _targets(scopes)
    _require_subscribed(spec, Scope.parse(scopes))
    with _transaction(spec) as (cur, group_id):
        flow.pause(cur, group_id, targets, reason)
    stderr.print(f"paused, starting with the next batch: {_comma_separated(targets)}", markup=False, highlight=False)
    if output is OutputFormat.JSON:
        print_json({"paused": _as_json(targets)})


def resume_reading(name: str, scopes: Sequence[str], consumers: Path | None, output: OutputFormat) -> None:
    with _transaction(spec_of(name, consumers)) as (cur, group_id):
        ended = flow.resume(cur, group_id, _targets(scopes))
        still_paused = flow.read(cur, group_id).paused
    stderr.print(f"resumed: {_comma_separated(ended)}" if ended else "nothing to resume: it was not paused", markup=False, highlight=False)
    if still_paused:
        stderr.print(f"still paused: {_comma_separated(list(still_paused))}", markup=False, highlight=False)
    if output is OutputFormat.JSON:
        print_json({"resumed": _as_json(ended), "paused": _as_json(still_paused)})


def change_flow(name: str, priorities: Sequence[str], max_ahead: str | None, consumers: Path | None, output: OutputFormat) -> None:
    changes = [_priority(text) for text in priorities]
    limit = None if max_ahead is None or max_ahead == "none" else parse_duration(max_ahead)
    spec = spec_of(name, consumers)
    _require_subscribed(spec, Scope(tuple(Item(topic) for topic, _ in changes)))
    with _transaction(spec) as (cur, group_id):
        for topic, priority in changes:
            flow.prioritize(cur, group_id, topic, priority)
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
        stdout.print(f"{label:<12}{value}", markup=False, highlight=False)


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


def _targets(texts: Sequence[str]) -> list[FlowTarget]:
    """Parses ``flights`` and ``flights:0,1,5-9``. An empty list means the whole consumer."""
    items = Scope.parse(texts).items
    for item in items:
        for first, last in item.partitions:
            if last - first >= MAX_RANGE:
                raise BadInput(
                    what="range of partitions", found=f"{first}-{last}", fix=f"Name at most {MAX_RANGE} partitions, or the whole topic."
                )
    targets = [] if items else [FlowTarget()]
    for item in items:
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

"""The partitions that a run with manual assignment reads: all of its topics, those fixed in its file, or those named for one run.

Each run claims only the partitions that it reads, in a generation of its own. Runs without a common partition do not fence each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tidemark.errors import BadInput
from tidemark.kafka.cluster import Topic
from tidemark.records.ranges import TopicPartition
from tidemark.spec import ConsumerSpec, Problem
from tidemark.spec.scope import Item, Scope, missing, spans
from tidemark.text.wording import nearest

OPTION = "--partition"


def narrowed(spec: ConsumerSpec, words: Sequence[str]) -> ConsumerSpec:
    """The consumer restricted to the partitions that ``words`` name (``orders:0-2``). Unchanged if there are no words.

    Raises `BadInput`. The run itself checks that the topics have these partitions (`partitions_of`).
    """
    only = Scope.parse(words, what=OPTION)
    if not only.items:
        return spec
    if spec.members > 1:
        fix = "Run it without --partition; its group assigns the partitions."
        raise BadInput(what=OPTION, found=f"{spec.name} has {spec.members} members", fix=fix)
    if spec.topic_pattern is not None:
        fix = "Run it without --partition, or name its topics in the file."
        raise BadInput(what=OPTION, found=f"{spec.name} reads topics by a pattern", fix=fix)
    require_topics(spec, only, what=OPTION)
    return spec.model_copy(update={"only": only})


def require_topics(spec: ConsumerSpec, scope: Scope, *, what: str) -> None:
    """Raises `BadInput` with ``what`` as its subject if the scope names a topic that is not in the file."""
    if unknown := next((item.topic for item in scope.items if spec.topics and item.topic not in spec.topics), None):
        near = nearest(unknown, spec.topics)
        fix = f"Did you mean {near}?" if near else f"Its topics are {', '.join(spec.topics)}."
        raise BadInput(what=what, found=f"{spec.name} does not read topic {unknown}", fix=fix)


def partitions_of(spec: ConsumerSpec, topics: Iterable[Topic]) -> list[TopicPartition]:
    """The partitions of these topics that the run reads, sorted.

    Raises `SpecInvalid` if the file fixes partitions that do not exist, and `BadInput` if the run names such partitions.
    """
    topics = list(topics)
    if problems := problems_of(spec, topics):
        raise spec.invalid(*problems)
    return spec.only.select((part for topic in topics for part in topic.all() if spec.fixed.covers(part)), what=OPTION)


def problems_of(spec: ConsumerSpec, topics: Iterable[Topic]) -> list[Problem]:
    """The fixed partitions that the topics do not have. Fixed topics that are not in ``topics`` are not checked."""
    existing = {topic.name: [part.partition for part in topic.all()] for topic in topics}
    checked = ((item, missing(item, existing)) for item in spec.fixed.items if item.topic in existing)
    return [_problem(spec, item, absent, existing[item.topic]) for item, absent in checked if absent]


def _problem(spec: ConsumerSpec, item: Item, absent: Sequence[str], existing: Sequence[int]) -> Problem:
    numbers = ",".join(text.removeprefix(f"{item.topic}:") for text in absent)
    return spec.problem(("partitions", item.topic), f"topic {item.topic} does not have {numbers}", f"it has {spans(existing)}")

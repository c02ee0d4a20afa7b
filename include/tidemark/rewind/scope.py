"""Which partitions a rewind moves: ``all``, ``flights``, ``flights:0,1,5-9``, several of them. (A topic named all is ``all:0-9``.)"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from tidemark.errors import BadInput
from tidemark.offsets.ranges import TopicPartition
from tidemark.spec.problem import nearest, quoted

ALL = "all"
_ITEM = re.compile(r"(?P<topic>[A-Za-z0-9._-]{1,249})(?::(?P<partitions>\d{1,9}(?:-\d{1,9})?(?:,\d{1,9}(?:-\d{1,9})?)*))?", re.ASCII)
_SHOWN = 10  # entries of a list in a message


@dataclass(frozen=True, slots=True)
class Item:
    """A topic, all of it or these partitions: pairs of first and last."""

    topic: str
    partitions: tuple[tuple[int, int], ...] = ()

    def covers(self, partition: TopicPartition) -> bool:
        if partition.topic != self.topic:
            return False
        return not self.partitions or any(first <= partition.partition <= last for first, last in self.partitions)

    def __str__(self) -> str:
        numbers = ",".join(str(first) if first == last else f"{first}-{last}" for first, last in self.partitions)
        return f"{self.topic}:{numbers}" if numbers else self.topic


@dataclass(frozen=True, slots=True)
class Scope:
    """What `parse` has read; its text reads back as the same. Without items it is everything."""

    items: tuple[Item, ...] = ()

    @classmethod
    def parse(cls, words: Iterable[str]) -> Scope:
        """The scope that the words name, each of them one or several, with blanks between. No word at all means ``all``.

        Raises `BadInput` with every word that is none.
        """
        asked = [word for text in words for word in text.split()]
        items, bad = [], []
        for word in asked:
            if word == ALL:
                continue
            match = _ITEM.fullmatch(word)
            backward = match and next((part for part in (match["partitions"] or "").split(",") if _backward(part)), None)
            if match is None or backward:
                bad.append((quoted(word), f"Write {'-'.join(reversed(backward.split('-')))} for {backward}." if backward else ""))
                continue
            items.append(Item(match["topic"], _pairs(match["partitions"])))
        if bad:
            fixes = list(dict.fromkeys(fix or f"Write {ALL}, flights, or flights:0,1,5-9." for _, fix in bad))
            found = f"{_listed([word for word, _ in bad])} {'does' if len(bad) == 1 else 'do'} not name topics or partitions"
            raise BadInput(what="scope", found=found, fix=" ".join(fixes))
        if items and ALL in asked:
            raise BadInput(
                what="scope", found=f"{ALL} stands beside {_listed([str(item) for item in items])}", fix="Write one or the other."
            )
        return cls(tuple(dict.fromkeys(items)))

    def select(self, partitions: Iterable[TopicPartition]) -> list[TopicPartition]:
        """Those of ``partitions`` that the scope names, in order.

        Raises `BadInput` if it names any that are not among them, with all such and with what there is.
        """
        there = sorted(set(partitions))
        by_topic: dict[str, list[int]] = defaultdict(list)
        for partition in there:
            by_topic[partition.topic].append(partition.partition)
        missing = [text for item in self.items for text in _missing(item, by_topic)]
        if missing:
            shown = _listed([f"{topic}:{spans(numbers)}" for topic, numbers in sorted(by_topic.items())])
            guess = next((near for item in self.items if item.topic not in by_topic and (near := nearest(item.topic, by_topic))), None)
            meant = f"Did you mean {guess}? " if guess else ""
            fix = f"{meant}There {'are' if len(there) > 1 else 'is'} {shown}." if there else "The group reads no partition."
            verb = "is" if len(missing) == 1 else "are"
            raise BadInput(what="scope", found=f"{_listed(missing)} {verb} not among the group's partitions", fix=fix)
        return [partition for partition in there if not self.items or any(item.covers(partition) for item in self.items)]

    def __str__(self) -> str:
        return " ".join(map(str, self.items)) or ALL


def spans(numbers: Iterable[int]) -> str:
    """Numbers as a person writes them: ``0-5,9``."""
    ordered = sorted(set(numbers))
    starts = [number for number, before in zip(ordered, [None, *ordered], strict=False) if before is None or number != before + 1]
    ends = [number for number, after in pairwise([*ordered, None]) if number is not None and after != number + 1]
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in zip(starts, ends, strict=True))


def _pairs(text: str | None) -> tuple[tuple[int, int], ...]:
    if text is None:
        return ()
    parts = [part.partition("-") for part in text.split(",")]
    return tuple(sorted({(int(first), int(last or first)) for first, _, last in parts}))


def _backward(part: str) -> bool:
    first, dash, last = part.partition("-")
    return bool(dash) and int(last) < int(first)


def _missing(item: Item, by_topic: dict[str, list[int]]) -> list[str]:
    """What the item names and is not there, as a person writes it."""
    if item.topic not in by_topic:
        return [str(item)]
    there = set(by_topic[item.topic])
    gone = []
    for first, last in item.partitions:
        if last - first >= 2 * len(there) + _SHOWN:  # most of it is not there; do not count to a billion to say so
            gone.append(f"{item.topic}:{first}-{last}")
        elif numbers := [number for number in range(first, last + 1) if number not in there]:
            gone.append(f"{item.topic}:{spans(numbers)}")
    return gone


def _listed(words: list[str]) -> str:
    more = f" and {len(words) - _SHOWN} more" if len(words) > _SHOWN else ""
    return ", ".join(words[:_SHOWN]) + more

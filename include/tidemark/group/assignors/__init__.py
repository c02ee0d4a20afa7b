"""Assignors decide which member reads which partition. They are pure functions of the topics and the members' subscriptions.

`range`, `roundrobin` and `sticky` are eager, `cooperative-sticky` is cooperative (KIP-429). They give the same results as Kafka's, racks
included (KIP-881). `random` is an example for custom assignors: any class that implements `Assignor` can be named as ``module:Class``.

Modules::

    base             what an assignor gets and returns
    general          sticky assignment with unequal subscriptions
    numbered         members, topics and partitions as numbers
    previous_owners  previous owners, and contradictory claims (KIP-792)
    racks            which members are near which replicas (KIP-881)
    random           `random`, the example of a custom assignor
    range            `range`
    result_check     the check of an assignment
    roundrobin       `roundrobin`
    sticky           `sticky` and `cooperative-sticky`
    uniform          sticky assignment with equal subscriptions
"""

from __future__ import annotations

from tidemark.errors import BadInput
from tidemark.group.assignors.base import Assignment, Assignor, Metadata, Subscription, TopicInfo, member_order
from tidemark.group.assignors.random import RandomAssignor
from tidemark.group.assignors.range import RangeAssignor
from tidemark.group.assignors.result_check import check_assignment
from tidemark.group.assignors.roundrobin import RoundRobinAssignor
from tidemark.group.assignors.sticky import CooperativeStickyAssignor, StickyAssignor
from tidemark.group.named import find_class

__all__ = [
    "ASSIGNORS",
    "Assignment",
    "Assignor",
    "Metadata",
    "Subscription",
    "TopicInfo",
    "check_assignment",
    "find_assignor",
    "member_order",
]

ASSIGNORS: dict[str, type[Assignor]] = {
    assignor.name: assignor for assignor in (RangeAssignor, RoundRobinAssignor, StickyAssignor, CooperativeStickyAssignor, RandomAssignor)
}
"""The built-in assignors, by their names in a spec's ``assignment``."""


def find_assignor(name: str) -> Assignor:
    """A new assignor: a built-in one, or an instance of the class that ``module:Class`` names, created without arguments.

    Raises `BadInput` for a name that is neither, and for a class that is not an assignor.
    """
    if name in ASSIGNORS:
        return ASSIGNORS[name]()
    fix = f"Write one of {', '.join(ASSIGNORS)}, or module:Class of your own assignor."
    cls = find_class(name, Assignor, what="assignor", fix=fix)  # type: ignore[type-abstract]
    problem = _problem(cls)
    if problem:
        raise BadInput(what=f"assignor {name!r}", found=problem, fix=fix)
    return cls()


def _problem(cls: type[Assignor]) -> str | None:
    if getattr(cls, "__abstractmethods__", None):
        return f"{cls.__name__} does not implement {', '.join(sorted(cls.__abstractmethods__))}"
    if not isinstance(getattr(cls, "name", None), str):
        return f"{cls.__name__} has no name"
    if cls.protocol not in ("eager", "cooperative"):
        return f"{cls.__name__}.protocol is {cls.protocol!r}, neither eager nor cooperative"
    return None

"""Erasures of a `Lab` of rewinds, by a condition on the sink or by the key of messages."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tidemark.erase import erasure
from tidemark.erase.erasure import Erasure, Person, Planned
from tidemark.erase.kafka_records import Keyed, records_of
from tidemark.spec import ConsumerSpec

if TYPE_CHECKING:
    from tests.integration.rewind.lab import Lab

REASON = "asked for by the customer"


def person(of: str | bytes) -> Person:
    return Person(where=of) if isinstance(of, str) else Person(key=of)


def reading(lab: Lab) -> Callable[[ConsumerSpec, bytes], Keyed]:
    return lambda spec, key: records_of(lab.cluster, lab.consumer.connections.kafka, spec, key, lambda _: None)


def told(lab: Lab, of: str | bytes) -> Planned:
    with lab.session() as connection:
        return erasure.plan(connection, lab.cluster, lab.spec, person(of), reading(lab), reason=REASON, by="ann")


def planned(lab: Lab, of: str | bytes) -> Erasure:
    return told(lab, of).erasure


def applied(lab: Lab, made: Erasure, of: str | bytes) -> Erasure:
    with lab.session() as connection:
        return erasure.apply(connection, lambda _: lab.spec, made.erasure_id, person(of), reading(lab), by="bob")


def erase(lab: Lab, of: str | bytes) -> Erasure:
    """Erases by a condition on the sink, or by the key of messages. Checks that the plan counts what the erasure removes."""
    made = planned(lab, of)
    done = applied(lab, made, of)
    assert (counts(made), made.failed_records, made.suppressed) == (counts(done), done.failed_records, done.suppressed)
    return done


def counts(one: Erasure) -> tuple[int, int, int]:
    return one.sink_rows, one.archived_rows, one.overwritten_rows

"""The forms of the DAGs ``discard`` and ``redrive``: a consumer, the filter of ``tidemark retries``, a reason. Also checks their input."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from airflow.sdk import Param

from tidemark.airflow.approvals.form import NUMBER, WHY, consumer_field, field, reason_field, refuse_unknown
from tidemark.airflow.operators import spec_of
from tidemark.errors import BadInput
from tidemark.retry.filter import Filter, RecordState, parse_key
from tidemark.spec import ConsumerSpec
from tidemark.text.moment import EXAMPLE as MOMENT
from tidemark.text.moment import parse_moment
from tidemark.text.problems import Problems, check_reason
from tidemark.text.storable import BIGINT, INTEGER

APPLY, ASK, NOTHING = "apply", "ask", "nothing"
"""The choices of the field ``then``."""
PLACES = {"ladder": "all delays again, from the first", "now": "one try, at once"}

_WHICH, _AMONG, _HOW = "Which records", "More filters (a record must match all)", "Where to, and how fast"


def discard_form(good: Sequence[ConsumerSpec], own: str | None) -> dict[str, Param]:
    """Returns the form's fields. The DAG of the consumer ``own`` has no field for consumers. A REST client sends the same keys in its
    conf."""
    return {
        **_records_fields("discard", good, own, (RecordState.FAILED, RecordState.WAITING, RecordState.HELD)),
        "then": _then("discard", "*ask* discards exactly the records shown.", ASK),
        "reason": reason_field("test flights of last week"),
    }


def redrive_form(good: Sequence[ConsumerSpec], own: str | None) -> dict[str, Param]:
    """The same for `redrive`."""
    limits: dict[str, Any] = {"section": _HOW, "minimum": 1}
    often = "A record that was redriven this often is not redriven again."
    places = {name: f"{name}: {words}" for name, words in PLACES.items()}
    return {
        **_records_fields("redrive", good, own, (RecordState.FAILED, RecordState.WAITING, RecordState.DISCARDED)),
        "to": field(
            "Where to",
            "If empty: *ladder*, or *now* for a consumer without retry delays.",
            _HOW,
            enum=[*places, None],
            values_display=places,
        ),
        "limit": field("Maximum number of records", "Takes the first ones.", kind=NUMBER, maximum=BIGINT, **limits),
        "per_second": field("Maximum records per second", "Unlimited if empty.", kind=NUMBER, maximum=INTEGER, **limits),
        "max_redrives": field("Maximum redrives per record", often, default=3, kind="integer", maximum=INTEGER, **limits),
        "then": _then("redrive", "A plan that is not applied now can be applied later: *tidemark redrive apply NUMBER*.", APPLY),
        "reason": reason_field("the service is back"),
    }


_UNSET = {
    "discard": "If empty: all of these. At least one field must choose records.",
    "redrive": "If empty: failed records, and those that the broker refused. *DISCARDED* records only if selected here.",
}


def _records_fields(verb: str, good: Sequence[ConsumerSpec], own: str | None, states: Sequence[RecordState]) -> dict[str, Param]:
    """Returns the fields of the filter. The form offers ``states`` and the consumers ``good``."""
    names = {spec.name: f"{spec.name}: {spec.shown_tables}" for spec in good}
    consumer = consumer_field("Consumer", f"The consumer whose records to {verb}.", _WHICH, names, type="string", minLength=1)
    choices = list(map(str, states))
    items = {"type": "string", "enum": choices}
    offsets: dict[str, Any] = {"section": _AMONG, "kind": NUMBER, "minimum": 0, "maximum": BIGINT}
    return {
        **({"consumer": consumer} if own is None else {}),
        "states": field("States", _UNSET[verb], _WHICH, kind=["null", "array"], items=items, examples=choices),
        "error": field("Error type", "The full name: *TimeoutError*.", _WHICH),
        "text": field("Error text", "Any part of it.", _WHICH),
        "numbers": field("Record numbers", "Only these, as shown by *tidemark retries list*: *4711, 4712*.", _WHICH),
        "topic": field("Topic", "The topic that the record was first read from.", _AMONG),
        "partition": field("Partition", "A partition of that topic.", _AMONG, kind=NUMBER, minimum=0, maximum=INTEGER),
        "from_offset": field("From offset", "Inclusive.", **offsets),
        "to_offset": field("To offset", "Exclusive.", **offsets),
        "key": field("Key", "As text.", _AMONG),
        "key_hex": field("Key in hex", "For a key that is not text: *00ff*.", _AMONG),
        "since": field("Since", f"First failed at or after this time: *{MOMENT}*.", _AMONG),
        "until": field("Until", "First failed before this time.", _AMONG),
        "tier": field("Tier", "The retry topic that the record is in or goes to: *5m*, *now*, *failed*.", _AMONG),
        "refused": field("Refused", "Only records that the broker refused.", _AMONG, default=False, kind="boolean"),
    }


def _then(verb: str, description: str, default: str) -> Param:
    choices = {APPLY: f"{verb} the records", ASK: "ask for approval first", NOTHING: "nothing (dry run)"}
    return field("After the plan", description, WHY, default, "string", enum=list(choices), values_display=choices)


DISCARD_FIELDS, REDRIVE_FIELDS = tuple(discard_form((), None)), tuple(redrive_form((), None))
"""The keys of the forms, and of a REST client's conf."""


@dataclass(frozen=True, slots=True)
class RecordsRequest:
    """The parsed form."""

    spec: ConsumerSpec
    filter: Filter
    reason: str


def consumer_name(params: Mapping[str, Any], own: str | None) -> str:
    """Returns the consumer: from the form, or the one that the DAG is for."""
    return str(params["consumer"]) if own is None else own


def read_records(params: Mapping[str, Any], conf: Mapping[str, Any], fields: Sequence[str], own: str | None = None) -> RecordsRequest:
    """Checks and parses the form. ``conf`` is what the client sent; keys other than ``fields`` are refused, so that a typo does not go
    unnoticed. In the DAG of the consumer ``own``, so is a consumer.

    Raises all problems at once (`BadInput`, `SeveralProblems`).
    """
    problems = Problems()
    refuse_unknown(problems, conf, fields, "consumer", own)
    spec = problems.attempt(lambda: spec_of(consumer_name(params, own)))
    reason = problems.attempt(lambda: check_reason(params["reason"]))
    since = problems.attempt(lambda: _optional(params["since"], parse_moment))
    until = problems.attempt(lambda: _optional(params["until"], parse_moment))
    numbers = problems.attempt(lambda: record_numbers(params["numbers"]))
    key = problems.attempt(lambda: parse_key(params["key"] or None, params["key_hex"] or None))
    record_filter = problems.attempt(
        lambda: Filter(
            numbers=numbers or (),
            states=tuple(RecordState(state) for state in params["states"] or ()),
            error_type=params["error"],
            error_text=params["text"],
            topic=params["topic"],
            partition=params["partition"],
            from_offset=params["from_offset"],
            to_offset=params["to_offset"],
            key=key,
            since=since,
            until=until,
            tier=params["tier"],
            refused=params["refused"],
        )
    )
    problems.end()
    assert spec is not None
    assert reason is not None
    assert record_filter is not None
    return RecordsRequest(spec, record_filter, reason)


def _optional(text: str | None, parse: Any) -> Any:
    return parse(text) if text else None


def record_numbers(text: str | None) -> tuple[int, ...]:
    words = (text or "").replace(",", " ").split()
    for word in words:
        if not (word.isascii() and word.isdigit() and 0 < int(word[:20]) <= BIGINT):
            raise BadInput(what="numbers", found=f'"{word[:80]}" is not a record number', fix="Separate numbers by commas: 4711, 4712.")
    return tuple(map(int, words))

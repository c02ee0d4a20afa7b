"""The part of a form that chooses failed records: a consumer, the filter of ``tidemark retries``, a reason. Also checks its input."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from airflow.sdk import Param

from tidemark.airflow.approvals.form import refuse_unknown
from tidemark.airflow.operators import spec_of
from tidemark.errors import BadInput
from tidemark.retry.filter import Filter, RecordState
from tidemark.spec import ConsumerSpec
from tidemark.text.moment import EXAMPLE as MOMENT
from tidemark.text.moment import parse_moment
from tidemark.text.problems import REASON_CHARACTERS, Problems, check_reason
from tidemark.text.storable import BIGINT, INTEGER, require_storable

WHICH, AMONG, WHY = "Which records", "More filters (a record must match all)", "Why"
TEXT, NUMBER = ["null", "string"], ["null", "integer"]
RECORDS_FIELDS = (
    *("consumer", "states", "error", "text", "numbers"),
    *("topic", "partition", "from_offset", "to_offset", "key", "key_hex", "since", "until", "tier", "refused"),
)
"""The keys of `records_fields`."""


def field(title: str, description: str, kind: Any = TEXT, default: Any = None, section: str = WHICH, **more: Any) -> Param:
    """An optional field."""
    return Param(default, type=kind, title=title, description_md=description, section=section, **more)


def records_fields(good: Sequence[ConsumerSpec], own: str | None, verb: str, states: Sequence[RecordState], unset: str) -> dict[str, Param]:
    """Returns the fields of the filter. The form offers ``states`` and the consumers ``good``; the DAG of the consumer ``own`` has no field
    for consumers. ``unset``: the meaning of no state."""
    names = {spec.name: f"{spec.name}: {spec.shown_tables}" for spec in good}
    consumer = Param(
        type="string",
        minLength=1,
        examples=list(names),
        values_display=names,
        title="Consumer",
        description_md=f"The consumer whose records to {verb}.",
        section=WHICH,
    )
    return {
        **({"consumer": consumer} if own is None else {}),
        "states": field(
            "States",
            unset,
            ["null", "array"],
            items={"type": "string", "enum": list(map(str, states))},
            examples=list(map(str, states)),
        ),
        "error": field("Error type", "The full name: *TimeoutError*."),
        "text": field("Error text", "Any part of it."),
        "numbers": field("Record numbers", "Only these, as shown by *tidemark retries list*: *4711, 4712*."),
        "topic": field("Topic", "The topic that the record was first read from.", section=AMONG),
        "partition": field("Partition", "A partition of that topic.", NUMBER, section=AMONG, minimum=0, maximum=INTEGER),
        "from_offset": field("From offset", "Inclusive.", NUMBER, section=AMONG, minimum=0, maximum=BIGINT),
        "to_offset": field("To offset", "Exclusive.", NUMBER, section=AMONG, minimum=0, maximum=BIGINT),
        "key": field("Key", "As text.", section=AMONG),
        "key_hex": field("Key in hex", "For a key that is not text: *00ff*.", section=AMONG),
        "since": field("Since", f"First failed at or after this time: *{MOMENT}*.", section=AMONG),
        "until": field("Until", "First failed before this time.", section=AMONG),
        "tier": field("Tier", "The retry topic that the record is in or goes to: *5m*, *now*, *failed*.", section=AMONG),
        "refused": field("Refused", "Only records that the broker refused.", "boolean", False, AMONG),
    }


def reason_field(example: str) -> Param:
    """The field of the reason, which is required."""
    return Param(
        type="string",
        minLength=REASON_CHARACTERS,
        maxLength=2_000,
        title="Reason",
        description_md=f"At least {REASON_CHARACTERS} characters; kept permanently: *{example}*.",
        section=WHY,
    )


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
    numbers = problems.attempt(lambda: _numbers(params["numbers"]))
    key = problems.attempt(lambda: _key(params["key"], params["key_hex"]))
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


def _numbers(text: str | None) -> tuple[int, ...]:
    words = (text or "").replace(",", " ").split()
    for word in words:
        if not (word.isascii() and word.isdigit() and 0 < int(word[:20]) <= BIGINT):
            raise BadInput(what="numbers", found=f'"{word[:80]}" is not a record number', fix="Separate numbers by commas: 4711, 4712.")
    return tuple(map(int, words))


def _key(text: str | None, in_hex: str | None) -> bytes | None:
    if text and in_hex:
        raise BadInput(what="key", found="both key and key_hex are given", fix="Give only one of them.")
    if not in_hex:
        require_storable("key", (text or "").replace("\0", ""))  # a key is bytes, which may have a NUL
        return text.encode() if text else None
    try:
        return bytes.fromhex(in_hex)
    except ValueError:
        raise BadInput(what="key_hex", found=f'"{in_hex[:80]}" is not hex', fix="Write two hex digits per byte: 00ff.") from None

"""The form of the DAG ``rewind``: its fields, and the check of its input, from the form or from a REST client."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from airflow.sdk import Param

from tidemark.airflow.approvals.form import LINE_CHARACTERS, consumer_field, field, reason_field, refuse_unknown
from tidemark.airflow.operators import spec_of
from tidemark.errors import BadInput
from tidemark.rewind.scenarios.offsets_file import MAX_BYTES
from tidemark.rewind.scenarios.scenario import FROM_FILE, SCENARIO_OPTIONS, normalized, parse, parse_expiry
from tidemark.spec import ConsumerSpec
from tidemark.spec.scope import Scope
from tidemark.text.moment import EXAMPLE as MOMENT
from tidemark.text.problems import Problems, check_reason
from tidemark.text.wording import quoted

if TYPE_CHECKING:
    from tidemark.rewind.plan import PlanRequest
    from tidemark.rewind.plan_model import Scenario

ZONES = (
    "UTC",
    "Europe/Berlin",
    "Europe/London",
    "Europe/Paris",
    "America/New_York",
    "America/Chicago",
    "America/Los_Angeles",
    "America/Sao_Paulo",
    "Asia/Kolkata",
    "Asia/Singapore",
    "Asia/Tokyo",
    "Australia/Sydney",
)
"""Suggestions. Any zone of the tz database is accepted."""

_WHAT, _WHERE, _WHY = "What to rewind", "Where to", "Why, and how"


def form(specs: Sequence[ConsumerSpec], own: str | None) -> dict[str, Param]:
    """Returns the form's fields. The DAG of the consumer ``own`` has no field for consumers. A REST client sends the same keys in its
    conf."""
    names = {spec.name: f"{spec.name}: {', '.join(spec.topics) or spec.topic_pattern} to {spec.shown_tables}" for spec in specs}
    several = "Several consumers are moved together or not at all."
    consumers = consumer_field("Consumers", several, _WHAT, names, type="array", items={"type": "string"}, minItems=1)
    examples = "".join(f"- {word.name}: *{word.example}*\n" for word in SCENARIO_OPTIONS.values() if word.value and word.name != FROM_FILE)
    value = f"Examples:\n\n{examples}\nWrite a time with its UTC offset, *{MOMENT}*, or name its zone below."
    zone = "Only for *to-datetime*: *Europe/Berlin* or any other name from the tz database."
    offsets = (
        "Only for *from-file*: paste the file's content, lines of *topic,partition,offset*, as written by *kafka-consumer-groups --export*."
    )
    loss = (
        "If Kafka no longer has the target offset: continue at the log start offset, and record the gap as lost. "
        "Needed for compacted topics too."
    )
    expires = "How long the plan waits for approval and can be applied: *30m*, *4h*, *2d*."
    backfill = "If the rewind skips records: read them later into the same table, in a separate run."
    beside = (
        "Read the records into tables beside the live rows first, and swap them in when they are complete and valid. Readers see the old "
        "rows until then, and never a gap."
    )
    topics = "*all*, *flights* or *flights:0,1,5-9*. Separate several by spaces."
    return {
        **({"consumers": consumers} if own is None else {}),
        "scope": field("Topics and partitions", topics, _WHAT, "all", "string", maxLength=MAX_BYTES),
        "scenario": Param(
            type="string",
            enum=list(SCENARIO_OPTIONS),
            values_display={word.name: f"{word.name}: {word.does}" for word in SCENARIO_OPTIONS.values()},
            title="Scenario",
            description_md="Most scenarios need a value in the next field.",
            section=_WHERE,
        ),
        "value": field("Value", value, _WHERE, maxLength=LINE_CHARACTERS),
        "zone": field("Zone of a local time", zone, _WHERE, pattern=r"^[A-Za-z0-9_+/-]{0,64}$", examples=list(ZONES)),
        "offsets": field("Offsets", offsets, _WHERE, maxLength=MAX_BYTES, format="multiline"),
        "reason": reason_field("transform of Tuesday doubled the fares", _WHY),
        "allow_loss": field("Allow loss", loss, _WHY, default=False, kind="boolean"),
        "expires_in": field("Expires in", expires, _WHY, "4h", "string"),
        "consume": field("Consume afterwards", "Start a run of each consumer after the rewind.", _WHY, default=True, kind="boolean"),
        "backfill": field("Backfill", backfill, _WHY, default=False, kind="boolean"),
        "beside": field("Beside", beside, _WHY, default=False, kind="boolean"),
    }


FIELDS = tuple(form((), None))
"""The keys of the form, and of a REST client's conf."""


def consumer_names(params: Mapping[str, Any], own: str | None) -> list[str]:
    """Returns the consumers to rewind: from the form, or the one that the DAG is for."""
    return list(dict.fromkeys(params["consumers"])) if own is None else [own]


def read_form(params: Mapping[str, Any], conf: Mapping[str, Any], own: str | None = None, *, by: str, **run: str) -> PlanRequest:
    """Checks and parses the form. ``conf`` is what the client sent; unknown keys are refused, so that a typo does not go unnoticed. In the
    DAG of the consumer ``own``, so are consumers.

    Raises all problems at once (`BadInput`, `SeveralProblems`).
    """
    from tidemark.rewind.plan import PlanRequest

    problems = Problems()
    refuse_unknown(problems, conf, FIELDS, "consumers", own)
    specs = [problems.attempt(lambda name=name: spec_of(name)) for name in consumer_names(params, own)]  # type: ignore[misc]
    good = tuple(spec for spec in specs if spec)
    scope = problems.attempt(lambda: Scope.parse([params["scope"]]))
    scenario = problems.attempt(lambda: _scenario(params, [spec.group for spec in good]))
    reason = problems.attempt(lambda: check_reason(params["reason"]))
    expires_in = problems.attempt(lambda: parse_expiry(params["expires_in"]))
    problems.end()
    assert scope is not None
    assert scenario is not None
    assert reason is not None
    assert expires_in is not None
    options: dict[str, Any] = {name: params[name] for name in ("allow_loss", "backfill", "beside")} | {"expires_in": expires_in, **run}
    return PlanRequest(good, scope, scenario, reason, by, **options)


def _scenario(params: Mapping[str, Any], groups: Sequence[str]) -> Scenario:
    """Parses the scenario. A file's contents are pasted, because a path would name a file of the worker."""
    name = params["scenario"]
    if normalized(name) == FROM_FILE and params["value"]:
        problem = f"the value is {quoted(params['value'])}, but the form does not open files"
        raise BadInput(what=FROM_FILE, found=problem, fix="Paste the file into offsets.")
    return parse(name, params["value"], zone=params["zone"] or None, groups=groups, contents=params["offsets"] or None)

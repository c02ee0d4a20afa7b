"""Scenarios by Kafka's names: parsed from a command line or form, stored as JSON, described as a sentence."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, get_args

from tidemark.errors import BadInput
from tidemark.records.ranges import TopicPartition
from tidemark.rewind.plan_model import (
    Adopt,
    ByDuration,
    FromFile,
    FromGroup,
    Scenario,
    ShiftBy,
    ToBatch,
    ToCurrent,
    ToDatetime,
    ToEarliest,
    ToLatest,
    ToOffset,
    ToValidated,
    Undo,
)
from tidemark.rewind.scenarios.offsets_file import offsets_for_groups, parse_offsets
from tidemark.text.duration import parse_duration
from tidemark.text.moment import iso, iso_duration, parse_iso_duration, parse_moment, to_timedelta
from tidemark.text.problems import Problems
from tidemark.text.storable import BIGINT, require_storable
from tidemark.text.wording import counted, nearest, quoted

EXPIRES_IN = timedelta(hours=4)
"""How long a plan can be applied by default."""
FROM_FILE = "from-file"
KAFKA = "kafka:"
"""Prefix of a group whose offsets are in Kafka."""

_INTEGER = re.compile(r"[+-]?\d{1,19}", re.ASCII)


@dataclass(frozen=True, slots=True)
class ScenarioOption:
    """A scenario in user interfaces: name, description, kind of value (empty if it has none) and an example value."""

    name: str
    does: str
    value: str = ""
    example: str = ""


SCENARIO_OPTIONS: Mapping[str, ScenarioOption] = {
    option.name: option
    for option in (
        ScenarioOption("to-earliest", "the first record that Kafka still has"),
        ScenarioOption("to-latest", "after the last stable record"),
        ScenarioOption("to-current", "no move: running attempts are fenced and claim again"),
        ScenarioOption("to-offset", "this offset", "an offset", "1200"),
        ScenarioOption("shift-by", "this many offsets forward, or back if negative", "a number of offsets", "-500"),
        ScenarioOption("to-datetime", "the first record at or after this time", "a time", "2026-03-29 14:00"),
        ScenarioOption("by-duration", "the first record within this time before the plan is made", "an ISO 8601 duration", "PT2H"),
        ScenarioOption("from-file", "the offsets in a file", "a file", "offsets.csv"),
        ScenarioOption(
            "from-group",
            "where another group is; kafka:name for offsets that a group committed to Kafka",
            "a group",
            "kafka:departures",
        ),
        ScenarioOption("to-validated", "the end of the validated rows"),
        ScenarioOption("to-batch", "just before a batch, or before all batches of an Airflow run", "a batch or DAG/RUN", "1234"),
        ScenarioOption("undo", "offsets and rows as they were before another rewind", "a rewind", "17"),
    )
}


def parse(
    scenario: str, value: str | None = None, *, zone: str | None = None, groups: Collection[str] = (), contents: str | None = None
) -> Scenario:
    """Returns the scenario with this name and value, as users write them (`SCENARIO_OPTIONS`).

    ``zone`` is the time zone of a local time. ``groups`` are the groups to move, whose offsets a file must have. ``contents`` is the
    text of that file, and ``value`` its name in messages. Opens no file, because the name may come from an untrusted user. Raises all
    problems at once (`BadInput`, `SeveralProblems`).
    """
    problems = Problems()
    name, text = normalized(scenario), (value or "").strip()
    problems.attempt(lambda: require_storable("value", text))
    option = SCENARIO_OPTIONS.get(name)
    if option is None:
        near = nearest(scenario, SCENARIO_OPTIONS)
        problems.add(
            "scenario", f"{quoted(scenario)} does not exist", f"Write {near}." if near else f"Write one of {', '.join(SCENARIO_OPTIONS)}."
        )
    if zone is not None and option is not None and name != "to-datetime":
        problems.add("zone", f"{name} does not use a time zone", "Omit it; only to-datetime takes a local time.")
    if contents is not None and option is not None and name != FROM_FILE:
        problems.add("offsets", f"{name} does not use offsets from a file", "Omit them; only from-file takes them.")
    if option is not None and not option.value and text:
        problems.add(name, f"it takes no value, but {quoted(text)} was given", "Omit the value.")
    if name == FROM_FILE and contents is None:
        problems.add(
            name, "the contents of the file are missing", "Give the file to `tidemark rewind plan --from-file`, or paste it into the form."
        )
    needs_value = option is not None and option.value and name != FROM_FILE
    if option is not None and needs_value and not text:
        problems.add(name, f"it needs {option.value}", f"Write {option.example}.")
    complete = option is not None and (contents is not None if name == FROM_FILE else text or not needs_value)
    parsed = problems.attempt(lambda: _make(name, text, zone, groups, contents or "")) if complete else None
    problems.end()
    assert parsed is not None
    return parsed


def normalized(scenario: str) -> str:
    """Returns the scenario's name in lower case, without blanks around it."""
    return scenario.strip().lower()


def _make(name: str, value: str, zone: str | None, groups: Collection[str], contents: str) -> Scenario:
    plain: dict[str, Callable[[], Scenario]] = {
        "to-earliest": ToEarliest,
        "to-latest": ToLatest,
        "to-current": ToCurrent,
        "to-validated": ToValidated,
        "to-offset": lambda: ToOffset(_integer(name, value, 0)),
        "shift-by": lambda: ShiftBy(_integer(name, value, -BIGINT)),
        "to-datetime": lambda: ToDatetime(parse_moment(value, zone)),
        "by-duration": lambda: ByDuration(parse_iso_duration(value)),
        "from-file": lambda: FromFile(offsets_for_groups(parse_offsets(contents, Path(value or "offsets")), groups)),
        "from-group": lambda: _from_group(value),
        "to-batch": lambda: _to_batch(value),
        "undo": lambda: Undo(_integer(name, value.removeprefix("#"), 1)),
    }
    return plain[name]()


def parse_expiry(text: str | None) -> timedelta:
    """Returns how long a plan can be applied, from ``4h`` or ``PT4H``."""
    if not text or not text.strip():
        return EXPIRES_IN
    text = text.strip()
    try:
        length = parse_iso_duration(text) if text[0] in "Pp" else parse_duration(text)
    except BadInput as error:
        raise BadInput(what="expires-in", found=f"{quoted(text)} is not a duration", fix="Write 30m, 4h, or 2d.") from error
    if not length:
        raise BadInput(what="expires-in", found=f"{quoted(text)} is zero", fix="Write 30m, 4h, or 2d.")
    return length


def _integer(name: str, text: str, least: int) -> int:
    number = int(text) if _INTEGER.fullmatch(text) else None
    if number is None or not least <= number <= BIGINT:
        kind = "a whole number, optionally with + or -" if least < 0 else f"a whole number, {least} or greater"
        raise BadInput(
            what=name, found=f"{quoted(text)} is not {SCENARIO_OPTIONS[name].value}", fix=f"Write {kind}: {SCENARIO_OPTIONS[name].example}."
        )
    return number


def _from_group(value: str) -> FromGroup:
    group = value.removeprefix(KAFKA).strip()
    if not group:
        raise BadInput(what="from-group", found=f"{quoted(value)} names no group", fix="Write departures, or kafka:departures.")
    return FromGroup(group, kafka=value.startswith(KAFKA))


def _to_batch(value: str) -> ToBatch:
    dag_id, slash, run_id = value.partition("/")
    if slash and dag_id.strip() and run_id.strip():
        return ToBatch(dag_id=dag_id.strip(), run_id=run_id.strip())
    if slash or not _INTEGER.fullmatch(value):
        fix = "Write the batch's number, or consume__departures/scheduled__2026-03-29T12:00:00+00:00."
        raise BadInput(what="to-batch", found=f"{quoted(value)} is neither a batch nor DAG/RUN", fix=fix)
    return ToBatch(batch_id=_integer("to-batch", value, 1))


# ---- As JSON


def to_json(scenario: Scenario) -> dict[str, Any]:
    """Returns plain values that `from_json` reads back: ``{"scenario": "to-offset", "offset": 1200}``."""
    values = {field.name: getattr(scenario, field.name) for field in fields(scenario)}
    return {"scenario": scenario.name, **{name: _json_value(value) for name, value in values.items() if value is not None}}


def _json_value(value: Any) -> Any:
    match value:
        case datetime():
            return iso(value)
        case timedelta():
            return iso_duration(value)
        case Mapping():
            return [[part.topic, part.partition, offset] for part, offset in sorted(value.items())]
    return value


def from_json(stored: Any) -> Scenario:
    """Reads a scenario that `to_json` wrote. Raises `BadInput` for anything else: a newer Tidemark may have more scenarios, and a role may
    have stored another value."""
    try:
        values = {name: value for name, value in stored.items() if name != "scenario"}
        (kind,) = (kind for kind in get_args(Scenario) if kind.name == stored["scenario"])
        if kind is FromFile:
            values["offsets"] = {TopicPartition(topic, number): offset for topic, number, offset in values["offsets"]}
        for name, parse_value in (("moment", datetime.fromisoformat), ("duration", _length)):
            if name in values:
                values[name] = parse_value(values[name])
        scenario: Scenario = kind(**values)
        describe(scenario)  # fails for values of other types
        if to_json(scenario) != stored:
            raise ValueError(stored)
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError):
        fix = "Use the Tidemark version that stored it."
        raise BadInput(what="stored scenario", found=quoted(str(stored)), fix=fix) from None
    return scenario


def _length(text: str) -> timedelta:
    length = to_timedelta(text)
    if length is None:
        raise ValueError(text)
    return length


# ---- As a sentence


def describe(scenario: Scenario) -> str:
    """Describes the scenario in one sentence."""
    match scenario:
        case ToOffset(offset):
            return f"Continue at offset {offset:,} of each partition."
        case ShiftBy(0):
            return "Stay where the group is (shift by 0)."
        case ShiftBy(offsets):
            return f"Continue {counted(abs(offsets), 'offset')} {'ahead' if offsets > 0 else 'back'}."
        case ToDatetime(moment):
            return f"Continue at the first record at or after {iso(moment)}."
        case ByDuration(duration):
            return f"Continue at the first record within {iso_duration(duration)} before the plan was made."
        case FromFile(offsets):
            return f"Continue at the offsets in a file, for {counted(len(offsets), 'partition')}."
        case FromGroup(group, kafka):
            return f"Continue at the offsets that group {group} committed to Kafka." if kafka else f"Continue where group {group} is."
        case Adopt(group):
            return f"Start where group {group} has committed in Kafka; where it has committed nothing, as offset_reset says."
        case ToBatch(batch_id, dag_id, run_id):
            return (
                f"Continue just before batch {batch_id}."
                if batch_id is not None
                else f"Continue just before all batches of run {run_id} of {dag_id}."
            )
        case Undo(rewind_id):
            return f"Undo rewind {rewind_id}: restore offsets and rows as they were before it."
    return _PLAIN[type(scenario)]


_PLAIN: Mapping[type, str] = {
    ToEarliest: "Continue at the first record that Kafka still has.",
    ToLatest: "Continue after the last stable record.",
    ToCurrent: "Stay where the group is; running attempts are fenced and claim again.",
    ToValidated: "Continue at the end of the validated rows.",
}

"""What was done and judged, of several consumers: rewinds, validations, the audit log."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from typing import TYPE_CHECKING, Any

import psycopg2

from tidemark import events
from tidemark.airflow.dags.consume import Declared
from tidemark.airflow.web.consumers import ask_each, database, declared, first_line
from tidemark.db import transaction
from tidemark.errors import BadInput, DatabaseUnavailable
from tidemark.quality import stored_verdicts as verdicts
from tidemark.rewind import plan_text, store, verify
from tidemark.text.wording import spreadsheet_cell

if TYPE_CHECKING:
    from tidemark.db import Connection
    from tidemark.rewind.plan_model import Plan
    from tidemark.spec import ConsumerSpec

REWINDS, VALIDATIONS, EVENTS = 50, 100, 100
"""Of each database, newest first."""
MOST_VALIDATIONS = 200
CSV_EVENTS = 10_000
CHARACTERS = 1_000
"""Of a value in an example row."""
VERDICTS = ("equal", "changed", "gone", "new")


def rewinds(consumers: Mapping[str, Declared], consumer: str | None) -> dict[str, Any]:
    """The newest rewinds of a consumer, or of all; of each the sums, and those of its consumers that the user may see."""

    def ask(connection: Connection, specs: list[ConsumerSpec]) -> dict[str, Any]:
        names = {spec.name for spec in specs}
        return {specs[0].name: [_summary(plan, names) for plan in store.history(connection, *sorted(names), limit=REWINDS)]}

    answers = ask_each(_chosen(consumers, consumer), ask)
    found = [plan for plans in answers.found.values() for plan in plans if plan["consumers"]]
    return {"rewinds": sorted(found, key=lambda plan: plan["planned_at"], reverse=True), "banners": answers.banners}


def rewind(one: Declared, rewind_id: int, readable: Mapping[str, Declared]) -> dict[str, Any]:
    """A rewind of the consumer, with the partitions of those of its consumers that the user may see."""
    with database(one.spec) as connection:
        plan = _of_consumer(store.read(connection, rewind_id), one)
        now = _now(connection)
    said = plan_text.as_json(plan)
    groups = [group for group in said["groups"] if group["consumer"] in readable]
    return said | {"groups": groups, "hidden": len(said["groups"]) - len(groups), "expired": _expired(plan, now)}


def verified(one: Declared, rewind_id: int, payloads: Mapping[str, bool]) -> dict[str, Any]:
    """What the replay after a rewind has changed, for those of its consumers that are in ``payloads``; of each with true, example rows
    too. ``unknown``: why that cannot be said."""
    keys = {name: each.spec.keys for name, each in declared().items()}
    try:
        with database(one.spec) as connection:
            with transaction(connection) as cur:
                _of_consumer(store.read_plan(cur, rewind_id), one)
            found = verify.verify(connection, rewind_id, keys)
    except verify.NotVerifiable as error:
        return {"groups": [], "unknown": str(error)}
    except (DatabaseUnavailable, psycopg2.Error) as error:
        fix = f"Compare at a terminal, without a time limit: tidemark rewind verify {rewind_id}"
        return {"groups": [], "unknown": f"{first_line(error).rstrip('.')}. {fix}"}
    return {"groups": [_compared(each, payloads[each.consumer]) for each in found if each.consumer in payloads], "unknown": None}


def _compared(found: verify.Verified, payloads: bool) -> dict[str, Any]:
    said = {name: getattr(found, name) for name in ("consumer", "table", "replayed", "left", *VERDICTS)}
    examples = [
        {"verdict": verdict, "columns": side_by_side(example, found.by)}
        for verdict in found.examples
        for example in found.examples[verdict]
    ]
    return said | {"payloads": payloads, "examples": examples if payloads else []}


def side_by_side(example: verify.Example, by: Sequence[str]) -> list[dict[str, Any]]:
    """The columns of a row as it was and as it is now: first those that identify it, then the user's."""
    was, now = example.was or {}, example.now or {}
    names = [*by, *(name for name in (example.now or was) if name not in by and not name.startswith("kafka_"))]
    both = example.was is not None and example.now is not None
    return [
        {"column": name, "was": _text(was.get(name)), "now": _text(now.get(name)), "differs": both and was.get(name) != now.get(name)}
        for name in names
    ]


def _text(value: Any) -> str | None:
    """A value as the browser shows it. Numbers too: JavaScript would round a large one."""
    if value is None:
        return None
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= CHARACTERS else f"{text[:CHARACTERS]} …"


def _of_consumer(plan: Plan, one: Declared) -> Plan:
    """The plan. Raises `BadInput` if it does not move the consumer."""
    if one.spec.name not in {group.consumer for group in plan.groups}:
        found = f"rewind {plan.rewind_id} is not of {one.spec.name}"
        raise BadInput(what="rewind", found=found, fix="Rewinds lists those of each consumer.")
    return plan


def validations(consumers: Mapping[str, Declared], consumer: str | None) -> dict[str, Any]:
    """The newest verdicts of a consumer, or some of each."""
    of_each = VALIDATIONS if consumer else 20

    def ask(connection: Connection, specs: list[ConsumerSpec]) -> dict[str, Any]:
        names = {spec.group: spec.name for spec in specs}
        found = verdicts.newest(connection, names, of_each=of_each, most=MOST_VALIDATIONS)
        return {specs[0].name: [{"consumer": names[row.pop("group")], **row} for row in found]}

    answers = ask_each(_chosen(consumers, consumer), ask)
    found = [row for made in answers.found.values() for row in made]
    newest = sorted(found, key=lambda row: row["validated_at"], reverse=True)
    return {"validations": newest[:MOST_VALIDATIONS], "banners": answers.banners}


def validation(one: Declared, validation_id: int, *, payloads: bool) -> dict[str, Any]:
    """A verdict with its failing expectations and the offsets of failing rows. Observed values quote rows: only with ``payloads``."""
    with database(one.spec) as connection:
        found = verdicts.read_validation(connection, one.spec.group, validation_id)
    for result in found["results"]:
        detail = result.pop("detail")
        result |= {"text": detail.get("text"), "arguments": detail.get("kwargs"), "not_stored": detail.get("rows_not_stored", 0)}
        result["observed"] = detail.get("observed") if payloads else None
    return found | {"consumer": one.spec.name, "payloads": payloads}


def audit(consumers: Mapping[str, Declared], *, consumer: str | None, whole: bool, limit: int = EVENTS, **wanted: Any) -> dict[str, Any]:
    """The newest events of the consumers' groups. ``whole``: those of the whole database too."""

    def ask(connection: Connection, specs: list[ConsumerSpec]) -> dict[str, Any]:
        groups = {spec.group: spec.name for spec in specs}
        found = events.newest(connection, list(groups), whole=whole and consumer is None, limit=limit, **wanted)
        said = [asdict(each) | {"consumer": groups.get(each.group or "")} for each in found]
        return {specs[0].name: [each | {"connection": specs[0].connections.postgres} for each in said]}

    answers = ask_each(_chosen(consumers, consumer), ask)
    found = sorted((each for made in answers.found.values() for each in made), key=lambda each: each["at"], reverse=True)
    return {"events": found[:limit], "banners": answers.banners, "limit": limit}


COLUMNS = ("at", "kind", "consumer", "group", "claimed_by", "database_role", "dag_id", "run_id", "plan", "digest", "reason", "connection")


def as_csv(found: Mapping[str, Any]) -> Iterator[str]:
    """The events for a spreadsheet."""
    for line in ([*COLUMNS], *([_cell(each[name]) for name in COLUMNS] for each in found["events"])):
        out = io.StringIO()
        csv.writer(out).writerow(line)
        yield out.getvalue()


def _cell(value: Any) -> str:
    return spreadsheet_cell(value.isoformat() if isinstance(value, datetime) else value)


def _summary(plan: Plan, names: set[str]) -> dict[str, Any]:
    said = {name: value for name, value in plan_text.as_json(plan).items() if name not in ("groups", "digest", "scenario")}
    shown = [group.consumer for group in plan.groups if group.consumer in names]
    return said | {"consumers": shown, "hidden": len(plan.groups) - len(shown), "partitions": sum(len(g.partitions) for g in plan.groups)}


def _chosen(consumers: Mapping[str, Declared], consumer: str | None) -> Mapping[str, Declared]:
    return consumers if consumer is None else {name: one for name, one in consumers.items() if name == consumer}


def _now(connection: Connection) -> datetime:
    with transaction(connection) as cur:
        cur.execute("SELECT clock_timestamp()")
        ((now,),) = cur.fetchall()
        assert isinstance(now, datetime)
        return now


def _expired(plan: Plan, now: datetime) -> bool:
    return plan.state == "PLANNED" and plan.expires_at <= now

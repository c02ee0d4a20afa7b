"""Rewinds, validations and the audit log of several consumers."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from typing import Any

import psycopg2

from tidemark import events
from tidemark.airflow.dags.consume import DeclaredConsumer
from tidemark.airflow.web import replays
from tidemark.airflow.web.consumers import Answers, ask_each, database, declared, first_line, require_moved
from tidemark.db import Connection, transaction
from tidemark.errors import DatabaseUnavailable
from tidemark.quality import stored_verdicts as verdicts
from tidemark.rewind import plan_text, store, verify
from tidemark.rewind.plan_model import Plan
from tidemark.spec import ConsumerSpec
from tidemark.text.wording import spreadsheet_cell

REWINDS, VALIDATIONS, EVENTS = 50, 100, 100
"""Limits for each database, newest first."""
MOST_VALIDATIONS = 200
CSV_EVENTS = 10_000
CHARACTERS = 1_000
"""Limit for a value in an example row."""
VERDICTS = ("equal", "changed", "gone", "new")


def rewinds(consumers: Mapping[str, DeclaredConsumer], consumer: str | None, state: str | None = None) -> dict[str, Any]:
    """Returns the newest rewinds of a consumer, or of all, in any or this state: for each, the sums and the consumers that the user may
    see."""

    def ask(connection: Connection, specs: list[ConsumerSpec]) -> dict[str, Any]:
        names = {spec.name for spec in specs}
        newest = store.summaries(connection, *sorted(names), limit=REWINDS, state=state)
        return {specs[0].name: [_summary(*each, names) for each in newest]}

    answers = ask_each(_chosen(consumers, consumer), ask)
    return {"rewinds": [plan for plan in _newest(answers, "planned_at") if plan["consumers"]], "banners": answers.banners, "limit": REWINDS}


def rewind(consumer: DeclaredConsumer, rewind_id: int, readable: Mapping[str, DeclaredConsumer]) -> dict[str, Any]:
    """Returns a rewind of the consumer, with the partitions of the consumers that the user may see, and the replay beside, if it has one
    that is neither swapped nor discarded."""
    with database(consumer.spec) as connection:
        plan = store.read(connection, rewind_id)
        require_moved(consumer, plan)
        with transaction(connection) as cur:
            cur.execute("SELECT clock_timestamp()")
            ((now,),) = cur.fetchall()
        replay = replays.describe(connection, rewind_id, readable)
    plan_json = plan_text.as_json(plan)
    groups = [group for group in plan_json["groups"] if group["consumer"] in readable]
    return plan_json | {
        "groups": groups,
        "hidden": len(plan_json["groups"]) - len(groups),
        "expired": plan.state == "PLANNED" and plan.expires_at <= now,
        "replay_beside": replay,
    }


def verified(consumer: DeclaredConsumer, rewind_id: int, payloads: Mapping[str, bool]) -> dict[str, Any]:
    """Returns the changes of the replay after a rewind, for the consumers in ``payloads``, with example rows where the value is true.
    ``unknown``: why it is undetermined."""
    keys = {name: entry.spec.keys for name, entry in declared().items()}
    try:
        with database(consumer.spec) as connection:
            with transaction(connection) as cur:
                require_moved(consumer, store.read_plan(cur, rewind_id))
            comparisons = verify.verify(connection, rewind_id, keys)
    except verify.NotVerifiable as error:
        return {"groups": [], "unknown": str(error)}
    except (DatabaseUnavailable, psycopg2.Error) as error:
        fix = f"Compare at a terminal, without a time limit: tidemark rewind verify {rewind_id}"
        return {"groups": [], "unknown": f"{first_line(error).rstrip('.')}. {fix}"}
    return {
        "groups": [_comparison_json(table, payloads[table.consumer]) for table in comparisons if table.consumer in payloads],
        "unknown": None,
    }


def _comparison_json(comparison: verify.Verified, payloads: bool) -> dict[str, Any]:
    counts = {name: getattr(comparison, name) for name in ("consumer", "table", "replayed", "left", *VERDICTS)}
    examples = [
        {"verdict": verdict, "columns": side_by_side(example, comparison.by)}
        for verdict in comparison.examples
        for example in comparison.examples[verdict]
    ]
    return counts | {"payloads": payloads, "examples": examples if payloads else []}


def side_by_side(example: verify.Example, by: Sequence[str]) -> list[dict[str, Any]]:
    """Returns the columns of a row before and after the replay: first the identifying ones, then the user's."""
    was, now = example.was or {}, example.now or {}
    names = [*by, *(name for name in (example.now or was) if name not in by and not name.startswith("kafka_"))]
    both = example.was is not None and example.now is not None
    return [
        {
            "column": name,
            "was": _browser_text(was.get(name)),
            "now": _browser_text(now.get(name)),
            "differs": both and was.get(name) != now.get(name),
        }
        for name in names
    ]


def _browser_text(value: Any) -> str | None:
    """Returns a value as text for the browser. Numbers too, because JavaScript would round large ones."""
    if value is None:
        return None
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= CHARACTERS else f"{text[:CHARACTERS]} …"


def validations(consumers: Mapping[str, DeclaredConsumer], consumer: str | None, verdict: str | None) -> dict[str, Any]:
    """Returns the newest validations of a consumer, or a few per consumer, with any or this verdict."""
    per_consumer = VALIDATIONS if consumer else 20

    def ask(connection: Connection, specs: list[ConsumerSpec]) -> dict[str, Any]:
        names = {spec.group: spec.name for spec in specs}
        verdict_rows = verdicts.newest(connection, names, of_each=per_consumer, most=MOST_VALIDATIONS, verdict=verdict)
        return {specs[0].name: [{"consumer": names[row.pop("group")], **row} for row in verdict_rows]}

    answers = ask_each(_chosen(consumers, consumer), ask)
    return {"validations": _newest(answers, "validated_at")[:MOST_VALIDATIONS], "banners": answers.banners, "limit": per_consumer}


def validation(consumer: DeclaredConsumer, validation_id: int, *, payloads: bool) -> dict[str, Any]:
    """Returns a verdict with its failing expectations and the offsets of failing rows. ``payloads``: also with observed values."""
    with database(consumer.spec) as connection:
        verdict = verdicts.read_validation(connection, consumer.spec.group, validation_id)
    for result in verdict["results"]:
        detail = result.pop("detail")
        result |= {"text": detail.get("text"), "arguments": detail.get("kwargs"), "not_stored": detail.get("rows_not_stored", 0)}
        result["observed"] = detail.get("observed") if payloads else None
    return verdict | {"consumer": consumer.spec.name, "payloads": payloads}


def audit(
    consumers: Mapping[str, DeclaredConsumer], *, consumer: str | None, whole: bool, limit: int = EVENTS, **filters: Any
) -> dict[str, Any]:
    """Returns the newest events of the consumers' groups. ``whole``: also those of the whole database."""

    def ask(connection: Connection, specs: list[ConsumerSpec]) -> dict[str, Any]:
        groups = {spec.group: spec.name for spec in specs}
        conn_id = specs[0].connections.postgres
        newest = events.newest(connection, list(groups), whole=whole and consumer is None, limit=limit, **filters)
        rows = [asdict(event) | {"consumer": groups.get(event.group or ""), "connection": conn_id} for event in newest]
        return {specs[0].name: rows}

    answers = ask_each(_chosen(consumers, consumer), ask)
    return {"events": _newest(answers, "at")[:limit], "banners": answers.banners, "limit": limit}


COLUMNS = ("at", "kind", "consumer", "group", "claimed_by", "database_role", "dag_id", "run_id", "plan", "digest", "reason", "connection")


def as_csv(answer: Mapping[str, Any]) -> Iterator[str]:
    """Yields the events as CSV lines for a spreadsheet."""
    for line in ([*COLUMNS], *([_cell(event[name]) for name in COLUMNS] for event in answer["events"])):
        out = io.StringIO()
        csv.writer(out).writerow(line)
        yield out.getvalue()


def _cell(value: Any) -> str:
    return spreadsheet_cell(value.isoformat() if isinstance(value, datetime) else value)


def _summary(plan: Plan, totals: Mapping[str, int], names: set[str]) -> dict[str, Any]:
    plan_json = {name: value for name, value in plan_text.summary_as_json(plan).items() if name not in ("digest", "scenario")}
    shown = [group.consumer for group in plan.groups if group.consumer in names]
    return {**plan_json, **totals, "consumers": shown, "hidden": len(plan.groups) - len(shown)}


def _newest(answers: Answers, at: str) -> list[dict[str, Any]]:
    """Returns the rows of all databases, newest first by this column."""
    return sorted((row for rows in answers.by_consumer.values() for row in rows), key=lambda row: row[at], reverse=True)


def _chosen(consumers: Mapping[str, DeclaredConsumer], consumer: str | None) -> Mapping[str, DeclaredConsumer]:
    return consumers if consumer is None else {name: entry for name, entry in consumers.items() if name == consumer}

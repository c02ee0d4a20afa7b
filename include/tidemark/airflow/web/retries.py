"""Records that wait for a retry or have failed: counts, reasons, and single records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from tidemark.airflow import connections
from tidemark.airflow.dags.consume import DeclaredConsumer
from tidemark.airflow.web.consumers import ask_each, database
from tidemark.airflow.web.payload import Room
from tidemark.db import Connection, rows, statements, transaction
from tidemark.driver.call import call
from tidemark.errors import TidemarkError
from tidemark.offsets import store
from tidemark.retry import admin, pending
from tidemark.retry.admin import Payload, RecordDetails
from tidemark.retry.filter import FAILED_TIER, Filter, RecordState
from tidemark.retry.pending import DueRecords, RecentTries
from tidemark.spec import ConsumerSpec
from tidemark.spec.retry_topics import failed_topic, retry_topic
from tidemark.text.duration import format_duration
from tidemark.worker.decoding import Shown, decode_for_people

SQL = statements("tidemark.airflow.web", "retries.sql")

OPEN = (RecordState.WAITING, RecordState.HELD, RecordState.FAILED)
"""States of records that are not settled."""
BUCKETS, BUCKET_S = 30, 60
"""The next half hour, by the minute."""
MOST = 10_000
"""Records of a consumer are counted up to here in the list of all."""
PAGE = 50
"""Records per page of the list."""
EDITS = 20
"""Maximum number of a record's latest edits."""
ASK_BRIEFLY = {"timeout": 3, "max.retries": 0}
"""Settings of the registry's client."""


def everywhere(consumers: Mapping[str, DeclaredConsumer]) -> dict[str, Any]:
    """Returns the consumers with records that wait or have failed, their counts, and how fast records fail. The most failed ones first."""

    def ask(connection: Connection, specs: list[ConsumerSpec]) -> dict[str, Any]:
        names = [spec.group for spec in specs]
        counts = open_errors(connection, names)
        recent = growth(connection, list(counts))
        return {spec.name: _summed(counts[spec.group], recent.get(spec.group, ())) for spec in specs if spec.group in counts}

    answers = ask_each(consumers, ask)
    summaries = [{"consumer": name} | sums for name, sums in answers.by_consumer.items()]
    return {"consumers": sorted(summaries, key=most_failed_first), "banners": answers.banners}


def most_failed_first(summary: Mapping[str, Any]) -> tuple[int, int, str]:
    """Returns the sort key of a consumer's counts."""
    return -summary["failed"], -(summary["waiting"] + summary["held"]), summary["consumer"]


def _summed(counts: Sequence[Mapping[str, Any]], recent: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Records by state, the most frequent error, and how many failed lately. ``more``: there are more records than were counted."""
    sums = {state.value.lower(): sum(row["records"] for row in counts if row["state"] == state) for state in OPEN}
    return sums | {
        "more": sum(sums.values()) >= MOST,
        "error_type": counts[0]["error_type"],
        "example": counts[0]["example"],
        "last": max(row["last"] for row in counts),
        "growth": [{name: sum(row[name] for row in recent) for name in ("last_hour", "hour_before")}],
    }


def of_consumer(consumer: DeclaredConsumer) -> dict[str, Any]:
    """Returns the waiting records by tier, the counts by error and their growth, and how late the last tries were."""
    spec = consumer.spec
    tiers = [
        *({"tier": format_duration(delay), "topic": retry_topic(spec.group, delay)} for delay in spec.retry.delays),
        {"tier": FAILED_TIER, "topic": failed_topic(spec.group)},
    ]
    summary: dict[str, Any] = {"consumer": spec.name, "tiers": tiers, "due": [], "counts": [], "growth": [], "late": None, "overdue": None}
    summary |= {"buckets": BUCKETS, "bucket_seconds": BUCKET_S}
    with database(spec) as connection:
        if has_run(connection, spec.group):
            summary |= {
                "due": admin.due_by_tier(connection, spec.group, seconds=BUCKET_S, buckets=BUCKETS),
                "counts": admin.count_records(connection, spec.group, Filter(states=OPEN)),
                "growth": growth(connection, [spec.group]).get(spec.group, []),
                "late": in_seconds(pending.tried(connection, spec.group)),
                "overdue": in_seconds(pending.due(connection, spec.group)),
            }
    return summary


def in_seconds(lateness: RecentTries | DueRecords | None) -> dict[str, float] | None:
    """Returns a number of records, and how late they are in seconds."""
    if lateness is None:
        return None
    return {name: value if name == "records" else value.total_seconds() for name, value in asdict(lateness).items()}


def open_errors(connection: Connection, groups: Sequence[str]) -> dict[str, list[dict[str, Any]]]:
    """Returns, by group, the counts of its records that are not settled, by state and error, largest first. Stops counting at `MOST`."""
    return _rows_by_group(connection, "open", groups=list(groups), states=[state.value for state in OPEN], most=MOST)


def growth(connection: Connection, groups: Sequence[str]) -> dict[str, list[dict[str, Any]]]:
    """Returns, by group, ``{"error_type", "last_hour", "hour_before"}`` of records that first failed in the last two hours and
    are not settled."""
    return _rows_by_group(connection, "growth", groups=list(groups), states=[state.value for state in OPEN])


def _rows_by_group(connection: Connection, statement: str, **arguments: object) -> dict[str, list[dict[str, Any]]]:
    by_group: dict[str, list[dict[str, Any]]] = {}
    with transaction(connection) as cur:
        cur.execute(SQL[statement], arguments)
        for row in rows(cur):
            by_group.setdefault(row.pop("group"), []).append(row)
    return by_group


def records(consumer: DeclaredConsumer, record_filter: Filter, after: int) -> dict[str, Any]:
    """Returns a page of the matching records, without payloads. ``next``: the start of the next page. ``total``: of all pages."""
    with database(consumer.spec) as connection:
        if not has_run(connection, consumer.spec.group):
            return {"records": [], "next": None, "total": 0}
        matches = admin.list_records(connection, consumer.spec.group, record_filter, limit=PAGE + 1, after=after)
        total = sum(count.records for count in admin.count_records(connection, consumer.spec.group, record_filter))
    return {"records": matches[:PAGE], "next": matches[PAGE - 1].number if len(matches) > PAGE else None, "total": total}


def record(consumer: DeclaredConsumer, number: int) -> dict[str, Any]:
    """Returns everything stored about a record, with its payload."""
    with database(consumer.spec) as connection:
        stored: RecordDetails = admin.show_record(connection, consumer.spec.group, number)
    decoded, room = _decoded(consumer.spec, stored.row["topic"], stored.payload), Room()
    return {
        "number": stored.number,
        "row": stored.row,
        "tries": stored.tries,
        "redrives": stored.redrives,
        "action": stored.action,
        "payload": room.payload(stored.payload, decoded),
        "edits": [
            {"by": edit.by, "at": edit.at, "reason": edit.reason, "was": room.payload(edit.was, {})} for edit in stored.edits[-EDITS:]
        ],
        "more_edits": max(len(stored.edits) - EDITS, 0),
    }


def _decoded(spec: ConsumerSpec, topic: str, payload: Payload) -> Mapping[str, Shown]:
    """Decodes the key and the value, unless people can read the consumer's format as is. Waits for the registry only briefly."""
    try:
        registry = {**connections.registry(spec), **ASK_BRIEFLY} if spec.format.uses_registry else None
    except TidemarkError as error:
        return {"value": Shown(None, str(error))}
    try:
        return call(partial(decode_for_people, spec, registry, topic, payload), with_keeper=False)
    except TidemarkError as error:
        return {"value": Shown(None, str(error))}


def has_run(connection: Connection, group: str) -> bool:
    """Whether a consumer has run."""
    with transaction(connection) as cur:
        return store.find_group(cur, group) is not None

"""What waits for a retry, what has failed and why, and the records themselves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tidemark.airflow import connections
from tidemark.airflow.dags.consume import Declared
from tidemark.airflow.web.consumers import ask_each, database
from tidemark.airflow.web.payload import Room
from tidemark.db import rows, statements, transaction
from tidemark.errors import TidemarkError
from tidemark.retry import admin, pending
from tidemark.retry.filter import FAILED_TIER, Filter, RecordState
from tidemark.spec.retry_topics import failed_topic, retry_topic
from tidemark.text.duration import format_duration
from tidemark.worker.decoding import Decoding, Shown

if TYPE_CHECKING:
    from tidemark.db import Connection
    from tidemark.retry.admin import Payload, Whole
    from tidemark.spec import ConsumerSpec

SQL = statements("tidemark.airflow.web", "retries.sql")

OPEN = (RecordState.WAITING, RecordState.HELD, RecordState.FAILED)
"""States of records that are not settled."""
BUCKETS, BUCKET_S = 30, 60
"""The next half hour, by the minute."""
MOST = 10_000
"""Records of a consumer are counted up to here in the list of all."""
PAGE = 50
"""Records of a page of the list."""
EDITS = 20
"""The latest edits of a record that are shown."""
ASK_BRIEFLY = {"timeout": 3, "max.retries": 0}
"""Settings of the registry's client."""


def everywhere(consumers: Mapping[str, Declared]) -> dict[str, Any]:
    """The consumers with records that wait or have failed, their counts, and how fast records fail."""

    def ask(connection: Connection, specs: list[ConsumerSpec]) -> dict[str, Any]:
        names = [spec.group for spec in specs]
        counts = _by_group(connection, "open", groups=names, states=[state.value for state in OPEN], most=MOST)
        lately = growth(connection, list(counts))
        return {spec.name: _summed(counts[spec.group], lately.get(spec.group, ())) for spec in specs if spec.group in counts}

    answers = ask_each(consumers, ask)
    found = [{"consumer": name} | sums for name, sums in sorted(answers.found.items())]
    return {"consumers": found, "banners": answers.banners}


def _summed(counts: Sequence[Mapping[str, Any]], lately: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Records by state, the most frequent error, and how many failed lately. ``more``: there are more records than were counted."""
    sums = {state.value.lower(): sum(one["records"] for one in counts if one["state"] == state) for state in OPEN}
    return sums | {
        "more": sum(sums.values()) >= MOST,
        "error_type": counts[0]["error_type"],
        "example": counts[0]["example"],
        "last": max(one["last"] for one in counts),
        "growth": [{name: sum(one[name] for one in lately) for name in ("last_hour", "hour_before")}],
    }


def of_consumer(one: Declared) -> dict[str, Any]:
    """Tiers with what waits in them, counts by error and whether they grow, and how late the last tries were."""
    spec = one.spec
    tiers = [
        *({"tier": format_duration(delay), "topic": retry_topic(spec.group, delay)} for delay in spec.retry.delays),
        {"tier": FAILED_TIER, "topic": failed_topic(spec.group)},
    ]
    said: dict[str, Any] = {"consumer": spec.name, "tiers": tiers, "due": [], "counts": [], "growth": [], "late": None, "overdue": None}
    said |= {"buckets": BUCKETS, "bucket_seconds": BUCKET_S}
    with database(spec) as connection:
        if spec.group in _known(connection, [spec]):
            said |= {
                "due": admin.due_by_tier(connection, spec.group, seconds=BUCKET_S, buckets=BUCKETS),
                "counts": admin.count_records(connection, spec.group, Filter(states=OPEN)),
                "growth": growth(connection, [spec.group]).get(spec.group, []),
                "late": pending.tried(connection, spec.group),
                "overdue": pending.due(connection, spec.group),
            }
    return said


def growth(connection: Connection, groups: Sequence[str]) -> dict[str, list[dict[str, Any]]]:
    """By group: ``{"error_type", "last_hour", "hour_before"}`` of records that first failed in the last two hours."""
    return _by_group(connection, "growth", groups=list(groups))


def _by_group(connection: Connection, statement: str, **arguments: object) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    with transaction(connection) as cur:
        cur.execute(SQL[statement], arguments)
        for row in rows(cur):
            found.setdefault(row.pop("group"), []).append(row)
    return found


def records(one: Declared, wanted: Filter, after: int) -> dict[str, Any]:
    """A page of the matching records, without payloads; ``next`` is where the next page begins."""
    with database(one.spec) as connection:
        if one.spec.group not in _known(connection, [one.spec]):
            return {"records": [], "next": None}
        found = admin.list_records(connection, one.spec.group, wanted, limit=PAGE + 1, after=after)
    return {"records": found[:PAGE], "next": found[PAGE - 1].number if len(found) > PAGE else None}


def record(one: Declared, number: int) -> dict[str, Any]:
    """Everything known of a record, with its payload."""
    with database(one.spec) as connection:
        whole: Whole = admin.show_record(connection, one.spec.group, number)
    decoded, room = _decoded(one.spec, whole.row["topic"], whole.payload), Room()
    return {
        "number": whole.number,
        "row": whole.row,
        "tries": whole.tries,
        "redrives": whole.redrives,
        "action": whole.action,
        "payload": room.payload(whole.payload, decoded),
        "edits": [
            {"by": edit.by, "at": edit.at, "reason": edit.reason, "was": room.payload(edit.was, {})} for edit in whole.edits[-EDITS:]
        ],
        "more_edits": max(len(whole.edits) - EDITS, 0),
    }


def _decoded(spec: ConsumerSpec, topic: str, payload: Payload) -> Mapping[str, Shown]:
    """The key and the value in the format of the consumer's file, if that is none for people. Asks the registry, for a short time."""
    try:
        registry = {**connections.registry(spec), **ASK_BRIEFLY} if spec.format.uses_registry else None
    except TidemarkError as error:
        return {"value": Shown(None, str(error))}
    return Decoding(spec, registry, lambda: spec.topics).for_people(topic, payload)


def _known(connection: Connection, specs: list[ConsumerSpec]) -> set[str]:
    """Those of the groups that have run."""
    with transaction(connection) as cur:
        cur.execute("SELECT name FROM tidemark.consumer_group WHERE name = ANY (%s)", ([spec.group for spec in specs],))
        return {row["name"] for row in rows(cur)}

"""What the forms for a rewind, a redrive and a discard offer."""

from __future__ import annotations

from typing import Any

import psycopg2

from tidemark.airflow.web.consumers import database
from tidemark.airflow.web.retries import OPEN, has_run
from tidemark.db import rows, statements, transaction
from tidemark.errors import TidemarkError
from tidemark.offsets import store
from tidemark.retry import admin, redrive
from tidemark.retry.filter import Filter
from tidemark.rewind import beside
from tidemark.rewind.scenarios.scenario import SCENARIO_OPTIONS
from tidemark.spec import ConsumerSpec
from tidemark.spec.model import RetryOrder
from tidemark.text.problems import REASON_CHARACTERS

SQL = statements("tidemark.airflow.web", "offers.sql")

RUNS = 3
"""Last runs that are offered as targets of a rewind."""


def offer(spec: ConsumerSpec) -> dict[str, Any]:
    """Returns the choices of the forms. If the database does not answer, they lack what the consumer's own runs offer. ``not_beside``: why
    a rewind cannot be read beside the live rows."""
    offered: dict[str, Any] = {
        "consumer": spec.name,
        "own": spec.access is not None,
        "scenarios": [
            {"name": word.name, "does": word.does, "value": word.value, "example": word.example} for word in SCENARIO_OPTIONS.values()
        ],
        "reason_characters": REASON_CHARACTERS,
        "approval": spec.rewind.approval,
        "table": spec.shown_tables,
        "redrive_to": redrive.default_destination(spec),
        "topics": list(spec.topics),
        "runs": [],
        "first_failed_batch": None,
        "not_beside": "Records of a replay would have to wait for records of the group (retry.order: key)."
        if spec.retry.order is RetryOrder.KEY
        else None,
    }
    try:
        with database(spec) as connection, transaction(connection) as cur:
            of_group = {"group": spec.group, "limit": RUNS}
            topics_read = {position.partition.topic for position in store.positions(cur, spec.group)}
            offered["topics"] = sorted(topics_read) or offered["topics"]
            cur.execute(SQL["runs"], of_group)
            offered["runs"] = rows(cur)
            cur.execute(SQL["first_failed_batch"], of_group)
            offered["first_failed_batch"] = next((batch_id for (batch_id,) in cur.fetchall()), None)
            for replay in beside.replays(cur, spec.group):
                offered["not_beside"] = f"Rewind {replay.rewind_id} is read beside already. Swap it or discard it first."
    except (TidemarkError, psycopg2.Error):
        pass  # the form is useful without them
    return offered


def matching(spec: ConsumerSpec, kind: str, record_filter: Filter) -> int:
    """Counts the records that the DAG of this kind would take now."""
    with database(spec) as connection:
        if not has_run(connection, spec.group):
            return 0
        if kind == "redrive":
            return redrive.matching(connection, spec.group, record_filter)
        return sum(count.records for count in admin.count_records(connection, spec.group, record_filter) if count.state in OPEN)

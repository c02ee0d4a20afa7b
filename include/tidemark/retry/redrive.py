"""Redrives: failed records are retried again. A plan fixes the set of records; apply then works through it in bounded portions.

    ① plan: choose, store and count the records   ② apply: take the group's lock   ③ record who applies it, and why; check the digest
    ④ a portion, in one transaction: check its records, make them wait, record it   ⑤ repeat ④, no faster than the cap   ⑥ record the end

A redrive only changes rows: its records then look as if just handed off, and relay and drain do the rest. ``ladder`` sends them to the
first delay. ``now`` gives them one immediate try, through a separate topic without a delay; a record that fails there has failed. Apply
passes over records that are waiting again, were loaded or discarded since the plan, or were withdrawn by a rewind. If it dies between two
portions, the rest stays planned, and the next apply continues there.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from tidemark.db import REDRIVE_LOCK, kept_open, rows, scalar, set_audit_actor, single_row, statements, transaction
from tidemark.errors import BadInput, Refused, Unavailable
from tidemark.offsets.store import require_group
from tidemark.retry.admin import add_action, begin_change, condition
from tidemark.retry.filter import Filter, RecordState, statement
from tidemark.retry.ladder import Ladder
from tidemark.retry.topics import ensure_topics
from tidemark.spec.retry_topics import now_topic
from tidemark.text.problems import check_reason, only
from tidemark.text.wording import counted

if TYPE_CHECKING:
    from tidemark.db import Connection, Cursor
    from tidemark.kafka.cluster import Cluster
    from tidemark.spec import ConsumerSpec

log = logging.getLogger(__name__)

SQL = {name: statement(text) for name, text in statements("tidemark.retry", "redrive.sql").items()}

PORTION = 500
MAX_REDRIVES = 3
"""Default limit of redrives per record: a record that still fails needs a different fix."""
EXAMPLES = 5
REDRIVEN = "Redriven"
"""Error type of a record that has not been tried since its redrive."""

REDRIVABLE = (RecordState.FAILED, RecordState.WAITING, RecordState.HELD, RecordState.DISCARDED)


class Destination(StrEnum):
    LADDER = "ladder"
    """The first delay, then the rest of the ladder."""
    NOW = "now"
    """One try by the next drain."""


class RedrivePhase(StrEnum):
    PLANNED = "PLANNED"
    RUNNING = "RUNNING"
    """Also if its process died while running."""
    STOPPED = "STOPPED"
    DONE = "DONE"


@dataclass(frozen=True, slots=True)
class Redrive:
    """A stored redrive and its progress: ``planned`` counts the remaining records."""

    redrive_id: int
    state: RedrivePhase
    consumer: str
    group: str
    destination: Destination
    filter: Filter
    per_second: int | None
    max_redrives: int
    reason: str
    planned_by: str
    planned_at: datetime
    started_at: datetime | None
    ended_at: datetime | None
    approved_by: str | None
    digest: str
    """A hash of the settings and the numbers of the records."""
    planned: int
    redriven: int
    passed_over: int

    @property
    def records(self) -> int:
        return self.planned + self.redriven + self.passed_over


@dataclass(frozen=True, slots=True)
class Preview:
    """A redrive with a summary of its records. ``waiting`` and ``worn_out`` count matching records that are not part of it, because they
    already wait for a retry or have reached the limit of redrives. Both are 0 once the redrive has started."""

    redrive: Redrive
    errors: Sequence[Mapping[str, Any]]
    topics: Sequence[Mapping[str, Any]]
    examples: Sequence[Mapping[str, Any]]
    passed_over: Mapping[str, int]
    waiting: int = 0
    worn_out: int = 0


@dataclass(frozen=True, slots=True)
class RedriveProgress:
    """Progress of an apply. ``records`` is the total."""

    records: int
    redriven: int
    passed_over: int


class RedriveInProgress(Unavailable):
    """Another redrive of the group is being applied."""

    group: str

    def __str__(self) -> str:
        return f"A redrive of group {self.group} is being applied. Nothing was changed. Try again when it is done, or stop it."


class NoLadder(Refused):
    """The consumer has no delays, so there is no first delay to send records to."""

    consumer: str

    def __str__(self) -> str:
        return f"{self.consumer} has no ladder (retry.delays). Nothing was changed. Redrive with --to now, or set retry.delays."


class PlanAltered(Refused):
    """The stored plan was modified after planning."""

    redrive_id: int

    def __str__(self) -> str:
        return f"The records or settings of redrive {self.redrive_id} do not match its digest. No record was redriven. Plan it again."


@dataclass(frozen=True, slots=True)
class RedriveRequest:
    """A request for a redrive of the records that the filter selects; with ``limit``, of the first ones only.

    ``by``: the requester. ``destination``: if `None`, the first delay; without delays, one try now. ``dag_id``, ``run_id``: the
    Airflow run.
    """

    spec: ConsumerSpec
    filter: Filter
    reason: str
    by: str
    destination: Destination | None = None
    limit: int | None = None
    per_second: int | None = None
    max_redrives: int = MAX_REDRIVES
    dag_id: str | None = None
    run_id: str | None = None


def default_destination(spec: ConsumerSpec) -> Destination:
    """Returns the first delay if the consumer has delays, otherwise one try now."""
    return Destination.LADDER if Ladder.of(spec) else Destination.NOW


def matching(connection: Connection, group: str, filter_: Filter) -> int:
    """Counts the records that a plan with this filter would take now."""
    with transaction(connection) as cur:
        discarded = RecordState.DISCARDED in filter_.states
        cur.execute(SQL["matching"], {**condition(cur, group, filter_), "max_redrives": MAX_REDRIVES, "discarded": discarded})
        return int(scalar(cur))


def plan(connection: Connection, request: RedriveRequest) -> Preview:
    """Stores which records a redrive would retry (①), and returns the redrive with counts and examples. Changes no record.

    Selects failed records and records that the broker rejected; discarded records only if the filter names that state. Raises `NoLadder`,
    or `BadInput` for bad arguments or if no record qualifies.
    """
    spec, filter_ = request.spec, request.filter
    reason = check_reason(request.reason)
    destination = request.destination or default_destination(spec)
    if destination is Destination.LADDER and not Ladder.of(spec):
        raise NoLadder(consumer=spec.name)
    if excluded := [state for state in filter_.states if state not in REDRIVABLE]:
        fix = "Use a rewind to read loaded or skipped records again."
        raise BadInput(what="state", found=f"records that are {excluded[0]} cannot be redriven", fix=fix)
    with transaction(connection) as cur:
        cur.execute(SQL["add"], {
            **condition(cur, spec.group, filter_), "consumer": spec.name, "destination": destination.value,
            "filter": json.dumps(filter_.as_json()), "limit": request.limit, "per_second": request.per_second,
            "max_redrives": request.max_redrives, "discarded": RecordState.DISCARDED in filter_.states, "reason": reason, "by": request.by,
            "dag_id": request.dag_id, "run_id": request.run_id,
        })  # fmt: skip
        redrive_id = scalar(cur)
        planned = _preview(cur, redrive_id)
        if not planned.redrive.records:
            wait, were = counted(planned.waiting, "already waits", "already wait"), counted(planned.worn_out, "was", "were")
            others = f"; {wait} for a retry, {were} redriven {counted(request.max_redrives, 'time')}"
            raise BadInput(what="redrive", found=f"no record to redrive: {filter_}{others}", fix="See: tidemark retries count.")
    log.info("redrive planned redrive=%s group=%s records=%s by=%s", redrive_id, spec.group, planned.redrive.records, request.by)
    return planned


def apply(
    connection: Connection,
    cluster: Cluster,
    spec_of: Callable[[str], ConsumerSpec],
    redrive_id: int,
    *,
    by: str,
    approved_by: str | None = None,
    on_progress: Callable[[RedriveProgress], None] = lambda _: None,
) -> Preview:
    """Redrives the remaining planned records and returns the result. Safe to repeat: redriven records are not redriven again.

    Between portions, no transaction holds rows. Ends early, without an error, if stopped (`stop`). Raises
    `RedriveInProgress`, `PlanAltered`, `NoLadder`, `TopicsUnfit` (for the topic of immediate tries), `DatabaseUnavailable` or
    `BrokerUnavailable`; earlier portions stay applied.
    """
    redrive = read(connection, redrive_id)
    if redrive.state is RedrivePhase.DONE:
        return preview(connection, redrive_id)
    spec = spec_of(redrive.consumer)
    target = _target(cluster, spec, redrive)
    with _redrive_lock(connection, spec.group) as group_id:  # ②
        with transaction(connection) as cur:  # ③
            set_audit_actor(cur, by)
            cur.execute(SQL["start"], {"redrive_id": redrive_id, "approved_by": approved_by})
            if cur.fetchone() is None:
                return _preview(cur, redrive_id)
            cur.execute(SQL["digest"], {"redrive_id": redrive_id})
            if cur.fetchone() != (redrive.digest,):
                raise PlanAltered(redrive_id=redrive_id)
            action = add_action(cur, group_id, "REDRIVE", redrive.filter, redrive.reason, by)
        started, progress = time.monotonic(), RedriveProgress(redrive.records, redrive.redriven, redrive.passed_over)
        size = PORTION if redrive.per_second is None else max(1, min(PORTION, redrive.per_second))
        values = {
            **target, "redrive_id": redrive_id, "records": size, "max_redrives": redrive.max_redrives, "action_id": action,
            "discarded": RecordState.DISCARDED in redrive.filter.states, "error_type": REDRIVEN, "error_text": f"by {by}: {redrive.reason}",
        }  # fmt: skip
        while (counts := _portion(connection, group_id, values, by)) is not None:  # ④ ⑥
            sent, passed_over = counts
            progress = RedriveProgress(redrive.records, progress.redriven + sent, progress.passed_over + passed_over)
            on_progress(progress)
            if sent + passed_over < size:
                break
            if redrive.per_second is not None:  # ⑤
                time.sleep(max(0.0, started + (progress.redriven - redrive.redriven) / redrive.per_second - time.monotonic()))
    final = preview(connection, redrive_id)
    log.info(
        "redriven redrive=%s group=%s state=%s records=%s passed_over=%s left=%s by=%s",
        redrive_id, spec.group, final.redrive.state, final.redrive.redriven, final.redrive.passed_over, final.redrive.planned, by,
    )  # fmt: skip
    return final


def stop(connection: Connection, redrive_id: int, *, reason: str, by: str) -> Redrive:
    """Stops a redrive after its current portion; `apply` continues it. A redrive that is not running is left unchanged."""
    reason, redrive = check_reason(reason), read(connection, redrive_id)
    with transaction(connection) as cur:
        set_audit_actor(cur, by, reason)
        cur.execute(SQL["stop"], {"redrive_id": redrive_id})
        if cur.rowcount:
            add_action(cur, require_group(cur, redrive.group), "STOP", redrive.filter, reason, by, records=redrive.planned)
    return read(connection, redrive_id)


def read(connection: Connection, redrive_id: int) -> Redrive:
    """Reads a stored redrive. Raises `BadInput` if it does not exist."""
    with transaction(connection) as cur:
        return _read_one(cur, redrive_id)


def preview(connection: Connection, redrive_id: int) -> Preview:
    """Reads a stored redrive with a summary of its records. Raises `BadInput`."""
    with transaction(connection) as cur:
        return _preview(cur, redrive_id)


def of_run(connection: Connection, dag_id: str, run_id: str) -> Redrive | None:
    """Reads the redrive that an Airflow run has planned, the first one if two task tries did. `None`: not planned yet."""
    with transaction(connection) as cur:
        cur.execute(SQL["of_run"], {"dag_id": dag_id, "run_id": run_id})
        row = cur.fetchone()
        return _read_one(cur, row[0]) if row else None


def history(connection: Connection, group: str | None = None, *, limit: int = 50) -> list[Redrive]:
    """Reads the redrives of a group, or of all groups, newest first."""
    with transaction(connection) as cur:
        return _read(cur, None, group, limit)


@contextlib.contextmanager
def _redrive_lock(connection: Connection, group: str) -> Iterator[int]:
    """Holds the group's redrive lock."""
    with transaction(connection) as cur:
        group_id = require_group(cur, group)
    with kept_open(connection) as guard:
        guard.execute(SQL["lock_group"], {"group_id": group_id, "class": REDRIVE_LOCK})
        if not scalar(guard):
            raise RedriveInProgress(group=group)
        yield group_id


def _portion(connection: Connection, group_id: int, values: Mapping[str, Any], by: str) -> tuple[int, int] | None:
    """Processes the next records, and returns how many were redriven and passed over. `None`: the redrive was stopped. The last portion
    also records the end of the redrive."""
    with transaction(connection) as cur:
        begin_change(cur, group_id)
        cur.execute(SQL["state"], values)
        if scalar(cur) != RedrivePhase.RUNNING:
            return None
        cur.execute(SQL["send"], values)
        sent, passed_over = single_row(cur)
        cur.execute(SQL["count_sent"], {**values, "records": sent})
        if sent + passed_over < values["records"]:
            set_audit_actor(cur, by)
            cur.execute(SQL["end"], values)
        return sent, passed_over


def _target(cluster: Cluster, spec: ConsumerSpec, redrive: Redrive) -> dict[str, Any]:
    """Returns number, delay and topic of the records' next retry, by the current spec."""
    ladder = Ladder.of(spec)
    if redrive.destination is Destination.NOW:
        ensure_topics(cluster, spec, now=True, only=[now_topic(spec.group)], missing_ok=spec.retry.topics.create)
        return {"number": len(ladder.delays), "delay": timedelta(0), "topic": now_topic(spec.group)}
    if ladder.first is None:
        raise NoLadder(consumer=spec.name)
    return {"number": ladder.first.number, "delay": ladder.first.delay, "topic": ladder.first.topic}


def _preview(cur: Cursor, redrive_id: int) -> Preview:
    redrive = _read_one(cur, redrive_id)
    params = {"redrive_id": redrive_id, "limit": EXAMPLES}
    results = []
    for name in ("by_error", "by_topic", "examples", "passed_over"):
        cur.execute(SQL[name], params)
        results.append(rows(cur))
    errors, topics, examples, passed_over = results
    excluded = {}
    if redrive.state is RedrivePhase.PLANNED:
        values = {**condition(cur, redrive.group, redrive.filter), "max_redrives": redrive.max_redrives}
        cur.execute(SQL["left_out"], {**values, "redrive_id": redrive_id})
        (excluded,) = rows(cur)
    return Preview(redrive, errors, topics, examples, {row["why"]: row["records"] for row in passed_over}, **excluded)


def _read_one(cur: Cursor, redrive_id: int) -> Redrive:
    return only(_read(cur, redrive_id, None, 1), "redrive", redrive_id, "tidemark redrive list")


def _read(cur: Cursor, redrive_id: int | None, group: str | None, limit: int) -> list[Redrive]:
    cur.execute(SQL["read"], {"redrive_id": redrive_id, "group": group, "limit": limit})
    return [
        Redrive(**{
            **row,
            "state": RedrivePhase(row["state"]),
            "destination": Destination(row["destination"]),
            "filter": Filter.from_json(row["filter"]),
        })
        for row in rows(cur)
    ]  # fmt: skip

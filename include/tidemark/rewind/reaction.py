"""Reacts to a critical verdict if the consumer's file has ``validation: {on_failure: rewind}``.

The group moves back to its positions before the run, and the run's rows are archived. This is an ordinary rewind that is planned and
applied at once, names the validation as its reason, and can be undone. The next run reads the same records again. Each range is taken back
only once: if the same records fail again, they stay and block as under ``block``, so no range is replayed endlessly.

Needs no approval: ``on_failure: rewind`` in the file approves this move in advance, and no other.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from tidemark.db import rows, statements, transaction
from tidemark.errors import Refused
from tidemark.offsets.store import require_group
from tidemark.quality.validation import CONSERVATION
from tidemark.quality.verdict import ValidatedRun, ValidationReport, Verdict
from tidemark.records.ranges import TopicPartition
from tidemark.rewind.apply import apply
from tidemark.rewind.plan import CompactedTopics, PlanRequest, plan
from tidemark.rewind.plan_model import Plan, ToBatch
from tidemark.rewind.store import reject
from tidemark.spec import ConsumerSpec
from tidemark.spec.scope import Scope
from tidemark.text.wording import first_of

if TYPE_CHECKING:
    from tidemark.db import Connection
    from tidemark.kafka.cluster import Cluster

SQL = statements("tidemark.rewind", "reaction.sql")
SHOWN = 5
"""Maximum number of ranges named in a text; the others are only counted."""
REASON_LIMIT = 1000
EXPIRES_IN = timedelta(minutes=10)
"""Short, because only the task that made the plan applies it."""
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TakenBack:
    """The outcome: ``rewound``, or nothing was done for this ``reason``."""

    rewound: Plan | None = None
    reason: str = ""

    def __str__(self) -> str:
        if self.rewound is None:
            return f"the rows stay: {self.reason}"
        ranges = [f"{part.partition} from {part.new} to {part.old}" for _, part in self.rewound]
        return (
            f"rewind {self.rewound.rewind_id} took its rows out. The next run reads again: {first_of(ranges, SHOWN)}. If they fail again, "
            "they stay and block"
        )


def taken_back(connection: Connection, group: str, run: ValidatedRun) -> int | None:
    """Returns the rewind, not undone since, with which a failed validation took back this run's rows. Then nothing is left to validate."""
    rewinds = _read(connection, "taken_back", group, run)
    return int(rewinds[0]["rewind_id"]) if rewinds else None


def take_back(connection: Connection, cluster: Cluster, spec: ConsumerSpec, run: ValidatedRun, verdict: ValidationReport) -> TakenBack:
    """Rewinds the group to before the run of this critical verdict and takes out its rows, or changes nothing and returns the reason.

    ``run`` is an Airflow run. Batches that other runs have committed after it meanwhile, as consecutive continuous runs do, are taken back
    too. Nothing is moved if a failed validation has taken the records back before, if one of its topics is compacted, if readers have
    already seen the rows (an old run that is validated again), or if the conservation check failed, because its cause can only be found in
    the unchanged tables. Raises the errors of `plan` and `apply`; then nothing was moved.
    """
    assert verdict.verdict is Verdict.CRITICAL
    assert verdict.validation_id is not None
    if any(not result.success for result in verdict.results if result.expectation == CONSERVATION):
        return TakenBack(reason="records are not accounted for, and a rewind would remove the evidence. Investigate first")
    repeated, seen = _repeated_failures(connection, spec.group, run), _seen_by_readers(connection, spec.group, run)
    if repeated:
        return TakenBack(
            reason=f"they were read again once and failed again: {first_of(repeated, SHOWN)}. Fix the transform, the data or the "
            "suite, then rewind manually or validate again"
        )
    if seen:
        return TakenBack(reason=f"readers have already seen the rows from {first_of(seen, SHOWN)} on. Rewind manually if they must go")
    failing = "; ".join(result.text for result in verdict.results if not result.success)
    by = f"validation {verdict.validation_id}"  # the statement `taken_back_before` recognizes the rewind by it
    try:
        planned = plan(
            connection,
            lambda _: cluster,
            PlanRequest(
                [spec],
                Scope.parse([]),
                ToBatch(dag_id=run.dag_id, run_id=run.run_id),
                expires_in=EXPIRES_IN,
                reason=f"{by} of {spec.name} was critical: {failing}"[:REASON_LIMIT],
                by=by,
                dag_id=run.dag_id,
                run_id=run.run_id,
            ),
        )
    except CompactedTopics as error:
        topics = ", ".join(error.topics)
        return TakenBack(reason=f"{topics}: compacted, so Kafka may no longer have all of its records. Rewind manually if the rows must go")
    try:
        done = apply(connection, lambda _: cluster, lambda _: spec, planned.rewind_id, by=by).plan
    except Refused:
        reject(connection, planned.rewind_id, by=by)
        raise
    log.info(
        "rewound for a failed validation group=%s run=%s validation=%s rewind=%s", spec.group, run, verdict.validation_id, done.rewind_id
    )
    return TakenBack(rewound=done)


def _repeated_failures(connection: Connection, group: str, run: ValidatedRun) -> list[str]:
    """Returns the ranges that fail for the second time, each with the rewind that took it back the first time."""
    return [
        f"{TopicPartition(row['topic'], row['partition'])} [{row['start_offset']}, {row['end_offset']}) by rewind {row['rewind_id']}"
        for row in _read(connection, "taken_back_before", group, run)
    ]


def _seen_by_readers(connection: Connection, group: str, run: ValidatedRun) -> list[str]:
    """Returns the offsets from which readers have already seen rows of the run, or later ones."""
    seen = _read(connection, "used_already", group, run)
    return [f"{TopicPartition(row['topic'], row['partition'])} {row['start_offset']}" for row in seen]


def _read(connection: Connection, statement: str, group: str, run: ValidatedRun) -> list[dict[str, Any]]:
    with transaction(connection) as cur:
        cur.execute(SQL[statement], {"group_id": require_group(cur, group), "dag_id": run.dag_id, "run_id": run.run_id})
        return rows(cur)

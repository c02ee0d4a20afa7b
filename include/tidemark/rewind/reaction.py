"""What a critical verdict leads to where the consumer's file says ``validation: {on_failure: rewind}``.

The group is moved back to where it was before the run, and what the run wrote is taken out and kept: an ordinary rewind, planned and
applied at once, whose reason names the validation, and which can be undone. The next run reads the same records again. It is done once:
records that a failed validation has already taken back, and that fail again, stay, and block as under ``block``. So no range goes round
for ever.

Nobody is asked for an approval. The file's ``on_failure: rewind`` is one, given beforehand, for this move only.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from tidemark.db import rows, statements, transaction
from tidemark.errors import Refused
from tidemark.quality.conservation import group_number
from tidemark.quality.validation import CONSERVATION
from tidemark.quality.verdict import ValidatedRun, ValidationReport, Verdict
from tidemark.records.ranges import TopicPartition
from tidemark.rewind.apply import apply
from tidemark.rewind.model import Plan, ToBatch
from tidemark.rewind.plan import plan
from tidemark.rewind.store import reject
from tidemark.spec import ConsumerSpec
from tidemark.spec.scope import Scope

if TYPE_CHECKING:
    from tidemark.db import Connection
    from tidemark.kafka.cluster import Cluster

SQL = statements("tidemark.rewind", "reaction.sql")
SHOWN = 5
"""Ranges that a text names; of the others it says how many there are."""
REASON_LIMIT = 1000
EXPIRES_IN = timedelta(minutes=10)
"""Nobody but the task that has planned it applies it."""
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Again:
    """A range that fails a second time: ``rewind_id`` had taken it back already."""

    rewind_id: int
    partition: TopicPartition
    start: int
    end: int

    def __str__(self) -> str:
        return f"{self.partition} [{self.start}, {self.end}) by rewind {self.rewind_id}"


@dataclass(frozen=True, slots=True)
class TakenBack:
    """What was done: ``rewound``, or nothing, for the reason ``kept``."""

    rewound: Plan | None = None
    kept: str = ""

    def __str__(self) -> str:
        if self.rewound is None:
            return f"the rows stay: {self.kept}"
        where = [f"{part.partition} from {part.new} to {part.old}" for _, part in self.rewound]
        return (
            f"rewind {self.rewound.rewind_id} has taken its rows out, and the next run reads again: {_several(where)}. If they fail again, "
            "they stay and block"
        )


def taken_back(connection: Connection, group: str, run: ValidatedRun) -> int | None:
    """The rewind, if one stands, by which a failed validation of this run has taken back what it wrote; there is nothing to judge then."""
    with transaction(connection) as cur:
        cur.execute(SQL["taken_back"], {"group_id": group_number(cur, group), "dag_id": run.dag_id, "run_id": run.run_id})
        found = rows(cur)
    return int(found[0]["rewind_id"]) if found else None


def take_back(connection: Connection, cluster: Cluster, spec: ConsumerSpec, run: ValidatedRun, verdict: ValidationReport) -> TakenBack:
    """Moves the group to before the run that this critical verdict is on, with what the run wrote; or leaves all as it is, and says why.

    ``run`` is one of Airflow's. What others have committed behind it meanwhile, as the next of several continuous runs does, is taken back
    with it. Left as it is what had been taken back for a failed validation before; what readers were shown already, as of an old run that
    is validated again; and what breaks the conservation of records: whoever looks into that needs the tables as they are. Raises what
    `plan` and `apply` raise; then nothing was moved.
    """
    assert verdict.verdict is Verdict.CRITICAL
    assert verdict.validation_id is not None
    if any(not result.success for result in verdict.results if result.expectation == CONSERVATION):
        return TakenBack(kept="records are not accounted for, and a rewind would move what shows why; somebody has to look")
    again, used = _again(connection, spec.group, run), _used(connection, spec.group, run)
    if again:
        return TakenBack(
            kept=f"they were read again once, and fail again: {_several([str(one) for one in again])}. Mend the transform, the data or the "
            "suite; then rewind by hand, or validate again"
        )
    if used:
        return TakenBack(kept=f"readers were shown what was read from {_several(used)} on, which only a person takes back")
    failing = "; ".join(result.text for result in verdict.results if not result.success)
    by = f"validation {verdict.validation_id}"  # by which the next validation knows it, see the statement `taken_back_before`
    made = plan(
        connection,
        lambda _: cluster,
        [spec],
        Scope.parse([]),
        ToBatch(dag_id=run.dag_id, run_id=run.run_id),
        expires_in=EXPIRES_IN,
        reason=f"{by} of {spec.name} was critical: {failing}"[:REASON_LIMIT],
        by=by,
        dag_id=run.dag_id,
        run_id=run.run_id,
    )
    try:
        done = apply(connection, lambda _: cluster, lambda _: spec, made.rewind_id, by=by).plan
    except Refused:
        reject(connection, made.rewind_id, by=by)
        raise
    log.info(
        "rewound for a failed validation group=%s run=%s validation=%s rewind=%s", spec.group, run, verdict.validation_id, done.rewind_id
    )
    return TakenBack(rewound=done)


def _again(connection: Connection, group: str, run: ValidatedRun) -> list[Again]:
    with transaction(connection) as cur:
        cur.execute(SQL["taken_back_before"], {"group_id": group_number(cur, group), "dag_id": run.dag_id, "run_id": run.run_id})
        return [
            Again(row["rewind_id"], TopicPartition(row["topic"], row["partition"]), row["start_offset"], row["end_offset"])
            for row in rows(cur)
        ]


def _used(connection: Connection, group: str, run: ValidatedRun) -> list[str]:
    """Where readers were shown something of the run, or of what lies behind it."""
    with transaction(connection) as cur:
        cur.execute(SQL["used_already"], {"group_id": group_number(cur, group), "dag_id": run.dag_id, "run_id": run.run_id})
        return [f"{TopicPartition(row['topic'], row['partition'])} {row['start_offset']}" for row in rows(cur)]


def _several(texts: list[str]) -> str:
    more = f" and {len(texts) - SHOWN} more" if len(texts) > SHOWN else ""
    return ", ".join(texts[:SHOWN]) + more

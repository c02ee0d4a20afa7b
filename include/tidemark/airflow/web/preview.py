"""What a rewind would do, computed while somebody fills in the form. Only reads; the DAG run makes the plan.

The one place of the page that asks Kafka, because a scenario names points of its logs: with short time-outs, in a few threads of its own,
so that a Kafka that does not answer holds up nothing else.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as TooLate
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psycopg2

from tidemark.airflow import connections
from tidemark.airflow.dags.consume import Declared
from tidemark.airflow.web.consumers import database, first_line
from tidemark.db import transaction
from tidemark.errors import BadInput, Refused, TidemarkError
from tidemark.kafka.cluster import Cluster
from tidemark.rewind import plan as planning
from tidemark.rewind import plan_text
from tidemark.rewind.plan_model import Undo
from tidemark.rewind.scenarios import scenario
from tidemark.rewind.scenarios.targets import SHOWN, TargetsOutOfRange
from tidemark.rewind.store import read_plan
from tidemark.spec.scope import Scope
from tidemark.text.problems import SeveralProblems
from tidemark.text.wording import counted

if TYPE_CHECKING:
    from tidemark.rewind.plan_model import Scenario
    from tidemark.spec import ConsumerSpec

KAFKA_S = 3
"""How long Kafka may take for each request."""
LIMIT_S = 8
"""How long a preview may take altogether."""
AT_ONCE = 4
"""Previews that are computed at the same time. As many others wait, within `LIMIT_S`; more are refused, because each one that waits takes a
thread from the other requests of Airflow's API server."""

_workers = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="tidemark-preview")
_places = threading.BoundedSemaphore(2 * AT_ONCE)


@dataclass(frozen=True, slots=True)
class PreviewRequest:
    """What the form says so far."""

    scenario: str
    value: str
    scope: str
    allow_loss: bool


def preview(one: Declared, readable: Mapping[str, Declared], asked: PreviewRequest) -> dict[str, Any]:
    """The consumers' partitions as a plan would have them; or ``problems``, for which the plan would be refused; or ``unknown``: why that
    cannot be said now, while the plan may well succeed."""
    said: dict[str, Any] = {"consumers": [one.spec.name], "undo_of": None, "problems": [], "loss": False, "unknown": None, "groups": []}
    if not _places.acquire(blocking=False):
        return said | {"unknown": "Too many previews are being computed. Change the form again in a few seconds."}
    future = _workers.submit(_computed, one, readable, asked)
    future.add_done_callback(lambda _: _places.release())
    try:
        return said | future.result(LIMIT_S)
    except TooLate:
        future.cancel()
        return said | {"unknown": f"Postgres and Kafka have not answered within {LIMIT_S} seconds."}
    except (TidemarkError, psycopg2.Error) as error:
        return said | refusal(error)


def refusal(error: Exception) -> dict[str, Any]:
    """Why there is no preview: ``problems`` of the request, or ``unknown`` if a server did not answer or does not let the page count."""
    if isinstance(error, TargetsOutOfRange):
        more = [f"{counted(len(error.outside) - SHOWN, 'more partition')} too"] if len(error.outside) > SHOWN else []
        return {"problems": [*map(str, error.outside[:SHOWN]), *more], "loss": any(each.before for each in error.outside)}
    if isinstance(error, planning.CompactedTopics):
        return {"problems": [str(error)], "loss": True}
    if isinstance(error, planning.PlanRefused | SeveralProblems):
        return {"problems": list(error.problems)}
    if isinstance(error, Refused):
        return {"problems": [str(error)]}
    return {"unknown": f"{first_line(error).rstrip('.')}."}


def _computed(one: Declared, readable: Mapping[str, Declared], asked: PreviewRequest) -> dict[str, Any]:
    scope, wanted = Scope.parse([asked.scope]), scenario.parse(asked.scenario, asked.value, groups=[one.spec.group])
    with database(one.spec) as connection:
        specs = [one.spec]
        if isinstance(wanted, Undo):
            with transaction(connection) as cur:
                names = [group.consumer for group in read_plan(cur, wanted.rewind_id).groups]
            specs = _together(one, readable, names, wanted)
        groups = planning.preview(connection, _cluster_of, specs, scope, wanted, allow_loss=asked.allow_loss)
    return _said(specs, wanted, plan_text.groups_as_json(groups))


def _said(specs: list[ConsumerSpec], wanted: Scenario, found: dict[str, Any]) -> dict[str, Any]:
    undo_of = wanted.rewind_id if isinstance(wanted, Undo) else None
    return {"consumers": [spec.name for spec in specs], "undo_of": undo_of, "says": scenario.describe(wanted), **found}


def _together(one: Declared, readable: Mapping[str, Declared], names: list[str], wanted: Undo) -> list[ConsumerSpec]:
    """The consumers of a rewind, which are undone together. Nothing is said of those that the user may not see."""
    if one.spec.name not in names:
        fix = "Rewinds lists those of each consumer."
        raise BadInput(what="rewind", found=f"rewind {wanted.rewind_id} is not of {one.spec.name}", fix=fix)
    if hidden := [name for name in names if name not in readable]:
        found = f"rewind {wanted.rewind_id} also moved {counted(len(hidden), 'consumer')} that your roles do not allow you to see"
        raise BadInput(what="rewind", found=found, fix="Ask somebody who may see all of them.")
    return [readable[name].spec for name in names]


def _cluster_of(spec: ConsumerSpec) -> Cluster:
    return Cluster(connections.kafka(spec), KAFKA_S)

"""Previews a rewind while a user fills in the form. Only reads; the DAG run makes the plan.

The one place of the page that asks Kafka, because a scenario names points of its logs: with short timeouts, in a few threads of its own,
so that a Kafka that does not answer holds up nothing else.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import psycopg2

from tidemark.airflow import connections
from tidemark.airflow.dags.consume import DeclaredConsumer
from tidemark.airflow.web.consumers import database, first_line, require_moved
from tidemark.db import transaction
from tidemark.errors import BadInput, Refused, TidemarkError
from tidemark.kafka.cluster import Cluster
from tidemark.rewind import plan as planning
from tidemark.rewind import plan_text
from tidemark.rewind.plan_model import Plan, Undo
from tidemark.rewind.scenarios import scenario
from tidemark.rewind.scenarios.targets import SHOWN, TargetsOutOfRange
from tidemark.rewind.store import read_plan
from tidemark.spec import ConsumerSpec
from tidemark.spec.scope import Scope
from tidemark.text.problems import SeveralProblems
from tidemark.text.wording import counted

KAFKA_S = 3
"""How long Kafka may take for each request."""
LIMIT_S = 8
"""How long a preview may take altogether."""
AT_ONCE = 4
"""Previews that are computed at the same time. As many others wait, within `LIMIT_S`; more are refused, because each one that waits takes a
thread from the other requests of Airflow's API server."""

_workers = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="tidemark-preview")
_slots = threading.BoundedSemaphore(2 * AT_ONCE)


@dataclass(frozen=True, slots=True)
class PreviewRequest:
    """The current input of the form."""

    scenario: str
    value: str
    scope: str
    allow_loss: bool
    beside: bool = False


def preview(consumer: DeclaredConsumer, readable: Mapping[str, DeclaredConsumer], request: PreviewRequest) -> dict[str, Any]:
    """Returns the consumers' partitions as a plan would move them; or the ``problems`` that would refuse the plan; or ``unknown``: why no
    preview exists. Planning may still work."""
    answer: dict[str, Any] = {
        "consumers": [consumer.spec.name],
        "undo_of": None,
        "problems": [],
        "loss": False,
        "unknown": None,
        "groups": [],
    }
    if not _slots.acquire(blocking=False):
        return answer | {"unknown": "Too many previews are being computed. Change the form again in a few seconds."}
    future = _workers.submit(_compute, consumer, readable, request)
    future.add_done_callback(lambda _: _slots.release())
    try:
        return answer | future.result(LIMIT_S)
    except TimeoutError:
        future.cancel()
        return answer | {"unknown": f"Postgres and Kafka have not answered within {LIMIT_S} seconds."}
    except (TidemarkError, psycopg2.Error) as error:
        return answer | refusal(error)


def refusal(error: Exception) -> dict[str, Any]:
    """Explains a missing preview: ``problems`` of the request, or ``unknown`` if a server does not answer or refuses to count."""
    if isinstance(error, TargetsOutOfRange):
        more = [f"{counted(len(error.outside) - SHOWN, 'more partition')} too"] if len(error.outside) > SHOWN else []
        return {"problems": [*map(str, error.outside[:SHOWN]), *more], "loss": any(target.before for target in error.outside)}
    if isinstance(error, planning.CompactedTopics):
        return {"problems": [str(error)], "loss": True}
    if isinstance(error, planning.PlanRefused | SeveralProblems):
        return {"problems": list(error.problems)}
    if isinstance(error, Refused):
        return {"problems": [str(error)]}
    return {"unknown": f"{first_line(error).rstrip('.')}."}


def _compute(consumer: DeclaredConsumer, readable: Mapping[str, DeclaredConsumer], request: PreviewRequest) -> dict[str, Any]:
    scope, chosen = Scope.parse([request.scope]), scenario.parse(request.scenario, request.value, groups=[consumer.spec.group])
    with database(consumer.spec) as connection:
        specs = [consumer.spec]
        if isinstance(chosen, Undo):
            with transaction(connection) as cur:
                plan = read_plan(cur, chosen.rewind_id)
            require_moved(consumer, plan)
            specs = _specs_of_rewind(readable, plan)
        moves = planning.MoveRequest(specs, scope, chosen, allow_loss=request.allow_loss, beside=request.beside)
        groups = planning.preview(connection, _cluster_of, moves)
    undo_of = chosen.rewind_id if isinstance(chosen, Undo) else None
    says = scenario.describe(chosen)
    return {"consumers": [spec.name for spec in specs], "undo_of": undo_of, "says": says, **plan_text.groups_as_json(groups)}


def _specs_of_rewind(readable: Mapping[str, DeclaredConsumer], plan: Plan) -> list[ConsumerSpec]:
    """Returns the consumers of a rewind, which are undone together. Omits the names of consumers hidden from the user."""
    names = [group.consumer for group in plan.groups]
    if hidden := [name for name in names if name not in readable]:
        mismatch = f"rewind {plan.rewind_id} also moved {counted(len(hidden), 'consumer')} that your roles do not allow you to see"
        raise BadInput(what="rewind", found=mismatch, fix="Ask somebody who may see all of them.")
    return [readable[name].spec for name in names]


def _cluster_of(spec: ConsumerSpec) -> Cluster:
    return Cluster(connections.kafka(spec), KAFKA_S)

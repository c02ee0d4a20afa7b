"""Who may read what, by the permissions on the consumers' DAGs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated

from airflow.api_fastapi.app import get_auth_manager
from airflow.api_fastapi.auth.managers.models.resource_details import AccessView, DagAccessEntity
from airflow.api_fastapi.core_api.security import GetUserDep, requires_access_dag, requires_access_view
from fastapi import Depends, HTTPException, Request

from tidemark.airflow.dags.consume import CONSUME, DISCARD, REDRIVE, REWIND, Declared, dag_id
from tidemark.airflow.web.consumers import declared

plugins = Depends(requires_access_view(AccessView.PLUGINS))
"""On the whole app."""


def _consumer(method: str, entity: DagAccessEntity | None = None) -> Callable[[str, Request, GetUserDep], Declared]:
    def check(consumer: str, request: Request, user: GetUserDep) -> Declared:
        # Before it is looked up: the answer must not tell whether a consumer exists.
        requires_access_dag(method, entity, dag_id(CONSUME, consumer))(request, user)  # type: ignore[arg-type]
        found = declared().get(consumer)
        if found is None:
            raise HTTPException(404, f"There is no consumer {consumer}. It may have been renamed; Groups lists all of them.")
        return found

    return check


Readable = Annotated[Declared, Depends(_consumer("GET"))]
"""The consumer in the path, for a user who may see its DAG."""
Editable = Annotated[Declared, Depends(_consumer("PUT"))]
"""The same for a user who may edit its DAG."""
Sourced = Annotated[Declared, Depends(_consumer("GET", DagAccessEntity.CODE))]
"""The same for a user who may see its DAG's code."""


def _rewindable(one: Readable, user: GetUserDep) -> Declared:
    if not forms(user, one)[REWIND]:
        raise HTTPException(403, "Your roles do not allow you to rewind this consumer.")
    return one


Rewindable = Annotated[Declared, Depends(_rewindable)]
"""The same for a user who may start the DAG that rewinds it."""


def _readable(user: GetUserDep) -> dict[str, Declared]:
    return only(user, declared())


AllReadable = Annotated[dict[str, Declared], Depends(_readable)]
"""The consumers whose DAGs the user may see, by name."""


def only(user: GetUserDep, consumers: Mapping[str, Declared]) -> dict[str, Declared]:
    dags = get_auth_manager().get_authorized_dag_ids(user=user, method="GET")
    return {name: one for name, one in consumers.items() if dag_id(CONSUME, name) in dags}


def edits(user: GetUserDep, one: Declared) -> bool:
    """Whether the user may see payloads of the consumer's records."""
    return _may(user, "PUT", dag_id(CONSUME, one.spec.name))


def forms(user: GetUserDep, one: Declared) -> dict[str, str | None]:
    """The DAGs that rewind this consumer, and redrive or discard its records; None if the user may not start them."""
    named = {kind: kind if one.spec.access is None else dag_id(kind, one.spec.name) for kind in (REWIND, REDRIVE, DISCARD)}
    return {kind: dag if _may(user, "POST", dag, DagAccessEntity.RUN) else None for kind, dag in named.items()}


def _may(user: GetUserDep, method: str, dag: str, entity: DagAccessEntity | None = None) -> bool:
    from airflow.api_fastapi.auth.managers.models.resource_details import DagDetails
    from airflow.models.dag import DagModel

    details = DagDetails(id=dag, team_name=DagModel.get_team_name(dag))
    return get_auth_manager().is_authorized_dag(method=method, access_entity=entity, details=details, user=user)  # type: ignore[arg-type]


def _everything(user: GetUserDep) -> bool:
    """May the user see every consumer? Then also the actions on whole databases."""
    return len(only(user, declared())) == len(declared())


Everything = Annotated[bool, Depends(_everything)]

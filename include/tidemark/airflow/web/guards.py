"""Who may read what, by the permissions on the consumers' DAGs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated

from airflow.api_fastapi.app import get_auth_manager
from airflow.api_fastapi.auth.managers.models.resource_details import AccessView, DagAccessEntity, DagDetails
from airflow.api_fastapi.core_api.security import GetUserDep, requires_access_dag, requires_access_view
from airflow.models.dag import DagModel
from fastapi import Depends, HTTPException, Request

from tidemark.airflow.dags.consume import CONSUME, DISCARD, REDRIVE, REWIND, DeclaredConsumer, dag_id
from tidemark.airflow.web.consumers import declared

plugins = Depends(requires_access_view(AccessView.PLUGINS))
"""Guards the whole app."""


def _consumer(method: str, entity: DagAccessEntity | None = None) -> Callable[[str, Request, GetUserDep], DeclaredConsumer]:
    def check(consumer: str, request: Request, user: GetUserDep) -> DeclaredConsumer:
        # before the lookup: the answer must not reveal whether a consumer exists
        requires_access_dag(method, entity, dag_id(CONSUME, consumer))(request, user)  # type: ignore[arg-type]
        declaration = declared().get(consumer)
        if declaration is None:
            raise HTTPException(404, f"There is no consumer {consumer}. It may have been renamed; Groups lists all of them.")
        return declaration

    return check


Readable = Annotated[DeclaredConsumer, Depends(_consumer("GET"))]
"""The consumer in the path, for a user who may see its DAG."""
Editable = Annotated[DeclaredConsumer, Depends(_consumer("PUT"))]
"""The same for a user who may edit its DAG."""
Sourced = Annotated[DeclaredConsumer, Depends(_consumer("GET", DagAccessEntity.CODE))]
"""The same for a user who may see its DAG's code."""


def _rewindable(consumer: Readable, user: GetUserDep) -> DeclaredConsumer:
    if not forms(user, consumer)[REWIND]:
        raise HTTPException(403, "Your roles do not allow you to rewind this consumer.")
    return consumer


Rewindable = Annotated[DeclaredConsumer, Depends(_rewindable)]
"""The same for a user who may start the DAG that rewinds it."""


def _readable(user: GetUserDep) -> dict[str, DeclaredConsumer]:
    return _visible_to(user, declared())


AllReadable = Annotated[dict[str, DeclaredConsumer], Depends(_readable)]
"""The consumers whose DAGs the user may see, by name."""


def _visible_to(user: GetUserDep, consumers: Mapping[str, DeclaredConsumer]) -> dict[str, DeclaredConsumer]:
    dags = get_auth_manager().get_authorized_dag_ids(user=user, method="GET")
    return {name: consumer for name, consumer in consumers.items() if dag_id(CONSUME, name) in dags}


def may_edit(user: GetUserDep, consumer: DeclaredConsumer) -> bool:
    """Whether the user may see payloads of the consumer's records."""
    return _may(user, "PUT", dag_id(CONSUME, consumer.spec.name))


def forms(user: GetUserDep, consumer: DeclaredConsumer) -> dict[str, str | None]:
    """Returns the DAGs that rewind this consumer, and redrive or discard its records. `None` for a DAG that the user may not start."""
    dag_ids = {kind: kind if consumer.spec.access is None else dag_id(kind, consumer.spec.name) for kind in (REWIND, REDRIVE, DISCARD)}
    return {kind: dag if _may(user, "POST", dag, DagAccessEntity.RUN) else None for kind, dag in dag_ids.items()}


def _may(user: GetUserDep, method: str, dag: str, entity: DagAccessEntity | None = None) -> bool:
    details = DagDetails(id=dag, team_name=DagModel.get_team_name(dag))
    return get_auth_manager().is_authorized_dag(method=method, access_entity=entity, details=details, user=user)  # type: ignore[arg-type]


def _sees_everything(user: GetUserDep) -> bool:
    """Whether the user may see every consumer, and so also the actions on whole databases."""
    return len(_visible_to(user, declared())) == len(declared())


Everything = Annotated[bool, Depends(_sees_everything)]

"""The embedded stack: Postgres, one Kafka broker and, on request, a schema registry on loopback, for the demo and the tests, behind
``tidemark local``.

It owns one folder (`tidemark.project.state()`), the servers that run on it, and the cache of jars. It keeps none of the invariants
itself, but durability, on which I1 stands: Postgres' ``fsync`` and Kafka's retention stay at their defaults.
Killed servers, and a start killed half-way, are recovered by the next ``up``.

Modules::

    account            the system user for Postgres if the caller is root
    airflow            Airflow on loopback
    airflow_client     the part of Airflow's REST API that the demo and the tests use
    airflow_metadata   Airflow's metadata database
    airflow_processes  Airflow's processes and their descendants
    airflow_settings   environment, connections and secrets of the local Airflow
    errors             errors of the embedded stack
    folder             the folder of the stack's state
    kafka              the Kafka broker
    ports              free ports
    postgres           the Postgres server
    processes          processes that outlive the command that started them
    registry_server    the schema registry
    server             what the servers share: start, readiness, stop
    stack              `LocalStack`: the servers in one folder
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tidemark.local.server import ServerState, ServerStatus
    from tidemark.local.stack import LocalStack

__all__ = ["LocalStack", "ServerState", "ServerStatus"]


def __getattr__(name: str) -> Any:
    """Import what is asked for: the Spark driver takes `tidemark.jvm.jars` where the packages of the servers are not installed."""
    if name not in __all__:
        raise AttributeError(name)
    from tidemark.local import server, stack

    return getattr(stack if name == "LocalStack" else server, name)

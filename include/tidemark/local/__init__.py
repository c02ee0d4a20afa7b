"""The embedded stack for the demo and the tests: Postgres, one Kafka broker and an Airflow on loopback.

``tidemark local`` drives the servers. Their state is one folder (`tidemark.project.state()`). The package implements no invariant, but I1
relies on durability, so Postgres' ``fsync`` and Kafka's retention stay at their defaults. The next ``up`` recovers killed servers and a
start that was killed half-way.

- `stack`: `LocalStack`, both servers together
- `server`: what both servers have in common
- `postgres`, `kafka`: the two servers
- `folder`: the state folder and its lock
- `ports`: finds free ports
- `processes`: starts and finds server processes
- `account`: the system user for Postgres if the caller is root
- `errors`: the stack's errors
- `airflow`: a local Airflow
- `airflow_settings`: its environment, connections and secrets
- `airflow_processes`: finds its processes
- `airflow_metadata`: its metadata database
- `airflow_client`: a client for its REST API
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tidemark.local.server import ServerState, ServerStatus
    from tidemark.local.stack import LocalStack

__all__ = ["LocalStack", "ServerState", "ServerStatus"]


def __getattr__(name: str) -> Any:
    """Import lazily, because the servers' packages are not installed everywhere."""
    if name not in __all__:
        raise AttributeError(name)
    from tidemark.local import server, stack

    return getattr(stack if name == "LocalStack" else server, name)

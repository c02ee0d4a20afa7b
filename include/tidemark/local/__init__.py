"""The embedded stack: Postgres and one Kafka broker on loopback, for the demo and the tests, behind ``tidemark local``.

It owns one folder (`tidemark.project.state()`), the servers that run on it, and the cache of jars. It keeps none of the invariants
itself, but durability, on which I1 stands: Postgres' ``fsync`` and Kafka's retention stay at their defaults.
Killed servers, and a start killed half-way, are recovered by the next ``up``.
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

"""The embedded stack: Postgres, one Kafka broker and, on request, a schema registry on loopback, for the demo and the tests, behind
``tidemark local``.

It owns one folder (`tidemark.project.state()`), the servers that run on it, and the cache of jars. It guarantees no invariant itself
except durability, on which I1 depends: Postgres' ``fsync`` and Kafka's retention stay at their defaults. The next ``up`` recovers killed
servers, and a start killed half-way.

Modules::

    account            the system user for Postgres if the caller is root
    airflow            Airflow on loopback
    airflow_client     the part of Airflow's REST API that the demo and the tests use
    airflow_metadata   Airflow's metadata database
    airflow_settings   environment, connections and secrets of the local Airflow
    errors             errors of the embedded stack
    folder             the folder of the stack's state
    kafka              the Kafka broker
    ports              free ports
    postgres           the Postgres server
    processes          processes that outlive the command that started them, and their descendants
    registry_server    the schema registry
    server             the servers' common base: start, readiness, stop
    stack              `LocalStack`: the servers in one folder
"""

from tidemark.local.server import ServerState
from tidemark.local.stack import LocalStack

__all__ = ["LocalStack", "ServerState"]

"""Examines the cluster manager to which drivers are submitted (``deploy-mode: cluster``)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tidemark.connections import Connections
from tidemark.doctor.finding import Finding, failure, ok
from tidemark.driver.applications import Application, queue_problem, report
from tidemark.driver.submission import cluster_settings
from tidemark.errors import BadInput
from tidemark.spec import ConsumerSpec

NOBODY = "tidemark-doctor"
"""The name of a pod that does not exist."""


def examine_cluster(connections: Connections, specs: Sequence[ConsumerSpec]) -> Iterator[Finding]:
    """Asks the cluster managers of the consumers whether they take drivers; submits none. Raises `ClusterUnavailable`."""
    queues, namespaces = set(), set()
    for spec in specs:
        try:
            settings = cluster_settings(spec, connections)
        except BadInput as error:
            yield failure(f"{spec.name}: driver on the cluster", f"{error.what}: {error.found}", error.fix)
            continue
        if settings is not None and settings.on_yarn:
            queues.add(settings.conf.get("spark.yarn.queue", "default"))
        elif settings is not None:
            namespaces.add((settings.master, settings.conf.get("spark.kubernetes.namespace", "default")))
    for queue in sorted(queues):
        problem = queue_problem(queue)
        fix = "Name another queue: queue in the Spark connection's extra, or spark.yarn.queue."
        yield ok("yarn", f"queue {queue} takes applications") if problem is None else failure("yarn", problem, fix)
    for master, namespace in sorted(namespaces):
        report(Application(master, NOBODY, f"{namespace}:{NOBODY}"))
        yield ok("kubernetes", f"{master} answers, for namespace {namespace}")

"""What the task of the DAG ``maintain`` does."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from airflow.sdk import Context

from tidemark.airflow import connections
from tidemark.airflow.operators import by_database, requester, valid_consumers
from tidemark.airflow.version_compat import AirflowFailException
from tidemark.db import session, transaction
from tidemark.errors import TidemarkError, Unavailable
from tidemark.kafka.cluster import Cluster
from tidemark.keep import parse_keep
from tidemark.maintenance import maintain, sample_and_mirror
from tidemark.objectives import report
from tidemark.profiles import Profile
from tidemark.retry.pending import trouble
from tidemark.roles import require
from tidemark.spec import ConsumerSpec


class NotMaintained(Unavailable):
    """The maintenance of some databases failed, and another try may help at least one of them. ``problems``: one text for each."""

    problems: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join(self.problems)


def run(context: Context, log: Any) -> dict[str, int]:
    """Runs the maintenance of each database. Returns the number of archives dropped, of their rows, of records emptied, and of attempts
    closed.

    Tries all databases, then fails with all the reasons if some were not maintained: without a retry if none can help.
    """
    keep, dag_run = parse_keep(context["params"]["keep"]), context["dag_run"]
    consumers, results = valid_consumers(), []
    problems: list[str] = []
    retriable = False
    for name, specs in by_database(consumers).items():
        try:
            with session(connections.database_url(specs[0])) as connection:
                require(connection, Profile.REWINDER)
                results.append(maintain(connection, keep, by=requester(context), dag_id=dag_run.dag_id, run_id=dag_run.run_id))
        except Exception as error:  # noqa: BLE001 - no error of one database may stop the others' maintenance
            problems.append(f"{name}: {trouble(error)}")
            retriable = retriable or not isinstance(error, TidemarkError) or error.retriable
    for _, same in itertools.groupby(sorted(consumers, key=_servers), key=_servers):
        _sample_and_mirror(list(same), log)
    removed = [archive for result in results for archive in result.removed]
    counts = {"archives": len(removed), "rows": sum(archive.rows for archive in removed)}
    counts |= {"emptied": sum(result.emptied for result in results), "attempts": sum(len(result.ended) for result in results)}
    log.info("maintained keep=%s archives=%s rows=%s emptied=%s attempts=%s", keep, *counts.values())
    if problems:
        raise NotMaintained(problems=tuple(problems)) if retriable else AirflowFailException("\n".join(problems))
    return counts


def _sample_and_mirror(specs: Sequence[ConsumerSpec], log: Any) -> None:
    """Ends objectives that were removed from files, samples the lag of consumers with the same connections, and publishes mirrored
    positions. A failure is only logged."""
    try:
        resolved = connections.resolve(specs[0])
        with session(resolved.database_url) as connection:
            with transaction(connection) as cur:
                for spec in specs:
                    if spec.slo is None:  # no task reports its former objectives
                        report(cur, spec)
            _, problems = sample_and_mirror(connection, Cluster(resolved.kafka), specs)
    except Exception as error:  # noqa: BLE001 - no error of these servers may stop the others' samples
        log.warning("lag not sampled, or positions not mirrored consumers=%s: %s", ",".join(spec.name for spec in specs), trouble(error))
        return
    for problem in problems:
        log.warning("%s", problem)


def _servers(spec: ConsumerSpec) -> tuple[str, str]:
    return spec.connections.postgres, spec.connections.kafka

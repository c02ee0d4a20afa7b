"""What the tasks ``relay`` and ``due`` of the DAG ``drain_retries`` do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tidemark import migrations, project, roles
from tidemark.airflow import connections
from tidemark.airflow.operators import by_database
from tidemark.airflow.version_compat import AirflowFailException
from tidemark.db import session
from tidemark.profiles import Profile
from tidemark.retry import pending
from tidemark.retry import relay as outbox
from tidemark.retry.pending import trouble
from tidemark.spec import ConsumerSpec, partial_spec, read_folder


def relay(log: Any) -> dict[str, int]:
    """Publishes the outbox of every consumer. Returns the number of published records by consumer.

    Tries all consumers, then fails with all the reasons if records could not be published.
    """
    problems: list[str] = []
    published: dict[str, int] = {}
    for spec in _busy(problems):
        try:
            with session(connections.database_url(spec), application="tidemark relay") as connection:
                result = outbox.relay(connection, connections.resolve(spec).kafka, spec)
        except Exception as error:  # noqa: BLE001 - no error of one consumer may stop the others' relay
            problems.append(f"{spec.name}: {trouble(error)}")
            continue
        problems += pending.obstacles(result, spec.name)
        if result.records:
            published[spec.name] = result.records
    log.info("relayed consumers=%s records=%s", len(published), sum(published.values()))
    if problems:
        raise AirflowFailException("\n".join(problems))
    return published


def due(log: Any) -> list[str]:
    """Returns the names of the consumers with due records.

    If the lookup fails for a consumer, its name is returned as well: its drain then fails with the reason, or finds nothing due.
    """
    problems: list[str] = []
    consumers = []
    for spec in _busy(problems):
        try:
            with session(connections.database_url(spec), application="tidemark due") as connection:
                overdue = pending.due(connection, spec.group)
        except Exception as error:  # noqa: BLE001 - no error of one consumer may stop the others' drains
            log.warning("cannot look up what is due consumer=%s cause=%s", spec.name, trouble(error))
            consumers.append(spec.name)
            continue
        if overdue is not None:
            consumers.append(spec.name)
            log.info(
                "due consumer=%s records=%s late_median_s=%.1f late_p99_s=%.1f late_oldest_s=%.1f",
                spec.name, overdue.records, *(delay.total_seconds() for delay in (overdue.median, overdue.p99, overdue.oldest)),
            )  # fmt: skip
    for problem in problems:  # only logged: the relay has failed with it, and so fails the run
        log.warning("%s", problem)
    log.info("due consumers=%s", ",".join(consumers) or "none")
    return consumers


def _busy(problems: list[str]) -> Iterator[ConsumerSpec]:
    """Yields the consumers whose groups have waiting or unpublished records. The others cost one statement per database.

    Adds a problem for a database that does not answer, if a consumer with a ladder uses it, and for an invalid consumer's file, if its
    group has such records. The other consumers are still yielded.
    """
    good, bad = read_folder(project.consumers())
    broken = {error.name: error for error in bad}
    specs_of_all = (*good.values(), *(partial_spec(error.problems[0].file) for error in bad))
    for name, specs in by_database(specs_of_all).items():
        try:
            with session(connections.database_url(specs[0]), application="tidemark relay") as connection:
                migrations.require_current(connection)
                roles.require(connection, Profile.RUNNER)
                groups = frozenset(pending.busy(connection))
        except Exception as error:  # noqa: BLE001 - no error of one database may stop the others' consumers
            if any(spec.retry.delays for spec in specs):
                problems.append(f"{name}: {trouble(error)}")
            continue
        busy = [spec for spec in specs if spec.group in groups]
        for spec in busy:
            if spec.name in broken:
                problems.append(
                    f"{spec.name}: its records are neither published nor retried, because its file is invalid.\n{broken[spec.name]}"
                )
        yield from (spec for spec in busy if spec.name not in broken)

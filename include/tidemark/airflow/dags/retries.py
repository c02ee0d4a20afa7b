"""The DAG ``drain_retries``: publishes failed records to their retry topics and tries due records again, for all consumers.

    relay     publishes the outbox of every consumer; a failure of one does not hold up the others
    due       finds the consumers with due records; if there are none, the rest is skipped
    drain     tries the due records: one bounded run for each of these consumers, at most `DRAINS_AT_ONCE` at a time
    validate  validates the rows of the drain with the consumer's suite
    publish   emits the asset event of the consumer's sink, as the consumer's own DAG does
    done      fails if any other task failed

The DAG runs every few minutes, and as soon as records are due (`tidemark.airflow.triggers.due`). The tasks of one consumer never wait for
another's. A consumer's run and a drain already publish the records that they hand off. This DAG's relay publishes the rest: records
that they could not publish, and records that reached the outbox in another way.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from airflow.providers.standard.operators.empty import EmptyOperator
from airflow.sdk import (
    DAG,
    Asset,
    AssetAlias,
    AssetOrTimeSchedule,
    BaseOperator,
    Context,
    CronTriggerTimetable,
    task_group,
)
from airflow.sdk.exceptions import AirflowFailException

from tidemark import project
from tidemark.airflow.dags.consume import RUN_TYPES, START, general_access, retrying
from tidemark.airflow.operators import AnnouncingOperator, ConsumeOperator, ValidateOperator, spec_of
from tidemark.airflow.triggers.due import DUE
from tidemark.profiles import Profile
from tidemark.spec import ConsumerSpec, partial_spec, read_folder

DRAIN_DAG = "drain_retries"
EVERY = "*/5 * * * *"
DRAINS_AT_ONCE = 4
"""Each is a Spark application."""
LOADED = AssetAlias("tidemark_drained")
"""Alias for the sinks of the drained consumers, which are only known during the run."""
DRAIN_LIMIT = timedelta(hours=1)
"""Timeout of a drain, so that one consumer does not keep the others waiting. What the drain has committed stays."""


def drain_dag() -> DAG:
    """Builds the DAG ``drain_retries``: every few minutes, publishes failed records and tries due ones again."""
    common: dict[str, Any] = {"owner": "tidemark"}
    with DAG(
        dag_id=DRAIN_DAG,
        description="Publishes failed records to their retry topics, and tries due records again.",
        doc_md=_DOC,
        schedule=AssetOrTimeSchedule(timetable=CronTriggerTimetable(EVERY, timezone="UTC"), assets=[DUE]),
        start_date=START,
        catchup=False,
        max_active_runs=1,
        allowed_run_types=RUN_TYPES,
        is_paused_upon_creation=False,  # a consumer with a ladder needs it
        tags=["tidemark", "retries"],
        default_args={"owner": "tidemark"},
        access_control=general_access(),
    ) as dag:
        relay = RelayOperator(task_id="relay", retries=0, doc_md="Publishes the outbox of every consumer.", **common)
        retried: dict[str, Any] = {**retrying(), **common}
        due = DueOperator(
            task_id="due",
            trigger_rule="all_done",  # records published earlier are tried even if the relay fails
            doc_md="Finds the consumers with due records.",
            **retried,
        )

        done = EmptyOperator(task_id="done", trigger_rule="none_failed", **common)

        @task_group(group_id="each_consumer", prefix_group_id=False)  # a consumer's tasks wait only for each other
        def each_consumer(consumer: Any) -> None:
            mapped: dict[str, Any] = {
                "consumer": consumer,
                "map_index_template": "{{ task.consumer }}",
                "max_active_tis_per_dagrun": DRAINS_AT_ONCE,
                **retried,
            }
            drain = DrainOperator(
                task_id="drain",
                execution_timeout=DRAIN_LIMIT,
                doc_md="Tries due records again, and loads them as the consumer's own runs do.",
                **mapped,
            )
            validate = ValidateDrainOperator(
                task_id="validate",
                trigger_rule="all_done",  # also validate and publish the commits of a failed drain: its task is rarely cleared
                doc_md="Validates exactly what this drain loaded.",
                **mapped,
            )
            publish = PublishDrainOperator(task_id="publish", outlets=[LOADED], doc_md="Emits the asset event of the sink.", **mapped)
            drain >> validate >> publish
            drain >> done

        relay >> due
        [relay, each_consumer.expand(consumer=due.output)] >> done
    return dag


class RelayOperator(BaseOperator):
    """Publishes the outbox of every consumer. Pushes the number of published records by consumer.

    Tries all consumers, then fails with all the reasons if records could not be published. Consumers without waiting or unpublished
    records cost one statement per database.
    """

    def execute(self, context: Context) -> dict[str, int]:
        from tidemark.airflow.connections import database_url, resolve
        from tidemark.db import session
        from tidemark.retry.pending import obstacles, trouble
        from tidemark.retry.relay import relay

        problems: list[str] = []
        published: dict[str, int] = {}
        for spec in self._busy(problems):
            try:
                with session(database_url(spec), application="tidemark relay") as connection:
                    result = relay(connection, resolve(spec).kafka, spec)
            except Exception as error:  # noqa: BLE001 - no error of one consumer may stop the others' relay
                problems.append(f"{spec.name}: {trouble(error)}")
                continue
            problems += obstacles(result, spec.name)
            if result.records:
                published[spec.name] = result.records
        self.log.info("relayed consumers=%s records=%s", len(published), sum(published.values()))
        if problems:
            raise AirflowFailException("\n".join(problems))
        return published

    def _busy(self, problems: list[str]) -> Iterator[ConsumerSpec]:
        for specs, busy in _busy_groups(problems):
            yield from (spec for spec in specs if spec.group in busy)


class DueOperator(BaseOperator):
    """Pushes the names of the consumers with due records. An empty list is a success and skips the drains.

    Logs how many records of each consumer are due, and for how long. If the lookup fails for a consumer, its name is pushed as well: its
    drain then fails with the reason, or finds nothing due.
    """

    def execute(self, context: Context) -> list[str]:
        from tidemark.airflow.connections import database_url
        from tidemark.db import session
        from tidemark.retry.pending import due, trouble

        problems: list[str] = []
        consumers = []
        for specs, busy in _busy_groups(problems):
            for spec in (spec for spec in specs if spec.group in busy):
                try:
                    with session(database_url(spec), application="tidemark due") as connection:
                        overdue = due(connection, spec.group)
                except Exception as error:  # noqa: BLE001 - no error of one consumer may stop the others' drains
                    self.log.warning("cannot look up what is due consumer=%s cause=%s", spec.name, trouble(error))
                    consumers.append(spec.name)
                    continue
                if overdue is not None:
                    consumers.append(spec.name)
                    self.log.info(
                        "due consumer=%s records=%s late_median_s=%.1f late_p99_s=%.1f late_oldest_s=%.1f",
                        spec.name, overdue.records, *(delay.total_seconds() for delay in (overdue.median, overdue.p99, overdue.oldest)),
                    )  # fmt: skip
        for problem in problems:  # only logged: the relay has failed with it, and so fails the run
            self.log.warning("%s", problem)
        self.log.info("due consumers=%s", ",".join(consumers) or "none")
        return consumers


class DrainOperator(ConsumeOperator):
    """One drain of a consumer's retry topics, bounded by the records due at its start. Otherwise like a run of the consumer."""

    drains = True


class ValidateDrainOperator(ValidateOperator):
    """Validates the rows of a consumer's drain, whichever topic their records were first read from."""

    drains = True


class PublishDrainOperator(AnnouncingOperator):
    """Emits the same asset events as the consumer's own DAG. Skipped if the drain loaded nothing."""

    template_fields = ("consumer",)

    def __init__(self, *, consumer: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.consumer = consumer

    def execute(self, context: Context) -> None:
        content = self.announcement(context)
        for table in spec_of(self.consumer).table_names:
            context["outlet_events"][LOADED].add(Asset(name=table), extra=content)


def _busy_groups(problems: list[str]) -> Iterator[tuple[list[ConsumerSpec], frozenset[str]]]:
    """Yields the consumers of each database, and the groups in it that have waiting or unpublished records.

    Adds a problem for a database that does not answer, if a consumer with a ladder uses it, and for an invalid consumer's file, if its
    group has such records. The other consumers are still yielded.
    """
    from tidemark import migrations, roles
    from tidemark.airflow.connections import database_url
    from tidemark.db import session
    from tidemark.retry.pending import busy, trouble

    good, bad = read_folder(project.consumers())
    broken = {error.name: error for error in bad}
    databases: dict[str, list[ConsumerSpec]] = {}
    for spec in (*good.values(), *(partial_spec(error.problems[0].file) for error in bad)):
        databases.setdefault(spec.connections.postgres, []).append(spec)
    for name, specs in databases.items():
        try:
            with session(database_url(specs[0]), application="tidemark relay") as connection:
                migrations.require_current(connection)
                roles.require(connection, Profile.RUNNER)
                groups = frozenset(busy(connection))
        except Exception as error:  # noqa: BLE001 - no error of one database may stop the others' consumers
            if any(spec.retry.delays for spec in specs):
                problems.append(f"{name}: {trouble(error)}")
            continue
        for spec in specs:
            if spec.name in broken and spec.group in groups:
                problems.append(
                    f"{spec.name}: its records are neither published nor retried, because its file is invalid.\n{broken[spec.name]}"
                )
        if valid := [spec for spec in specs if spec.name not in broken]:
            yield valid, groups


_DOC = """
Tries records again that could not be loaded. They wait in their consumer's retry topics for the delays that its file sets
(`retry: {delays: [5m, 30m, 1h]}`). A run starts every 5 minutes, and as soon as records are due (asset `tidemark_retries_due`).

| task | |
|---|---|
| relay | publishes the outbox of every consumer to the retry topics |
| due | finds the consumers with due records; if there are none, the rest is skipped and Spark is not started |
| drain | tries the due records: one bounded run per consumer, into the same table, with the lineage of the first read |
| validate | validates what was loaded with the consumer's suite; on a critical verdict the rows stay, but no event is emitted |
| publish | emits the asset event of the sink |
| done | fails if any other task failed |

`tidemark retries count NAME` shows how many records wait and have failed. `tidemark audit NAME` shows where every record is. The DAG
`redrive` retries records that have failed permanently.
"""

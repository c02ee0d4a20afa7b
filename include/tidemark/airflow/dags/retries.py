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

from datetime import timedelta
from typing import Any

from airflow.providers.standard.operators.empty import EmptyOperator
from airflow.sdk import (
    DAG,
    Asset,
    AssetAlias,
    BaseOperator,
    Context,
    task_group,
)

from tidemark.airflow.dags.consume import retrying, shared_dag
from tidemark.airflow.operators import AnnouncingOperator, ConsumeOperator, ValidateOperator, final_errors_fail, spec_of
from tidemark.airflow.triggers.due import DUE
from tidemark.airflow.version_compat import AssetOrTimeSchedule, CronTriggerTimetable

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
    with shared_dag(
        DRAIN_DAG,
        "retries",
        description="Publishes failed records to their retry topics, and tries due records again.",
        doc_md=_DOC,
        schedule=AssetOrTimeSchedule(timetable=CronTriggerTimetable(EVERY, timezone="UTC"), assets=[DUE]),
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

    Tries all consumers, then fails with all the reasons if records could not be published.
    """

    @final_errors_fail
    def execute(self, context: Context) -> dict[str, int]:
        from tidemark.airflow.tasks.drain_retries import relay

        return relay(self.log)


class DueOperator(BaseOperator):
    """Pushes the names of the consumers with due records. An empty list is a success and skips the drains.

    Logs how many records of each consumer are due, and for how long.
    """

    @final_errors_fail
    def execute(self, context: Context) -> list[str]:
        from tidemark.airflow.tasks.drain_retries import due

        return due(self.log)


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

    @final_errors_fail
    def execute(self, context: Context) -> None:
        tables = spec_of(self.consumer).table_names
        content = self.announcement(context, tables)
        for table in tables:
            context["outlet_events"][LOADED].add(Asset(name=table), extra=content)


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

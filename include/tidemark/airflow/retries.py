"""The DAG ``drain_retries``: for all consumers, what was handed off goes to its topic, and what is due is tried again.

    relay     publishes the outbox of every consumer; one that cannot be published does not hold up the others
    due       finds the consumers of which something is due; where there is none, nothing else is started
    drain     tries it: a bounded run of its own for each of them, at most `DRAINS_AT_ONCE` at a time
    validate  judges what the drain has loaded, by the consumer's suite
    publish   emits the asset event of the consumer's sink, as the consumer's own DAG does
    done      fails if any of the others has failed

It runs every few minutes, and as soon as something is due (`tidemark.airflow.due`). No consumer's drain, verdict and event wait for
another's.
A run of a consumer publishes what it has handed off itself, and so does a drain. What they could not publish, and what came to lie in the
outbox in another way, is this DAG's.
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
from tidemark.airflow.dags import RUN_TYPES, START, retrying
from tidemark.airflow.due import DUE
from tidemark.airflow.operators import ConsumeOperator, ValidateOperator, announcement, spec_of
from tidemark.spec import ConsumerSpec, partial_spec, read_folder

DRAIN_DAG = "drain_retries"
EVERY = "*/5 * * * *"
DRAINS_AT_ONCE = 4
"""Each is a Spark application."""
LOADED = AssetAlias("tidemark_drained")
"""Stands for the sinks of the consumers that are drained: a run finds out which ones."""
DRAIN_LIMIT = timedelta(hours=1)
"""A drain that takes longer is ended, lest one consumer keep the others waiting. What it has committed stays."""


def drain_dag() -> DAG:
    """The DAG ``drain_retries``: every few minutes, publishes what has failed and tries again what is due."""
    common: dict[str, Any] = {"owner": "tidemark"}
    with DAG(
        dag_id=DRAIN_DAG,
        description="Publishes records that failed to their retry topics, and tries again what is due.",
        doc_md=_DOC,
        schedule=AssetOrTimeSchedule(timetable=CronTriggerTimetable(EVERY, timezone="UTC"), assets=[DUE]),
        start_date=START,
        catchup=False,
        max_active_runs=1,
        allowed_run_types=RUN_TYPES,
        is_paused_upon_creation=False,  # a consumer with a ladder is not done with before its records are
        tags=["tidemark", "retries"],
        default_args={"owner": "tidemark"},
    ) as dag:
        relay = RelayOperator(task_id="relay", retries=0, doc_md="Publishes what was handed off.", **common)
        tried_again: dict[str, Any] = {**retrying(), **common}
        due = DueOperator(
            task_id="due",
            trigger_rule="all_done",  # what was published before is tried, also when the broker takes nothing more from the relay
            doc_md="Finds the consumers of which something is due.",
            **tried_again,
        )

        done = EmptyOperator(task_id="done", trigger_rule="none_failed", **common)

        @task_group(group_id="each_consumer", prefix_group_id=False)  # each consumer's tasks wait for one another, and for no other's
        def each_consumer(consumer: Any) -> None:
            mapped: dict[str, Any] = {
                "consumer": consumer,
                "map_index_template": "{{ task.consumer }}",
                "max_active_tis_per_dagrun": DRAINS_AT_ONCE,
                **tried_again,
            }
            drain = DrainOperator(
                task_id="drain",
                execution_timeout=DRAIN_LIMIT,
                doc_md="Tries again what is due, and loads it in the same way as the consumer's own runs.",
                **mapped,
            )
            validate = ValidateDrainOperator(
                task_id="validate",
                trigger_rule="all_done",  # what a drain that failed had committed before is judged and announced, too: nobody clears it
                doc_md="Judges exactly what this drain loaded.",
                **mapped,
            )
            publish = PublishDrainOperator(task_id="publish", outlets=[LOADED], doc_md="Emits the asset event of the sink.", **mapped)
            drain >> validate >> publish
            drain >> done

        relay >> due
        [relay, each_consumer.expand(consumer=due.output)] >> done
    return dag


class RelayOperator(BaseOperator):
    """Publishes what every consumer has in its outbox; pushes how many records, by consumer.

    Goes through all of them, and fails in the end if records could not be published, with all the reasons. Consumers whose records neither
    wait nor are to be published cost one statement a database.
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
                    done = relay(connection, resolve(spec).kafka, spec)
            except Exception as error:  # noqa: BLE001 - whatever it is, it stops no other consumer's relay
                problems.append(f"{spec.name}: {trouble(error)}")
                continue
            problems += obstacles(done, spec.name)
            if done.records:
                published[spec.name] = done.records
        self.log.info("relayed consumers=%s records=%s", len(published), sum(published.values()))
        if problems:
            raise AirflowFailException("\n".join(problems))
        return published

    def _busy(self, problems: list[str]) -> Iterator[ConsumerSpec]:
        for specs, busy in _busy_groups(problems):
            yield from (spec for spec in specs if spec.group in busy)


class DueOperator(BaseOperator):
    """Pushes the names of the consumers of which something is due; none of them is no failure, and skips the drains.

    Its log says of each how many records are due, and for how long they have been. A consumer that this cannot be found out of is pushed as
    well: its own drain fails with the reason, or finds nothing due.
    """

    def execute(self, context: Context) -> list[str]:
        from tidemark.airflow.connections import database_url
        from tidemark.db import session
        from tidemark.retry.pending import due, trouble

        problems: list[str] = []
        found = []
        for specs, busy in _busy_groups(problems):
            for spec in (spec for spec in specs if spec.group in busy):
                try:
                    with session(database_url(spec), application="tidemark due") as connection:
                        late = due(connection, spec.group)
                except Exception as error:  # noqa: BLE001 - whatever it is, it stops no other consumer's drain
                    self.log.warning("cannot find out what is due consumer=%s cause=%s", spec.name, trouble(error))
                    found.append(spec.name)
                    continue
                if late is not None:
                    found.append(spec.name)
                    self.log.info(
                        "due consumer=%s records=%s late_median_s=%.1f late_p99_s=%.1f late_oldest_s=%.1f",
                        spec.name, late.records, *(one.total_seconds() for one in (late.median, late.p99, late.oldest)),
                    )  # fmt: skip
        for problem in problems:  # the relay has failed with it, and the run fails with the relay
            self.log.warning("%s", problem)
        self.log.info("due consumers=%s", ",".join(found) or "none")
        return found


class DrainOperator(ConsumeOperator):
    """One drain of a consumer's retry topics, bounded by what was due when it began. All else is as in a run of the consumer."""

    drains = True


class ValidateDrainOperator(ValidateOperator):
    """Judges what the drain of a consumer has loaded, wherever it was read first."""

    drains = True


class PublishDrainOperator(BaseOperator):
    """Emits the event of the consumer's sink, the same as the consumer's own DAG does; skipped if the drain has loaded nothing."""

    template_fields = ("consumer",)

    def __init__(self, *, consumer: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.consumer = consumer

    def execute(self, context: Context) -> None:
        context["outlet_events"][LOADED].add(Asset(name=spec_of(self.consumer).sink.table), extra=announcement(context))


def _busy_groups(problems: list[str]) -> Iterator[tuple[list[ConsumerSpec], frozenset[str]]]:
    """The consumers of each database, and the groups that there is something to do for.

    A database that does not answer becomes a problem if a consumer with a ladder uses it. So does a consumer whose file is broken, if
    records of its group wait; the others go on.
    """
    from tidemark import schema
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
                schema.require_current(connection)
                groups = frozenset(busy(connection))
        except Exception as error:  # noqa: BLE001 - whatever it is, it stops no other database's consumers
            if any(spec.retry.delays for spec in specs):
                problems.append(f"{name}: {trouble(error)}")
            continue
        for spec in specs:
            if spec.name in broken and spec.group in groups:
                problems.append(
                    f"{spec.name}: its records are neither published nor tried, because its file is broken.\n{broken[spec.name]}"
                )
        if sound := [spec for spec in specs if spec.name not in broken]:
            yield sound, groups


_DOC = """
Records that could not be loaded wait in the retry topics of their consumer, as long as its file says (`retry: {delays: [5m, 30m, 1h]}`).
A run begins every 5 minutes, and when something is due (asset `tidemark_retries_due`).

| task | |
|---|---|
| relay | publishes what was handed off, for every consumer |
| due | finds the consumers of which something is due; if there is none, the rest is skipped, and no Spark is started |
| drain | tries it: one bounded run a consumer, into the same table, with the lineage of the record as it was read first |
| validate | judges what was loaded, by the consumer's suite; what is critical stays, and is not announced |
| publish | emits the event of the sink's asset |
| done | fails with the others |

`tidemark retries count NAME` shows what waits and what has failed, `tidemark audit NAME` where every record is. The DAG `redrive` sends
round again what has failed for good.
"""

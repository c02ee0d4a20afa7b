"""The DAG ``watch``: fails a consumer's task when the consumer misses an objective, so that the task's callbacks and notifiers run.

    watch                   waits in the triggerer until there is something to report, then skips the tasks of all other consumers
    objectives__<consumer>  fails with the missed objectives, or logs the recovered ones

Runs follow each other. A run reports once and ends; the next one waits for the next change. The trigger only reads, and so does
`watch`: the consumer's task stores what it reports (`tidemark.objectives`), so a run that is killed before it has reported is repeated by
the next one. The tasks are not mapped, because each carries the owner of its consumer.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from typing import Any

from airflow.sdk import DAG, Context, get_parsing_context
from airflow.triggers.base import BaseTrigger, TriggerEvent

from tidemark.airflow.dags.consume import dag_id, retrying, shared_dag
from tidemark.airflow.operators import ConsumerOperator, by_database, final_errors_fail, spec_of, valid_consumers
from tidemark.airflow.triggers.polling import Poll, cursor
from tidemark.airflow.version_compat import AirflowFailException, BaseBranchOperator
from tidemark.spec import ConsumerSpec

WATCH = "watch"
OBJECTIVES = "objectives"
LOOK_EVERY_S = 15.0
RUN_FOR_S = 6 * 3600.0
"""Maximum duration of a run without anything to report. The next run continues to wait."""
RENEW_AFTER_S = 60.0
"""Minimum duration of a run that ends because consumers have gained or lost objectives. The next run has their tasks, if Airflow has read
the files again by then."""
log = logging.getLogger(__name__)


def watch_dags() -> dict[str, DAG]:
    """Builds the DAG ``watch``, by its id, with a task for each consumer with ``slo``. Empty if there is no such consumer."""
    if get_parsing_context().dag_id not in (None, WATCH):
        return {}
    specs = watched()
    if not specs:
        return {}
    with shared_dag(
        WATCH,
        WATCH,
        description="Fails a consumer's task once when the consumer misses an objective.",
        doc_md=_DOC,
        schedule="@continuous",
        max_consecutive_failed_dag_runs=0,  # it fails on purpose; Airflow's default would pause it
    ) as dag:
        watch = WatchOperator(
            task_id=WATCH,
            consumers=[spec.name for spec in specs],
            doc_md="Waits until an objective is missed or met again.",
            owner="tidemark",
            **retrying(),
        )
        for spec in specs:
            watch >> ReportOperator(
                task_id=task_of(spec.name),
                task_display_name=spec.name,
                consumer=spec.name,
                owner=spec.airflow.owner,
                retries=0,  # a retry would find the change reported, and succeed
                doc_md="Fails with the objectives that are missed since the last report.",
            )
    return {dag.dag_id: dag}


def watched() -> list[ConsumerSpec]:
    """The consumers with objectives."""
    return [spec for spec in valid_consumers() if spec.slo is not None]


def task_of(consumer: str) -> str:
    return dag_id(OBJECTIVES, consumer)


class WatchOperator(BaseBranchOperator):
    """Waits in the triggerer until there is something to report about ``consumers``, and continues with their tasks."""

    def __init__(self, *, consumers: Sequence[str], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.consumers = consumers

    def execute(self, context: Context) -> None:
        self.defer(trigger=ObjectivesTrigger(list(self.consumers)), method_name="go_on")

    def go_on(self, context: Context, event: Sequence[str]) -> Any:
        return self.do_branch(context, sorted({task_of(name) for name in event} & self.downstream_task_ids))


class ReportOperator(ConsumerOperator):
    """Stores the changes of a consumer's objectives, and fails if an objective is missed."""

    @final_errors_fail
    def execute(self, context: Context) -> None:
        from tidemark.airflow.connections import database_url
        from tidemark.db import session, transaction
        from tidemark.objectives import report
        from tidemark.profiles import Profile
        from tidemark.roles import require

        spec = spec_of(self.consumer)
        with session(database_url(spec), application="tidemark watch") as connection:
            require(connection, Profile.RUNNER)
            with transaction(connection) as cur:
                result = report(cur, spec)
        for objective in result.recovered:
            self.log.info("objective is met again consumer=%s objective=%s", spec.name, objective)
        if result.missed:
            raise AirflowFailException(f"{spec.name} misses {_objectives(result.missed)}: {'; '.join(result.missed.values())}")


class ObjectivesTrigger(BaseTrigger):
    """Fires with the names of the consumers whose objectives have changed. Without names after `RUN_FOR_S`, or when other consumers than
    ``consumers`` have objectives. Reads the consumers' files and Airflow's connections again on every poll."""

    def __init__(self, consumers: Sequence[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.consumers = consumers
        self._poll = Poll(log, "objectives")
        self._consumers_changed = False

    def serialize(self) -> tuple[str, dict[str, Any]]:
        return f"{type(self).__module__}.{type(self).__qualname__}", {"consumers": list(self.consumers)}

    async def run(self) -> AsyncIterator[TriggerEvent]:
        started = time.monotonic()
        while True:
            names = await self.look()
            waited_s = time.monotonic() - started
            if names or waited_s >= RUN_FOR_S or (self._consumers_changed and waited_s >= RENEW_AFTER_S):
                log.info("objectives changed consumers=%s", ",".join(names) or "none")
                yield TriggerEvent(names)  # type: ignore[no-untyped-call]
                return
            await asyncio.sleep(LOOK_EVERY_S)

    async def look(self) -> list[str]:
        """Returns the consumers with unreported changes, in all databases that answer."""
        answers = await self._poll.ask(self._databases, _changed)
        return sorted(name for names in answers.values() for name in names)

    def _databases(self) -> dict[str, list[ConsumerSpec]]:
        specs = watched()
        self._consumers_changed = {spec.name for spec in specs} != set(self.consumers)
        return by_database(spec for spec in specs if spec.name in self.consumers)


def _changed(connection: Any, specs: Iterable[ConsumerSpec]) -> list[str]:
    """Returns the consumers with unreported changes. Raises `TidemarkError`, also if their tasks could not store the report: they would
    fail again and again."""
    from tidemark.objectives import changes
    from tidemark.profiles import Profile
    from tidemark.roles import RoleLacks, missing

    with cursor(connection, "tidemark watch") as cur:
        if lacking := missing(cur, Profile.RUNNER):
            raise RoleLacks(role=cur.connection.info.user, profile=Profile.RUNNER, rights=tuple(lacking))
        return [spec.name for spec in specs if changes(cur, spec)]


def _objectives(missed: Mapping[Any, str]) -> str:
    return "an objective" if len(missed) == 1 else f"{len(missed)} objectives"


_DOC = """
Watches the objectives of consumers (`slo: {lag: 10m, failed: 100, freshness: 1h}`). While all are met, a run waits in the triggerer and
takes no worker. When a consumer misses an objective, its task fails once, with the objective and the value found, so that the callbacks and
notifiers of that task run. When the objective is met again, its task succeeds and says so in its log.

| task | |
|---|---|
| watch | waits until an objective is missed or met again |
| objectives__NAME | fails with the missed objectives of a consumer, or logs those that are met again; skipped if nothing has changed |
"""

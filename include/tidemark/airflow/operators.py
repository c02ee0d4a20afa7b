"""The tasks of a consumer's DAG: consume, validate, publish."""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from airflow.sdk import Asset, BaseOperator, Context
from airflow.sdk.exceptions import AirflowFailException, AirflowSkipException, DownstreamTasksSkipped

from tidemark import project
from tidemark.errors import Refused, TidemarkError
from tidemark.spec import ConsumerSpec, find_consumer
from tidemark.text.wording import visible

if TYPE_CHECKING:
    from airflow.providers.openlineage.extractors import OperatorLineage

    from tidemark.airflow.lineage.facets import Consumed, ValidationFacts
    from tidemark.driver.launch import Driver
    from tidemark.quality import Verdict

T = TypeVar("T")

PROGRESS_EVERY_S = 5
DRIVER_LINE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} (DEBUG|INFO|WARNING|ERROR|CRITICAL) (?:tidemark\.\S+ )?(.*)")
"""A line that the driver logged. Its level is kept; its timestamp and Tidemark's logger name are dropped, as the task log adds its own."""


def refusals_fail(method: Callable[..., T]) -> Callable[..., T]:
    """Makes a `Refused` fail the task without a retry. Logs its text above Airflow's traceback."""

    @functools.wraps(method)
    def fail_without_retry(self: Any, context: Context, *args: Any) -> T:
        try:
            return method(self, context, *args)
        except Refused as error:
            self.log.error("%s", error)
            raise AirflowFailException(str(error)) from None

    return fail_without_retry


class ConsumeOperator(BaseOperator):
    """One bounded run of a consumer. Each try is a new attempt, whose claim fences the try before it.

    A consumer with several members gets one mapped task per member. ``member`` is its number; with the DAG and the task it makes up the
    group.instance.id. The driver's log goes to the task's log. The driver never outlives the task: the kernel kills the task with its
    supervisor and the driver with the task, and `on_kill` kills the driver's process group. Pushes counts, not data.

    With one member, the task first checks for records to read. If there are none, it starts no driver, and skips the consumer's
    `ValidateOperator` and `PublishOperator` after it, unless an earlier attempt of the DAG run may have committed something, or earlier
    runs have left rows that were not validated or announced.
    """

    template_fields: Sequence[str] = ("consumer",)
    drains = False
    """Whether it reads due records of the retry topics, instead of the consumer's topics."""

    def __init__(self, *, consumer: str, member: int = 0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.consumer = consumer
        self.member = member
        self._driver: Driver | None = None
        self._killed = False
        self._consumed: list[Consumed] = []

    @refusals_fail
    def execute(self, context: Context) -> dict[str, Any]:
        spec = spec_of(self.consumer)
        summary = self._consume(context, spec)
        idle = self._idle_tasks(context, spec, summary)
        if idle:
            context["ti"].xcom_push("return_value", summary)
            raise DownstreamTasksSkipped(tasks=idle)  # type: ignore[no-untyped-call]
        return summary

    def _idle_tasks(self, context: Context, spec: ConsumerSpec, summary: dict[str, Any]) -> list[str]:
        """Returns the downstream tasks if none of them has work. Empty if a task of another kind is among them: its author decides what
        it waits for."""
        from tidemark.airflow.connections import database_url
        from tidemark.db import session, transaction
        from tidemark.offsets.store import dag_run_planned
        from tidemark.quality import unannounced, unjudged

        after = self.get_flat_relatives()
        only_own = all(isinstance(task, PublishOperator) or _is_validation_of(task, self.consumer) for task in after)
        if summary["records"] or not only_own or context["ti"].map_index not in (None, -1):
            return []
        url = database_url(spec)
        with session(url) as connection:
            with transaction(connection) as cur:
                if dag_run_planned(cur, summary["attempt_id"]):
                    return []
            if any(pending.running is None for pending in unjudged(connection, spec.group)):
                return []
        announces = any(isinstance(task, PublishOperator) for task in after)
        if announces and unannounced(url, spec.group, publishable(spec)).ranges:
            return []
        return sorted(task.task_id for task in after)

    def _consume(self, context: Context, spec: ConsumerSpec, *, backfill_of: int | None = None) -> dict[str, Any]:
        from tidemark.airflow.connections import resolve
        from tidemark.airflow.lineage import statistics
        from tidemark.airflow.lineage.facets import Consumed
        from tidemark.consume.run import consume, open_attempt
        from tidemark.driver.launch import progress, run_attempt
        from tidemark.driver.process import die_with_parent
        from tidemark.retry.pending import relay_at_end
        from tidemark.waiting import watch

        die_with_parent()
        connections = resolve(spec)
        attempt_id = open_attempt(connections.database_url, spec.group, _identity(context), backfill_of=backfill_of)
        topics = () if self.drains else spec.topics
        addresses = connections.kafka["bootstrap.servers"], connections.database_url
        self._consumed.append(Consumed(spec.group, attempt_id, spec.table_names, topics, *addresses))
        self.log.info("attempt begins group=%s attempt=%s try=%s", spec.group, attempt_id, context["ti"].try_number)
        watch()
        try:
            if consume(spec, connections, attempt_id, None, drain=self.drains):
                result = progress(connections.database_url, attempt_id)
            else:
                result = run_attempt(
                    spec.name,
                    connections,
                    attempt_id,
                    folders={"consumers": [project.consumers()], "transforms": [project.transforms()]},
                    on_log=self._log_line,
                    on_progress=_Progress(self.log),
                    on_start=self._remember_driver,
                    drain=self.drains,
                    with_keeper=uses_keeper(spec),
                )
        except TidemarkError:
            statistics.report_failed(spec, self.task_id, connections.database_url, attempt_id)
            raise
        counts = statistics.counts_of(result)
        statistics.report(spec, self.task_id, counts)
        summary = {"attempt_id": attempt_id, **counts}
        fields = " ".join(f"{name}={value}" for name, value in summary.items() if value or name != "deleted")
        self.log.info("attempt is committed group=%s %s", spec.group, fields)
        if counts["retried"] or counts["failed"]:
            self.log.warning(
                "records not loaded group=%s retried=%s failed=%s; to see them: tidemark retries list %s",
                spec.group, counts["retried"], counts["failed"], spec.name,
            )  # fmt: skip
        for obstacle in relay_at_end(connections, spec):
            self.log.warning("%s", obstacle)
        return summary

    def get_openlineage_facets_on_complete(self, ti: Any) -> OperatorLineage[Any, Any]:
        """Returns the topics and the sink, for OpenLineage. Also called after a failure: what a failed attempt has committed stays."""
        from tidemark.airflow.lineage.openlineage import of_attempts

        return of_attempts(self._consumed)

    def on_kill(self) -> None:
        """Kills the driver first. Also called on a timeout. Logs nothing, because a broken log pipe must not prevent the kill."""
        self._killed = True
        if self._driver is not None:
            from tidemark.driver.launch import kill_group

            kill_group(self._driver)

    def _remember_driver(self, driver: Driver) -> None:
        self._driver = driver
        if self._killed:  # while the driver was being started
            self.on_kill()

    def _log_line(self, line: str) -> None:
        line = visible(line)
        match = DRIVER_LINE.fullmatch(line)
        if match:
            self.log.log(logging.getLevelNamesMapping()[match[1]], match[2])
        else:
            self.log.info(line)


class ValidateOperator(BaseOperator):
    """Validates the DAG run's rows with its suite and the conservation check, after the rows that earlier runs left without a verdict.
    Pushes the verdict, ranges and counts.

    A critical verdict fails the task, so that `publish` does not run, unless the spec says ``on_failure: report``. With ``rewind``, the
    run's rows are rewound first (`tidemark.rewind.reaction`); a later try reports that and fails too. Rows loaded by a drain are never
    rewound: they lie among rows of other runs, which the rewind would take out as well.
    """

    template_fields: Sequence[str] = ("consumer",)
    drains = False
    """Whether it validates a drain."""

    def __init__(self, *, consumer: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.consumer = consumer
        self._validations: list[ValidationFacts] = []

    @refusals_fail
    def execute(self, context: Context) -> dict[str, Any]:
        from tidemark.airflow.connections import database_url
        from tidemark.airflow.lineage.facets import ValidationFacts
        from tidemark.quality import Reaction, ValidatedRun, Verdict, reaction, suite_files, validate_with_earlier

        logging.getLogger("great_expectations").setLevel(logging.WARNING)  # it logs hundreds of lines at its start
        spec = spec_of(self.consumer)
        ti = context["ti"]
        run, url = ValidatedRun(ti.dag_id, ti.run_id), database_url(spec)
        suites = suite_files(spec)
        judge = partial(validate_with_earlier, url, run, group=spec.group, suites=suites, upsert=spec.upserts)
        verdict, earlier_verdicts = call_in_keeper(judge) if uses_keeper(spec) and any(suites.values()) else judge()
        for earlier in earlier_verdicts:
            self.log.warning(
                "an earlier run had no verdict validation=%s verdict=%s ranges=%s",
                earlier.validation_id,
                earlier.verdict,
                earlier.ranges,
            )
        self._validations.append(ValidationFacts(spec.table_names, verdict.results, url))
        for result in verdict.results:
            level = logging.INFO if result.success else logging.WARNING
            self.log.log(level, "%s %s [%s] %s", "pass" if result.success else "FAIL", result.number, result.severity, result.text)
        failing = [result.text for result in verdict.results if not result.success]
        if verdict.validation_id is None and reaction(Verdict.CRITICAL, spec.validation, may_rewind=not self.drains) is Reaction.REWIND:
            self._require_not_rewound(spec, run)
        reacts = reaction(verdict.verdict, spec.validation, may_rewind=not self.drains)
        if reacts is not Reaction.PUBLISH:
            text = f"validation {verdict.validation_id} of {spec.name} is critical; nothing is published: {'; '.join(failing)[:2000]}"
            raise AirflowFailException(f"{text}. {self._rewind(spec, run, verdict)}" if reacts is Reaction.REWIND else text)
        return verdict.as_json() | {"consumer": spec.name}

    def get_openlineage_facets_on_complete(self, ti: Any) -> OperatorLineage[Any, Any]:
        """Returns the results as assertions on the sink, for OpenLineage. Also called after a failure."""
        from tidemark.airflow.lineage.openlineage import of_validations

        return of_validations(self._validations)

    def _rewind(self, spec: ConsumerSpec, run: Any, verdict: Any) -> str:
        """Rewinds the run's rows, for ``on_failure: rewind``. Returns a sentence about the result. Raises if a service is unavailable, so
        that Airflow tries again."""
        from tidemark.airflow.connections import resolve
        from tidemark.db import session
        from tidemark.kafka.cluster import Cluster
        from tidemark.rewind.reaction import take_back

        connections = resolve(spec)
        with session(connections.database_url, application="tidemark rewind") as connection:
            try:
                return f"on_failure: rewind: {take_back(connection, Cluster(connections.kafka), spec, run, verdict)}."
            except Refused as error:
                return f"on_failure: rewind: the rewind was refused, so the rows stay: {error}"

    def _require_not_rewound(self, spec: ConsumerSpec, run: Any) -> None:
        """Raises if an earlier try of this validation has rewound the run's rows. Without this check the run would pass as one that wrote
        nothing."""
        from tidemark.airflow.connections import database_url
        from tidemark.db import session
        from tidemark.rewind.reaction import taken_back

        with session(database_url(spec)) as connection:
            rewind_id = taken_back(connection, spec.group, run)
        if rewind_id is not None:
            raise AirflowFailException(
                f"validation of this run of {spec.name} was critical, and rewind {rewind_id} took its rows out; nothing is published"
            )


class AnnouncingOperator(BaseOperator):
    """A task that emits asset events. Once it has succeeded, so that the events exist, it marks their verdicts as announced. If it ends
    earlier, a later run announces them again."""

    def __init__(self, *, on_success_callback: Any = None, **kwargs: Any) -> None:
        callbacks = on_success_callback or []
        if not isinstance(callbacks, Sequence):
            callbacks = [callbacks]
        super().__init__(on_success_callback=[*callbacks, _note_announced], **kwargs)
        self.announced: tuple[str, Sequence[int]] | None = None
        """The consumer, and the verdicts."""

    def announcement(self, context: Context) -> dict[str, Any]:
        """Returns the event's content: the consumer's unannounced verdicts, and the verdict of this run or of its mapped task. Skips the
        task if they cover no rows."""
        from tidemark.airflow.connections import database_url
        from tidemark.quality import unannounced

        ti = context["ti"]
        verdict = ti.xcom_pull(task_ids=self._validation(), map_indexes=ti.map_index)
        spec = spec_of(verdict["consumer"])
        unannounced_rows = unannounced(database_url(spec), spec.group, publishable(spec), again=verdict["validation_id"])
        if not unannounced_rows.ranges:
            raise AirflowSkipException("nothing to publish: all committed rows have been announced")
        self.announced = spec.name, unannounced_rows.validation_ids
        return unannounced_rows.as_json()

    def _validation(self) -> str:
        """Returns the id of the nearest upstream task that validates."""
        upstream = [task for task in self.get_flat_relatives(upstream=True) if issubclass(_class_of(task), ValidateOperator)]
        nearest = [task for task in upstream if task.task_id in self.upstream_task_ids] or upstream
        if not nearest:
            raise AirflowFailException(f"{self.task_id} has no task before it that validates: set a ValidateOperator upstream")
        return str(nearest[0].task_id)


def _class_of(task: Any) -> type:
    return getattr(task, "operator_class", None) or type(task)


def _note_announced(context: Context) -> None:
    from tidemark.airflow.connections import database_url
    from tidemark.quality import announced

    task = context["task"]
    if isinstance(task, AnnouncingOperator) and task.announced is not None:
        consumer, validation_ids = task.announced
        announced(database_url(spec_of(consumer)), validation_ids)


def publishable(spec: ConsumerSpec) -> list[Verdict]:
    """Returns the verdicts whose rows are announced."""
    from tidemark.quality import Reaction, Verdict, reaction

    return [verdict for verdict in Verdict if reaction(verdict, spec.validation) is Reaction.PUBLISH]


class PublishOperator(AnnouncingOperator):
    """Emits the asset event of each table, with ranges, counts and verdict: of the run, and of earlier runs that were not announced.

    Skipped if there is nothing to announce. ``assets`` must be the task's outlets. A `ValidateOperator` must be before it.
    """

    def __init__(self, *, assets: Sequence[Asset], **kwargs: Any) -> None:
        super().__init__(outlets=list(assets), **kwargs)
        self.assets = tuple(assets)

    def execute(self, context: Context) -> None:
        content = self.announcement(context)
        for asset in self.assets:
            context["outlet_events"][asset].extra = content


class _Progress:
    """Logs a run's progress at most every `PROGRESS_EVERY_S`."""

    def __init__(self, log: Any) -> None:
        self._log = log
        self._logged_at = 0.0
        self._records = -1

    def __call__(self, progress: Any) -> None:
        import time

        if progress.planned and progress.records != self._records and time.monotonic() - self._logged_at >= PROGRESS_EVERY_S:
            self._logged_at, self._records = time.monotonic(), progress.records
            self._log.info("progress attempt=%s committed=%s of=%s", progress.attempt_id, progress.records, progress.total)


def spec_of(name: str) -> ConsumerSpec:
    """Reads the consumer's file, when the task runs."""
    return find_consumer(name, project.consumers())


def uses_keeper(spec: ConsumerSpec) -> bool:
    """Whether a keeper starts the consumer's drivers. It must outlive the task, which is impossible in a pod of the task's own."""
    from airflow.configuration import conf

    return spec.spark.shared and "Kubernetes" not in conf.get("core", "executor", fallback="")


def call_in_keeper(function: Callable[[], T]) -> T:
    """Calls the function in a fork of a keeper, if possible: importing Great Expectations takes longer than a small validation."""
    from tidemark.driver.keeper_client import KeeperUnavailable, call_in_fork

    try:
        return call_in_fork(function)
    except KeeperUnavailable:
        return function()


def _is_validation_of(task: Any, consumer: str) -> bool:
    return isinstance(task, ValidateOperator) and task.consumer == consumer


def _identity(context: Context) -> Any:
    from tidemark.offsets.store import TaskIdentity

    ti = context["ti"]
    return TaskIdentity(ti.dag_id, ti.run_id, ti.task_id, ti.map_index if ti.map_index is not None else -1, ti.try_number)

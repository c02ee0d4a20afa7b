"""The tasks of a consumer's DAG: consume, validate, publish."""

from __future__ import annotations

import functools
import logging
import re
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from airflow.configuration import conf
from airflow.sdk import Asset, BaseOperator, Context

from tidemark import project
from tidemark.airflow.version_compat import AirflowFailException, DownstreamTasksSkipped
from tidemark.errors import TidemarkError
from tidemark.packages import optional
from tidemark.spec import ConsumerSpec, find_consumer, read_folder
from tidemark.text.wording import visible

if TYPE_CHECKING:
    from airflow.providers.openlineage.extractors import OperatorLineage

    from tidemark.airflow.lineage.facets import Consumed, ValidationFacts
    from tidemark.driver.applications import Application
    from tidemark.driver.launch import Driver

T = TypeVar("T")

PROGRESS_EVERY_S = 5
DRIVER_LINE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} (DEBUG|INFO|WARNING|ERROR|CRITICAL) (?:tidemark\.\S+ )?(.*)")
"""A line that the driver logged. Its level is kept; its timestamp and Tidemark's logger name are dropped, as the task log adds its own."""


def final_errors_fail(method: Callable[..., T]) -> Callable[..., T]:
    """Makes an error that another try would meet again fail the task without a retry. Logs its text above Airflow's traceback."""

    @functools.wraps(method)
    def fail_without_retry(self: Any, context: Context, *args: Any, **options: Any) -> T:
        try:
            with optional():
                return method(self, context, *args, **options)
        except TidemarkError as error:
            if error.retriable:
                raise
            self.log.error("%s", error)
            raise AirflowFailException(str(error)) from None

    return fail_without_retry


class ConsumerOperator(BaseOperator):
    """A task of one consumer."""

    template_fields: Sequence[str] = ("consumer",)

    def __init__(self, *, consumer: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.consumer = consumer


class ConsumeOperator(ConsumerOperator):
    """One bounded run of a consumer. Each try is a new attempt, whose claim fences the try before it.

    A consumer with several members gets one mapped task per member. ``member`` is its number; with the DAG and the task it makes up the
    group.instance.id. Pushes counts, not data.

    A driver beside the task writes its log to the task's log, and never outlives the task: the kernel kills the task with its supervisor
    and the driver with the task, and `on_kill` kills the driver's process group. A driver on a cluster (``deploy-mode: cluster`` in the
    Spark connection) outlives a task that dies: the next try follows it to its end. `on_kill` kills it. With ``deferrable``, the task gives
    its slot back while the cluster works.

    With one member, the task first checks for records to read. If there are none, it starts no driver, and skips the consumer's
    `ValidateOperator` and `PublishOperator` after it, unless an earlier attempt of the DAG run may have committed something, or earlier
    runs have left rows that were not validated or announced.
    """

    drains = False
    """Whether it reads due records of the retry topics, instead of the consumer's topics."""

    def __init__(
        self,
        *,
        consumer: str,
        member: int = 0,
        deferrable: bool = conf.getboolean("operators", "default_deferrable", fallback=False),
        **kwargs: Any,
    ) -> None:
        super().__init__(consumer=consumer, **kwargs)
        self.member = member
        self.deferrable = deferrable
        self._driver: Driver | None = None
        self._application: Application | None = None
        self._killed = False
        self.consumed: list[Consumed] = []

    @final_errors_fail
    def execute(self, context: Context) -> dict[str, Any]:
        spec = spec_of(self.consumer)
        return self._finish(context, spec, self._consume(context, spec))

    @final_errors_fail
    def resume(self, context: Context, event: dict[str, Any], attempt_id: int, deadline: str | None) -> dict[str, Any]:
        """Continues with the attempt for which the task was deferred, once its trigger has fired."""
        from tidemark.airflow.tasks.consume import resume

        spec = spec_of(self.consumer)
        return self._finish(context, spec, resume(self, context, spec, event, attempt_id, deadline))

    def _finish(self, context: Context, spec: ConsumerSpec, summary: dict[str, Any]) -> dict[str, Any]:
        idle = self._idle_tasks(context, spec, summary)
        if idle:
            context["ti"].xcom_push("return_value", summary)
            raise DownstreamTasksSkipped(tasks=idle)  # type: ignore[no-untyped-call]
        return summary

    def _idle_tasks(self, context: Context, spec: ConsumerSpec, summary: dict[str, Any]) -> list[str]:
        """Returns the downstream tasks if none of them has work. Empty if a task of another kind is among them: its author decides what
        it waits for."""
        from tidemark.airflow.tasks.consume import leaves_nothing_to_do

        after = self.get_flat_relatives()
        only_own = all(isinstance(task, PublishOperator) or _is_validation_of(task, self.consumer) for task in after)
        if summary["records"] or not only_own or context["ti"].map_index not in (None, -1):
            return []
        announces = any(isinstance(task, PublishOperator) for task in after)
        idle = leaves_nothing_to_do(spec, summary["attempt_id"], announces=announces)
        return sorted(task.task_id for task in after) if idle else []

    def _consume(self, context: Context, spec: ConsumerSpec, *, of_rewind: int | None = None) -> dict[str, Any]:
        from tidemark.airflow.tasks.consume import run

        return run(self, context, spec, of_rewind)

    def get_openlineage_facets_on_complete(self, ti: Any) -> OperatorLineage[Any, Any]:
        """Returns the topics and the sink, for OpenLineage. Also called after a failure: what a failed attempt has committed stays."""
        from tidemark.airflow.lineage.openlineage import of_attempts

        return of_attempts(self.consumed)

    def on_kill(self) -> None:
        """Kills the driver first. Also called on a timeout. Logs nothing, because a broken log pipe must not prevent the kill."""
        self._killed = True
        if self._driver is not None and self._driver.returncode is None:  # otherwise another process may have its id
            from tidemark.driver.launch import kill_group

            kill_group(self._driver)
        if self._application is not None:
            from tidemark.driver.applications import start_to_kill

            start_to_kill(self._application)

    def remember_driver(self, driver: Driver) -> None:
        self._driver = driver
        if self._killed:  # while the driver was being started
            self.on_kill()

    def remember_application(self, application: Application) -> None:
        self._application = application
        if self._killed:
            self.on_kill()

    def was_killed(self) -> bool:
        return self._killed

    def log_line(self, line: str) -> None:
        line = visible(line)
        match = DRIVER_LINE.fullmatch(line)
        if match:
            self.log.log(logging.getLevelNamesMapping()[match[1]], match[2])
        else:
            self.log.info(line)


class ValidateOperator(ConsumerOperator):
    """Validates the DAG run's rows with its suite and the conservation check, after the rows that earlier runs left without a verdict.
    Pushes the verdict, ranges and counts.

    A critical verdict fails the task, so that `publish` does not run, unless the spec says ``on_failure: report``. With ``rewind``, the
    run's rows are rewound first (`tidemark.rewind.reaction`); a later try reports that and fails too. Rows loaded by a drain are never
    rewound: they lie among rows of other runs, which the rewind would take out as well.
    """

    drains = False
    """Whether it validates a drain."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.validations: list[ValidationFacts] = []

    @final_errors_fail
    def execute(self, context: Context) -> dict[str, Any]:
        from tidemark.airflow.tasks.validate import validate

        return validate(self, context)

    def get_openlineage_facets_on_complete(self, ti: Any) -> OperatorLineage[Any, Any]:
        """Returns the results as assertions on the sink, for OpenLineage. Also called after a failure."""
        from tidemark.airflow.lineage.openlineage import of_validations

        return of_validations(self.validations)


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

    def announcement(self, context: Context, assets: Iterable[str]) -> dict[str, Any]:
        """Returns the content of the assets' events, and logs it: the consumer's unannounced verdicts, and the verdict of this run or of
        its mapped task. Skips the task if they cover no rows."""
        from tidemark.airflow.tasks.validate import announcement, shown

        ti = context["ti"]
        verdict = ti.xcom_pull(task_ids=self._validation(), map_indexes=ti.map_index)
        content, validation_ids = announcement(verdict)
        self.announced = verdict["consumer"], validation_ids
        self.log.info("publishing assets=%s %s", ",".join(assets), shown(content))
        return content

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
    from tidemark.airflow.tasks.validate import note_announced

    task = context["task"]
    if isinstance(task, AnnouncingOperator) and task.announced is not None:
        note_announced(*task.announced)


class PublishOperator(AnnouncingOperator):
    """Emits the asset event of each table, with ranges, counts and verdict: of the run, and of earlier runs that were not announced.

    Skipped if there is nothing to announce. ``assets`` must be the task's outlets. A `ValidateOperator` must be before it.
    """

    def __init__(self, *, assets: Sequence[Asset], **kwargs: Any) -> None:
        super().__init__(outlets=list(assets), **kwargs)
        self.assets = tuple(assets)

    @final_errors_fail
    def execute(self, context: Context) -> None:
        content = self.announcement(context, [asset.name for asset in self.assets])
        for asset in self.assets:
            context["outlet_events"][asset].extra = content


class ProgressLog:
    """Logs progress, if it has changed, at most every `PROGRESS_EVERY_S`. ``text`` has a place for each of these attributes."""

    def __init__(self, log: Any, text: str, *attributes: str) -> None:
        self._log, self._text, self._attributes = log, text, attributes
        self._logged_at = 0.0
        self._logged: list[Any] = []

    def __call__(self, progress: Any) -> None:
        values = [getattr(progress, name) for name in self._attributes]
        if values != self._logged and time.monotonic() - self._logged_at >= PROGRESS_EVERY_S:
            self._logged_at, self._logged = time.monotonic(), values
            self._log.info(self._text, *values)


def requester(context: Context) -> str:
    """The Airflow user who started the run."""
    return context["dag_run"].triggering_user_name or "airflow"


def spec_of(name: str) -> ConsumerSpec:
    """Reads the consumer's file, when the task runs."""
    return find_consumer(name, project.consumers())


def by_database(specs: Iterable[ConsumerSpec]) -> dict[str, list[ConsumerSpec]]:
    """Groups consumers by the id of their Postgres connection."""
    databases: dict[str, list[ConsumerSpec]] = {}
    for spec in specs:
        databases.setdefault(spec.connections.postgres, []).append(spec)
    return databases


def valid_consumers() -> list[ConsumerSpec]:
    """Reads the consumers' files that have no problems."""
    return list(read_folder(project.consumers())[0].values())


def _is_validation_of(task: Any, consumer: str) -> bool:
    return isinstance(task, ValidateOperator) and task.consumer == consumer

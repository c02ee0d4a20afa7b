"""The tasks of a consumer's DAG: consume, validate, publish."""

from __future__ import annotations

import functools
import logging
import re
import subprocess
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from airflow.sdk import Asset, BaseOperator, Context
from airflow.sdk.exceptions import AirflowFailException, AirflowSkipException

from tidemark import project
from tidemark.errors import Refused
from tidemark.spec import ConsumerSpec, find_consumer

T = TypeVar("T")

PROGRESS_EVERY_S = 5
DRIVER_LINE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} (DEBUG|INFO|WARNING|ERROR|CRITICAL) (?:tidemark\.\S+ )?(.*)")
"""A line of the driver's own logging: it keeps its level and loses its time, which the task's log gives it, and our loggers' names."""
COUNTS = ("loaded", "skipped", "retried", "failed", "unaccounted", "sink_rows")


def plainly(method: Callable[..., T]) -> Callable[..., T]:
    """A refusal fails the task with its text alone, which is logged above Airflow's traceback."""

    @functools.wraps(method)
    def tell(self: Any, context: Context, *args: Any) -> T:
        try:
            return method(self, context, *args)
        except Refused as error:
            self.log.error("%s", error)
            raise AirflowFailException(str(error)) from None

    return tell


class ConsumeOperator(BaseOperator):
    """One bounded run of a consumer. A retried try is a new attempt, whose claim fences the try before it.

    A consumer with several members has a mapped task, one for each: ``member`` is its number, and with dag and task its seat in the group.
    The driver's log becomes the task's log. Whatever ends the task ends the driver: the kernel kills the task with its supervisor and
    the driver with the task, and `on_kill` kills the driver's process group. Returns counts (for XCom), no data.
    """

    template_fields: Sequence[str] = ("consumer",)
    drains = False
    """Does it read what is due in the consumer's retry topics, and not its topics?"""

    def __init__(self, *, consumer: str, member: int = 0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.consumer = consumer
        self.member = member
        self._driver: subprocess.Popen[str] | None = None
        self._killed = False

    @plainly
    def execute(self, context: Context) -> dict[str, Any]:
        return self._consume(context, spec_of(self.consumer))

    def _consume(self, context: Context, spec: ConsumerSpec, *, backfill_of: int | None = None) -> dict[str, Any]:
        from tidemark.airflow.connections import resolve
        from tidemark.consume.launch import run_attempt
        from tidemark.consume.process import die_with_parent
        from tidemark.consume.run import open_attempt
        from tidemark.retry.pending import relay_at_end

        die_with_parent()
        connections = resolve(spec)
        attempt_id = open_attempt(connections.database_url, spec.group, _identity(context), backfill_of=backfill_of)
        self.log.info("attempt begins group=%s attempt=%s try=%s", spec.group, attempt_id, context["ti"].try_number)
        done = run_attempt(
            spec.name,
            connections,
            attempt_id,
            folders={"consumers": [project.consumers()], "transforms": [project.transforms()]},
            on_log=self._pass_on,
            on_progress=_Progress(self.log),
            on_start=self._started,
            drain=self.drains,
        )
        counts = {name: sum(getattr(part, name) for part in done.partitions) for name in COUNTS}
        summary = {"attempt_id": attempt_id, "records": done.records, **counts}
        self.log.info("attempt is committed group=%s %s", spec.group, " ".join(f"{name}={value}" for name, value in summary.items()))
        if counts["retried"] or counts["failed"]:
            self.log.warning(
                "records not loaded group=%s retried=%s failed=%s, shown by: tidemark retries list %s",
                spec.group, counts["retried"], counts["failed"], spec.name,
            )  # fmt: skip
        for obstacle in relay_at_end(connections, spec):
            self.log.warning("%s", obstacle)
        return summary

    def on_kill(self) -> None:
        """Ends the driver first of all; also called on a time-out. Writes nothing, because a broken log pipe must not save the driver."""
        self._killed = True
        if self._driver is not None:
            from tidemark.consume.launch import kill_group

            kill_group(self._driver)

    def _started(self, driver: subprocess.Popen[str]) -> None:
        self._driver = driver
        if self._killed:  # while the driver was being started
            self.on_kill()

    def _pass_on(self, line: str) -> None:
        said = DRIVER_LINE.fullmatch(line)
        if said:
            self.log.log(logging.getLevelNamesMapping()[said[1]], said[2])
        else:
            self.log.info(line)


class ValidateOperator(BaseOperator):
    """Judges what the DAG run wrote, by its suite and by the conservation check; pushes the verdict, with ranges and counts.

    A critical verdict fails the task, so that `publish` does not run, unless the spec says ``on_failure: report``. Where it says
    ``rewind``, what the run wrote is taken back first (`tidemark.rewind.reaction`); a try after that says so, and fails likewise.
    What a drain has loaded is never taken back: it lies among rows of other runs, and a rewind would have to take all of them.
    """

    template_fields: Sequence[str] = ("consumer",)
    drains = False
    """Is it a drain that is judged?"""

    def __init__(self, *, consumer: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.consumer = consumer

    @plainly
    def execute(self, context: Context) -> dict[str, Any]:
        from tidemark.airflow.connections import database_url
        from tidemark.quality import Reaction, ValidatedRun, Verdict, reaction, validate

        logging.getLogger("great_expectations").setLevel(logging.WARNING)  # hundreds of lines about its own start
        spec = spec_of(self.consumer)
        suite = project.expectations() / f"{spec.validation.suite}.json" if spec.validation else None
        ti = context["ti"]
        run, sink = ValidatedRun(ti.dag_id, ti.run_id), spec.sink
        verdict = validate(database_url(spec), run, group=spec.group, table=sink.table, suite=suite, upsert=bool(sink.key))
        for result in verdict.results:
            level = logging.INFO if result.success else logging.WARNING
            self.log.log(level, "%s %s [%s] %s", "pass" if result.success else "FAIL", result.number, result.severity, result.text)
        failing = [result.text for result in verdict.results if not result.success]
        if verdict.validation_id is None and reaction(Verdict.CRITICAL, spec.validation, may_rewind=not self.drains) is Reaction.REWIND:
            self._require_not_taken_back(spec, run)
        reacts = reaction(verdict.verdict, spec.validation, may_rewind=not self.drains)
        if reacts is not Reaction.PUBLISH:
            text = f"validation {verdict.validation_id} of {spec.name} is critical; nothing is published: {'; '.join(failing)[:2000]}"
            raise AirflowFailException(f"{text}. {self._take_back(spec, run, verdict)}" if reacts is Reaction.REWIND else text)
        return verdict.as_json()

    def _take_back(self, spec: ConsumerSpec, run: Any, verdict: Any) -> str:
        """What ``on_failure: rewind`` has come to. An outage is raised, so that Airflow tries again."""
        from tidemark.airflow.connections import resolve
        from tidemark.db import session
        from tidemark.kafka.cluster import Cluster
        from tidemark.rewind.reaction import take_back

        connections = resolve(spec)
        with session(connections.database_url, application="tidemark rewind") as connection:
            try:
                return f"By on_failure: rewind, {take_back(connection, Cluster(connections.kafka), spec, run, verdict)}."
            except Refused as error:
                return f"The rewind of on_failure: rewind was refused, the rows stay: {error}"

    def _require_not_taken_back(self, spec: ConsumerSpec, run: Any) -> None:
        """A run that wrote nothing has passed; not so one whose rows its failed validation has taken back in an earlier try."""
        from tidemark.airflow.connections import database_url
        from tidemark.db import session
        from tidemark.rewind.reaction import taken_back

        with session(database_url(spec)) as connection:
            rewind_id = taken_back(connection, spec.group, run)
        if rewind_id is not None:
            raise AirflowFailException(
                f"what this run of {spec.name} wrote was critical, and rewind {rewind_id} has taken it out; nothing is published"
            )


class PublishOperator(BaseOperator):
    """Tells whoever waits for the sink that there is more in it: one asset event with ranges, counts and verdict.

    Skipped if the run wrote nothing. ``asset`` must be among the task's outlets.
    """

    def __init__(self, *, asset: Asset, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.asset = asset

    def execute(self, context: Context) -> None:
        context["outlet_events"][self.asset].extra = announcement(context)


def announcement(context: Context) -> dict[str, Any]:
    """What the event says of the run, or of the mapped task's part of it. Skips the task if nothing is new in the sink."""
    ti = context["ti"]
    verdict = ti.xcom_pull(task_ids="validate", map_indexes=ti.map_index)
    if not verdict["ranges"]:
        raise AirflowSkipException("the run committed nothing to the sink, so there is nothing to tell")
    return {name: verdict[name] for name in ("group", "verdict", "validation_id", "ranges", "counts")}


class _Progress:
    """A line in the log now and then while a run goes on."""

    def __init__(self, log: Any) -> None:
        self._log = log
        self._said = 0.0
        self._records = -1

    def __call__(self, seen: Any) -> None:
        import time

        if seen.planned and seen.records != self._records and time.monotonic() - self._said >= PROGRESS_EVERY_S:
            self._said, self._records = time.monotonic(), seen.records
            self._log.info("progress attempt=%s committed=%s of=%s", seen.attempt_id, seen.records, seen.total)


def spec_of(name: str) -> ConsumerSpec:
    """The consumer's file, read when the task runs."""
    return find_consumer(name, project.consumers())


def _identity(context: Context) -> Any:
    from tidemark.offsets.store import TaskIdentity

    ti = context["ti"]
    return TaskIdentity(ti.dag_id, ti.run_id, ti.task_id, ti.map_index if ti.map_index is not None else -1, ti.try_number)

"""What the tasks of the DAG ``rewind`` do."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Never

from airflow.sdk import Asset, Context
from rich.console import Console, RenderableType

from tidemark import quality
from tidemark.airflow import connections
from tidemark.airflow.approvals.review import Answer, Question, Task
from tidemark.airflow.approvals.rewind_form import consumer_names, read_form
from tidemark.airflow.dags.rewind import REWOUND
from tidemark.airflow.operators import spec_of
from tidemark.airflow.version_compat import AirflowFailException, AirflowSkipException
from tidemark.db import transaction
from tidemark.kafka.cluster import Cluster
from tidemark.profiles import Profile
from tidemark.rewind import beside, plan_text, store, verify
from tidemark.rewind import plan as plans
from tidemark.rewind.apply import StalePlan, catch_up_and_swap
from tidemark.rewind.apply import apply as apply_plan
from tidemark.rewind.backfill import unfinished
from tidemark.rewind.plan_model import Plan, RewindState, Undo
from tidemark.roles import require
from tidemark.spec import ConsumerSpec, RunMode
from tidemark.spec.model import Approval
from tidemark.text.wording import escaped

NOBODY, STALE = "nobody (no answer in time)", "nobody (the plan was stale)"
"""Stored as the rejecter of a plan that nobody answered, or that was approved too late."""
WIDTH = 120
"""Width of the plan's table in a log, in characters."""


def stored(task: Task) -> tuple[Plan, Sequence[ConsumerSpec]]:
    """Returns the run's plan in its current state, and the consumers that the form names. Raises `AirflowFailException` if the run has no
    plan, or one with other consumers."""
    specs = [spec_of(name) for name in consumer_names(task.params, task.own)]
    with task.session(specs[0]) as connection:
        plan = store.of_run(connection, **task.run)
    if plan is None:
        raise AirflowFailException(f"Run {task.run['run_id']} has no plan. Nothing was changed; clear the task `plan`.")
    if unnamed := {group.consumer for group in plan.groups} - {spec.name for spec in specs}:
        others = ", ".join(sorted(unnamed))
        raise AirflowFailException(
            f"Rewind {plan.rewind_id} also includes {others}, which this run's form does not name. Nothing was changed."
        )
    return plan, specs


def plan(task: Task) -> int:
    request = read_form(task.params, task.conf, task.own, by=task.requester, **task.run)
    with task.session(request.consumers[0]) as connection:
        require(connection, Profile.REWINDER)
        plan = store.of_run(connection, **task.run) or plans.plan(connection, _cluster_of, request)
    _log_table(task, plan_text.table(plan))
    return plan.rewind_id


def question(task: Task) -> Question | None:
    """The approval is required if the file of one of the consumers says so. The answer may come until the plan expires. A rewind beside
    asks before its swap (`swap_question`)."""
    plan, specs = stored(task)
    if plan.state is not RewindState.PLANNED or plan.beside or not _needs_approval(specs):
        return None
    within = plan.expires_at - datetime.now(UTC)
    if within <= timedelta(0):
        _reject(task, plan, specs, NOBODY)
    _log_table(task, plan_text.table(plan))
    return _question(task, plan, specs, "Rewind {} of {}?", plan_text.markdown(plan), within)


def _needs_approval(specs: Sequence[ConsumerSpec]) -> bool:
    return any(spec.rewind.approval is Approval.REQUIRED for spec in specs)


def _question(task: Task, plan: Plan, specs: Sequence[ConsumerSpec], subject: str, body: str, within: timedelta) -> Question:
    subject = subject.format(plan.rewind_id, escaped(", ".join(spec.name for spec in specs)))
    if not all(spec.rewind.own for spec in specs):
        who = escaped(task.requester)
        subject += f" Not by {who}"
        body = f"**{who} requested this rewind, so someone else must approve it.**\n\n{body}"
    return Question(subject, body, task.identity(plan.rewind_id, plan.digest), within)


def apply(task: Task, answer: Answer | None) -> list[str]:
    """Stores a rejected or stale plan as rejected. Returns the names of the consumers to run now.

    A retry after a committed try finds the rewind applied, logs that, and succeeds.
    """
    plan, specs = stored(task)
    if answer is not None:
        answer.require_about(task.identity(plan.rewind_id, plan.digest))
        if not answer.approved:
            _reject(task, plan, specs, answer.by or NOBODY)
        if answer.is_of(task.requester) and not all(spec.rewind.own for spec in specs):
            _store_rejected(task, plan, specs, f"{answer.by} (may not approve their own)")
            raise AirflowFailException(
                f"Rewind {plan.rewind_id} was approved by {answer.by}, who also requested it; the consumer's file says rewind: "
                "{own: false}. Nothing was changed, and the plan is rejected. Start a new run, and have someone else approve it."
            )
    with task.session(specs[0]) as connection:
        try:
            approved_by = None if answer is None else answer.by
            result = apply_plan(connection, _cluster_of, spec_of, plan.rewind_id, by=task.requester, approved_by=approved_by)
        except StalePlan:
            _store_rejected(task, plan, specs, STALE)
            raise
    if result.already:
        task.log.info("rewind %s was already applied at %s; nothing was changed now", plan.rewind_id, result.plan.applied_at)
    _log_table(task, plan_text.table(result.plan))
    if result.plan.beside:
        return []  # the groups stay where they are
    _emit_events(task.context, result.plan)
    if not task.params["consume"]:
        return []
    return [spec.name for spec in specs if spec.run is not RunMode.CONTINUOUS]  # continuous consumers keep reading by themselves


def _reject(task: Task, plan: Plan, specs: Sequence[ConsumerSpec], by: str) -> Never:
    _store_rejected(task, plan, specs, by)
    raise AirflowSkipException(f"rewind {plan.rewind_id} was rejected by {by}; nothing was changed")


def _store_rejected(task: Task, plan: Plan, specs: Sequence[ConsumerSpec], by: str) -> None:
    with task.session(specs[0]) as connection:
        store.reject(connection, plan.rewind_id, by=by)


def require_applied(task: Task, consumer: str) -> int:
    """Returns the rewind's id. Raises `AirflowFailException` unless the rewind is applied and includes this consumer."""
    plan, specs = stored(task)
    if plan.state is not RewindState.APPLIED or consumer not in {spec.name for spec in specs}:
        raise AirflowFailException(f"Rewind {plan.rewind_id} is {plan.state} and does not start a run of {consumer}.")
    return plan.rewind_id


def backfill(task: Task, consume: Callable[[ConsumerSpec, int], dict[str, Any]]) -> dict[str, Any]:
    """Calls ``consume`` with each consumer and the rewind's id, until all records that it skipped are read, and validates them. Returns the
    counts by consumer."""
    plan, specs = stored(task)
    if plan.state is not RewindState.APPLIED or not plan.backfill:
        raise AirflowSkipException("there is nothing to backfill")
    counts = {}
    for spec in specs:
        with task.session(spec) as connection, transaction(connection) as cur:
            has_records_left = plan.rewind_id in unfinished(cur, spec.group)
        if has_records_left:
            task.log.info("backfilling consumer=%s rewind=%s", spec.name, plan.rewind_id)
            counts[spec.name] = consume(spec, plan.rewind_id)
        _validate(task, spec)
    return counts


def _validate(task: Task, spec: ConsumerSpec) -> None:
    """Validates the rows that all tries of this task have committed, as `validate` does in the consumer's DAG. A critical verdict fails
    the task; the rows stay."""
    run = quality.ValidatedRun(**task.run)
    suites = quality.suite_files(spec)
    verdict = quality.validate(connections.database_url(spec), run, group=spec.group, suites=suites, upsert=spec.upserts)
    failing = _log_failing(task, spec, verdict)
    if quality.reaction(verdict.verdict, spec.validation) is not quality.Reaction.PUBLISH:
        raise AirflowFailException(f"validation of the backfill of {spec.name} is critical; the rows stay: {failing}")


def _log_failing(task: Task, spec: ConsumerSpec, report: quality.ValidationReport) -> str:
    failing = "; ".join(result.text for result in report.results if not result.success)
    task.log.info("validated consumer=%s verdict=%s failing=%s", spec.name, report.verdict, failing or "nothing")
    return failing[:2000]


def replay(task: Task, consume: Callable[[ConsumerSpec, int], dict[str, Any]]) -> dict[str, dict[str, int]]:
    """Calls ``consume`` with each consumer and the rewind's id, validates what it has read beside, and compares it with the live rows.
    Returns the counts by consumer."""
    plan, specs = stored(task)
    if plan.state is not RewindState.BESIDE:
        raise AirflowSkipException("there is no replay beside to read")
    _read_beside(task, plan, specs, consume)
    comparisons = _comparisons(task, plan, specs)
    _log_table(task, plan_text.verified_table(comparisons))
    return _counts(comparisons)


def _read_beside(task: Task, plan: Plan, specs: Sequence[ConsumerSpec], consume: Callable[[ConsumerSpec, int], dict[str, Any]]) -> None:
    for spec in specs:
        consume(spec, plan.rewind_id)
        _validate_replay(task, plan, spec, specs)


def _validate_replay(task: Task, plan: Plan, spec: ConsumerSpec, specs: Sequence[ConsumerSpec]) -> None:
    """Validates what is read beside and was not judged, or was critical. A critical verdict fails the task; the replay stays."""
    with task.session(spec) as connection, transaction(connection) as cur:
        side = beside.find(cur, spec.group, plan.rewind_id)
    for report in beside.validate_replay(connections.database_url(spec), spec, side):
        failing = _log_failing(task, spec, report)
        if quality.reaction(report.verdict, spec.validation) is not quality.Reaction.PUBLISH:
            or_swap = "" if _needs_approval(specs) else f", or swap it all the same: tidemark rewind swap {plan.rewind_id}"
            raise AirflowFailException(
                f"Validation of the replay of {spec.name} is critical; nothing was swapped: {failing}. If the suite is wrong, correct it "
                f"and clear this task. Otherwise discard the replay: tidemark rewind discard {plan.rewind_id}{or_swap}"
            )


def _comparisons(task: Task, plan: Plan, specs: Sequence[ConsumerSpec]) -> list[verify.Verified]:
    with task.session(specs[0]) as connection:
        return verify.verify(connection, plan.rewind_id, {spec.name: spec.keys for spec in specs})


def _counts(comparisons: Sequence[verify.Verified]) -> dict[str, dict[str, int]]:
    names = ("equal", "changed", "gone", "new")
    return {comparison.consumer: {name: getattr(comparison, name) for name in names} for comparison in comparisons}


def swap_question(task: Task) -> Question | None:
    """The question before the swap of a replay beside, with what the swap would change. The answer may come until the replay expires."""
    plan, specs = stored(task)
    if plan.state is not RewindState.BESIDE or plan.transform is not None:
        raise AirflowSkipException("there is no replay beside to swap")
    if not _needs_approval(specs) or plan.decided_by is not None:
        return None
    assert plan.started_at is not None
    within = plan.started_at + beside.KEEP - datetime.now(UTC)
    if within <= timedelta(0):
        _discard(task, plan, specs, NOBODY)
    body = f"{plan_text.compared_markdown(_comparisons(task, plan, specs))}\n\n{plan_text.markdown(plan)}"
    return _question(task, plan, specs, "Swap the replay of rewind {} of {}?", body, within)


def decide_swap(task: Task, answer: Answer | None) -> None:
    """Stores who approved the swap. Discards a rejected replay."""
    plan, specs = stored(task)
    if answer is None:
        return
    answer.require_about(task.identity(plan.rewind_id, plan.digest))
    if not answer.approved:
        _discard(task, plan, specs, answer.by or NOBODY)
    if answer.is_of(task.requester) and not all(spec.rewind.own for spec in specs):
        raise AirflowFailException(
            f"The swap of rewind {plan.rewind_id} was approved by {answer.by}, who also requested it; the consumer's file says rewind: "
            "{own: false}. Nothing was changed. Clear this task, and have someone else approve it."
        )
    with task.session(specs[0]) as connection:
        store.approve(connection, plan.rewind_id, by=str(answer.by))


def _discard(task: Task, plan: Plan, specs: Sequence[ConsumerSpec], by: str) -> Never:
    with task.session(specs[0]) as connection:
        beside.discard(connection, plan.rewind_id, by=by)
    raise AirflowSkipException(f"the replay of rewind {plan.rewind_id} was rejected by {by} and discarded; no row was changed")


def swap(task: Task, consume: Callable[[ConsumerSpec, int], dict[str, Any]]) -> dict[str, Any]:
    """Reads the last records beside and swaps the replay into the tables. First validates what earlier tries have read. A retry after a
    committed try finds the rewind applied."""
    plan, specs = stored(task)
    if not plan.beside or plan.transform is not None or plan.state not in (RewindState.BESIDE, RewindState.APPLIED):
        raise AirflowSkipException("there is no replay beside to swap")
    if _needs_approval(specs) and plan.decided_by is None:
        raise AirflowFailException(f"The swap of rewind {plan.rewind_id} was not approved. Nothing was changed; clear the task `approve`.")
    if plan.state is RewindState.BESIDE:
        for spec in specs:
            _validate_replay(task, plan, spec, specs)

    def read_on() -> None:
        _read_beside(task, plan, specs, consume)

    with task.session(specs[0]) as connection:
        result = catch_up_and_swap(connection, _cluster_of, spec_of, plan.rewind_id, read_on=read_on, by=task.requester)
    if result.already:
        task.log.info("rewind %s was already swapped at %s; nothing was changed now", plan.rewind_id, result.plan.applied_at)
    _log_table(task, plan_text.table(result.plan))
    _emit_events(task.context, result.plan)
    return {"rewind": plan.rewind_id}


def compare(task: Task) -> dict[str, dict[str, int]] | None:
    """Returns how many rows are equal, changed, gone and new, by consumer. None if not everything is read again yet."""
    plan, specs = stored(task)
    if plan.state is not RewindState.APPLIED or plan.beside or isinstance(plan.scenario, Undo) or not task.params["consume"]:
        raise AirflowSkipException("there is nothing to compare")
    comparisons = _comparisons(task, plan, specs)
    left = sum(comparison.left for comparison in comparisons)
    if left:
        task.log.info("still to be read again: %s offsets", left)
        return None
    _log_table(task, plan_text.verified_table(comparisons))
    return _counts(comparisons)


def _emit_events(context: Context, plan: Plan) -> None:
    """Emits an asset event for each sink, with the changed ranges and the keys of a run's event. A later try emits it again, with the same
    ``rewind``."""
    for group in plan.groups:
        changed = [part for part in group.partitions if part.sink_rows or (plan.undo_of is not None and part.old != part.new)]
        if changed:
            ranges = {
                str(part.partition): [[part.new if part.superseded_from is None else part.superseded_from, max(part.old, part.new)]]
                for part in changed
            }
            counts = {name: sum(getattr(part, name) for part in changed) for name in ("sink_rows", "failed_records")}
            extra: dict[str, Any] = {"group": group.group, "verdict": None, "validation_id": None, "ranges": ranges, "counts": counts}
            extra |= {"rewind": plan.rewind_id, "undo_of": plan.undo_of}
            for table in group.tables:
                context["outlet_events"][REWOUND].add(Asset(name=table), extra=extra)


def _cluster_of(spec: ConsumerSpec) -> Cluster:
    return Cluster(connections.kafka(spec))


def _log_table(task: Task, table: RenderableType) -> None:
    text = io.StringIO()
    Console(file=text, width=WIDTH, color_system=None).print(table)
    task.log_lines(line.rstrip() for line in text.getvalue().splitlines())

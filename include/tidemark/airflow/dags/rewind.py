"""The DAG ``rewind``, and ``rewind__<consumer>`` for consumers with ``access``: plan, apply, consume, backfill, verify.

    plan     checks the form, also for REST clients; stores a plan and logs it
    apply    asks for approval if one of the consumers requires it; applies an approved plan in one transaction.
             A plan that was rejected, or not answered in time, is stored as REJECTED
    consume  starts a run of each consumer, if requested; continuous consumers need none
    backfill reads skipped records into the same tables, if requested, alongside the consumers' own runs
    verify   waits until everything is read again, and compares the rows taken out with the rows there now

A run has one plan, which its tasks look up by the run's id. They do not rely on XComs, which users can write. Every task can be retried:
`plan` keeps an existing plan, and no plan is applied twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Never

from airflow.sdk import DAG, Asset, AssetAlias, BaseOperator, BaseSensorOperator, Context, PokeReturnValue
from airflow.sdk.exceptions import AirflowFailException, AirflowSkipException

from tidemark.airflow.approvals.form import Answer, ApprovalOperator, Question, manual_dags, manual_only, own_consumer, requester, start_run
from tidemark.airflow.approvals.rewind_form import consumer_names, form, read_form
from tidemark.airflow.dags.consume import CONSUME, REWIND, dag_id, retrying
from tidemark.airflow.operators import ConsumeOperator, refusals_fail, spec_of
from tidemark.spec import ConsumerSpec, RunMode
from tidemark.spec.model import Approval

if TYPE_CHECKING:
    from rich.console import RenderableType

    from tidemark.kafka.cluster import Cluster
    from tidemark.rewind.plan_model import Plan

NOBODY, STALE = "nobody (no answer in time)", "nobody (the plan was stale)"
"""Stored as the rejecter of a plan that nobody answered, or that was approved too late."""
REWOUND = AssetAlias("tidemark_rewound")
"""Alias for the sinks of the rewound consumers, which are only known during the run."""
VERIFY_EVERY_S, VERIFY_LIMIT_S = 10.0, 86_400.0
"""No backoff: its first intervals are about a second, and Airflow 3.3 loses a task rescheduled while its last process is still ending."""
WIDTH = 120
"""Width of the plan's table in a log, in characters."""


def rewind_dags() -> dict[str, DAG]:
    """The DAGs by id: ``rewind`` for all consumers, and ``rewind__<consumer>`` for each with ``access``. In a task, only its DAG."""
    return manual_dags(REWIND, _dag)


def _dag(good: Sequence[ConsumerSpec], own: str | None, **more: Any) -> DAG:
    """Builds the DAG whose form offers these consumers, or the DAG of the consumer ``own``."""
    common: dict[str, Any] = {"owner": "tidemark", **retrying()}
    description = "Move a running consumer group to any offset, together with its rows. Reviewed, and can be undone."
    with DAG(schedule=None, **manual_only(form(good, own), "rewind", description=description, doc_md=_DOC, **more)) as dag:
        plan = PlanRewindOperator(task_id="plan", doc_md="Resolves the request to offsets and stores the plan. Changes nothing.", **common)
        apply = ApplyRewindOperator(
            task_id="apply",
            outlets=[REWOUND],
            doc_md="Asks for approval, if required; then moves the offsets and takes the superseded rows out, in one transaction.",
            **common,
        )
        consume = StartConsumerOperator.partial(
            task_id="consume", map_index_template="{{ task.consumer }}", doc_md="Starts a run that reads the rewound range.", **common
        ).expand(consumer=apply.output)
        verify = VerifyRewindOperator(
            task_id="verify",
            doc_md="Waits until everything is read again, and logs which rows have changed.",
            trigger_rule="none_failed",
            **common,
        )
        backfill = BackfillRewindOperator(task_id="backfill", doc_md="Reads the skipped records, beside the consumers' own runs.", **common)
        plan >> apply >> consume >> verify
        apply >> backfill
    return dag


class PlanRewindOperator(BaseOperator):
    """Checks the form and stores the plan. Pushes the plan's number, for information only. A run that has a plan keeps it."""

    @refusals_fail
    def execute(self, context: Context) -> int:
        from tidemark.airflow.connections import database_url
        from tidemark.db import session
        from tidemark.profiles import Profile
        from tidemark.rewind.plan import PlanRequest, plan
        from tidemark.rewind.store import of_run
        from tidemark.roles import require

        run = context["dag_run"]
        request = read_form(context["params"], run.conf or {}, own_consumer(context, REWIND))
        with session(database_url(request.specs[0])) as connection:
            require(connection, Profile.REWINDER)
            stored_plan = of_run(connection, run.dag_id, run.run_id) or plan(
                connection,
                _cluster_of,
                PlanRequest(
                    request.specs,
                    request.scope,
                    request.scenario,
                    reason=request.reason,
                    by=requester(context),
                    allow_loss=request.allow_loss,
                    backfill=request.backfill,
                    expires_in=request.expires_in,
                    dag_id=run.dag_id,
                    run_id=run.run_id,
                ),
            )
        _log_plan(self.log, stored_plan)
        return stored_plan.rewind_id


class ApplyRewindOperator(ApprovalOperator):
    """Asks for approval if a consumer of the plan requires it, and applies an approved plan. Waits for the answer until the plan expires.
    A rejected or stale plan is stored as rejected. Pushes the names of the consumers to run now.

    A retry after a committed try finds the rewind applied, logs that, and succeeds.
    """

    @refusals_fail
    def execute(self, context: Context) -> list[str]:
        from tidemark.rewind.plan_model import RewindState
        from tidemark.rewind.plan_text import markdown
        from tidemark.text.wording import escaped

        rewind, specs = _stored(context)
        if rewind.state is RewindState.PLANNED and any(spec.rewind.approval is Approval.REQUIRED for spec in specs):
            within = rewind.expires_at - datetime.now(UTC)
            if within <= timedelta(0):
                return self._reject(specs, rewind, NOBODY)
            _log_plan(self.log, rewind)
            subject, body = f"Rewind {rewind.rewind_id} of {escaped(', '.join(spec.name for spec in specs))}?", markdown(rewind)
            if not all(spec.rewind.own for spec in specs):
                who = escaped(requester(context))
                subject += f" Not by {who}"
                body = f"**{who} requested this rewind, so someone else must approve it.**\n\n{body}"
            self.ask(context, Question(subject, body, _identity(rewind), within))
        return self._apply(context, rewind, specs, approved_by=None)

    @refusals_fail
    def answered(self, context: Context, plan: str, answer: Answer) -> list[str]:
        rewind, specs = _stored(context)
        identity = _identity(rewind)
        if plan != identity:
            raise AirflowFailException(
                f"The answer was about {plan}, but this run's plan is {identity}. Nothing was changed; clear this task to ask again."
            )
        if not answer.approved:
            return self._reject(specs, rewind, answer.by or NOBODY)
        if answer.is_of(requester(context)) and not all(spec.rewind.own for spec in specs):
            self._store_rejected(specs, rewind, f"{answer.by} (may not approve their own)")
            raise AirflowFailException(
                f"Rewind {rewind.rewind_id} was approved by {answer.by}, who also requested it; the consumer's file says rewind: "
                "{own: false}. Nothing was changed, and the plan is rejected. Start a new run, and have someone else approve it."
            )
        return self._apply(context, rewind, specs, approved_by=answer.by)

    def _apply(self, context: Context, rewind: Plan, specs: Sequence[ConsumerSpec], *, approved_by: str | None) -> list[str]:
        from tidemark.airflow.connections import database_url
        from tidemark.db import session
        from tidemark.rewind.apply import StalePlan, apply

        with session(database_url(specs[0])) as connection:
            try:
                result = apply(connection, _cluster_of, spec_of, rewind.rewind_id, by=requester(context), approved_by=approved_by)
            except StalePlan:
                self._store_rejected(specs, rewind, STALE)
                raise
        if result.already:
            self.log.info("rewind %s was already applied at %s; nothing was changed now", rewind.rewind_id, result.plan.applied_at)
        _log_plan(self.log, result.plan)
        _emit_events(context, result.plan)
        if not context["params"]["consume"]:
            return []
        return [spec.name for spec in specs if spec.run is not RunMode.CONTINUOUS]  # continuous consumers keep reading by themselves

    def _reject(self, specs: Sequence[ConsumerSpec], rewind: Plan, by: str) -> Never:
        self._store_rejected(specs, rewind, by)
        raise AirflowSkipException(f"rewind {rewind.rewind_id} was rejected by {by}; nothing was changed")

    def _store_rejected(self, specs: Sequence[ConsumerSpec], rewind: Plan, by: str) -> None:
        from tidemark.airflow.connections import database_url
        from tidemark.db import session
        from tidemark.rewind.store import reject

        with session(database_url(specs[0])) as connection:
            reject(connection, rewind.rewind_id, by=by)


class StartConsumerOperator(BaseOperator):
    """Starts a run ``rewind__<id>`` of a consumer's DAG and does not wait for it. Skipped if that run already exists.

    The consumer's name comes from an XCom, so it is checked: the rewind must be applied and must include this consumer.
    """

    template_fields = ("consumer",)

    def __init__(self, *, consumer: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.consumer = consumer

    @refusals_fail
    def execute(self, context: Context) -> None:
        from tidemark.rewind.plan_model import RewindState

        rewind, specs = _stored(context)
        if rewind.state is not RewindState.APPLIED or self.consumer not in {spec.name for spec in specs}:
            raise AirflowFailException(f"Rewind {rewind.rewind_id} is {rewind.state} and does not start a run of {self.consumer}.")
        raise start_run(dag_id(CONSUME, self.consumer), f"rewind__{rewind.rewind_id}")


class BackfillRewindOperator(ConsumeOperator):
    """Reads the records that the rewind skipped, one consumer after the other, and validates them. Pushes the counts by consumer.

    Runs alongside the consumers' own runs, so that a long backfill holds up nothing. A retry continues where the last try stopped.
    Skipped if no backfill was requested or the rewind was not applied.
    """

    template_fields: Sequence[str] = ()

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(consumer="", **kwargs)

    def execute(self, context: Context) -> dict[str, Any]:
        from tidemark.airflow.connections import database_url
        from tidemark.db import session, transaction
        from tidemark.rewind.backfill import unfinished
        from tidemark.rewind.plan_model import RewindState

        rewind, specs = _stored(context)
        if rewind.state is not RewindState.APPLIED or not rewind.backfill:
            raise AirflowSkipException("there is nothing to backfill")
        counts = {}
        for spec in specs:
            with session(database_url(spec)) as connection, transaction(connection) as cur:
                has_records_left = rewind.rewind_id in unfinished(cur, spec.group)
            if has_records_left:
                self.log.info("backfilling consumer=%s rewind=%s", spec.name, rewind.rewind_id)
                counts[spec.name] = self._consume(context, spec, backfill_of=rewind.rewind_id)
            self._validate(spec, context["ti"])
        return counts

    def _validate(self, spec: ConsumerSpec, ti: Any) -> None:
        """Validates the rows that all tries of this task have committed, as `validate` does in the consumer's DAG. A critical verdict fails
        the task; the rows stay."""
        from tidemark import quality
        from tidemark.airflow.connections import database_url

        run = quality.ValidatedRun(ti.dag_id, ti.run_id)
        verdict = quality.validate(database_url(spec), run, group=spec.group, suites=quality.suite_files(spec), upsert=spec.upserts)
        failing = [result.text for result in verdict.results if not result.success]
        self.log.info("validated consumer=%s verdict=%s failing=%s", spec.name, verdict.verdict, "; ".join(failing) or "nothing")
        if quality.reaction(verdict.verdict, spec.validation) is not quality.Reaction.PUBLISH:
            raise AirflowFailException(f"validation of the backfill of {spec.name} is critical; the rows stay: {'; '.join(failing)[:2000]}")


class VerifyRewindOperator(BaseSensorOperator):
    """Waits until the groups are back at their old positions, and compares the rows. Pushes how many are equal, changed, gone and new.

    Skipped if nothing was moved, if the form did not request a run of the consumers, or if the scenario is an undo.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(mode="reschedule", poke_interval=VERIFY_EVERY_S, timeout=VERIFY_LIMIT_S, soft_fail=True, **kwargs)

    def poke(self, context: Context) -> PokeReturnValue:
        from tidemark.airflow.connections import database_url
        from tidemark.db import session
        from tidemark.rewind.plan_model import RewindState, Undo
        from tidemark.rewind.plan_text import verified_table
        from tidemark.rewind.verify import verify

        rewind, specs = _stored(context)
        if rewind.state is not RewindState.APPLIED or isinstance(rewind.scenario, Undo) or not context["params"]["consume"]:
            raise AirflowSkipException("there is nothing to compare")
        with session(database_url(specs[0])) as connection:
            comparisons = verify(connection, rewind.rewind_id, {spec.name: spec.keys for spec in specs})
        left = sum(comparison.left for comparison in comparisons)
        if left:
            self.log.info("still to be read again: %s offsets", left)
            return PokeReturnValue(is_done=False)
        _log_table(self.log, verified_table(comparisons))
        return PokeReturnValue(
            is_done=True,
            xcom_value={
                comparison.consumer: {name: getattr(comparison, name) for name in ("equal", "changed", "gone", "new")}
                for comparison in comparisons
            },
        )


def _stored(context: Context) -> tuple[Plan, list[ConsumerSpec]]:
    """Returns this run's plan in its current state, and the consumers that the form names."""
    from tidemark.airflow.connections import database_url
    from tidemark.db import session
    from tidemark.rewind.store import of_run

    run = context["dag_run"]
    specs = [spec_of(name) for name in consumer_names(context["params"], own_consumer(context, REWIND))]
    with session(database_url(specs[0])) as connection:
        rewind = of_run(connection, run.dag_id, run.run_id)
    if rewind is None:
        raise AirflowFailException(f"Run {run.run_id} has no plan. Nothing was changed; clear the task `plan`.")
    if unnamed := {group.consumer for group in rewind.groups} - {spec.name for spec in specs}:
        others = ", ".join(sorted(unnamed))
        raise AirflowFailException(
            f"Rewind {rewind.rewind_id} also includes {others}, which this run's form does not name. Nothing was changed."
        )
    return rewind, specs


def _identity(rewind: Plan) -> str:
    """Returns the text that identifies the plan in the question that Airflow records."""
    return f"rewind {rewind.rewind_id}, digest {rewind.digest}"


def _emit_events(context: Context, rewind: Plan) -> None:
    """Emits an asset event for each sink, with the changed ranges and the keys of a run's event. A later try emits it again, with the same
    ``rewind``."""
    for group in rewind.groups:
        changed = [part for part in group.partitions if part.sink_rows or (rewind.undo_of is not None and part.old != part.new)]
        if changed:
            ranges = {
                str(part.partition): [[part.new if part.superseded_from is None else part.superseded_from, max(part.old, part.new)]]
                for part in changed
            }
            counts = {name: sum(getattr(part, name) for part in changed) for name in ("sink_rows", "failed_records")}
            extra: dict[str, Any] = {"group": group.group, "verdict": None, "validation_id": None, "ranges": ranges, "counts": counts}
            extra |= {"rewind": rewind.rewind_id, "undo_of": rewind.undo_of}
            for table in group.tables:
                context["outlet_events"][REWOUND].add(Asset(name=table), extra=extra)


def _cluster_of(spec: ConsumerSpec) -> Cluster:
    from tidemark.airflow.connections import resolve
    from tidemark.kafka.cluster import Cluster

    return Cluster(resolve(spec).kafka)


def _log_plan(log: Any, plan: Plan) -> None:
    from tidemark.rewind.plan_text import table

    _log_table(log, table(plan))


def _log_table(log: Any, table: RenderableType) -> None:
    """Logs a table line by line."""
    import io

    from rich.console import Console

    text = io.StringIO()
    Console(file=text, width=WIDTH, color_system=None).print(table)
    for line in text.getvalue().splitlines():
        log.info("%s", line.rstrip())


_DOC = """
Moves consumer groups to any offset while they run. The rows that they wrote from that offset on are taken out of the sinks and archived,
so that the rewind can be undone (scenario `undo`).

| task | |
|---|---|
| plan | resolves the request to offsets and stores them; its log shows the plan as a table. Changes nothing |
| apply | waits for approval (*Required Actions*), then applies the plan in one transaction |
| consume | starts a run of each consumer, if requested |
| backfill | reads skipped records into the same tables, if requested, alongside the consumers' own runs |
| verify | waits until everything is read again, and logs which rows have changed |

**Approval.** No approval is needed if the files of all consumers say `rewind: {approval: none}`. With `own: false`, the requester cannot
approve the rewind. `apply` refuses a stale plan: one whose basis has changed since. A run has one plan. If you clear `apply`, it asks about
the same plan again; for another plan, start a new run.

**Events.** `apply` emits an asset event with the ranges for each sink whose rows were taken out or put back.

**Validation and retries.** The view of validated rows ends at the new position until the replay is validated. Failed records of the
rewound ranges are taken out with the rows and withdrawn from the retry topics; an undo puts them back.

`tidemark rewind list` shows all rewinds, `tidemark rewind show ID` shows one.
"""

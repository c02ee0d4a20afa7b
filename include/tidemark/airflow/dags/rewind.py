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

from tidemark.airflow.approvals.form import Answer, AskThenDo, Question, by_hand, dags_by_hand, own_consumer, requester, start_run
from tidemark.airflow.approvals.rewind_form import form, named, read_form
from tidemark.airflow.dags.consume import CONSUME, REWIND, dag_id, retrying
from tidemark.airflow.operators import ConsumeOperator, plainly, spec_of
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
    return dags_by_hand(REWIND, _dag)


def _dag(good: Sequence[ConsumerSpec], own: str | None, **by: Any) -> DAG:
    """The DAG that offers these consumers, or that is for the consumer ``own``: a form, a plan, an approval, and the move of a running
    group."""
    common: dict[str, Any] = {"owner": "tidemark", **retrying()}
    said = "Move a running consumer group to any offset, together with its rows. Reviewed, and can be undone."
    with DAG(schedule=None, **by_hand(form(good, own), "rewind", description=said, doc_md=_DOC, **by)) as dag:
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

    @plainly
    def execute(self, context: Context) -> int:
        from tidemark.airflow.connections import database_url
        from tidemark.db import session
        from tidemark.profiles import Profile
        from tidemark.rewind.plan import plan
        from tidemark.rewind.store import of_run
        from tidemark.roles import require

        run = context["dag_run"]
        asked = read_form(context["params"], run.conf or {}, own_consumer(context, REWIND))
        with session(database_url(asked.specs[0])) as connection:
            require(connection, Profile.REWINDER)
            made = of_run(connection, run.dag_id, run.run_id) or plan(
                connection,
                _cluster_of,
                asked.specs,
                asked.scope,
                asked.scenario,
                reason=asked.reason,
                by=requester(context),
                allow_loss=asked.allow_loss,
                backfill=asked.backfill,
                expires_in=asked.expires_in,
                dag_id=run.dag_id,
                run_id=run.run_id,
            )
        _log_plan(self.log, made)
        return made.rewind_id


class ApplyRewindOperator(AskThenDo):
    """Asks for approval if a consumer of the plan requires it, and applies an approved plan. Waits for the answer until the plan expires.
    A rejected or stale plan is stored as rejected. Pushes the names of the consumers to run now.

    A retry after a committed try finds the rewind applied, logs that, and succeeds.
    """

    @plainly
    def execute(self, context: Context) -> list[str]:
        from tidemark.rewind.plan_model import RewindState
        from tidemark.rewind.plan_text import markdown
        from tidemark.text.wording import escaped

        made, specs = _stored(context)
        if made.state is RewindState.PLANNED and any(spec.rewind.approval is Approval.REQUIRED for spec in specs):
            within = made.expires_at - datetime.now(UTC)
            if within <= timedelta(0):
                return self._reject(specs, made, NOBODY)
            _log_plan(self.log, made)
            subject, body = f"Rewind {made.rewind_id} of {escaped(', '.join(spec.name for spec in specs))}?", markdown(made)
            if not all(spec.rewind.own for spec in specs):
                who = escaped(requester(context))
                subject += f" Not by {who}"
                body = f"**{who} requested this rewind, so someone else must approve it.**\n\n{body}"
            self.ask(context, Question(subject, body, _words(made), within))
        return self._apply(context, made, specs, approved_by=None)

    @plainly
    def answered(self, context: Context, plan: str, answer: Answer) -> list[str]:
        made, specs = _stored(context)
        if plan != _words(made):
            raise AirflowFailException(
                f"The answer was about {plan}, but this run's plan is {_words(made)}. Nothing was changed; clear this task to ask again."
            )
        if not answer.approved:
            return self._reject(specs, made, answer.by or NOBODY)
        if answer.is_of(requester(context)) and not all(spec.rewind.own for spec in specs):
            self._store_rejected(specs, made, f"{answer.by} (may not approve their own)")
            raise AirflowFailException(
                f"Rewind {made.rewind_id} was approved by {answer.by}, who also requested it; the consumer's file says rewind: "
                "{own: false}. Nothing was changed, and the plan is rejected. Start a new run, and have someone else approve it."
            )
        return self._apply(context, made, specs, approved_by=answer.by)

    def _apply(self, context: Context, made: Plan, specs: Sequence[ConsumerSpec], *, approved_by: str | None) -> list[str]:
        from tidemark.airflow.connections import database_url
        from tidemark.db import session
        from tidemark.rewind.apply import StalePlan, apply

        run = context["dag_run"]
        by: dict[str, Any] = {"by": requester(context), "approved_by": approved_by, "dag_id": run.dag_id, "run_id": run.run_id}
        with session(database_url(specs[0])) as connection:
            try:
                done = apply(connection, _cluster_of, spec_of, made.rewind_id, **by)
            except StalePlan:
                self._store_rejected(specs, made, STALE)
                raise
        if done.already:
            self.log.info("rewind %s was already applied at %s; nothing was changed now", made.rewind_id, done.plan.applied_at)
        _log_plan(self.log, done.plan)
        _announce(context, done.plan)
        if not context["params"]["consume"]:
            return []
        return [spec.name for spec in specs if spec.run is not RunMode.CONTINUOUS]  # continuous consumers go on reading by themselves

    def _reject(self, specs: Sequence[ConsumerSpec], made: Plan, by: str) -> Never:
        self._store_rejected(specs, made, by)
        raise AirflowSkipException(f"rewind {made.rewind_id} was rejected by {by}; nothing was changed")

    def _store_rejected(self, specs: Sequence[ConsumerSpec], made: Plan, by: str) -> None:
        from tidemark.airflow.connections import database_url
        from tidemark.db import session
        from tidemark.rewind.store import reject

        with session(database_url(specs[0])) as connection:
            reject(connection, made.rewind_id, by=by)


class StartConsumerOperator(BaseOperator):
    """Starts a run ``rewind__<id>`` of a consumer's DAG and does not wait for it. Skipped if that run already exists.

    The consumer's name comes from an XCom, so it is checked: the rewind must be applied and must include this consumer.
    """

    template_fields = ("consumer",)

    def __init__(self, *, consumer: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.consumer = consumer

    @plainly
    def execute(self, context: Context) -> None:
        from tidemark.rewind.plan_model import RewindState

        made, specs = _stored(context)
        if made.state is not RewindState.APPLIED or self.consumer not in {spec.name for spec in specs}:
            raise AirflowFailException(f"Rewind {made.rewind_id} is {made.state} and does not start a run of {self.consumer}.")
        raise start_run(dag_id(CONSUME, self.consumer), f"rewind__{made.rewind_id}")


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

        made, specs = _stored(context)
        if made.state is not RewindState.APPLIED or not made.backfill:
            raise AirflowSkipException("there is nothing to backfill")
        done = {}
        for spec in specs:
            with session(database_url(spec)) as connection, transaction(connection) as cur:
                left = made.rewind_id in unfinished(cur, spec.group)
            if left:
                self.log.info("backfilling consumer=%s rewind=%s", spec.name, made.rewind_id)
                done[spec.name] = self._consume(context, spec, backfill_of=made.rewind_id)
            self._judge(spec, context["ti"])
        return done

    def _judge(self, spec: ConsumerSpec, ti: Any) -> None:
        """Validates everything that this task's tries have committed, as `validate` does for a run of the consumer's DAG. A critical
        verdict fails the task; the rows stay."""
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

        made, specs = _stored(context)
        if made.state is not RewindState.APPLIED or isinstance(made.scenario, Undo) or not context["params"]["consume"]:
            raise AirflowSkipException("there is nothing to compare")
        with session(database_url(specs[0])) as connection:
            found = verify(connection, made.rewind_id, {spec.name: spec.keys for spec in specs})
        left = sum(one.left for one in found)
        if left:
            self.log.info("still to be read again: %s offsets", left)
            return PokeReturnValue(is_done=False)
        _log_shown(self.log, verified_table(found))
        return PokeReturnValue(
            is_done=True,
            xcom_value={one.consumer: {name: getattr(one, name) for name in ("equal", "changed", "gone", "new")} for one in found},
        )


def _stored(context: Context) -> tuple[Plan, list[ConsumerSpec]]:
    """This run's plan in its current state, and the consumers that the form named."""
    from tidemark.airflow.connections import database_url
    from tidemark.db import session
    from tidemark.rewind.store import of_run

    run = context["dag_run"]
    specs = [spec_of(name) for name in named(context["params"], own_consumer(context, REWIND))]
    with session(database_url(specs[0])) as connection:
        made = of_run(connection, run.dag_id, run.run_id)
    if made is None:
        raise AirflowFailException(f"Run {run.run_id} has no plan. Nothing was changed; clear the task `plan`.")
    if strange := {group.consumer for group in made.groups} - {spec.name for spec in specs}:
        raise AirflowFailException(
            f"Rewind {made.rewind_id} also includes {', '.join(sorted(strange))}, which this run's form does not name. Nothing was changed."
        )
    return made, specs


def _words(made: Plan) -> str:
    """Identifies the plan in the question that Airflow records."""
    return f"rewind {made.rewind_id}, digest {made.digest}"


def _announce(context: Context, done: Plan) -> None:
    """Emits an asset event for each sink, with the ranges that changed and the same keys as a run's event. A later try emits it again, with
    the same ``rewind``."""
    for group in done.groups:
        changed = [part for part in group.partitions if part.sink_rows or (done.undo_of is not None and part.old != part.new)]
        if changed:
            ranges = {
                str(part.partition): [[part.new if part.superseded_from is None else part.superseded_from, max(part.old, part.new)]]
                for part in changed
            }
            counts = {name: sum(getattr(part, name) for part in changed) for name in ("sink_rows", "failed_records")}
            told: dict[str, Any] = {"group": group.group, "verdict": None, "validation_id": None, "ranges": ranges, "counts": counts}
            told |= {"rewind": done.rewind_id, "undo_of": done.undo_of}
            for table in group.tables:
                context["outlet_events"][REWOUND].add(Asset(name=table), extra=told)


def _cluster_of(spec: ConsumerSpec) -> Cluster:
    from tidemark.airflow.connections import resolve
    from tidemark.kafka.cluster import Cluster

    return Cluster(resolve(spec).kafka)


def _log_plan(log: Any, plan: Plan) -> None:
    from tidemark.rewind.plan_text import table

    _log_shown(log, table(plan))


def _log_shown(log: Any, shown: RenderableType) -> None:
    """Logs a table, one log line per line of it."""
    import io

    from rich.console import Console

    text = io.StringIO()
    Console(file=text, width=WIDTH, color_system=None).print(shown)
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

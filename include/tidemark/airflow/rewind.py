"""The DAG ``rewind``: plan, apply, consume, backfill, verify. Its form is checked by the DAG itself, whatever a REST client sends.

    plan     checks the form, stores a plan, shows it in the log
    apply    asks a person, who sees the plan, if one of the consumers asks for an approval; does what was approved, in one transaction.
             What was rejected, or not answered in time, is stored as REJECTED
    consume  starts a run of each consumer, if that was wished and it does not read all the time
    backfill reads what was skipped into the same tables, if that was wished, beside whatever the consumers read by themselves
    verify   waits until all is read again, and compares what was taken out with what is there now

A run has one plan, which its tasks look up by the run's id: users can write XComs, so nothing here depends on one. Every task can be
tried again: `plan` keeps the plan that there is, and one that was applied is not applied twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Never

from airflow.sdk import DAG, Asset, AssetAlias, BaseOperator, BaseSensorOperator, Context, PokeReturnValue
from airflow.sdk.exceptions import AirflowFailException, AirflowSkipException

from tidemark import project
from tidemark.airflow.dags import retrying
from tidemark.airflow.form import Answer, AskThenDo, Question, by_hand, requester, start_run
from tidemark.airflow.operators import ConsumeOperator, plainly, spec_of
from tidemark.airflow.rewind_form import form, read_form
from tidemark.spec import ConsumerSpec, RunMode
from tidemark.spec.model import Approval

if TYPE_CHECKING:
    from rich.console import RenderableType

    from tidemark.kafka.cluster import Cluster
    from tidemark.rewind.model import Plan

NOBODY, STALE = "nobody (no answer in time)", "nobody (the plan was stale)"
"""Who is stored to have rejected a plan that was not answered, or that was approved too late."""
REWOUND = AssetAlias("tidemark_rewound")
"""Stands for the sinks of the consumers that were rewound, which only the run knows."""
VERIFY_EVERY_S, VERIFY_LIMIT_S = 10.0, 86_400.0
"""No backoff: it draws first intervals of a second, and Airflow 3.3 loses a task that is rescheduled while its last process still ends."""
WIDTH = 120
"""Columns of the plan's table in a log."""


def rewind_dag() -> DAG:
    """The DAG ``rewind``: a form, a plan, an approval, and the move of a running group."""
    common: dict[str, Any] = {"owner": "tidemark", **retrying()}
    said = "Move a running consumer group to any point, with its results: reviewed, and undoable."
    with DAG(schedule=None, **by_hand("rewind", form(), "rewind", description=said, doc_md=_DOC)) as dag:
        plan = PlanRewindOperator(task_id="plan", doc_md="Resolves everything to numbers, once. Changes nothing.", **common)
        apply = ApplyRewindOperator(
            task_id="apply",
            outlets=[REWOUND],
            doc_md="Shows the plan to a person, who approves or rejects it; then moves offsets and takes superseded rows out, at once.",
            **common,
        )
        consume = StartConsumerOperator.partial(
            task_id="consume", map_index_template="{{ task.consumer }}", doc_md="Starts a run that reads what was rewound.", **common
        ).expand(consumer=apply.output)
        verify = VerifyRewindOperator(
            task_id="verify",
            doc_md="Waits until all is read again, and tells what has become another row.",
            trigger_rule="none_failed",
            **common,
        )
        backfill = BackfillRewindOperator(task_id="backfill", doc_md="Reads what was skipped, in runs of its own.", **common)
        plan >> apply >> consume >> verify
        apply >> backfill
    return dag


class PlanRewindOperator(BaseOperator):
    """Checks the form and stores the plan; pushes its number, for people to see. A run that has a plan keeps it."""

    @plainly
    def execute(self, context: Context) -> int:
        from tidemark.airflow.connections import database_url
        from tidemark.db import session
        from tidemark.rewind.plan import plan
        from tidemark.rewind.store import of_run

        run = context["dag_run"]
        asked = read_form(context["params"], run.conf or {})
        with session(database_url(asked.specs[0])) as connection:
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
    """Asks until the plan expires, where a consumer of the plan asks for an approval, and applies what was approved. Stores what was
    rejected, or was stale by then, as rejected; pushes the names of the consumers to run now.

    A try after one that had committed finds the rewind applied, says so, and succeeds.
    """

    @plainly
    def execute(self, context: Context) -> list[str]:
        from tidemark.rewind.model import RewindState
        from tidemark.rewind.show import markdown
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
                body = f"**{who} has asked for this rewind, so that somebody else has to approve it.**\n\n{body}"
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
                f"Rewind {made.rewind_id} was approved by {answer.by}, who had asked for it; the consumer's file says rewind: "
                "{own: false}. Nothing was changed, and the plan is rejected: start a new run, and let somebody else approve it."
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
            self.log.info("rewind %s was applied before, at %s; nothing was changed now", made.rewind_id, done.plan.applied_at)
        _log_plan(self.log, done.plan)
        _announce(context, done.plan)
        if not context["params"]["consume"]:
            return []
        return [spec.name for spec in specs if spec.run is not RunMode.CONTINUOUS]  # those go on reading by themselves

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
    """Starts a run ``rewind__<id>`` of a consumer's DAG and does not wait for it; skipped if it was started before.

    The name comes from an XCom: only consumers of the rewind, once it is applied.
    """

    template_fields = ("consumer",)

    def __init__(self, *, consumer: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.consumer = consumer

    @plainly
    def execute(self, context: Context) -> None:
        from tidemark.rewind.model import RewindState

        made, specs = _stored(context)
        if made.state is not RewindState.APPLIED or self.consumer not in {spec.name for spec in specs}:
            raise AirflowFailException(f"Rewind {made.rewind_id} is {made.state}, and starts no run of {self.consumer}.")
        raise start_run(f"consume__{self.consumer}", f"rewind__{made.rewind_id}")


class BackfillRewindOperator(ConsumeOperator):
    """Reads what the rewind has skipped of each consumer, one after the other, and judges the ledger; pushes the counts, by consumer.

    It is a run beside the consumer's own, so that a long one holds up nobody. A try after one that had come some way goes on from there.
    Skipped where that was not wished, or the rewind was not applied.
    """

    template_fields: Sequence[str] = ()

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(consumer="", **kwargs)

    def execute(self, context: Context) -> dict[str, Any]:
        from tidemark.airflow.connections import database_url
        from tidemark.db import session, transaction
        from tidemark.rewind.backfill import unfinished
        from tidemark.rewind.model import RewindState

        made, specs = _stored(context)
        if made.state is not RewindState.APPLIED or not made.backfill:
            raise AirflowSkipException("nothing is to be backfilled")
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
        """All that this task's tries have committed, as `validate` judges a run of the consumer's DAG. A critical verdict fails the task;
        the rows stay."""
        from tidemark import quality
        from tidemark.airflow.connections import database_url

        suite = project.expectations() / f"{spec.validation.suite}.json" if spec.validation else None
        run, sink = quality.ValidatedRun(ti.dag_id, ti.run_id), spec.sink
        verdict = quality.validate(database_url(spec), run, group=spec.group, table=sink.table, suite=suite, upsert=bool(sink.key))
        failing = [result.text for result in verdict.results if not result.success]
        self.log.info("judged consumer=%s verdict=%s failing=%s", spec.name, verdict.verdict, "; ".join(failing) or "nothing")
        if quality.reaction(verdict.verdict, spec.validation) is not quality.Reaction.PUBLISH:
            raise AirflowFailException(f"what was backfilled of {spec.name} is critical, and stays: {'; '.join(failing)[:2000]}")


class VerifyRewindOperator(BaseSensorOperator):
    """Waits until the groups are back where they were, and logs what has become of the rows; pushes how many are equal, changed, gone, new.

    Skipped where nothing was moved, nobody was asked to read it again, or an undo has put the rows back.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(mode="reschedule", poke_interval=VERIFY_EVERY_S, timeout=VERIFY_LIMIT_S, soft_fail=True, **kwargs)

    def poke(self, context: Context) -> PokeReturnValue:
        from tidemark.airflow.connections import database_url
        from tidemark.db import session
        from tidemark.rewind.model import RewindState, Undo
        from tidemark.rewind.show import verified_table
        from tidemark.rewind.verify import verify

        made, specs = _stored(context)
        if made.state is not RewindState.APPLIED or isinstance(made.scenario, Undo) or not context["params"]["consume"]:
            raise AirflowSkipException("there is nothing to compare")
        with session(database_url(specs[0])) as connection:
            found = verify(connection, made.rewind_id, {spec.name: spec.sink.key for spec in specs})
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
    """The plan of this run as it is now, and the consumers that the form named."""
    from tidemark.airflow.connections import database_url
    from tidemark.db import session
    from tidemark.rewind.store import of_run

    run = context["dag_run"]
    specs = [spec_of(name) for name in dict.fromkeys(context["params"]["consumers"])]
    with session(database_url(specs[0])) as connection:
        made = of_run(connection, run.dag_id, run.run_id)
    if made is None:
        raise AirflowFailException(f"Run {run.run_id} has no plan. Nothing was changed; clear the task plan.")
    if strange := {group.consumer for group in made.groups} - {spec.name for spec in specs}:
        raise AirflowFailException(
            f"Rewind {made.rewind_id} is also of {', '.join(sorted(strange))}, which this run was not asked for. Nothing was changed."
        )
    return made, specs


def _words(made: Plan) -> str:
    """Which plan, as a question says it and Airflow records it."""
    return f"rewind {made.rewind_id}, digest {made.digest}"


def _announce(context: Context, done: Plan) -> None:
    """Emits an event of each sink with the ranges that have changed, with the keys of a run's event. A later try emits it again; ``rewind``
    is the same then."""
    for group in done.groups:
        changed = [part for part in group.partitions if part.sink_rows or (done.undo_of is not None and part.old != part.new)]
        if changed:
            ranges = {
                str(part.partition): [[part.new if part.superseded_from is None else part.superseded_from, max(part.old, part.new)]]
                for part in changed
            }
            counts = {name: sum(getattr(part, name) for part in changed) for name in ("sink_rows", "failed_records")}
            told: dict[str, Any] = {"group": group.group, "verdict": None, "validation_id": None, "ranges": ranges, "counts": counts}
            context["outlet_events"][REWOUND].add(
                Asset(name=group.table), extra={**told, "rewind": done.rewind_id, "undo_of": done.undo_of}
            )


def _cluster_of(spec: ConsumerSpec) -> Cluster:
    from tidemark.airflow.connections import resolve
    from tidemark.kafka.cluster import Cluster

    return Cluster(resolve(spec).kafka)


def _log_plan(log: Any, plan: Plan) -> None:
    from tidemark.rewind.show import table

    _log_shown(log, table(plan))


def _log_shown(log: Any, shown: RenderableType) -> None:
    """A table, a line of the log for each of its lines."""
    import io

    from rich.console import Console

    text = io.StringIO()
    Console(file=text, width=WIDTH, color_system=None).print(shown)
    for line in text.getvalue().splitlines():
        log.info("%s", line.rstrip())


_DOC = """
Moves consumer groups to any point, while they run, with the rows that they wrote since then: these are taken out of the sinks and kept, so
that the rewind can be undone (scenario `undo`).

| task | |
|---|---|
| plan | resolves everything to numbers and stores them; its log shows the plan as a table. Changes nothing |
| apply | a person approves or rejects the plan (*Required Actions*), then it is applied in one transaction |
| consume | starts a run of each consumer, if wished |
| backfill | reads what was skipped, if wished, into the same tables, beside the consumers' own runs |
| verify | waits until all is read again, and tells which rows are others now |

**Approval.** Nobody is asked if the files of all consumers say `rewind: {approval: none}`. With `own: false`, the requester cannot
approve the rewind. `apply` refuses if what the plan was made from has changed. A run has one plan: cleared, `apply` asks about the same one
again; for another plan, start a new run.

**Events.** `apply` emits an asset event for each sink whose rows were taken out or put back, with the ranges.

**Validation and retries.** The view of validated rows ends at the new position until the replay is validated. Failed records of the
rewound ranges are taken out with the rows, and withdrawn from the retry topics; an undo puts them back.

`tidemark rewind list` shows all rewinds, `tidemark rewind show ID` one of them.
"""

"""The DAG ``rewind``: plan, approve, apply, consume, backfill, verify. Its form is checked by the DAG itself, whatever a REST client sends.

    plan     checks the form, stores a plan, shows it in the log, hands on its number
    approve  waits for a person, who sees the plan; or lets it through, if none of the consumers asks for an approval
    apply    does what was approved, in one transaction; what was rejected, or not answered in time, is stored as REJECTED
    consume  starts a run of each consumer, if that was wished and it does not read all the time
    backfill reads what was skipped into the same tables, if that was wished, beside whatever the consumers read by themselves
    verify   waits until all is read again, and compares what was taken out with what is there now

Every task can be tried again: a plan that nobody applied changes nothing, and one that was applied is not applied twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from airflow.sdk import DAG, BaseOperator, BaseSensorOperator, Context, Param, PokeReturnValue
from airflow.sdk.exceptions import AirflowFailException, AirflowSkipException

from tidemark import project
from tidemark.airflow.dags import RETRY_POLICY, form_consumers
from tidemark.airflow.form import LET_THROUGH, ApproveOperator, by_hand, refuse_unknown, requester, start_run
from tidemark.airflow.operators import ConsumeOperator, spec_of
from tidemark.rewind.moment import EXAMPLE as MOMENT
from tidemark.rewind.scenario import REASON_CHARACTERS, WORDS, Problems, check_reason, parse, parse_expiry
from tidemark.rewind.scope import Scope
from tidemark.spec import ConsumerSpec, OnFailure, Run
from tidemark.spec.model import Approval
from tidemark.spec.problem import quoted

if TYPE_CHECKING:
    from rich.console import RenderableType

    from tidemark.kafka.cluster import Cluster
    from tidemark.rewind.model import Plan, Scenario

NOBODY, STALE = "nobody (no answer in time)", "nobody (the plan was stale)"
"""Who is stored to have rejected a plan that was not answered, or that was approved too late."""
VERIFY_EVERY_S, VERIFY_LIMIT_S = 10.0, 86_400.0
"""No backoff: it draws first intervals of a second, and Airflow 3.3 loses a task that is rescheduled while its last process still ends."""
WIDTH = 120
"""Columns of the plan's table in a log."""
FIELDS = ("consumers", "scope", "scenario", "value", "zone", "offsets", "reason", "allow_loss", "expires_in", "consume", "backfill")
"""The form's keys, and those of a REST client's conf."""
ZONES = (
    "UTC",
    "Europe/Berlin",
    "Europe/London",
    "Europe/Paris",
    "America/New_York",
    "America/Chicago",
    "America/Los_Angeles",
    "America/Sao_Paulo",
    "Asia/Kolkata",
    "Asia/Singapore",
    "Asia/Tokyo",
    "Australia/Sydney",
)
"""Proposals; any zone of the tz database may be written."""

_WHAT, _WHERE, _WHY = "What to rewind", "Where to", "Why, and how"
_TEXT = ["null", "string"]


def rewind_dag() -> DAG:
    common: dict[str, Any] = {"retries": 2, "retry_policy": RETRY_POLICY, "owner": "tidemark"}
    said = "Move a running consumer group to any point, with its results: reviewed, and undoable."
    with DAG(schedule=None, **by_hand("rewind", _form(), "rewind", description=said, doc_md=_DOC)) as dag:
        plan = PlanRewindOperator(task_id="plan", doc_md="Resolves everything to numbers, once. Changes nothing.", **common)
        approve = ApproveRewindOperator(task_id="approve", doc_md="Shows the plan to a person, who approves or rejects it.", **common)
        apply = ApplyRewindOperator(task_id="apply", doc_md="Moves offsets and takes superseded rows out, in one transaction.", **common)
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
        plan >> approve >> apply >> consume >> verify
        apply >> backfill
    return dag


def _form() -> dict[str, Param]:
    """The form's fields; the same keys are those of a REST client's conf."""
    good = form_consumers()
    names = {name: f"{name}: {', '.join(spec.topics) or spec.topic_pattern} to {spec.sink.table}" for name, spec in sorted(good.items())}
    examples = "".join(f"- {word.name}: *{word.example}*\n" for word in WORDS.values() if word.value and word.name != "from-file")
    return {
        "consumers": Param(
            type="array",
            items={"type": "string"},
            minItems=1,
            examples=list(names),
            values_display=names,
            title="Consumers",
            description_md="Several are moved together, or none of them.",
            section=_WHAT,
        ),
        "scope": Param(
            "all",
            type="string",
            title="Topics and partitions",
            description_md="*all*, or *flights*, or *flights:0,1,5-9*; several with blanks between.",
            section=_WHAT,
        ),
        "scenario": Param(
            type="string",
            enum=list(WORDS),
            values_display={word.name: f"{word.name}: {word.does}" for word in WORDS.values()},
            title="Scenario",
            description_md="Most of them need a value, in the next field.",
            section=_WHERE,
        ),
        "value": Param(
            None,
            type=_TEXT,
            title="Value",
            description_md=f"An example of each:\n\n{examples}\nA time may have an offset, *{MOMENT}*; if not, name its zone below.",
            section=_WHERE,
        ),
        "zone": Param(
            None,
            type=_TEXT,
            examples=list(ZONES),
            title="Zone of a local time",
            description_md="Only for *to-datetime*: *Europe/Berlin*, or any other name of the tz database.",
            section=_WHERE,
        ),
        "offsets": Param(
            None,
            type=_TEXT,
            format="multiline",
            title="Offsets",
            description_md="Only for *from-file*: paste the file. Each line is *topic,partition,offset*, as *kafka-consumer-groups "
            "--export* writes it; or it is the JSON of a plan.",
            section=_WHERE,
        ),
        "reason": Param(
            type="string",
            minLength=REASON_CHARACTERS,
            title="Reason",
            description_md=f"At least {REASON_CHARACTERS} characters; kept for ever: *transform of Tuesday doubled the fares*.",
            section=_WHY,
        ),
        "allow_loss": Param(
            False,
            type="boolean",
            title="Allow loss",
            description_md="Where Kafka no longer has the target: go on at the start of the log, and store what is missing as lost.",
            section=_WHY,
        ),
        "expires_in": Param(
            "4h",
            type="string",
            title="Expires in",
            description_md="How long the plan waits for an approval, and may be applied: *30m*, *4h*, *2d*.",
            section=_WHY,
        ),
        "consume": Param(
            True, type="boolean", title="Consume afterwards", description_md="Start a run of each consumer when it is done.", section=_WHY
        ),
        "backfill": Param(
            False,
            type="boolean",
            title="Backfill",
            description_md="Where the rewind goes forward: read what it skips as well, later and into the same table, in a run of its own.",
            section=_WHY,
        ),
    }


@dataclass(frozen=True, slots=True)
class Asked:
    """What the form says."""

    specs: tuple[ConsumerSpec, ...]
    scope: Scope
    scenario: Scenario
    reason: str
    expires_in: timedelta
    allow_loss: bool
    backfill: bool


def read_form(params: Mapping[str, Any], conf: Mapping[str, Any]) -> Asked:
    """What was asked for. ``conf`` is what the client sent: keys that the form does not have are refused, lest a slip be lost.

    Raises everything that is wrong at once (`BadInput`, `SeveralProblems`).
    """
    problems = Problems()
    refuse_unknown(problems, conf, FIELDS)
    specs = [problems.attempt(lambda name=name: spec_of(name)) for name in dict.fromkeys(params["consumers"])]  # type: ignore[misc]
    good = tuple(spec for spec in specs if spec)
    scope = problems.attempt(lambda: Scope.parse([params["scope"]]))
    scenario = problems.attempt(lambda: _scenario(params, [spec.group for spec in good]))
    reason = problems.attempt(lambda: check_reason(params["reason"]))
    expires_in = problems.attempt(lambda: parse_expiry(params["expires_in"]))
    problems.end()
    assert scope is not None
    assert scenario is not None
    assert reason is not None
    assert expires_in is not None
    return Asked(good, scope, scenario, reason, expires_in, params["allow_loss"], params["backfill"])


def _scenario(params: Mapping[str, Any], groups: Sequence[str]) -> Scenario:
    """A file is pasted here: a path would be one of the worker's, and anybody could ask for any."""
    name = params["scenario"]
    if name == "from-file":
        problems = Problems()
        if params["value"]:
            problems.add(name, f"the value is {quoted(params['value'])}, but no file is opened here", "Paste its text into offsets.")
        if not params["offsets"]:
            problems.add(name, "there are no offsets", "Paste the text of the file into offsets.")
        problems.end()
    return parse(name, params["value"], zone=params["zone"] or None, groups=groups, contents=params["offsets"] or None)


class PlanRewindOperator(BaseOperator):
    """Checks the form and stores the plan; pushes its number, and nothing else."""

    def execute(self, context: Context) -> int:
        from tidemark.airflow.connections import database_url
        from tidemark.db import session
        from tidemark.rewind.plan import plan

        run = context["dag_run"]
        asked = read_form(context["params"], run.conf or {})
        with session(database_url(asked.specs[0])) as connection:
            made = plan(
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


class ApproveRewindOperator(ApproveOperator):
    """Asks until the plan expires. Where no consumer of the plan asks for an approval, nobody is asked."""

    def execute(self, context: Context) -> dict[str, Any]:
        from tidemark.rewind.show import escaped, markdown

        made, specs = _stored(context)
        if not any(spec.rewind.approval is Approval.REQUIRED for spec in specs):
            self.log.info("no approval is asked for rewind=%s", made.rewind_id)
            return dict(LET_THROUGH)
        _log_plan(self.log, made)
        subject = f"Rewind {made.rewind_id} of {escaped(', '.join(spec.name for spec in specs))}?"
        return self.ask(context, subject, markdown(made), made.expires_at - made.planned_at)


class ApplyRewindOperator(BaseOperator):
    """Applies what was approved; stores what was rejected, or was stale by then, as rejected; pushes the names of the consumers to run now.

    A try after one that had committed finds the rewind applied, says so, and succeeds.
    """

    def execute(self, context: Context) -> list[str]:
        from tidemark.airflow.connections import database_url
        from tidemark.db import session
        from tidemark.rewind.apply import StalePlan, apply
        from tidemark.rewind.store import reject

        made, specs = _stored(context)
        answer: Mapping[str, Any] = context["ti"].xcom_pull(task_ids="approve")
        asked_by, approver, run = requester(context), answer["by"], context["dag_run"]
        own = approver is not None and asked_by in (approver, answer.get("name"))
        with session(database_url(specs[0])) as connection:
            if not answer["approved"]:
                reject(connection, made.rewind_id, by=approver or NOBODY)
                raise AirflowSkipException(f"rewind {made.rewind_id} was rejected by {approver or NOBODY}; nothing was changed")
            if own and not all(spec.rewind.own for spec in specs):
                reject(connection, made.rewind_id, by=f"{approver} (may not approve their own)")
                raise AirflowFailException(
                    f"rewind {made.rewind_id} was approved by {approver}, who had asked for it; the consumer's file says rewind: "
                    "{own: false}. Nothing was changed, and the plan is rejected: plan again, and let somebody else approve it."
                )
            try:
                done = apply(
                    connection,
                    _cluster_of,
                    spec_of,
                    made.rewind_id,
                    by=asked_by,
                    approved_by=approver,
                    dag_id=run.dag_id,
                    run_id=run.run_id,
                )
            except StalePlan:
                reject(connection, made.rewind_id, by=STALE)
                raise
        if done.already:
            self.log.info("rewind %s was applied before, at %s; nothing was changed now", made.rewind_id, done.plan.applied_at)
        _log_plan(self.log, done.plan)
        if not context["params"]["consume"]:
            return []
        return [spec.name for spec in specs if spec.run is not Run.CONTINUOUS]  # those go on reading by themselves


class StartConsumerOperator(BaseOperator):
    """Starts a run ``rewind__<id>`` of a consumer's DAG and does not wait for it; skipped if it was started before."""

    template_fields = ("consumer",)

    def __init__(self, *, consumer: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.consumer = consumer

    def execute(self, context: Context) -> None:
        raise start_run(f"consume__{self.consumer}", f"rewind__{context['ti'].xcom_pull(task_ids='plan')}")


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

        made, specs = _stored(context)
        if not made.backfill:
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
        run, sink = quality.Run(ti.dag_id, ti.run_id), spec.sink
        verdict = quality.validate(database_url(spec), run, group=spec.group, table=sink.table, suite=suite, upsert=bool(sink.key))
        failing = [result.text for result in verdict.results if not result.success]
        self.log.info("judged consumer=%s verdict=%s failing=%s", spec.name, verdict.verdict, "; ".join(failing) or "nothing")
        reports = spec.validation is not None and spec.validation.on_failure is OnFailure.REPORT
        if verdict.verdict is quality.Outcome.CRITICAL and not reports:
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
        from tidemark.rewind.model import State, Undo
        from tidemark.rewind.show import verified_table
        from tidemark.rewind.verify import verify

        made, specs = _stored(context)
        if made.state is not State.APPLIED or isinstance(made.scenario, Undo) or not context["params"]["consume"]:
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
    """The plan of this run as it is now, and its consumers."""
    from tidemark.airflow.connections import database_url
    from tidemark.db import session
    from tidemark.rewind.store import read

    specs = [spec_of(name) for name in dict.fromkeys(context["params"]["consumers"])]
    with session(database_url(specs[0])) as connection:
        return read(connection, context["ti"].xcom_pull(task_ids="plan")), specs


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
| approve | a person approves or rejects the plan (*Required Actions*); nobody is asked if all files say `rewind: {approval: none}` |
| apply | does it, in one transaction; refuses if what the plan was made from has changed |
| consume | starts a run of each consumer, if wished |
| backfill | reads what was skipped, if wished, into the same tables, beside the consumers' own runs |
| verify | waits until all is read again, and tells which rows are others now |

`tidemark rewind list` shows all rewinds, `tidemark rewind show ID` one of them.
"""

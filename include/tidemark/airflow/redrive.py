"""The DAG ``redrive``: failed records of a consumer are chosen by a form, and sent round again.

    plan     checks the form, chooses the records once and for all, shows counts and examples in its log
    apply    asks a person, who sees the plan, if the form says so; sends them round, no faster than was said, and publishes them
    drain    has them tried at once, where the form says ``now``

No consumer's file asks for an approval: a redrive loads what was meant to be loaded, and takes nothing away. A run has one plan, which its
tasks look up by the run's id. Every task can be tried again, and `apply`, cleared, goes on with what is left.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from airflow.sdk import DAG, BaseOperator, Context, Param
from airflow.sdk.exceptions import AirflowFailException, AirflowSkipException

from tidemark.airflow.dags import form_consumers, retrying
from tidemark.airflow.form import Answer, AskThenDo, Question, by_hand, refuse_unknown, requester, start_run
from tidemark.airflow.operators import PROGRESS_EVERY_S, plainly, spec_of
from tidemark.airflow.retries import DRAIN_DAG
from tidemark.errors import BadInput
from tidemark.retry.filter import Filter, RecordState
from tidemark.spec import ConsumerSpec
from tidemark.text.moment import EXAMPLE as MOMENT
from tidemark.text.moment import parse_moment
from tidemark.text.problems import REASON_CHARACTERS, Problems, check_reason

if TYPE_CHECKING:
    from tidemark.retry.redrive import Redrive

APPLY, ASK, NOTHING = "apply", "ask", "nothing"
THEN = {APPLY: "send them round", ASK: "ask a person, who sees the plan", NOTHING: "nothing (a dry run)"}
PLACES = {"ladder": "the first delay, and then the whole ladder", "now": "one try, at once"}
STATES = (RecordState.FAILED, RecordState.WAITING, RecordState.DISCARDED)
ANSWER_WITHIN = timedelta(hours=4)

_WHICH, _AMONG, _HOW, _WHY = "Which records", "Only some of these (all that is said must be true)", "Where to, and how fast", "Why"
_TEXT, _NUMBER = ["null", "string"], ["null", "integer"]


def redrive_dag() -> DAG:
    """The DAG ``redrive``: a form, a plan, an approval, and failed records that are requeued."""
    common: dict[str, Any] = {"owner": "tidemark", **retrying()}
    said = "Send failed records round again: chosen by a form, planned, applied."
    with DAG(schedule=None, **by_hand("redrive", _form(), "retries", description=said, doc_md=_DOC)) as dag:
        plan = PlanRedriveOperator(task_id="plan", doc_md="Chooses the records, once and for all. Changes none.", **common)
        apply = ApplyRedriveOperator(
            task_id="apply",
            doc_md="Shows the plan to a person, if that was wished; then sends them round. Cleared, it goes on with what is left.",
            **common,
        )
        drain = StartDrainOperator(task_id="drain", doc_md=f"Starts a run of {DRAIN_DAG}, where they go through at once.", **common)
        plan >> apply >> drain
    return dag


def _form() -> dict[str, Param]:
    """The form's fields; the same keys are those of a REST client's conf."""
    good = form_consumers()
    names = {name: f"{name}: {spec.sink.table}" for name, spec in sorted(good.items())}

    def some(title: str, description: str, kind: Any = _TEXT, default: Any = None, section: str = _WHICH, **more: Any) -> Param:
        return Param(default, type=kind, title=title, description_md=description, section=section, **more)

    return {
        "consumer": Param(
            type="string",
            minLength=1,
            examples=list(names),
            values_display=names,
            title="Consumer",
            description_md="Whose records.",
            section=_WHICH,
        ),
        "states": some(
            "States",
            "None named: those that have failed, and those that the broker did not take. *DISCARDED* ones only if they are named.",
            ["null", "array"],
            items={"type": "string", "enum": list(map(str, STATES))},
            examples=list(map(str, STATES)),
        ),
        "error": some("Type of the error", "Its whole name: *TimeoutError*."),
        "text": some("Text of the error", "A part of it."),
        "numbers": some("Numbers", "Only these, as *tidemark retries list* shows them: *4711, 4712*."),
        "topic": some("Topic", "That they were read from.", section=_AMONG),
        "partition": some("Partition", "Of that topic.", _NUMBER, section=_AMONG, minimum=0),
        "from_offset": some("From offset", "This one included.", _NUMBER, section=_AMONG, minimum=0),
        "to_offset": some("To offset", "This one not included.", _NUMBER, section=_AMONG, minimum=0),
        "key": some("Key", "As text.", section=_AMONG),
        "key_hex": some("Key in hex", "Where it is no text: *00ff*.", section=_AMONG),
        "since": some("Since", f"First failed at this time or later: *{MOMENT}*.", section=_AMONG),
        "until": some("Until", "First failed before this time.", section=_AMONG),
        "tier": some("Tier", "The topic that they are in or go to: *5m*, *now*, *failed*.", section=_AMONG),
        "refused": some("Refused", "Only those that the broker did not take.", "boolean", False, _AMONG),
        "to": some("Where to", "", "string", "ladder", _HOW, enum=list(PLACES), values_display={k: f"{k}: {v}" for k, v in PLACES.items()}),
        "limit": some("Records at most", "The first ones only.", _NUMBER, section=_HOW, minimum=1),
        "per_second": some("Records a second", "At most.", _NUMBER, section=_HOW, minimum=1),
        "max_redrives": some(
            "Redrives of a record", "One that was sent round so often already stays where it is.", "integer", 3, _HOW, minimum=1
        ),
        "then": some(
            "After the plan",
            "A plan that is not applied here can be applied later: *tidemark redrive apply NUMBER*.",
            "string",
            APPLY,
            _WHY,
            enum=list(THEN),
            values_display=THEN,
        ),
        "reason": Param(
            type="string",
            minLength=REASON_CHARACTERS,
            maxLength=2_000,
            title="Reason",
            description_md=f"At least {REASON_CHARACTERS} characters; kept permanently: *the service is back*.",
            section=_WHY,
        ),
    }


FIELDS = (
    *("consumer", "states", "error", "text", "numbers"),
    *("topic", "partition", "from_offset", "to_offset", "key", "key_hex", "since", "until", "tier", "refused"),
    *("to", "limit", "per_second", "max_redrives", "then", "reason"),
)
"""The form's keys, and those of a REST client's conf."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What the form says."""

    spec: ConsumerSpec
    wanted: Filter
    reason: str


def read_form(params: Mapping[str, Any], conf: Mapping[str, Any]) -> Asked:
    """What was asked for. ``conf`` is what the client sent: keys that the form does not have are refused, lest a slip be lost.

    Raises everything that is wrong at once (`BadInput`, `SeveralProblems`).
    """
    problems = Problems()
    refuse_unknown(problems, conf, FIELDS)
    spec = problems.attempt(lambda: spec_of(params["consumer"]))
    reason = problems.attempt(lambda: check_reason(params["reason"]))
    since = problems.attempt(lambda: _optional(params["since"], parse_moment))
    until = problems.attempt(lambda: _optional(params["until"], parse_moment))
    numbers = problems.attempt(lambda: _numbers(params["numbers"]))
    key = problems.attempt(lambda: _key(params["key"], params["key_hex"]))
    wanted = problems.attempt(
        lambda: Filter(
            numbers=numbers or (),
            states=tuple(RecordState(state) for state in params["states"] or ()),
            error_type=params["error"],
            error_text=params["text"],
            topic=params["topic"],
            partition=params["partition"],
            from_offset=params["from_offset"],
            to_offset=params["to_offset"],
            key=key,
            since=since,
            until=until,
            tier=params["tier"],
            refused=params["refused"],
        )
    )
    problems.end()
    assert spec is not None
    assert reason is not None
    assert wanted is not None
    return Asked(spec, wanted, reason)


def _optional(text: str | None, parse: Any) -> Any:
    return parse(text) if text else None


def _numbers(text: str | None) -> tuple[int, ...]:
    words = (text or "").replace(",", " ").split()
    for word in words:
        if not (word.isascii() and word.isdigit() and 0 < int(word) < 2**63):
            raise BadInput(what="numbers", found=f'"{word[:80]}" is no record\'s number', fix="Write them with commas between: 4711, 4712.")
    return tuple(map(int, words))


def _key(text: str | None, in_hex: str | None) -> bytes | None:
    if text and in_hex:
        raise BadInput(what="key", found="key and key_hex are given", fix="Leave out one of them.")
    if not in_hex:
        return text.encode() if text else None
    try:
        return bytes.fromhex(in_hex)
    except ValueError:
        raise BadInput(what="key_hex", found=f'"{in_hex[:80]}" is no hex', fix="Write two digits a byte: 00ff.") from None


class PlanRedriveOperator(BaseOperator):
    """Checks the form and stores the plan; pushes its number, for people to see. A run that has a plan keeps it."""

    @plainly
    def execute(self, context: Context) -> int:
        from tidemark.retry.redrive import Destination, of_run, plan, preview

        params, run = context["params"], context["dag_run"]
        asked = read_form(params, run.conf or {})
        with _session(asked.spec) as connection:
            known = of_run(connection, run.dag_id, run.run_id)
            if known is not None:
                made = preview(connection, known.redrive_id)
            else:
                made = plan(
                    connection,
                    asked.spec,
                    asked.wanted,
                    reason=asked.reason,
                    by=requester(context),
                    destination=Destination(params["to"]),
                    limit=params["limit"],
                    per_second=params["per_second"],
                    max_redrives=params["max_redrives"],
                    dag_id=run.dag_id,
                    run_id=run.run_id,
                )
        _log(self.log, made)
        return made.redrive.redrive_id


class ApplyRedriveOperator(AskThenDo):
    """Asks where the form says ``ask``, unless the redrive is already running. Sends round what was planned and is left of it; pushes how
    many were sent round, and how many were passed over.

    Its log shows what became of it. One that was stopped meanwhile fails.
    """

    @plainly
    def execute(self, context: Context) -> dict[str, int]:
        from tidemark.retry.redrive import Phase, preview
        from tidemark.retry.show import markdown
        from tidemark.text.wording import escaped

        then = context["params"]["then"]
        if then == NOTHING:
            raise AirflowSkipException("a dry run: the plan is stored, and nothing is sent round")
        made, spec = _stored(context)
        if then == ASK and made.state in {Phase.PLANNED, Phase.STOPPED}:
            with _session(spec) as connection:
                body = markdown(preview(connection, made.redrive_id))
            self.ask(context, Question(f"Redrive {made.redrive_id} of {escaped(made.consumer)}?", body, _words(made), ANSWER_WITHIN))
        return self._apply(context, made, spec, approved_by=None)

    @plainly
    def answered(self, context: Context, plan: str, answer: Answer) -> dict[str, int]:
        made, spec = _stored(context)
        if plan != _words(made):
            raise AirflowFailException(f"The answer was about {plan}, this run's plan is {_words(made)}. Nothing was changed.")
        if not answer.approved:
            raise AirflowSkipException(f"redrive {made.redrive_id} was not approved; nothing was sent round")
        return self._apply(context, made, spec, approved_by=answer.by)

    def _apply(self, context: Context, made: Redrive, spec: ConsumerSpec, *, approved_by: str | None) -> dict[str, int]:
        from tidemark.airflow.connections import resolve
        from tidemark.kafka.cluster import Cluster
        from tidemark.retry.pending import relay_at_end
        from tidemark.retry.redrive import apply

        number, connections = made.redrive_id, resolve(spec)
        by: dict[str, Any] = {"by": requester(context), "approved_by": approved_by}
        with _session(spec) as connection:
            done = apply(connection, Cluster(connections.kafka), spec_of, number, **by, on_progress=_Progress(self.log))
        _log(self.log, done)
        for obstacle in relay_at_end(connections, spec):
            self.log.warning("%s", obstacle)
        if done.redrive.planned:
            raise AirflowFailException(
                f"redrive {number} was stopped: {done.redrive.planned} records are left. Clear this task to go on with them."
            )
        return {"redriven": done.redrive.redriven, "passed_over": done.redrive.passed_over}


class StartDrainOperator(BaseOperator):
    """Starts a run ``redrive__<number>`` of the drains and does not wait for it; skipped where the records go to the first delay."""

    def execute(self, context: Context) -> None:
        if context["params"]["to"] != "now":
            raise AirflowSkipException("the records wait for their first delay")
        made, _ = _stored(context)
        raise start_run(DRAIN_DAG, f"redrive__{made.redrive_id}")


def _stored(context: Context) -> tuple[Redrive, ConsumerSpec]:
    """The plan of this run as it is now, and the consumer that the form named."""
    from tidemark.retry.redrive import of_run

    run, spec = context["dag_run"], spec_of(context["params"]["consumer"])
    with _session(spec) as connection:
        made = of_run(connection, run.dag_id, run.run_id)
    if made is None or made.group != spec.group:
        raise AirflowFailException(f"Run {run.run_id} has no plan for {spec.name}. Nothing was changed; clear the task plan.")
    return made, spec


def _words(made: Redrive) -> str:
    """Which plan, as a question says it and Airflow records it; its records were chosen when it was made."""
    return f"redrive {made.redrive_id}, planned at {made.planned_at.isoformat()}"


class _Progress:
    """A line in the log now and then."""

    def __init__(self, log: Any) -> None:
        self._log = log
        self._said = time.monotonic()

    def __call__(self, seen: Any) -> None:
        if time.monotonic() - self._said >= PROGRESS_EVERY_S:
            self._said = time.monotonic()
            self._log.info("progress redriven=%s passed_over=%s of=%s", seen.redriven, seen.passed_over, seen.records)


def _session(spec: ConsumerSpec) -> Any:
    from tidemark.airflow.connections import database_url
    from tidemark.db import session

    return session(database_url(spec), application="tidemark redrive")


def _log(log: Any, made: Any) -> None:
    from tidemark.retry.show import lines

    for line in lines(made):
        log.info("%s", line)


_DOC = """
Sends records round again that have failed for good: the service is back, or they were edited (`tidemark retries edit`).

| task | |
|---|---|
| plan | chooses the records, once and for all; its log shows how many of each error, and examples. Changes nothing |
| apply | a person approves or rejects the plan (*Required Actions*), if wished; then they are sent round. Skipped with *nothing* |
| drain | starts a run of `drain_retries`, where they are tried at once |

`tidemark redrive list` shows all redrives, `tidemark redrive stop NUMBER` ends one behind the portion that it is at; cleared, `apply` goes
on with it. A record that was loaded, discarded or withdrawn meanwhile is passed over. Who redrove what, when and why is kept permanently.

*ladder* sends a record to the first delay of its consumer (`retry: {delays: [5m, 30m]}`), *now* gives it one try in the next drain. A drain
validates what it has loaded by the consumer's suite before it emits the asset event.
"""

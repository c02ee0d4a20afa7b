"""The DAG ``rewind``, and ``rewind__<consumer>`` for consumers with ``access``: plan, apply, then consume, backfill and verify, or for a
rewind beside replay, approve and swap.

    plan     checks the form, also for REST clients; stores a plan and logs it
    apply    asks for approval if one of the consumers requires it; applies an approved plan in one transaction.
             A plan that was rejected, or not answered in time, is stored as REJECTED
    consume  starts a run of each consumer, if requested; continuous consumers need none
    backfill reads skipped records into the same tables, if requested, alongside the consumers' own runs
    verify   waits until everything is read again, and compares the rows taken out with the rows there now

    replay   for a rewind beside, which `apply` only begins: reads the records beside the live rows, validates and compares them
    approve  asks for approval of the swap if one of the consumers requires it. A replay that was rejected, or not answered in time, is
             discarded
    swap     lets the replay reach the groups, and swaps it into the tables in one transaction

A run has one plan, which its tasks look up by the run's id. They do not rely on XComs, which users can write. Every task can be retried:
`plan` keeps an existing plan, and no plan is applied twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any, ClassVar

from airflow.sdk import DAG, AssetAlias, BaseSensorOperator, Context, PokeReturnValue

from tidemark.airflow.approvals.review import ApplyOperator, ReviewedDag, Task, start_run
from tidemark.airflow.approvals.rewind_form import form
from tidemark.airflow.dags.consume import CONSUME, REWIND, dag_id
from tidemark.airflow.operators import ConsumeOperator, ConsumerOperator, final_errors_fail

REWOUND = AssetAlias("tidemark_rewound")
"""Alias for the sinks of the rewound consumers, which are only known during the run."""
VERIFY_EVERY_S, VERIFY_LIMIT_S = 10.0, 86_400.0
"""No backoff: its first intervals are about a second, and Airflow 3.3 loses a task rescheduled while its last process is still ending."""


class StartConsumerOperator(ConsumerOperator):
    """Starts a run ``rewind__<id>`` of a consumer's DAG and does not wait for it. Skipped if that run already exists.

    The consumer's name comes from an XCom, so it is checked: the rewind must be applied and must include this consumer.
    """

    @final_errors_fail
    def execute(self, context: Context) -> None:
        from tidemark.airflow.tasks.rewind import require_applied

        rewind_id = require_applied(Task(REWIND, context, self.log), self.consumer)
        raise start_run(dag_id(CONSUME, self.consumer), f"rewind__{rewind_id}")


class _RunsOperator(ConsumeOperator):
    """Performs runs of several consumers, one after the other, for a rewind. A retry continues where the last try stopped.

    ``function``: the function in `tidemark.airflow.tasks.rewind`. It gets the task and a function that performs a run.
    """

    template_fields: Sequence[str] = ()
    function: ClassVar[str]

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(consumer="", deferrable=False, **kwargs)  # it has several attempts, one after the other

    @final_errors_fail
    def execute(self, context: Context) -> dict[str, Any]:
        tasks = import_module("tidemark.airflow.tasks.rewind")
        perform = getattr(tasks, self.function)
        summary: dict[str, Any] = perform(
            Task(REWIND, context, self.log), lambda spec, rewind_id: self._consume(context, spec, of_rewind=rewind_id)
        )
        return summary


class BackfillRewindOperator(_RunsOperator):
    """Reads the records that the rewind skipped, and validates them. Pushes the counts by consumer.

    Runs alongside the consumers' own runs, so that a long backfill holds up nothing. Skipped if no backfill was requested or the rewind
    was not applied.
    """

    function = "backfill"


class ReplayRewindOperator(_RunsOperator):
    """Reads the records of a rewind beside, validates them, and compares them with the live rows. Pushes how many are equal, changed, gone
    and new. Skipped for any other rewind."""

    function = "replay"


class SwapRewindOperator(_RunsOperator):
    """Reads the last records beside, and swaps the replay into the tables. Skipped for a rewind that is not beside."""

    function = "swap"


class VerifyRewindOperator(BaseSensorOperator):
    """Waits until the groups are back at their old positions, and compares the rows. Pushes how many are equal, changed, gone and new.

    Skipped if nothing was moved, if the form did not request a run of the consumers, if the scenario is an undo, or for a rewind beside.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(mode="reschedule", poke_interval=VERIFY_EVERY_S, timeout=VERIFY_LIMIT_S, soft_fail=True, **kwargs)

    def poke(self, context: Context) -> PokeReturnValue:
        from tidemark.airflow.tasks.rewind import compare

        counts = compare(Task(REWIND, context, self.log))
        return PokeReturnValue(is_done=counts is not None, xcom_value=counts)


def _further(apply: ApplyOperator, common: dict[str, Any]) -> None:
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
    apply >> consume >> verify
    apply >> backfill
    replay = ReplayRewindOperator(
        task_id="replay", doc_md="Reads the records beside the live rows, validates them and compares both.", **common
    )
    approve = ApplyOperator(
        task_id="approve",
        kind=REWIND,
        asks="swap_question",
        acts="decide_swap",
        doc_md="Asks for approval of the swap, if required, and stores the answer with the rewind.",
        **common,
    )
    swap = SwapRewindOperator(
        task_id="swap", doc_md="Swaps the replay into the tables, in one transaction.", outlets=list(apply.outlets), **common
    )
    apply >> replay >> approve >> swap


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
| replay | *beside* only: reads the records into tables beside the live rows, validates them, and logs what a swap would change |
| approve | *beside* only: waits for approval of the swap. A rejected replay is discarded |
| swap | *beside* only: swaps the replay into the tables in one transaction. Readers see the old rows until then |

**Approval.** No approval is needed if the files of all consumers say `rewind: {approval: none}`. With `own: false`, the requester cannot
approve the rewind. `apply` refuses a stale plan: one whose basis has changed since. A run has one plan. If you clear `apply`, it asks about
the same plan again; for another plan, start a new run. A rewind beside asks before its swap, not before `apply`.

**Events.** `apply` emits an asset event with the ranges for each sink whose rows were taken out or put back.

**Validation and retries.** The view of validated rows ends at the new position until the replay is validated. Failed records of the
rewound ranges are taken out with the rows and withdrawn from the retry topics; an undo puts them back.

`tidemark rewind list` shows all rewinds, `tidemark rewind show ID` shows one.
"""

_DAG = ReviewedDag(
    REWIND,
    form,
    tag="rewind",
    description="Move a running consumer group to any offset, together with its rows. Reviewed, and can be undone.",
    doc=_DOC,
    plan_doc="Resolves the request to offsets and stores the plan. Changes nothing.",
    apply_doc="Asks for approval, if required; then moves the offsets and takes the superseded rows out, in one transaction.",
    outlets=[REWOUND],
    further=_further,
)


def rewind_dags() -> dict[str, DAG]:
    """The DAGs by id: ``rewind`` for all consumers, and ``rewind__<consumer>`` for each with ``access``. In a task, only its DAG."""
    return _DAG.build()

"""The DAG ``redrive``, and ``redrive__<consumer>`` for consumers with ``access``: sends a consumer's failed records, chosen in a form,
through the retry topics again.

    plan     checks the form, fixes the list of records, logs counts and examples
    apply    asks for approval of the plan if the form says so; then redrives the records, within the rate limit, and publishes them
    drain    starts a drain at once if the form says ``now``

A consumer's file cannot require approval, because a redrive only loads what was meant to be loaded and removes nothing. A run has one
plan, which its tasks look up by the run's id. Every task can be retried. Clearing `apply` makes it continue with the remaining records.
"""

from __future__ import annotations

from typing import Any

from airflow.sdk import DAG, BaseOperator, Context

from tidemark.airflow.approvals.records_form import redrive_form
from tidemark.airflow.approvals.review import ApplyOperator, ReviewedDag, Task, start_run
from tidemark.airflow.dags.consume import REDRIVE
from tidemark.airflow.dags.retries import DRAIN_DAG
from tidemark.airflow.operators import final_errors_fail
from tidemark.airflow.version_compat import AirflowSkipException


class StartDrainOperator(BaseOperator):
    """Starts a run ``redrive__<number>`` of the drain DAG and does not wait for it. Skipped if the records go to the first delay."""

    @final_errors_fail
    def execute(self, context: Context) -> None:
        from tidemark.airflow.tasks.redrive import stored
        from tidemark.retry.redrive import Destination

        redrive, _ = stored(Task(REDRIVE, context, self.log))
        if redrive.destination is not Destination.NOW:
            raise AirflowSkipException("the records wait for their first delay")
        raise start_run(DRAIN_DAG, f"redrive__{redrive.redrive_id}")


def _further(apply: ApplyOperator, common: dict[str, Any]) -> None:
    apply >> StartDrainOperator(task_id="drain", doc_md=f"Starts a run of {DRAIN_DAG}, which tries the records at once.", **common)


_DOC = """
Retries records that have failed permanently, for instance because the service is back or the records were edited
(`tidemark retries edit`).

| task | |
|---|---|
| plan | fixes the list of records; its log shows counts per error, and examples. Changes nothing |
| apply | waits for approval (*Required Actions*), if requested; then redrives the records. Skipped with *nothing* |
| drain | starts a run of `drain_retries`, which tries the records at once. Only with *now* |

`tidemark redrive list` shows all redrives. `tidemark redrive stop NUMBER` stops one after its current batch of records; clear `apply` to
continue it. Records that were loaded, discarded or withdrawn meanwhile are passed over. Who redrove what, when and why is kept permanently.

*ladder* sends a record to the first delay of its consumer (`retry: {delays: [5m, 30m]}`). *now* gives it one try in the next drain. A
drain validates what it loaded with the consumer's suite before it emits the asset event.
"""

_DAG = ReviewedDag(
    REDRIVE,
    redrive_form,
    tag="retries",
    description="Retry failed records: choose them in a form, review the plan, apply it.",
    doc=_DOC,
    plan_doc="Fixes the list of records. Changes nothing.",
    apply_doc="Asks for approval, if requested; then redrives the records. Clear it to continue with the remaining records.",
    further=_further,
)


def redrive_dags() -> dict[str, DAG]:
    """The DAGs by id: ``redrive`` for all consumers, and ``redrive__<consumer>`` for each with ``access``. In a task, only its DAG."""
    return _DAG.build()

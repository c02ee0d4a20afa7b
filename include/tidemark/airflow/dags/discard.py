"""The DAG ``discard``, and ``discard__<consumer>`` for consumers with ``access``: settles failed records, chosen in a form, without
loading them.

    plan     checks the form, logs counts and examples
    apply    asks for approval if the form says so; then discards the records

An approved discard settles exactly the records that were shown: the question contains the digest of their numbers, and the transaction
that discards compares it. Every task can be retried. Nothing is left to discard then, if the first try committed.
"""

from __future__ import annotations

from airflow.sdk import DAG

from tidemark.airflow.approvals.records_form import discard_form
from tidemark.airflow.approvals.review import ReviewedDag
from tidemark.airflow.dags.consume import DISCARD

_DOC = """
Settles waiting, held or failed records without loading them. They stay in the table and are never tried again, unless you redrive them
(state *DISCARDED*).

| task | |
|---|---|
| plan | its log shows counts per error, and examples. Changes nothing |
| apply | waits for approval (*Required Actions*), if requested; then discards the records. Skipped with *nothing* |

If other records match at the time of the answer, none is discarded. `tidemark retries actions CONSUMER` shows who discarded what, when and
why. Records are edited with `tidemark retries edit` only, because Airflow stores and shows what is typed in a form.
"""

_DAG = ReviewedDag(
    DISCARD,
    discard_form,
    tag="retries",
    description="Discard failed records: choose them in a form, review the plan, apply it.",
    doc=_DOC,
    plan_doc="Logs which records match. Changes nothing.",
    apply_doc="Asks for approval, if requested; then discards the records.",
)


def discard_dags() -> dict[str, DAG]:
    """The DAGs by id: ``discard`` for all consumers, and ``discard__<consumer>`` for each with ``access``. In a task, only its DAG."""
    return _DAG.build()

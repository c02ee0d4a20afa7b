"""The DAG ``maintain``. Runs daily, once for each database that consumers write to."""

from __future__ import annotations

from airflow.sdk import DAG, BaseOperator, Context, Param

from tidemark.airflow.dags.consume import retrying, shared_dag
from tidemark.airflow.operators import final_errors_fail
from tidemark.keep import FLOOR, FLOOR_VARIABLE, default_keep


def maintain_dag() -> DAG:
    """Builds the DAG ``maintain``: removes expired archives and payloads once a day, as `tidemark maintain` does."""
    with shared_dag(
        "maintain",
        "maintain",
        description="Removes old rewind archives and the payloads of settled records, and closes attempts without a driver.",
        doc_md="Drops the archives of rewinds older than `keep`. Such a rewind can no longer be undone or verified. "
        "Empties failed records that were loaded, skipped or discarded before that: key, value and headers are deleted, the rest stays. "
        "Closes attempts that began more than a day ago and no longer have a driver. Samples the lag of each consumer, and publishes "
        "positions that are mirrored to Kafka.\n\n"
        f"`keep` is at least {FLOOR}, unless the environment variable `{FLOOR_VARIABLE}` sets another minimum. Who rewound what, when and "
        "why is kept permanently, and so is who ran the maintenance (table `tidemark.maintenance`).",
        schedule="@daily",
        params={
            "keep": Param(
                default_keep(),
                type="string",
                pattern="^[0-9]{1,9}[smhd]$",
                title="Keep",
                description_md=f"How long to keep archives and payloads, such as `30d`. At least {FLOOR}, or `{FLOOR_VARIABLE}`.",
            )
        },
    ) as dag:
        MaintainOperator(task_id="maintain", **retrying())
    return dag


class MaintainOperator(BaseOperator):
    """Runs the maintenance. Pushes the number of archives dropped, of their rows, of records emptied, and of attempts closed."""

    @final_errors_fail
    def execute(self, context: Context) -> dict[str, int]:
        from tidemark.airflow.tasks import maintain

        return maintain.run(context, self.log)

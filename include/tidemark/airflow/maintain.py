"""The DAG ``maintain``: once a day, in each database that consumers write."""

from __future__ import annotations

from typing import Any

from airflow.sdk import DAG, BaseOperator, Context, Param

from tidemark import project
from tidemark.airflow.dags import START, retrying
from tidemark.spec import parse_duration, read_folder


def maintain_dag() -> DAG:
    with DAG(
        dag_id="maintain",
        description="Removes what rewinds took out, and payloads of settled records, after their time; ends attempts without a driver.",
        doc_md="Drops the archives of rewinds that are older than `keep`: these can be neither undone nor verified any more. "
        "Who rewound what, when and why is kept for ever. Empties failed records that were loaded, skipped or discarded longer ago: "
        "key, value and headers go, all else stays. Attempts that began a day ago and have no driver any more are ended.",
        schedule="@daily",
        start_date=START,
        catchup=False,
        max_active_runs=1,
        tags=["tidemark", "maintain"],
        default_args={"owner": "tidemark"},
        params={"keep": Param("30d", type="string", title="Keep", description_md="How long archives and payloads are kept: `12h`, `30d`.")},
    ) as dag:
        MaintainOperator(task_id="maintain", **retrying())
    return dag


class MaintainOperator(BaseOperator):
    """Pushes how many archives it has removed, and of how many rows, how many records it has emptied, and how many attempts ended."""

    def execute(self, context: Context) -> dict[str, int]:
        from tidemark.airflow.connections import database_url
        from tidemark.db import session, transaction
        from tidemark.offsets import store
        from tidemark.retry.retention import empty_settled
        from tidemark.rewind.retention import remove_archives

        keep = parse_duration(context["params"]["keep"])
        good, _ = read_folder(project.consumers())
        databases = {spec.connections.postgres: spec for spec in good.values()}
        removed: list[Any] = []
        ended: list[int] = []
        emptied = 0
        for spec in databases.values():
            with session(database_url(spec)) as connection:
                removed += remove_archives(connection, keep)
                emptied += empty_settled(connection, keep)
                with transaction(connection) as cur:
                    ended += store.end_abandoned(cur)
        self.log.info("archives removed: %s, records emptied: %s, attempts ended: %s", len(removed), emptied, len(ended))
        return {"archives": len(removed), "rows": sum(one.rows for one in removed), "emptied": emptied, "attempts": len(ended)}

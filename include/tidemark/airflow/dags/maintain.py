"""The DAG ``maintain``. Runs daily, once for each database that consumers write to."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from airflow.sdk import DAG, BaseOperator, Context, Param

from tidemark import project
from tidemark.airflow.approvals.form import requester
from tidemark.airflow.dags.consume import RUN_TYPES, START, general_access, retrying
from tidemark.airflow.operators import refusals_fail
from tidemark.errors import TidemarkError
from tidemark.keep import FLOOR, FLOOR_VARIABLE, default_keep, parse_keep
from tidemark.spec import ConsumerSpec, read_folder

if TYPE_CHECKING:
    from tidemark.maintenance import Maintained


def maintain_dag() -> DAG:
    """Builds the DAG ``maintain``: removes expired archives and payloads once a day, as `tidemark maintain` does."""
    with DAG(
        dag_id="maintain",
        description="Removes old rewind archives and the payloads of settled records, and closes attempts without a driver.",
        doc_md="Drops the archives of rewinds older than `keep`. Such a rewind can no longer be undone or verified. "
        "Empties failed records that were loaded, skipped or discarded before that: key, value and headers are deleted, the rest stays. "
        "Closes attempts that began more than a day ago and no longer have a driver. Samples the lag of each consumer, and publishes "
        "positions that are mirrored to Kafka.\n\n"
        f"`keep` is at least {FLOOR}, unless the environment variable `{FLOOR_VARIABLE}` sets another minimum. Who rewound what, when and "
        "why is kept permanently, and so is who ran the maintenance (table `tidemark.maintenance`).",
        schedule="@daily",
        start_date=START,
        catchup=False,
        max_active_runs=1,
        allowed_run_types=RUN_TYPES,
        is_paused_upon_creation=False,  # otherwise archives and payloads grow without limit
        tags=["tidemark", "maintain"],
        default_args={"owner": "tidemark"},
        access_control=general_access(),
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

    @refusals_fail
    def execute(self, context: Context) -> dict[str, int]:
        from tidemark.airflow.connections import database_url
        from tidemark.db import session
        from tidemark.maintenance import maintain
        from tidemark.profiles import Profile
        from tidemark.roles import require

        keep, run = parse_keep(context["params"]["keep"]), context["dag_run"]
        good, _ = read_folder(project.consumers())
        databases = {spec.connections.postgres: spec for spec in good.values()}
        by_servers = itertools.groupby(sorted(good.values(), key=_servers), key=_servers)
        results: list[Maintained] = []
        for spec in databases.values():
            with session(database_url(spec)) as connection:
                require(connection, Profile.REWINDER)
                results.append(maintain(connection, keep, by=requester(context), dag_id=run.dag_id, run_id=run.run_id))
        for (_, _), specs in by_servers:
            self._sample_and_mirror(list(specs))
        removed = [archive for result in results for archive in result.removed]
        counts = {"archives": len(removed), "rows": sum(archive.rows for archive in removed)}
        counts |= {"emptied": sum(result.emptied for result in results), "attempts": sum(len(result.ended) for result in results)}
        self.log.info("maintained keep=%s archives=%s rows=%s emptied=%s attempts=%s", keep, *counts.values())
        return counts

    def _sample_and_mirror(self, specs: Sequence[ConsumerSpec]) -> None:
        """Ends objectives that were removed from files, samples the lag of consumers with the same connections, and publishes mirrored
        positions. A failure is only logged."""
        from tidemark.airflow.connections import resolve
        from tidemark.db import session, transaction
        from tidemark.kafka.cluster import Cluster
        from tidemark.objectives import report
        from tidemark.offsets.mirror import republish_all
        from tidemark.offsets.sampling import sample_all

        try:
            connections = resolve(specs[0])
            with session(connections.database_url) as connection:
                with transaction(connection) as cur:
                    for spec in specs:
                        if spec.slo is None:  # no task reports its former objectives
                            report(cur, spec)
                cluster = Cluster(connections.kafka)
                unsampled = sample_all(connection, cluster, specs)
                _, unpublished = republish_all(connection, cluster, specs)
        except TidemarkError as error:
            self.log.warning("lag not sampled, or positions not mirrored consumers=%s: %s", ",".join(spec.name for spec in specs), error)
            return
        for name, cause in unsampled.items():
            self.log.warning("lag not sampled consumer=%s: %s", name, cause)
        for name, cause in unpublished.items():
            self.log.warning("positions not mirrored consumer=%s: %s", name, cause)


def _servers(spec: ConsumerSpec) -> tuple[str, str]:
    return spec.connections.postgres, spec.connections.kafka

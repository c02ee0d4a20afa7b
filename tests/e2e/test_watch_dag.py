"""The DAG ``watch`` in a real Airflow, with its triggerer and the callback that ``docs/operating.md`` shows."""

from __future__ import annotations

from tests.e2e.lab import Lab, Run
from tests.support.waiting import until

from tidemark.airflow.dags.watch import task_of

TASK = task_of("promised")
DISCARD = """
UPDATE tidemark.failed_record failed SET state = 'DISCARDED'
  FROM tidemark.consumer_group grp
 WHERE grp.group_id = failed.group_id AND grp.name = %s AND failed.state = 'FAILED'
"""


def runs(lab: Lab) -> dict[str, dict[str, str | None]]:
    """The states of the tasks of each run of the DAG ``watch``, oldest first. The run's own state is under its empty name."""
    found = sorted(lab.client.runs("watch"), key=lambda run: str(run["run_after"]))
    return {run["dag_run_id"]: Run(lab, "watch", run["dag_run_id"]).tasks() | {"": run["state"]} for run in found}


def run_that(lab: Lab, state: str) -> Run:
    """Waits for a run of the DAG ``watch`` that has ended in this state, with the consumer's task in the same state."""

    def look() -> str | None:
        return next((run_id for run_id, tasks in runs(lab).items() if tasks[""] == tasks.get(TASK) == state), None)

    return Run(lab, "watch", until(look, within_s=240, what=f"the task of the consumer is {state}"))


def alarms(lab: Lab) -> list[str]:
    return lab.alarmed.read_text().splitlines() if lab.alarmed.exists() else []


def test_missed_objective_fails_the_consumers_task_once_and_its_callback_runs_once(lab: Lab) -> None:
    """While the objective is missed, the next run waits. When it is met again, the task succeeds and the callback is not called."""
    consumer = lab.consumer("promised")
    lab.topics.produce("promised", ["1", "two"])
    consumer.read_here()
    failed = run_that(lab, "failed")
    until(lambda: list(runs(lab).values())[-1].get("watch") == "deferred", what="the next run waits")
    said = "promised misses an objective: 1 failed record, objective 0"
    until(lambda: alarms(lab) == [f"{failed.run_id} {TASK} {said}"], what="the callback has run once")
    assert said in failed.log(TASK)

    lab.sql(DISCARD, "promised")
    assert "objective is met again" in run_that(lab, "success").log(TASK)
    assert [tasks[TASK] for tasks in runs(lab).values() if tasks.get(TASK) in ("success", "failed")] == ["failed", "success"]
    assert len(alarms(lab)) == 1

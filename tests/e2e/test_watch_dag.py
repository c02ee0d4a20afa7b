"""The DAG ``watch`` in a real Airflow, with its triggerer and the callback that ``docs/operating.md`` shows."""

from __future__ import annotations

from typing import Any

from tests.e2e.lab import Lab
from tests.support.waiting import until

from tidemark.airflow.watch import task_of

TASK = task_of("promised")
DISCARD = """
UPDATE tidemark.failed_record failed SET state = 'DISCARDED'
  FROM tidemark.consumer_group grp
 WHERE grp.group_id = failed.group_id AND grp.name = %s AND failed.state = 'FAILED'
"""


def states(lab: Lab, run: Any) -> dict[str, str | None]:
    return {task.task_id: task.state for task in lab.client.task_instances("watch", run["dag_run_id"])}


def run_in_which(lab: Lab, state: str, *, without: set[str]) -> Any:
    """Waits for a run of the DAG ``watch`` that has ended and in which the consumer's task has this state; returns the run."""

    def look() -> Any:
        for run in lab.client.runs("watch"):
            if run["dag_run_id"] not in without and run["state"] in ("success", "failed") and states(lab, run).get(TASK) == state:
                return run
        return None

    return until(look, within_s=240, what=f"the task of the consumer is {state}")


def waits_after(lab: Lab, run: Any) -> bool:
    """Whether a later run is waiting in the triggerer."""
    later = [one for one in lab.client.runs("watch") if one["run_after"] > run["run_after"]]
    return any(states(lab, one).get("watch") == "deferred" for one in later)


def test_missed_objective_fails_the_consumers_task_once_and_its_callback_runs_once(lab: Lab) -> None:
    """While the objective is missed, the next run waits. When it is met again, the task succeeds and the callback is not called."""
    consumer = lab.consumer("promised")
    lab.topics.produce("promised", ["1", "two"])
    consumer.read_here()
    failed = run_in_which(lab, "failed", without=set())
    until(lambda: waits_after(lab, failed), what="the next run waits")
    said = "promised misses an objective: 1 failed record, objective 0"
    assert lab.alarmed.read_text() == f"{failed['dag_run_id']} {TASK} {said}\n"
    assert failed["state"] == "failed"
    assert said in lab.client.log("watch", failed["dag_run_id"], TASK)

    lab.sql(DISCARD, "promised")
    met = run_in_which(lab, "success", without={failed["dag_run_id"]})
    assert met["state"] == "success"
    assert "objective is met again" in lab.client.log("watch", met["dag_run_id"], TASK)
    runs = sorted(lab.client.runs("watch"), key=lambda one: str(one["run_after"]))
    assert [states(lab, run).get(TASK) for run in runs if run["state"] in ("success", "failed")] == ["failed", "success"]
    assert len(lab.alarmed.read_text().splitlines()) == 1

"""Runs of the DAG ``rewind``, as the end-to-end tests follow them."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any
from urllib.parse import quote

from tests.e2e.lab import Lab, eventually

DAG = "rewind"


@dataclass
class RewindRun:
    """A run of the DAG, whoever has started it."""

    lab: Lab
    run_id: str

    @property
    def path(self) -> str:
        return f"dags/{DAG}/dagRuns/{quote(self.run_id, safe='')}/taskInstances"

    def states(self) -> dict[str, str | None]:
        return {task.task_id: task.state for task in self.lab.client.task_instances(DAG, self.run_id)}

    def log(self, task: str, try_number: int = 1) -> str:
        return self.lab.client.log(DAG, self.run_id, task, try_number)

    def xcom(self, task: str) -> Any:
        return self.lab.client.xcom(DAG, self.run_id, task)

    def wait(self) -> str:
        return self.lab.client.wait(DAG, self.run_id, 60)

    def question(self) -> dict[str, Any]:
        """What the person is asked, once the scheduler knows that the task waits: it loses answers that are quicker than its own loop."""
        eventually(lambda: self.states().get("approve") == "awaiting_input", what="somebody is asked")
        asked = datetime.fromisoformat(self.lab.client.get(f"{self.path}/approve/-1/hitlDetails")["created_at"])
        eventually(lambda: self._scheduler_at() > asked.timestamp() + 1, what="the scheduler has gone round")
        found: dict[str, Any] = self.lab.client.get(f"{self.path}/approve/-1/hitlDetails")
        return found

    def answer(self, option: str) -> None:
        self.lab.client.patch(f"{self.path}/approve/-1/hitlDetails", {"chosen_options": [option], "params_input": {}})

    def stored(self) -> tuple[Any, ...]:
        """State, who planned, decided and applied it, and its number."""
        columns = "state, planned_by, decided_by, applied_by, rewind_id"
        (row,) = self.lab.sql(f"SELECT {columns} FROM tidemark.rewind WHERE dag_id = %s AND run_id = %s", DAG, self.run_id)
        return tuple(row)

    def _scheduler_at(self) -> float:
        return datetime.fromisoformat(self.lab.client.health()["scheduler"]["latest_scheduler_heartbeat"] or "").timestamp()

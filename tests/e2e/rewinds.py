"""Runs of the DAG ``rewind`` in the end-to-end tests."""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from urllib.parse import quote

from tests.e2e.lab import Lab
from tests.support.waiting import until

from tidemark.local.airflow_client import AirflowClient

DAG = "rewind"
ASKS = "apply"
"""The task that waits for an answer."""


@dataclass
class RewindRun:
    """A run of the DAG, whether a user or a program started it."""

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
        return self.lab.client.wait(DAG, self.run_id, 180)

    def question(self) -> dict[str, Any]:
        """Returns the question to the user, once the scheduler knows that the task waits. The scheduler loses answers that arrive before
        its loop has run."""
        until(lambda: self.states().get(ASKS) in {"awaiting_input", "failed"}, what="somebody is asked")
        assert self.states()[ASKS] == "awaiting_input", self.log(ASKS)
        asked = time.time()
        until(lambda: self._scheduler_at() > asked + 1, what="the scheduler has gone round")
        found: dict[str, Any] = self.lab.client.get(f"{self.path}/{ASKS}/-1/hitlDetails")
        return found

    def answer(self, option: str, *, client: AirflowClient | None = None) -> None:
        """Answers as the admin, or as the user of ``client``."""
        path = f"{self.path}/{ASKS}/-1/hitlDetails"
        (client or self.lab.client).patch(path, {"chosen_options": [option], "params_input": {}})

    def forge(self, client: AirflowClient, task: str, value: Any) -> None:
        """Overwrites the XCom of a task, as any user may."""
        path = f"{self.path}/{task}/xcomEntries"
        entries = client.get(path)["xcom_entries"]
        if any(entry["key"] == "return_value" for entry in entries):
            client.patch(f"{path}/return_value", {"value": value, "map_index": -1})
        else:
            client.post(path, {"key": "return_value", "value": value, "map_index": -1})

    def mark_success(self, client: AirflowClient, task: str) -> None:
        client.patch(f"{self.path}/{task}", {"new_state": "success"})

    def stored(self) -> tuple[Any, ...]:
        """The rewind's state, who planned, decided and applied it, and its id."""
        columns = "state, planned_by, decided_by, applied_by, rewind_id"
        (row,) = self.lab.sql(f"SELECT {columns} FROM tidemark.rewind WHERE dag_id = %s AND run_id = %s", DAG, self.run_id)
        return tuple(row)

    def _scheduler_at(self) -> float:
        return datetime.fromisoformat(self.lab.client.health()["scheduler"]["latest_scheduler_heartbeat"] or "").timestamp()

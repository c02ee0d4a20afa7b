"""Runs of the DAG ``rewind`` in the end-to-end tests."""

from __future__ import annotations

from typing import Any

from tests.e2e.lab import Run

from tidemark.local.airflow_client import AirflowClient

DAG = "rewind"


class RewindRun(Run):
    """A run of the DAG, and its row in Postgres."""

    def forge(self, client: AirflowClient, task: str, value: Any) -> None:
        """Overwrites the XCom of a task, as any user may."""
        path = f"{self.path}/{task}/xcomEntries"
        entries = client.get(path)["xcom_entries"]
        if any(entry["key"] == "return_value" for entry in entries):
            client.patch(f"{path}/return_value", {"value": value, "map_index": -1})
        else:
            client.post(path, {"key": "return_value", "value": value, "map_index": -1})

    def stored(self) -> tuple[Any, ...]:
        """The rewind's state, who planned, decided and applied it, and its id."""
        columns = "state, planned_by, decided_by, applied_by, rewind_id"
        (row,) = self.lab.sql(f"SELECT {columns} FROM tidemark.rewind WHERE dag_id = %s AND run_id = %s", DAG, self.run_id)
        return tuple(row)

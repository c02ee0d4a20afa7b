"""Reads DAG files as Airflow's DAG processor does: a process that imports Airflow once, and forks for each file.

A line of its input has the arguments of `read`, a line of its output what it returned or raised.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any


def read(source: str, env: dict[str, str]) -> dict[str, Any]:
    """What Airflow finds in the file. Fails if the file connects a socket."""
    import socket

    from airflow.dag_processing.dagbag import DagBag
    from airflow.sdk import DAG
    from airflow.serialization.serialized_objects import DagSerialization

    os.environ.update(env)
    socket.socket.connect = socket.socket.connect_ex = _refuse  # type: ignore[method-assign, assignment]
    module: dict[str, Any] = {"__name__": "read", "__file__": source}
    exec(compile(Path(source).read_text(), source, "exec"), module)
    bag = DagBag(source)
    return {
        "globals": sorted(value.dag_id for value in module.values() if isinstance(value, DAG)),
        "errors": bag.import_errors,
        "serialized": {dag_id: DagSerialization.to_dict(dag) for dag_id, dag in bag.dags.items()},
        "dags": {dag_id: _dag(dag) for dag_id, dag in bag.dags.items()},
    }


def _refuse(*_: object) -> None:
    raise AssertionError("a socket was connected while a DAG file was read")


def _dag(dag: Any) -> dict[str, Any]:
    access = dag.access_control
    return {
        "paused": dag.is_paused_upon_creation,
        "shown": dag.dag_display_name,
        "runs": sorted(each.value for each in dag.allowed_run_types or ()),
        "access": access and {role: {kind: sorted(actions) for kind, actions in one.items()} for role, one in access.items()},
        "params": sorted(dag.params),
        "doc": dag.doc_md,
        "zone": dag.timezone.name,
        "tags": sorted(dag.tags),
        "tasks": {each.task_id: _task(each) for each in dag.tasks},
        **{name: getattr(dag, name) for name in ("owner", "max_active_runs", "catchup", "schedule", "description")},
    }


def _task(task: Any) -> dict[str, Any]:
    return {
        "kind": type(task).__name__,
        "retry_delay": task.retry_delay.total_seconds(),
        "timeout": task.execution_timeout and task.execution_timeout.total_seconds(),
        "doc": task.doc_md,
        "upstream": sorted(task.upstream_task_ids),
        "outlets": [asset.name for asset in task.outlets],
        "templates": {name: getattr(task, name, None) for name in task.template_fields},
        "rule": task.trigger_rule.value,
        **{name: getattr(task, name) for name in ("owner", "retries", "pool")},
    }


def main() -> None:
    import airflow.dag_processing.dagbag
    import airflow.sdk
    import airflow.serialization.serialized_objects  # noqa: F401

    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)  # what Airflow prints is no answer
        for line in sys.stdin:
            if (child := os.fork()) == 0:
                try:
                    answer = {"found": read(**json.loads(line))}
                except BaseException:  # noqa: BLE001
                    answer = {"raised": traceback.format_exc()}
                print(json.dumps(answer, default=str), file=answers, flush=True)
                os._exit(0)
            if os.waitpid(child, 0)[1]:
                print(json.dumps({"raised": "the process ended"}), file=answers, flush=True)


if __name__ == "__main__":
    main()

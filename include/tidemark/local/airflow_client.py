"""A client for the parts of Airflow's REST API that start, watch and repair runs.

Retries a refused connection for a few seconds, and a request that may have arrived only if it changes nothing. A 4xx response raises
`AirflowRefused`; 5xx or none raises `AirflowUnavailable`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self
from urllib.parse import quote

import httpx
import tenacity

from tidemark.errors import Refused, Unavailable

CONNECT_ATTEMPTS = 5
CONNECTION_LIMITS = httpx.Limits(keepalive_expiry=2.0)
"""Closes idle connections before Airflow's server does, after 5 s, perhaps just as the next request is sent."""
POLL_S = 0.3
FINISHED = frozenset({"success", "failed"})
"""The final states of a run."""
_LOG_FRAME = frozenset(
    {"event", "timestamp", "level", "logger", "filename", "lineno", "error_detail"}
    | {"dag_id", "run_id", "task_id", "map_index", "try_number", "ti_id"}
)
"""Fields of a log event that the caller knows or that are printed in another way."""


class AirflowUnavailable(Unavailable):
    """Airflow or one of its processes is not available; ``log`` is the end of the process's log, if known."""

    process: str
    cause: str
    log: str = ""

    def __str__(self) -> str:
        return f"Airflow's {self.process} is not available: {self.cause}." + (f" The end of its log:\n{self.log}" if self.log else "")


class AirflowRefused(Refused):
    """Airflow rejected a request with a client error; ``detail`` is Airflow's text."""

    request: str
    status: int
    detail: str

    def __str__(self) -> str:
        return f"Airflow refused {self.request} with {self.status}: {self.detail}"


class RunUnfinished(Unavailable):
    """A run did not end within the timeout; ``tasks`` are the states of its tasks."""

    dag_id: str
    run_id: str
    state: str
    timeout_s: float
    tasks: tuple[str, ...]

    def __str__(self) -> str:
        tasks = ", ".join(self.tasks) or "none"
        return f"Run {self.run_id} of {self.dag_id} is still {self.state} after {self.timeout_s:g} s; tasks: {tasks}."


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskInstance:
    """One try of one task. ``state`` is None before it is scheduled; ``map_index`` is -1 for a task that is not mapped."""

    task_id: str
    map_index: int
    rendered_map_index: str | None
    state: str | None
    try_number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AssetEvent:
    """One asset event: its source and its extra."""

    source_dag_id: str | None
    source_task_id: str | None
    source_run_id: str | None
    extra: Mapping[str, Any]


class AirflowClient:
    """A signed-in user. Not thread-safe. Use it as a context manager, or `close` it."""

    def __init__(self, url: str, *, user: str, password: str) -> None:
        self._user = user
        self._password = password
        self._http = httpx.Client(
            base_url=url, timeout=60, limits=CONNECTION_LIMITS, trust_env=False
        )  # a proxy from the environment cannot reach loopback

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    def token(self) -> str:
        """A new bearer token."""
        answer = self._send("POST", "/auth/token", json={"username": self._user, "password": self._password})
        token: str = answer.json()["access_token"]
        return token

    def get(self, path: str, **params: Any) -> Any:
        """The JSON response to ``GET /api/v2/<path>``."""
        return self._send_signed("GET", path, params=params).json()

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """The JSON response to ``POST /api/v2/<path>``."""
        return self._send_signed("POST", path, json=body).json()

    def patch(self, path: str, body: Mapping[str, Any]) -> Any:
        """The JSON response to ``PATCH /api/v2/<path>``."""
        return self._send_signed("PATCH", path, json=body).json()

    def health(self) -> Mapping[str, Mapping[str, str | None]]:
        """The response of ``/api/v2/monitor/health``, by component. Needs no sign-in and is not retried."""
        answer: Mapping[str, Mapping[str, str | None]] = self._send_once("GET", "/api/v2/monitor/health").json()
        return answer

    def wait_for_dag(self, dag_id: str, timeout_s: float = 60) -> None:
        """Waits until the DAG processor has stored ``dag_id``. Raises `AirflowUnavailable` with the import errors after ``timeout_s``."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                self.get(f"dags/{quote(dag_id)}")
            except AirflowRefused as refused:
                if refused.status != httpx.codes.NOT_FOUND:
                    raise
            else:
                return
            if time.monotonic() > deadline:
                errors = self.get("importErrors", limit=100)["import_errors"]
                failures = "\n".join(f"{error['filename']}: {error['stack_trace']}" for error in errors)
                raise AirflowUnavailable(process="dag-processor", cause=f"no DAG {dag_id} after {timeout_s:g} s", log=failures)
            time.sleep(POLL_S)

    def unpause(self, dag_id: str) -> None:
        self.patch(f"dags/{quote(dag_id)}", {"is_paused": False})

    def pause(self, dag_id: str) -> None:
        self.patch(f"dags/{quote(dag_id)}", {"is_paused": True})

    def trigger(self, dag_id: str, conf: Mapping[str, Any] | None = None) -> str:
        """Starts a run and returns its id."""
        body = {"logical_date": None, "conf": dict(conf or {})}  # without a logical date, any number of runs can be started
        run_id: str = self.post(f"dags/{quote(dag_id)}/dagRuns", body)["dag_run_id"]
        return run_id

    def run(self, dag_id: str, run_id: str) -> str:
        """The state of a run: ``queued``, ``running``, ``success`` or ``failed``."""
        state: str = self.get(_run(dag_id, run_id))["state"]
        return state

    def runs(self, dag_id: str) -> list[Mapping[str, Any]]:
        """The last 100 runs of a DAG as Airflow returns them, newest first."""
        runs: list[Mapping[str, Any]] = self.get(f"dags/{quote(dag_id)}/dagRuns", order_by="-run_after", limit=100)["dag_runs"]
        return runs

    def wait(self, dag_id: str, run_id: str, timeout_s: float) -> str:
        """Waits for a run's end and returns its state, success or failed. Raises `RunUnfinished` after ``timeout_s``."""
        deadline = time.monotonic() + timeout_s
        while (state := self.run(dag_id, run_id)) not in FINISHED:
            if time.monotonic() > deadline:
                tasks = tuple(f"{task.task_id}[{task.map_index}]={task.state}" for task in self.task_instances(dag_id, run_id))
                raise RunUnfinished(dag_id=dag_id, run_id=run_id, state=state, timeout_s=timeout_s, tasks=tasks)
            time.sleep(POLL_S)
        return state

    def task_instances(self, dag_id: str, run_id: str) -> list[TaskInstance]:
        """The latest try of every task of a run, mapped ones included."""
        tasks = self.get(f"{_run(dag_id, run_id)}/taskInstances", limit=1000)["task_instances"]
        return [_task_instance(task) for task in tasks]

    def tries(self, dag_id: str, run_id: str, task_id: str, map_index: int = -1) -> list[TaskInstance]:
        """Every try of one task, oldest first."""
        tries = self.get(f"{_task(dag_id, run_id, task_id, map_index)}/tries")["task_instances"]
        return sorted((_task_instance(task) for task in tries), key=lambda task: task.try_number)

    def xcom(self, dag_id: str, run_id: str, task_id: str) -> Any:
        """The value that a task that is not mapped returned."""
        return self.get(f"{_task(dag_id, run_id, task_id)}/xcomEntries/return_value", map_index=-1, deserialize=True)["value"]

    def log(self, dag_id: str, run_id: str, task_id: str, try_number: int = 1, map_index: int = -1) -> str:
        """The log of one try, one event per line, with its extra fields."""
        answer = self.get(f"{_task(dag_id, run_id, task_id)}/logs/{try_number}", map_index=map_index, full_content=True)
        return "\n".join(_log_line(entry) for entry in answer["content"])

    def mark(self, state: str, dag_id: str, run_id: str, task_id: str) -> None:
        """Marks a task as failed or success, as in the UI. A running task notices at its next heartbeat and is not retried."""
        self.patch(_task(dag_id, run_id, task_id), {"new_state": state})

    def clear(self, dag_id: str, run_id: str, task_ids: Sequence[str]) -> None:
        """Clears tasks of a run so that they run again, with all downstream tasks."""
        body = {
            "dry_run": False,
            "dag_run_id": run_id,
            "task_ids": list(task_ids),
            "only_failed": False,
            "include_downstream": True,
            "reset_dag_runs": True,
        }
        self.post(f"dags/{quote(dag_id)}/clearTaskInstances", body)

    def asset_events(self, uri: str) -> list[AssetEvent]:
        """The events of the asset with exactly this URI, oldest first; none if no DAG names the asset."""
        assets = self.get("assets", uri_pattern=uri, limit=100)["assets"]
        ids = [asset["id"] for asset in assets if asset["uri"] == uri]
        if not ids:
            return []
        events = self.get("assets/events", asset_id=ids[0], order_by="timestamp", limit=1000)["asset_events"]
        return [
            AssetEvent(
                source_dag_id=event["source_dag_id"],
                source_task_id=event["source_task_id"],
                source_run_id=event["source_run_id"],
                extra=event["extra"] or {},
            )
            for event in events
        ]

    def _send_signed(self, method: str, path: str, **options: Any) -> httpx.Response:
        if "Authorization" not in self._http.headers:
            self._http.headers["Authorization"] = f"Bearer {self.token()}"
        try:
            return self._send(method, f"/api/v2/{path}", **options)
        except AirflowRefused as refused:
            if refused.status != httpx.codes.UNAUTHORIZED:
                raise
        self._http.headers["Authorization"] = f"Bearer {self.token()}"  # the token had expired
        return self._send(method, f"/api/v2/{path}", **options)

    def _send(self, method: str, path: str, **options: Any) -> httpx.Response:
        never_sent = (httpx.ConnectError, httpx.ConnectTimeout)
        retried = (httpx.TransportError,) if method == "GET" else never_sent
        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception(lambda error: isinstance(error.__cause__, retried)),
            stop=tenacity.stop_after_attempt(CONNECT_ATTEMPTS),
            wait=tenacity.wait_exponential(multiplier=0.1, max=2),
            reraise=True,
        )
        return retrying(self._send_once, method, path, **options)

    def _send_once(self, method: str, path: str, **options: Any) -> httpx.Response:
        request = f"{method} {path}"
        try:
            answer = self._http.request(method, path, **options)
        except httpx.TransportError as error:
            raise AirflowUnavailable(process="api-server", cause=f"{request}: {error or type(error).__name__}") from error
        if answer.is_server_error:
            raise AirflowUnavailable(process="api-server", cause=f"{request}: {answer.status_code} {_detail(answer)}")
        if not answer.is_success:
            raise AirflowRefused(request=request, status=answer.status_code, detail=_detail(answer))
        return answer


def _run(dag_id: str, run_id: str) -> str:
    return f"dags/{quote(dag_id)}/dagRuns/{quote(run_id, safe='')}"


def _task(dag_id: str, run_id: str, task_id: str, map_index: int = -1) -> str:
    mapped = f"/{map_index}" if map_index >= 0 else ""
    return f"{_run(dag_id, run_id)}/taskInstances/{quote(task_id)}{mapped}"


def _detail(answer: httpx.Response) -> str:
    try:
        return str(answer.json()["detail"])
    except (ValueError, KeyError, TypeError):
        return answer.text[:500]


def _task_instance(task: Mapping[str, Any]) -> TaskInstance:
    return TaskInstance(
        task_id=task["task_id"],
        map_index=task["map_index"],
        rendered_map_index=task.get("rendered_map_index"),
        state=task["state"],
        try_number=task["try_number"],
    )


def _log_line(entry: str | Mapping[str, Any]) -> str:
    if isinstance(entry, str):
        return entry
    fields = [f"{name}={value}" for name, value in entry.items() if name not in _LOG_FRAME]
    errors = [f"\n{error['exc_type']}: {error['exc_value']}" for error in entry.get("error_detail") or ()]
    return " ".join([str(entry["event"]), *fields]) + "".join(errors)

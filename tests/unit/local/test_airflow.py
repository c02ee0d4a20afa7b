"""The environment of the local Airflow's processes, and how the REST client handles responses."""

from __future__ import annotations

import json
import os
import socket
import stat
import sys
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from airflow.secrets.environment_variables import EnvironmentVariablesBackend
from tests.support.airflow_options import airflow_options
from typer.testing import CliRunner

from tidemark.airflow.connections import kafka_config, postgres_url, spark_settings
from tidemark.cli.local import airflow_app
from tidemark.errors import BadInput
from tidemark.local import airflow_settings as settings
from tidemark.local import processes
from tidemark.local.airflow import PROCESSES, LocalAirflow
from tidemark.local.airflow_client import AirflowClient, AirflowRefused, AirflowUnavailable, RunUnfinished
from tidemark.local.errors import PortInUse


def here(folder: Path, env: dict[str, str]) -> dict[str, Any]:
    metadata_url = "postgresql://postgres:hidden@127.0.0.1:1/airflow"
    return {"folder": folder, "metadata_url": metadata_url, "env": env, "dags": folder / "dags", "plugins": None}


def overlay(folder: Path, **env: str) -> dict[str, str]:
    """The variables of `stack`, on port 28080."""
    return settings.overlay(port=28080, secrets=settings.Secrets.of(folder), **here(folder, env))


def stack(folder: Path, port: int = 28080, **env: str) -> LocalAirflow:
    return LocalAirflow(port=port, **here(folder, env))


COMMANDS = str(Path(sys.executable).parent)


@pytest.mark.parametrize(
    ("base", "told"),
    [
        (
            {"AIRFLOW__CORE__EXECUTOR": "X", "AIRFLOW_CONN_X": "x", "_AIRFLOW__AS_LIBRARY": "1", "LANG": "C"},
            {"AIRFLOW__CORE__EXECUTOR": "LocalExecutor", "AIRFLOW_CONN_X": None, "_AIRFLOW__AS_LIBRARY": None, "LANG": "C"},
        ),
        (
            {"VIRTUAL_ENV": "/theirs", "PYTHONHOME": "/theirs", "PATH": f"/theirs/bin:{COMMANDS}:/usr/bin"},
            {"VIRTUAL_ENV": None, "PYTHONHOME": None, "PATH": f"{COMMANDS}:/theirs/bin:/usr/bin"},
        ),
        (
            {"HTTP_PROXY": "http://proxy:3128", "no_proxy": "corp"},
            {"NO_PROXY": "corp,127.0.0.1,localhost", "no_proxy": "corp,127.0.0.1,localhost"},
        ),
        ({"PYTEST_CURRENT_TEST": "x", "PYTHONDONTWRITEBYTECODE": "1"}, {"PYTEST_CURRENT_TEST": None, "PYTHONDONTWRITEBYTECODE": None}),
    ],
    ids=["another Airflow", "another Python", "a proxy", "a test"],
)
def test_processes_do_not_inherit_what_would_change_them(tmp_path, base, told):
    """They reach the api-server on loopback without a proxy."""
    found = settings.environment(base | {"AIRFLOW_HOME": "/theirs"}, own := overlay(tmp_path), process="scheduler")
    assert {name: found.get(name) for name in told} == told
    assert found["AIRFLOW_HOME"] == own["AIRFLOW_HOME"]


def test_every_process_bears_a_mark_of_its_own(tmp_path):
    """Children inherit the mark, so everything that a process of this folder has started can be found."""
    for name in PROCESSES:
        told = settings.environment({}, overlay(tmp_path), process=name)
        assert (told[settings.MARK], told["SPT_NOENV"]) == (f"{name}:{tmp_path}", "1")


def test_the_callers_variables_win_over_the_quick_settings_only(tmp_path):
    """The caller may slow Airflow down or add connections, but not move it to another database or port. With other settings the
    fingerprint changes."""
    own = overlay(tmp_path, AIRFLOW__CORE__PARALLELISM="2", AIRFLOW__API__PORT="1", TIDEMARK_DATABASE_URL="postgresql://x/y")
    assert own["AIRFLOW__CORE__PARALLELISM"] == "2"
    assert own["AIRFLOW__API__PORT"] == "28080"
    assert own["TIDEMARK_DATABASE_URL"] == "postgresql://x/y"
    assert settings.fingerprint(overlay(tmp_path)) == settings.fingerprint(overlay(tmp_path)) != settings.fingerprint(own)


def test_no_secret_stands_on_a_command_line(tmp_path):
    """Every user of the machine can see command lines, so passwords and keys are passed in the environment."""
    secrets = settings.Secrets.of(tmp_path)
    hidden = {"hidden", secrets.admin_password, secrets.jwt_secret, secrets.api_secret_key, secrets.fernet_key}
    lines = [" ".join(settings.command(*arguments)) for arguments in [*PROCESSES.values(), ("db", "migrate")]]
    assert not [line for line in lines if any(secret in line for secret in hidden)]
    assert secrets.admin_password not in repr(secrets)


def test_secrets_are_made_once_and_readable_by_their_owner_only(tmp_path):
    """The four processes share the same secrets across restarts, and the login stays the same."""
    first = settings.Secrets.of(tmp_path)
    assert settings.Secrets.of(tmp_path) == first
    assert [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("secrets.json", "passwords.json")] == [0o600, 0o600]
    assert json.loads((tmp_path / "passwords.json").read_text()) == {"admin": first.admin_password}


def test_every_quick_setting_exists_in_the_locked_airflow():
    """A setting that an upgrade renames would silently fall back to its default."""
    names = [name.removeprefix("AIRFLOW__").lower().split("__") for name in settings.QUICK]
    assert [(section, option) for section, option in names if option not in airflow_options().get(section, ())] == []


def test_connections_say_where_the_stack_is():
    """The connections have the names that specs use by default. A host may be a URL, because there is no other field for its path. Without
    a registry there is no connection to it."""
    database, kafka = "postgresql://me:p%40ss@127.0.0.1:5433/tidemark", {"bootstrap.servers": "k:9092"}
    url = "http://r:8081/apis/ccompat/v7"
    env = settings.connections_env(database, kafka, "spark://127.0.0.1:7077")
    connections = {name: EnvironmentVariablesBackend().deserialize_connection(name, value) for name, value in env.items()}
    postgres, broker, spark = (connections[f"AIRFLOW_CONN_TIDEMARK_{kind}"] for kind in ("POSTGRES", "KAFKA", "SPARK"))
    assert (len(connections), postgres.conn_type, postgres_url(postgres)) == (3, "postgres", database)
    assert (broker.conn_type, kafka_config(broker)) == ("kafka", kafka)
    assert (spark.conn_type, spark_settings(spark)) == ("spark", ("spark://127.0.0.1:7077", {}))
    registry = {"AIRFLOW_CONN_TIDEMARK_REGISTRY": json.dumps({"conn_type": "http", "host": url})}
    assert settings.connections_env(database, kafka, "spark://127.0.0.1:7077", url) == env | registry


def test_port_of_another_program_is_refused_before_anything_starts(tmp_path):
    """A requested port is never silently replaced by another."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        airflow = stack(tmp_path / "home", port)
        with pytest.raises(PortInUse, match=f"Airflow cannot listen on 127.0.0.1:{port}.*--port"):
            airflow.up()
    assert all(process.pid is None for process in airflow.status().processes)


def test_folder_that_never_ran_has_a_status_and_nothing_to_stop(tmp_path):
    """``down`` and ``status`` need only the folder. The address is known after the first ``up``."""
    airflow = LocalAirflow.at(tmp_path / "home")
    airflow.down()
    assert not (tmp_path / "home").exists()
    assert (airflow.status().url, airflow.status().healthy) == (None, False)
    with pytest.raises(BadInput, match="never been started"):
        _ = airflow.url


def test_status_command_fails_unless_all_are_healthy(tmp_path):
    """Scripts check its exit code; people read one line per process."""
    shown = CliRunner().invoke(airflow_app, ["status"], env={"TIDEMARK_STATE": str(tmp_path)})
    assert shown.exit_code == 1
    assert shown.stdout.splitlines() == ["url=never started", *(f"{name} pid=- stopped" for name in PROCESSES)]


def test_pid_of_a_later_process_is_not_taken_for_ours():
    """The same pid with another start time is a different process."""
    here = processes.Started.now(os.getpid())
    assert here.runs()
    assert not processes.Started(pid=here.pid, created=here.created - 60).runs()
    assert processes.wait_gone([psutil.Process()], 0) is False


class _Server:
    """Answers requests with the responses of a list, and records the requests. A mapping stands for a response with this content."""

    def __init__(self, *answers: httpx.Response | dict[str, Any] | type[httpx.TransportError]) -> None:
        self.answers = [httpx.Response(200, json=answer) if isinstance(answer, dict) else answer for answer in answers]
        self.seen: list[tuple[str, str, str | None]] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/auth/token":
            return httpx.Response(201, json={"access_token": f"token{len(self.seen)}"})
        self.seen.append((request.method, request.url.raw_path.decode(), request.headers.get("Authorization")))
        answer = self.answers.pop(0)
        if isinstance(answer, httpx.Response):
            return answer
        raise answer("gone")

    def client(self) -> AirflowClient:
        client = AirflowClient("http://airflow", user="admin", password="x")
        client._http.close()
        client._http = httpx.Client(base_url="http://airflow", transport=httpx.MockTransport(self))
        return client


def test_token_that_ran_out_is_renewed_once():
    """A long run outlives its token. A second refusal in a row is raised."""
    refused = httpx.Response(401)
    server = _Server(refused, {"state": "running"}, refused, refused)
    with server.client() as client:
        assert client.run("d", "r") == "running"
        assert [token for _, _, token in server.seen] == ["Bearer token0", "Bearer token1"]
        with pytest.raises(AirflowRefused) as raised:
            client.run("d", "r")
    assert raised.value.status == 401


def test_request_is_repeated_unless_it_is_a_trigger_that_may_have_arrived():
    """A POST that was never sent, and any GET, are sent again. If the connection is lost after a POST was sent, the run may exist, and a
    second request would start another one. Run ids, which contain colons and plus signs, are quoted."""
    server = _Server(httpx.ConnectError, {"dag_run_id": "r"}, httpx.ReadError, {"state": "queued"}, httpx.ReadError)
    with server.client() as client:
        assert client.trigger("d") == "r"
        assert client.run("d", "manual__2026-01-01T00:00:00+00:00") == "queued"
        with pytest.raises(AirflowUnavailable):
            client.trigger("d")
    assert [method for method, _, _ in server.seen] == ["POST", "POST", "GET", "GET", "POST"]
    assert server.seen[2][1] == "/api/v2/dags/d/dagRuns/manual__2026-01-01T00%3A00%3A00%2B00%3A00"


def test_run_that_does_not_end_says_how_far_its_tasks_got():
    """The error shows which task the run is waiting for."""
    task = {"task_id": "t", "map_index": 2, "state": "queued", "try_number": 1}
    server = _Server({"state": "running"}, {"task_instances": [task]})
    with server.client() as client, pytest.raises(RunUnfinished, match=r"still running after 0 s; tasks: t\[2\]=queued"):
        client.wait("d", "r", timeout_s=0)


def test_log_is_text_with_the_logged_fields_and_the_exception():
    """Structured events become lines, without the logger's name and the task's identifiers."""
    content = [
        {"event": "batch", "timestamp": "2026-01-01T00:00:00Z", "level": "info", "logger": "x", "dag_id": "d", "rows": 7},
        {"event": "Task failed", "error_detail": [{"exc_type": "ValueError", "exc_value": "once"}]},
        "plain",
    ]
    server = _Server({"content": content, "continuation_token": None})
    with server.client() as client:
        assert client.log("d", "r", "t", 1) == "batch rows=7\nTask failed\nValueError: once\nplain"


def test_tries_come_in_order():
    found = [{"task_id": "t", "map_index": 0, "state": state, "try_number": number} for number, state in ((2, "running"), (1, "failed"))]
    server = _Server({"task_instances": found})
    with server.client() as client:
        tries = client.tries("d", "r", "t", map_index=0)
    assert [(task.try_number, task.state) for task in tries] == [(1, "failed"), (2, "running")]
    assert server.seen[0][1].endswith("/taskInstances/t/0/tries")

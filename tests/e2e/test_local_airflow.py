"""The local Airflow of four processes: start, crashes, repair, and a stop that leaves nothing behind. `Lab.down` checks the stop, too."""

from __future__ import annotations

import contextlib

import httpx
import psutil
import pytest
from tests.e2e.lab import Consumer, Lab
from tests.support.waiting import until

from tidemark import db
from tidemark.local.airflow import PROCESSES, LocalAirflow
from tidemark.local.airflow_client import AirflowClient, AirflowRefused, AirflowUnavailable

IN_CRITICAL_SECTION = """
SELECT pid FROM pg_locks AS held WHERE locktype = 'advisory' AND granted
   AND EXISTS (SELECT FROM pg_locks AS wanted
                WHERE wanted.pid = held.pid AND wanted.relation = 'public.slot_pool'::regclass AND NOT granted)
"""
"""Finds the session that holds the scheduler's lock and waits for the table of pools."""


def pids(airflow: LocalAirflow) -> dict[str, int | None]:
    return {process.name: process.pid for process in airflow.status().processes}


def sleeping(lab: Lab) -> list[psutil.Process]:
    """Starts a run whose task sleeps. Returns the driver that the task has started in a separate session, and the task."""
    lab.client.unpause("sleeper")
    run_id = lab.client.trigger("sleeper")

    def found() -> list[psutil.Process] | None:
        if lab.client.task_instances("sleeper", run_id)[0].state != "running":
            return None
        said = [line.split() for line in lab.client.log("sleeper", run_id, "sleeps").splitlines() if line.startswith("driver ")]
        return [psutil.Process(int(said[0][1])), psutil.Process(int(said[0][3]))] if said else None

    processes: list[psutil.Process] = until(found)
    return processes


def asked(cursor: db.Cursor, query: str) -> int | None:
    cursor.execute("SELECT pg_stat_clear_snapshot()")  # otherwise a transaction always sees the same state of all sessions
    cursor.execute(query)
    row = cursor.fetchone()
    return row[0] if row else None


def test_up_of_a_running_airflow_does_nothing(lab: Lab) -> None:
    """The same four processes keep running, and are healthy."""
    before, said = pids(lab.airflow), list[str]()
    lab.airflow.up(said.append)
    assert (pids(lab.airflow), said) == (before, [])
    until(lambda: lab.airflow.status().healthy)
    assert list(before) == list(PROCESSES)


def test_only_a_client_with_the_generated_password_gets_access(lab: Lab) -> None:
    assert httpx.get(f"{lab.airflow.url}/api/v2/dags", trust_env=False, timeout=60).status_code == 401
    with AirflowClient(lab.airflow.url, user="admin", password="admin") as stranger, pytest.raises(AirflowRefused):
        stranger.token()


def test_scheduler_killed_while_it_queues_tasks_does_not_hold_up_its_successor(lab: Lab) -> None:
    """A task that survives the scheduler has inherited its database connection. Postgres therefore keeps the dead scheduler's transaction
    open, with the lock that any scheduler needs to queue a task. A successor ends that session first."""
    left = sleeping(lab)
    with db.session(lab.airflow.metadata_url) as connection:
        with db.transaction(connection) as cursor:
            cursor.execute("LOCK TABLE public.slot_pool IN EXCLUSIVE MODE")  # the scheduler asks for this table once it has its lock
            pid = until(lambda: asked(cursor, IN_CRITICAL_SECTION))
            lab.kill_scheduler()
        with db.transaction(connection) as cursor:
            until(lambda: asked(cursor, f"SELECT pid FROM pg_stat_activity WHERE pid = {pid} AND state = 'idle in transaction'"))
    lab.start_scheduler()
    run = Consumer(lab, "bad").trigger()
    assert run.wait() == "failed", "its task has been queued, and has said what is wrong with its file"
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def test_up_repairs_what_a_killed_scheduler_has_left(lab: Lab) -> None:
    """It is started again, after the tasks and drivers that it left behind have been ended. The other processes keep running."""
    driver, task = sleeping(lab)
    before = pids(lab.airflow)
    lab.kill_scheduler()
    until(lambda: [process.name for process in lab.airflow.status().processes if not process.healthy] == ["scheduler"])
    assert driver.is_running(), "a session of its own is out of the group's reach"
    lab.airflow.up()
    until(lambda: lab.airflow.status().healthy)
    assert [name for name, pid in pids(lab.airflow).items() if before[name] != pid] == ["scheduler"]
    until(lambda: not driver.is_running() and not task.is_running())


@pytest.mark.thorough
def test_changed_settings_restart_all_four_and_down_leaves_nothing_not_even_a_driver(lab: Lab) -> None:
    """Here, the tasks get another variable. After ``down``, the processes that a task has started in a separate session are gone too, and
    the API no longer answers."""
    own, before = lab.airflow, pids(lab.airflow)
    env = {**own.env, "GREETING": "good bye"}
    other = LocalAirflow(own.folder, metadata_url=own.metadata_url, env=env, dags=own.dags, plugins=own.plugins)
    other.up()
    assert set(pids(other).values()).isdisjoint(before.values())
    assert {psutil.Process(pid).environ()["GREETING"] for pid in pids(other).values()} == {"good bye"}
    driver, _ = sleeping(lab)
    other.down()
    assert lab.family() == []
    assert not driver.is_running()
    with pytest.raises(AirflowUnavailable):
        lab.client.health()
    lab.airflow.up()

"""A run ends, and a caller that stops following its driver gets its own error, whatever holds the driver's pipe."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
import threading
from datetime import timedelta
from pathlib import Path

import pytest
from tenacity import stop_after_attempt, wait_none
from tests.support.waiting import until

from tidemark.connections import Connections
from tidemark.db import DatabaseUrl
from tidemark.driver import launch, on_cluster
from tidemark.driver.environment import PYTHON
from tidemark.driver.submission import ClusterSettings
from tidemark.errors import BadInput, ConnectionRefused, PasswordUnavailable

NOWHERE = Connections("postgresql://nobody@127.0.0.1:1/nowhere", {"bootstrap.servers": "127.0.0.1:1"}, "local[1]")


@pytest.mark.parametrize("holder", ["driver", "process-that-it-left"])
def test_interrupt_ends_although_the_drivers_pipe_stays_open(monkeypatch: pytest.MonkeyPatch, holder: str) -> None:
    """A driver may hang in the kernel, and a process that a transform has started in a session of its own outlives it."""
    scripts = {"driver": "echo $$; exec sleep 600", "process-that-it-left": "setsid sh -c 'echo $$; exec sleep 600' & wait"}
    drivers: list[subprocess.Popen[str]] = []
    pids: list[int] = []

    def spawn(_command: object, _env: object) -> subprocess.Popen[str]:
        drivers.append(subprocess.Popen(["sh", "-c", scripts[holder]], stdout=subprocess.PIPE, text=True, start_new_session=True))
        return drivers[0]

    def interrupt(line: str) -> None:
        pids.append(int(line))
        raise KeyboardInterrupt

    monkeypatch.setattr(launch, "_spawn", spawn)
    monkeypatch.setattr(launch, "KILL_WAIT_S", 0.1)
    if holder == "driver":
        monkeypatch.setattr(launch, "kill_group", lambda driver: None)
    try:
        with pytest.raises(KeyboardInterrupt):
            launch.run_attempt(launch.DriverArguments("orders", 4711), NOWHERE, on_log=interrupt)
        os.kill(pids[0], 0)  # it still holds the pipe
    finally:
        for pid in (*pids, drivers[0].pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        drivers[0].wait()
    until(lambda: drivers[0].stdout.closed, "the reader has closed the pipe")
    assert [thread.name for thread in threading.enumerate() if "follow 4711" in thread.name] == []


def test_run_ends_with_its_driver_although_a_process_that_it_left_holds_the_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    script = "setsid sh -c 'echo $$; exec sleep 600' & read line; echo last"
    driver = subprocess.Popen(["sh", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert driver.stdin is not None
    assert driver.stdout is not None
    lines: list[str] = []

    def take(line: str) -> None:
        lines.append(line)
        if line != "last":
            driver.stdin.close()

    done = launch.Progress(4711, "COMMITTED", planned=True, partitions=(), lost=())
    monkeypatch.setattr(launch, "_spawn", lambda command, env: driver)
    monkeypatch.setattr(launch, "KILL_WAIT_S", 2.0)
    monkeypatch.setattr(launch, "outcome", lambda url, attempt_id, died: done)
    try:
        assert launch.run_attempt(launch.DriverArguments("orders", 4711), NOWHERE, on_log=take) is done
        assert lines[1:] == ["last"]
    finally:
        os.kill(int(lines[0]), signal.SIGKILL)
    until(lambda: driver.stdout.closed, "the reader has closed the pipe")


@pytest.fixture
def asked(tmp_path: Path) -> Path:
    """Has a line for each call of the command that fails to give a password."""
    (tmp_path / "asked").touch()
    return tmp_path / "asked"


@pytest.fixture
def without_password(asked: Path) -> DatabaseUrl:
    script = asked.with_name("password")
    script.write_text(f"#!/bin/sh\necho >> {asked}\nexit 1\n")
    script.chmod(0o755)
    return f"postgresql://nobody@127.0.0.1:1/nowhere?password_command={script}"


def test_driver_is_followed_although_the_source_of_passwords_fails(
    asked: Path, without_password: DatabaseUrl, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "POLL_S", 0.01)
    with contextlib.closing(launch.Follow(without_password, 4711)) as follow:
        until(lambda: asked.read_text().count("\n") > 1, "it has tried to connect again")
        assert follow.show(lambda progress: None, print) is None


def test_outcome_is_read_again_after_the_source_of_passwords_failed(asked: Path, without_password: DatabaseUrl) -> None:
    read = launch.outcome.retry_with(stop=stop_after_attempt(3), wait=wait_none())  # type: ignore[attr-defined]
    with pytest.raises(PasswordUnavailable):
        read(without_password, 4711, launch.DriverDied(attempt_id=4711, status=0))
    assert asked.read_text().count("\n") == 3


@pytest.fixture
def abandoned(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str]]:
    """The attempts that were ended, with their errors."""
    ended: list[tuple[int, str]] = []

    def abandon(_url: DatabaseUrl, attempt_id: int, error: BaseException) -> None:
        ended.append((attempt_id, type(error).__name__))

    monkeypatch.setattr(launch, "abandon", abandon)
    monkeypatch.setattr(on_cluster, "abandon", abandon)
    return ended


@pytest.mark.parametrize("problem", ["interpreter", "memory"])
def test_attempt_ends_with_its_cause_if_no_driver_can_be_started(
    abandoned: list[tuple[int, str]], monkeypatch: pytest.MonkeyPatch, problem: str
) -> None:
    """Otherwise it would be running, without a driver, until somebody gives it up for another reason."""

    def popen(*_arguments: object, **_options: object) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    if problem == "interpreter":
        monkeypatch.setenv(PYTHON, "/nowhere/python")
    else:
        monkeypatch.setattr(subprocess, "Popen", popen)
    with pytest.raises((BadInput, launch.DriverNotSpawned), match=r"/nowhere/python|4711 could not be started: .*allocate memory"):
        launch.run_attempt(launch.DriverArguments("orders", 4711), NOWHERE, on_log=print)
    assert abandoned == [(4711, "BadInput" if problem == "interpreter" else "DriverNotSpawned")]


def test_attempt_ends_if_its_application_cannot_be_noted(abandoned: list[tuple[int, str]]) -> None:
    settings = ClusterSettings("yarn", {}, timedelta(minutes=10))
    with pytest.raises(ConnectionRefused):
        on_cluster.start(launch.DriverArguments("orders", 4711), NOWHERE, settings, on_log=print)
    assert abandoned == [(4711, "ConnectionRefused")]

"""What follows a driver is closed, whatever the driver does."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from tidemark.connections import Connections
from tidemark.driver import launch


def test_driver_that_does_not_end_when_it_is_killed_leaves_no_thread_and_no_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may hang in the kernel. The error says so, after everything else is closed."""
    drivers: list[subprocess.Popen[str]] = []

    def spawn(_command: object, _env: object) -> subprocess.Popen[str]:
        drivers.append(subprocess.Popen([sys.executable, "-c", ""], stdout=subprocess.PIPE, text=True))
        return drivers[0]

    def hang(driver: launch.Driver) -> None:
        driver.wait(60)
        raise subprocess.TimeoutExpired("driver", 10)

    monkeypatch.setattr(launch, "_spawn", spawn)
    monkeypatch.setattr(launch, "kill", hang)
    nowhere = Connections("postgresql://nobody@127.0.0.1:1/nowhere", {"bootstrap.servers": "127.0.0.1:1"}, "local[1]")
    with pytest.raises(subprocess.TimeoutExpired):
        launch.run_attempt(launch.DriverArguments("orders", 4711), nowhere, on_log=print)
    assert [thread.name for thread in threading.enumerate() if "4711" in thread.name] == []
    assert [driver.stdout and driver.stdout.closed for driver in drivers] == [True]

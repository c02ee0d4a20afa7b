"""A caller that stops following a driver gets its own error at once, whatever holds the driver's pipe."""

from __future__ import annotations

import os
import signal
import subprocess
import threading

import pytest

from tidemark.connections import Connections
from tidemark.driver import launch


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
    nowhere = Connections("postgresql://nobody@127.0.0.1:1/nowhere", {"bootstrap.servers": "127.0.0.1:1"}, "local[1]")
    try:
        with pytest.raises(KeyboardInterrupt):
            launch.run_attempt(launch.DriverArguments("orders", 4711), nowhere, on_log=interrupt)
        os.kill(pids[0], 0)  # it still holds the pipe
    finally:
        os.kill(pids[0], signal.SIGKILL)
        drivers[0].wait()
    assert [thread.name for thread in threading.enumerate() if "follow 4711" in thread.name] == []

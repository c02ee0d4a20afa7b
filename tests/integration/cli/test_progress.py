"""What a terminal shows of a run: its phases, and what stays after Ctrl-C."""

from __future__ import annotations

import contextlib
import os
import pty
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.support.scenario import Scenario
from tests.support.waiting import until

GATED = """
    import time
    from pathlib import Path

    from tidemark.transform import Record

    FOLDER = Path({folder!r})


    def transform(record: Record):
        (FOLDER / "reached").touch()
        while not (FOLDER / record.value.decode()).exists():
            time.sleep(0.05)
        return {{"payload": record.value}}
"""
"""Waits for a file with the name of the record's value."""


class Terminal:
    """A command in a terminal of its own. ``seen`` is what it has printed so far."""

    def __init__(self, scenario: Scenario, *words: str) -> None:
        self.seen = ""
        self._terminal, theirs = pty.openpty()
        own = ["env", "--default-signal=INT", "setsid", "--ctty"]  # pytest may have been started by a shell that ignores Ctrl-C
        command = [*own, sys.executable, "-m", "tidemark.cli.main", *words]
        env = scenario.env() | {"COLUMNS": "150"}
        self._process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=env)
        os.close(theirs)
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        with contextlib.suppress(OSError):  # the terminal is closed once the command has ended
            while data := os.read(self._terminal, 65_536):
                self.seen += data.decode(errors="replace")

    def shows(self, text: str) -> None:
        until(lambda: text in self.seen, what=f"{text} in {self.seen}")

    def interrupt(self) -> int:
        """Presses Ctrl-C. Returns the exit status."""
        os.write(self._terminal, b"\x03")
        status = self._process.wait()
        self._reader.join()
        return status

    def kill(self) -> None:
        """For a test that failed before the interrupt."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self._reader.join()
        os.close(self._terminal)


@pytest.fixture
def opened() -> Iterator[Callable[..., Terminal]]:
    """Starts a command in a terminal."""
    terminals: list[Terminal] = []

    def start(scenario: Scenario, *words: str) -> Terminal:
        terminals.append(Terminal(scenario, *words))
        return terminals[-1]

    yield start
    for terminal in terminals:
        terminal.kill()


@pytest.fixture
def gated(scenario: Scenario, tmp_path: Path) -> Scenario:
    """A consumer of two partitions with one record each."""
    topic = scenario.topics.create(2)
    scenario.topics.produce(topic, [b"first"], partition=0)
    scenario.topics.produce(topic, [b"second"], partition=1)
    return scenario.write(GATED.format(folder=str(tmp_path)), topics=topic).make_sink("payload bytea")


def test_run_names_its_phases_and_says_what_stays_when_it_is_interrupted(
    gated: Scenario, opened: Callable[..., Terminal], tmp_path: Path
) -> None:
    """The next run loads the rest."""
    terminal = opened(gated, "consume", gated.name)
    for phase in ("planning", "starting Spark", "reading"):
        terminal.shows(f"{gated.name}: {phase}")
    (tmp_path / "first").touch()
    terminal.shows(f"{gated.name}: committing")
    assert terminal.interrupt() == 130, terminal.seen
    assert "The driver of attempt 1 was killed. Its commits stay; the next run continues from there." in " ".join(terminal.seen.split())
    assert [gated.attempt(1)["state"], *map(bytes, gated.rows())] == ["FAILED", b"first"]
    (tmp_path / "second").touch()
    assert gated.run().records == 1
    gated.check()


def test_other_commands_say_it_in_general(gated: Scenario, opened: Callable[..., Terminal], tmp_path: Path) -> None:
    """Here while the command waits for the transform."""
    terminal = opened(gated, "try", gated.name)
    until((tmp_path / "reached").exists, what="the transform is called")
    assert terminal.interrupt() == 130, terminal.seen
    assert terminal.seen.rstrip().endswith("Interrupted. What was committed stays.")

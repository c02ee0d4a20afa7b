"""Calls in the driver's environment, where ``TIDEMARK_PYTHON`` names another interpreter."""

from __future__ import annotations

import os
import socket
import sys
import tempfile
import threading
from functools import partial
from pathlib import Path

import pytest

from tidemark import project
from tidemark.driver import keeper_client
from tidemark.driver.call import call
from tidemark.driver.environment import CALLER_VERSION, PYTHON, VersionsDiffer, interpreter, require_same_version, separate
from tidemark.driver.keeper_client import CallDied, call_in_fork
from tidemark.errors import BadInput
from tidemark.packages import version
from tidemark.spec import UnknownConsumer, find_consumer


def _fail_without_a_text() -> None:
    class Textless(Exception):
        def __str__(self) -> str:
            return {}["text"]  # type: ignore[no-any-return]

    raise Textless


@pytest.fixture
def another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An interpreter with another path, and the same packages."""
    script = tmp_path / "python"
    script.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    script.chmod(0o755)
    monkeypatch.setenv(PYTHON, str(script))
    return script


@pytest.mark.usefixtures("another")
def test_call_runs_in_a_process_of_the_other_environment() -> None:
    """It has the caller's version, and is not separate from itself. What it prints is not part of the answer."""
    assert separate()
    assert call(os.getpid, with_keeper=False) != os.getpid()
    assert call(partial(os.getenv, PYTHON), with_keeper=False) is None
    assert call(partial(os.getenv, CALLER_VERSION), with_keeper=False) == version()
    assert call(partial(os.system, "echo printed"), with_keeper=False) == 0


@pytest.mark.usefixtures("another")
def test_error_of_a_call_reaches_its_caller() -> None:
    with pytest.raises(UnknownConsumer, match="nobody"):
        call(partial(find_consumer, "nobody", project.consumers()), with_keeper=False)
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        call(partial(divmod, 1, 0), with_keeper=False)
    with pytest.raises(RuntimeError, match="Textless: its text cannot be shown: KeyError"):
        call(_fail_without_a_text, with_keeper=False)
    with pytest.raises(CallDied):
        call(partial(os._exit, 3), with_keeper=False)


def test_call_without_another_environment_is_a_plain_call(monkeypatch: pytest.MonkeyPatch) -> None:
    for same in ("", sys.executable):
        monkeypatch.setenv(PYTHON, same)
        assert not separate()
        assert call(os.getpid, with_keeper=False) == os.getpid()


def test_interpreter_that_cannot_run_tidemark_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in (tmp_path, tmp_path / "missing"):
        monkeypatch.setenv(PYTHON, str(path))
        with pytest.raises(BadInput, match=f"TIDEMARK_PYTHON: {path} is not an executable file"):
            interpreter()
    bare = tmp_path / "bare"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    bare.chmod(0o755)
    monkeypatch.setenv(PYTHON, str(bare))
    with pytest.raises(BadInput, match=r"cannot import Tidemark .*pip install 'tidemark-kafka\[driver\]"):
        call(os.getpid, with_keeper=False)


def test_other_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CALLER_VERSION, version())
    require_same_version()
    monkeypatch.setenv(CALLER_VERSION, "0.0.1")
    with pytest.raises(VersionsDiffer, match=rf"version 0\.0\.1 where the run was started, and {version()}"):
        require_same_version()


@pytest.mark.parametrize("reads", [False, True], ids=["before it reads", "while it reads"])
def test_fork_that_ends_early_is_an_outage(monkeypatch: pytest.MonkeyPatch, *, reads: bool) -> None:
    """As when its memory is gone: the same call may succeed later."""
    ends: list[socket.socket] = []

    def request_fork(_env: object, _request: object, file: int) -> tuple[socket.socket, int]:
        fork = socket.socket(fileno=os.dup(file))
        if reads:
            threading.Thread(target=lambda: (fork.recv(1), fork.close())).start()
        else:
            fork.close()
        ours, theirs = socket.socketpair()
        ends.append(theirs)
        return ours, 4711

    monkeypatch.setattr(keeper_client, "_request_fork", request_fork)
    with pytest.raises(CallDied):
        call_in_fork(partial(len, "x" * 1_000_000))
    ends[0].close()


@pytest.mark.parametrize("changed", ["a module", "a package", "nothing"])
def test_upgrade_of_the_other_environment_gets_another_keeper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: str) -> None:
    """The modules that a keeper has imported stay what they were."""
    python, packages = tmp_path / "bin" / "python", tmp_path / "lib" / "python3.12" / "site-packages"
    module = packages / "tidemark" / "consume" / "run.py"
    for file in (python, module):
        file.parent.mkdir(parents=True)
        file.touch(0o755)
    monkeypatch.setenv(PYTHON, str(python))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = keeper_client.socket_path(os.environ)
    os.utime({"a module": module, "a package": packages, "nothing": python}[changed], (5, 5))
    assert (keeper_client.socket_path(os.environ) == before) == (changed == "nothing")

"""Calls in the driver's environment, where ``TIDEMARK_PYTHON`` names another interpreter."""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path

import pytest

from tidemark import project
from tidemark.driver.call import call
from tidemark.driver.environment import CALLER_VERSION, PYTHON, VersionsDiffer, interpreter, require_same_version, separate
from tidemark.driver.keeper_client import CallDied
from tidemark.errors import BadInput
from tidemark.packages import version
from tidemark.spec import UnknownConsumer, find_consumer


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

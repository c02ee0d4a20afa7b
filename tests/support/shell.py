"""The ``tidemark`` command in this process. A process for each command would spend most of its time on imports."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
from collections.abc import Mapping

import pytest

from tests.support.json_output import command_of, mismatches
from tests.support.scenario import Scenario, tidy_imports
from tidemark.cli.main import main


def tidemark(scenario: Scenario, *words: str, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Like `Scenario.command`, and checks that JSON on stdout is as documented. Only `Scenario.command` returns what processes print that
    the command starts, such as a run's driver."""
    wanted = scenario.env() | dict(env or {})
    out, err, status = io.StringIO(), io.StringIO(), 0
    with pytest.MonkeyPatch.context() as patch, tidy_imports(), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        for name in os.environ.keys() - wanted.keys():
            patch.delenv(name)
        for name, value in wanted.items():
            patch.setenv(name, value)
        patch.chdir(scenario.folder)
        patch.setattr(sys, "argv", ["tidemark", *words])
        try:
            main()
        except SystemExit as ended:
            status = int(ended.code or 0)
    if "json" in words and status != 2:
        assert mismatches(command_of(words), out.getvalue()) == []
    return subprocess.CompletedProcess(words, status, out.getvalue(), err.getvalue())

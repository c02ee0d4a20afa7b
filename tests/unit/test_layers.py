"""The packages' layers in pyproject.toml: no import points upwards, not even a lazy or type-only one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tidemark import project

LINT = (sys.executable, "-c", "from importlinter.cli import lint_imports_command; lint_imports_command()", "--no-cache")


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": str(folder / "include")}
    return subprocess.run(LINT, cwd=folder, env=env, capture_output=True, text=True, timeout=300)


def test_no_import_points_upwards() -> None:
    done = lint(project.root())
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 kept, 0 broken" in done.stdout


@pytest.mark.parametrize(
    "line",
    [
        "from tidemark import rewind",
        "def late() -> None:\n    from tidemark.rewind.apply import apply",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from tidemark.rewind.model import Plan",
    ],
    ids=["plain", "lazy", "type-only"],
)
def test_an_import_upwards_is_noticed(tmp_path: Path, line: str) -> None:
    shutil.copytree(project.root() / "include" / "tidemark", tmp_path / "include" / "tidemark", ignore=shutil.ignore_patterns("*.sql"))
    shutil.copy(project.root() / "pyproject.toml", tmp_path)
    with (tmp_path / "include" / "tidemark" / "errors.py").open("a") as file:
        file.write(f"\n{line}\n")
    done = lint(tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "tidemark.errors -> tidemark.rewind" in done.stdout

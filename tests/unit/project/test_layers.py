"""The packages' layers in pyproject.toml, which `make lint` checks: no import points upwards, not even a lazy or type-only one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from tidemark import project

LINT = (sys.executable, "-c", "from importlinter.cli import lint_imports_command; lint_imports_command()", "--no-cache")
UPWARDS = {
    "errors": "from tidemark import rewind",
    "secret": "def late() -> None:\n    from tidemark.rewind.apply import apply",
    "keep": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from tidemark.rewind.plan_model import Plan",
}


def test_plain_lazy_and_type_only_imports_upwards_are_noticed(tmp_path: Path) -> None:
    library = tmp_path / "include" / "tidemark"
    shutil.copytree(project.root() / "include" / "tidemark", library, ignore=shutil.ignore_patterns("*.sql", "*.pyc"))
    shutil.copy(project.root() / "pyproject.toml", tmp_path)
    for module, line in UPWARDS.items():
        with (library / f"{module}.py").open("a") as file:
            file.write(f"\n{line}\n")
    env = os.environ | {"PYTHONPATH": str(tmp_path / "include")}
    done = subprocess.run(LINT, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1, done.stdout + done.stderr
    for module in UPWARDS:
        assert f"tidemark.{module} -> tidemark.rewind" in done.stdout

"""Removes each protection of the commit path in a copy of the project: some test must fail without it.

A protection whose absence goes unnoticed may be lost in the next change. The same tests pass on the unchanged project.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.protections import PROTECTIONS, Without

from tidemark import project
from tidemark.local import LocalStack

COPIED = ("include", "sql", "spark_jobs", "tests", "docs", "pyproject.toml")


@pytest.mark.sampled
@pytest.mark.parametrize("without", PROTECTIONS.values(), ids=PROTECTIONS.keys())
def test_a_missing_protection_is_noticed(stack: LocalStack, tmp_path: Path, without: Without) -> None:
    """The named test fails in the copy, in the short run: it was found, and it ran."""
    root = project.root()
    for name in COPIED:
        if (root / name).is_dir():
            shutil.copytree(root / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(root / name, tmp_path / name)
    file = tmp_path / "include" / "tidemark" / without.file
    text = file.read_text()
    for there, instead in without.edits.items():
        assert text.count(there) == 1, f"{without.file} does not have {there!r} once: correct the table of this test"
        text = text.replace(there, instead)
    file.write_text(text)

    own = ["-p", "no:cacheprovider", f"--basetemp={tmp_path / 'tmp'}"]  # otherwise pytest closes the shared folder to other users
    command = [sys.executable, "-m", "pytest", "-qx", *own, without.noticed_by]
    env = {name: value for name, value in os.environ.items() if name not in ("TIDEMARK_TEST_ALL", "TIDEMARK_TEST_SHARD")} | {
        "PYTHONPATH": str(tmp_path / "include"),
        "TIDEMARK_HOME": str(tmp_path),
        "TIDEMARK_TEST_STACK": str(stack.folder),
    }
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1, f"nothing noticed: {done.stdout[-3000:]}{done.stderr[-1000:]}"
    assert "1 failed" in done.stdout, done.stdout[-3000:]

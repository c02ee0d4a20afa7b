"""A JVM that hangs during its start does not block a driver for longer than the limit."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tidemark.spark import session

CODE = """
from tidemark.spark import session

session.JVM_LIMIT_S = 1.0
try:
    session._start_jvm("local[1]", {})
except session.JvmHangs as error:
    print(error, error.retriable)
"""


def test_jvm_that_hangs_while_it_starts_is_killed_and_is_an_outage(tmp_path: Path) -> None:
    """pyspark itself would wait indefinitely."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "spark-submit").write_text("#!/bin/sh\nexec sleep 600\n")
    (tmp_path / "bin" / "spark-submit").chmod(0o755)
    env = {**os.environ, "SPARK_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", CODE], env=env, capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL)
    assert done.stdout.startswith("Spark's JVM did not start within 1 s and was killed."), done.stderr
    assert done.stdout.endswith("True\n")


def test_folder_that_another_user_made_first_does_not_stop_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The temporary folder is open to all users of the host. Spark's files go to a new private folder then."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("SPARK_SUBMIT_OPTS", "")
    monkeypatch.delenv("SPARK_LOCAL_DIRS", raising=False)
    taken = tmp_path / f"tidemark-{os.geteuid()}"
    taken.mkdir()
    taken.chmod(0o777)
    folder = Path(session._private()["spark.local.dir"])
    assert folder.parent == tmp_path
    assert folder.stat().st_mode & 0o777 == 0o700
    assert str(folder) in os.environ["SPARK_SUBMIT_OPTS"]

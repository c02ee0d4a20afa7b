"""A JVM that hangs during its start does not block a driver for longer than the limit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

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

"""Which modules a driver imports before it knows whether there is anything to read."""

from __future__ import annotations

import subprocess
import sys


def test_run_that_is_taken_by_hand_brings_nothing_heavy() -> None:
    """The operator imports it too, in every task. Assignors need numpy, and engines need Spark and Arrow, but only later, if at all."""
    heavy = ("numpy", "pyarrow", "pyspark", "great_expectations")
    code = f"import sys, tidemark.consume.run; sys.exit(', '.join(name for name in {heavy} if name in sys.modules) or 0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")

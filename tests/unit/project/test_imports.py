"""Which modules are imported before they are needed, if at all."""

from __future__ import annotations

import subprocess
import sys

import pytest

LIGHT = {
    "tidemark.consume.run": {"numpy", "pyarrow", "pyspark", "great_expectations"},
    "tidemark.jvm.jars": {"psutil", "psycopg2", "confluent_kafka"},
    "tidemark.cli.main": {"psycopg2", "confluent_kafka", "pydantic", "yaml", "tidemark.cli.consume"},
}


@pytest.mark.parametrize("module", LIGHT)
def test_module_imports_nothing_heavy(module: str) -> None:
    """The operator imports ``run`` in every task, before it knows whether there is anything to read. A driver needs the jars even where
    Tidemark is installed without the extra ``local``. A command imports only its own module."""
    code = f"import sys, {module}; sys.exit(', '.join({LIGHT[module]} & set(sys.modules)) or 0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")

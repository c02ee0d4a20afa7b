"""Which modules are imported before they are needed, if at all."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = {"airflow", "pyspark", "great_expectations", "sqlalchemy", "confluent_kafka", "pandas", "pyarrow", "psycopg2", "croniter"}
LIGHT = {
    "import tidemark": HEAVY | {"tidemark.transform", "tidemark.spec", "tidemark.errors"},
    "from tidemark import *; from tidemark.transform import *; import tidemark.spec, tidemark.spec.user_transform": HEAVY,
    "import tidemark.quality": {"great_expectations", "sqlalchemy", "pandas", "pyarrow", "pyspark"},
    "import tidemark.consume.run": {"numpy", "pyarrow", "pyspark", "great_expectations"},
    "import tidemark.jvm.jars": {"psutil", "psycopg2", "confluent_kafka"},
    "import tidemark.cli.main": {"psycopg2", "confluent_kafka", "pydantic", "yaml", "tidemark.cli.consume"},
}


@pytest.mark.parametrize("imports", LIGHT)
def test_import_brings_nothing_that_it_does_not_need(imports: str) -> None:
    """Airflow imports specs whenever it parses DAGs, and ``run`` in every task, before it knows whether there is anything to read. A
    transform can be tested where neither Spark nor Airflow is installed. A driver needs the jars even where Tidemark is installed without
    the extra ``local``. A command imports only its own module."""
    code = f"import sys; {imports}; print(*sys.modules.keys() & {LIGHT[imports]})"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split() == []

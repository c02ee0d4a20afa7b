"""The names that users import: each is documented, is where the front pages say, and loads no module that it does not need."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
from importlib.metadata import version

import pytest

DOORS = ("tidemark", "tidemark.transform", "tidemark.airflow")
HEAVY = {"airflow", "pyspark", "great_expectations", "sqlalchemy", "confluent_kafka", "pandas", "pyarrow", "psycopg2", "croniter"}
LIGHT = [
    ("import tidemark", HEAVY | {"tidemark.transform", "tidemark.spec", "tidemark.errors"}),
    ("from tidemark import *; from tidemark.transform import *; import tidemark.spec, tidemark.spec.user_transform", HEAVY),
    ("import tidemark.quality", {"great_expectations", "sqlalchemy", "pandas", "pyarrow", "pyspark"}),
]
PUBLIC = [(door, name) for door in DOORS for name in importlib.import_module(door).__all__ if name != "__version__"]


@pytest.mark.parametrize(("door", "name"), PUBLIC)
def test_public_name_is_documented(door: str, name: str) -> None:
    """Each name has its own docstring, not an inherited one."""
    found = getattr(importlib.import_module(door), name)
    assert found.__name__ == name
    assert inspect.cleandoc(found.__doc__ or "")


@pytest.mark.parametrize("door", DOORS)
def test_front_page_lists_its_names_and_refuses_others(door: str) -> None:
    """Front pages behave like ordinary modules, so completion in a shell offers their names before they are used."""
    module = importlib.import_module(door)
    assert importlib.import_module("tidemark").__version__ == version("tidemark")
    assert set(module.__all__) <= set(dir(module))
    with pytest.raises(AttributeError, match=f"module '{door}' has no attribute 'Nothing'"):
        _ = module.Nothing


@pytest.mark.parametrize(("imports", "unwanted"), LIGHT, ids=[imports for imports, _ in LIGHT])
def test_import_brings_nothing_that_it_does_not_need(imports: str, unwanted: set[str]) -> None:
    """Airflow imports specs whenever it parses DAGs, and a transform can be tested where neither Spark nor Airflow is installed."""
    code = f"import sys; {imports}; print(*sys.modules.keys() & {unwanted})"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split() == []

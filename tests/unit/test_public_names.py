"""The names that users import: each is documented, is where the front pages say, and loads no module that it does not need."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
from importlib.metadata import version

import pytest

DOORS = ("tidemark", "tidemark.transform", "tidemark.airflow")
HEAVY = ("airflow", "pyspark", "great_expectations", "confluent_kafka", "pandas", "pyarrow", "psycopg2")
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
    assert set(module.__all__) <= set(dir(module))
    with pytest.raises(AttributeError, match=f"module '{door}' has no attribute 'Nothing'"):
        _ = module.Nothing


def test_version_is_that_of_the_distribution() -> None:
    assert importlib.import_module("tidemark").__version__ == version("tidemark")


@pytest.mark.parametrize("door", ["tidemark", "tidemark.transform"])
def test_names_for_transforms_need_neither_spark_nor_airflow(door: str) -> None:
    """A transform's module can be imported and tested where neither is installed."""
    code = f"import sys; from {door} import *; print(*sorted({{name.partition('.')[0] for name in sys.modules}} & {set(HEAVY)}))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split() == []


def test_front_page_imports_nothing_until_a_name_is_used() -> None:
    code = "import sys, tidemark; print(*[name for name in sys.modules if name.startswith('tidemark.')])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split() == []

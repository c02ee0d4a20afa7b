"""The names that users import: each is documented, and is where the front pages say."""

from __future__ import annotations

import importlib
import inspect
from importlib.metadata import version

import pytest

DOORS = ("tidemark", "tidemark.transform", "tidemark.airflow")
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
    assert importlib.import_module("tidemark").__version__ == version("tidemark-kafka")
    assert set(module.__all__) <= set(dir(module))
    with pytest.raises(AttributeError, match=f"module '{door}' has no attribute 'Nothing'"):
        _ = module.Nothing

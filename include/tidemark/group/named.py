"""Loads users' classes by the names in a spec."""

from __future__ import annotations

import importlib
from typing import TypeVar

from tidemark.errors import BadInput

T = TypeVar("T")


def find_class(name: str, base: type[T], *, what: str, fix: str) -> type[T]:
    """The class that ``module:Class`` names. Raises `BadInput` with ``what`` and ``fix`` unless it exists and implements ``base``."""

    def refusal(problem: str) -> BadInput:
        return BadInput(what=f"{what} {name!r}", found=problem, fix=fix)

    module_name, colon, class_name = name.partition(":")
    if not (colon and module_name and class_name):
        raise refusal(f"no {what} has this name")
    try:
        candidate = getattr(importlib.import_module(module_name), class_name, None)
    except ImportError as error:
        raise refusal(f"{module_name} cannot be imported: {error}") from error
    if candidate is None:
        raise refusal(f"{module_name} has no {class_name}")
    if not (isinstance(candidate, type) and issubclass(candidate, base)):
        raise refusal(f"{class_name} does not implement {base.__module__}.{base.__name__}")
    return candidate

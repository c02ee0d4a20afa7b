"""The file of a consumer's transform, as text: the page never imports the user's code."""

from __future__ import annotations

import ast
import contextlib
from pathlib import Path
from typing import Any

from fastapi import HTTPException

from tidemark import project
from tidemark.spec import ConsumerSpec

MOST_BYTES = 256 * 1024


def place(spec: ConsumerSpec) -> dict[str, Any]:
    """Returns ``{"transform": "module:function", "file": ...}``. The file is relative to the project. None: not in the folder of
    transforms, so the module is installed, or missing here. Both are None for a consumer without code."""
    path = _file(spec)
    return {"transform": spec.transform, "file": None if path is None else _relative_path(path)}


def source(spec: ConsumerSpec) -> dict[str, Any]:
    """Returns `place`, the file's ``text``, and the ``line`` where the function begins, if the file defines it. Raises 404."""
    path, location = _file(spec), place(spec)
    if spec.transform is None:
        raise HTTPException(404, f"{spec.name} has no transform: the fields of its values become columns.")
    if path is None:
        module = spec.transform.partition(":")[0]
        raise HTTPException(404, f"Module {module} is not in {_relative_path(project.transforms())}. It may be an installed module.")
    with path.open("rb") as file:
        text = file.read(MOST_BYTES).decode("utf-8", "replace")
    return location | {"text": text, "line": _first_line(text, spec.transform.partition(":")[2])}


def _file(spec: ConsumerSpec) -> Path | None:
    if spec.transform is None:
        return None
    base = project.transforms().joinpath(*spec.transform.partition(":")[0].split("."))
    return next((path for path in (base.with_suffix(".py"), base / "__init__.py") if path.is_file()), None)


def _relative_path(path: Path) -> str:
    with contextlib.suppress(ValueError):
        return str(path.relative_to(project.root()))
    return str(path)


def _first_line(text: str, name: str) -> int | None:
    try:
        body = ast.parse(text).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    functions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return next((node.lineno for node in body if isinstance(node, functions) and node.name == name), None)

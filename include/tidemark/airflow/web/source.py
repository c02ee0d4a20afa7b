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
    """``{"transform": "module:function", "file": ...}``. The file is relative to the project. None: the folder of the transforms does not
    have it, so the module is an installed one, or missing here. A consumer without code has neither."""
    found = _file(spec)
    return {"transform": spec.transform, "file": None if found is None else _shown(found)}


def source(spec: ConsumerSpec) -> dict[str, Any]:
    """`place`, the file's ``text``, and the ``line`` where the function begins, if it is defined there. Raises 404."""
    found, said = _file(spec), place(spec)
    if spec.transform is None:
        raise HTTPException(404, f"{spec.name} has no transform: the fields of its values become columns.")
    if found is None:
        module = spec.transform.partition(":")[0]
        raise HTTPException(404, f"Module {module} is not in {_shown(project.transforms())}. It may be an installed module.")
    with found.open("rb") as file:
        text = file.read(MOST_BYTES).decode("utf-8", "replace")
    return said | {"text": text, "line": _line(text, spec.transform.partition(":")[2])}


def _file(spec: ConsumerSpec) -> Path | None:
    if spec.transform is None:
        return None
    base = project.transforms().joinpath(*spec.transform.partition(":")[0].split("."))
    return next((path for path in (base.with_suffix(".py"), base / "__init__.py") if path.is_file()), None)


def _shown(path: Path) -> str:
    with contextlib.suppress(ValueError):
        return str(path.relative_to(project.root()))
    return str(path)


def _line(text: str, name: str) -> int | None:
    try:
        body = ast.parse(text).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    functions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return next((each.lineno for each in body if isinstance(each, functions) and each.name == name), None)

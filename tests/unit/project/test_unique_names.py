"""In the core, a name stands for one thing. ``cli/`` and ``airflow/`` name their modules after what they open."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

from tidemark import project

LIBRARY = project.root() / "include" / "tidemark"
EDGES = {"airflow", "cli"}
IN_EACH_PACKAGE = {"__init__", "errors", "store"}


def shared(names: dict[str, list[Path]]) -> dict[str, list[str]]:
    return {name: [str(path.relative_to(LIBRARY)) for path in paths] for name, paths in names.items() if len(paths) > 1}


def test_no_two_modules_share_a_name() -> None:
    modules = defaultdict(list)
    for path in LIBRARY.rglob("*.py"):
        if path.relative_to(LIBRARY).parts[0] not in EDGES and path.stem not in IN_EACH_PACKAGE:
            modules[path.stem].append(path)
    assert len(modules) > 100
    assert shared(modules) == {}


def test_no_two_public_classes_share_a_name() -> None:
    classes = defaultdict(list)
    for path in LIBRARY.rglob("*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                classes[node.name].append(path)
    assert len(classes) > 200
    assert shared(classes) == {}

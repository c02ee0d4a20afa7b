"""`make test` notices the loss of each protection of the commit path."""

from __future__ import annotations

import ast

import pytest
from tests.support.protections import PROTECTIONS, Without

from tidemark import project


@pytest.mark.parametrize("noticed_by", sorted({without.noticed_by for without in PROTECTIONS.values()}))
def test_protection_is_noticed_by_a_test_of_the_short_run(noticed_by: str) -> None:
    file, _, name = noticed_by.partition("::")
    module = ast.parse((project.root() / file).read_text())
    (test,) = [node for node in module.body if isinstance(node, ast.FunctionDef) and node.name == name]
    marks = [node.value for node in module.body if isinstance(node, ast.Assign) and "pytestmark" in ast.unparse(node.targets[0])]
    assert not [mark for mark in (*marks, *test.decorator_list) if "thorough" in ast.unparse(mark)]


@pytest.mark.parametrize("without", PROTECTIONS.values(), ids=PROTECTIONS)
def test_protection_stands_once_in_its_file(without: Without) -> None:
    """`make test` removes only a sample of them."""
    text = (project.root() / "include" / "tidemark" / without.file).read_text(encoding="utf-8")
    assert {there: text.count(there) for there in without.edits} == dict.fromkeys(without.edits, 1)

"""Each claim of docs/security.md is in ``tests/security_claims.txt``, with the tests that prove it.

In the register, each claim has a separate line. Each indented line below it is a test (``file::function``) or one of two words: ``advice``
tells the reader what to do or where to look, ``elsewhere`` states what other software does. A claim is a sentence, or a row of a table; in
the table "What a stolen role can do", it is an item. A row may be cut with ``…`` if its test compares it with the code, cell by cell.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from functools import cache

from tests.support.documented import text_of

PAGE = "docs/security.md"
REGISTER = "tests/security_claims.txt"
NO_TEST = ("advice", "elsewhere")
SENTENCE = re.compile(r"(?<=[.?!])\s+(?=[A-Z`*\[])")
ITEMS = ["role", "can", "cannot"]


def claims(page: str) -> list[str]:
    """The claims of a Markdown page, in order."""
    text = re.sub(r"^```.*?^```$", "", page, flags=re.MULTILINE | re.DOTALL)
    return [claim for block in re.split(r"\n\s*\n", text) if not block.strip().startswith("#") for claim in _of_block(block)]


def _of_block(block: str) -> Iterator[str]:
    lines = block.strip().splitlines()
    if lines and lines[0].startswith("|"):
        header, _, *rows = ([cell.strip() for cell in line.strip("| ").split(" | ")] for line in lines)
        for row in rows:
            if header == ITEMS:
                for kind, cell in zip(("can", "cannot"), row[1:], strict=True):
                    yield from (f"{row[0]} {kind} {item}" for item in cell.split("; ") if item != "-")
            else:
                yield "| " + " | ".join(row) + " |"
        return
    for paragraph in re.split(r"^- ", "\n".join(lines), flags=re.MULTILINE):
        if words := " ".join(paragraph.split()):
            yield from SENTENCE.split(words)


@cache
def register() -> dict[str, list[str]]:
    """Each claim with its proofs. Claims with the same words count as one."""
    found: dict[str, list[str]] = {}
    proofs: list[str] = []
    for line in text_of(REGISTER).splitlines():
        if line.startswith(" "):
            proofs.append(line.strip())
        elif line and not line.startswith("#"):
            assert line not in found, f"twice: {line}"
            proofs = found[line] = []
    return found


@cache
def functions(path: str) -> set[str]:
    """The test functions of a file."""
    return {node.name for node in ast.parse(text_of(path)).body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


def _cuts(entry: str, found: Sequence[str]) -> bool:
    """Whether the entry is the truncated form of one of the rows."""
    return entry.startswith("|") and entry.endswith("…") and any(one.startswith(entry.removesuffix("…")) for one in found)


def test_each_claim_of_the_page_is_in_the_register_and_no_other() -> None:
    found = claims(text_of(PAGE))
    missing = [one for one in found if one not in register() and not any(_cuts(entry, [one]) for entry in register())]
    gone = [entry for entry in register() if entry not in found and not _cuts(entry, found)]
    assert (missing, gone) == ([], []), "prove what is missing, and remove what is gone, in " + REGISTER


def test_each_proof_is_a_test_that_exists() -> None:
    wrong = []
    for claim, proofs in register().items():
        tests = [proof for proof in proofs if proof not in NO_TEST]
        if not proofs or (tests and len(tests) != len(proofs)):
            wrong.append((claim, "needs tests, or one of the words"))
        for path, _, name in (proof.partition("::") for proof in tests):
            if not (path.startswith("tests/") and name in functions(path)):
                wrong.append((claim, f"no such test: {path}::{name}"))
    assert wrong == []


def test_page_is_split_into_its_claims() -> None:
    page = (
        "# Title\n\nOne `a.b`. Two\nlines: `x` does.\n\n- A bullet. With two\n  sentences.\n- Another\n\n"
        "| a | b |\n|---|---|\n| 1 | 2. X |\n\n"
        "```sh\nno claim.\n```\n\n| role | can | cannot |\n|---|---|---|\n| `r` | do this; do, that | fly |\n| o | all | - |\n"
    )
    assert claims(page) == [
        "One `a.b`.", "Two lines: `x` does.", "A bullet.", "With two sentences.", "Another", "| 1 | 2. X |",
        "`r` can do this", "`r` can do, that", "`r` cannot fly", "o can all",
    ]  # fmt: skip

"""I6: the database's clock decides what is due or expired. Python's wall clock is shown to people and reaches no statement."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tidemark import project

ROOT = project.root()
LIBRARY = ROOT / "include" / "tidemark"
SOURCES = sorted(path for folder in (LIBRARY, ROOT / "dags", ROOT / "spark_jobs") for path in folder.rglob("*.py"))
WALL_CLOCK = re.compile(r"\b(?:datetime|date|time)\.(?:now|utcnow|today|time|time_ns|localtime|gmtime)\b")
"""A reading of the wall clock, even if the function is not called, as in ``default_factory=time.time``."""
MAY_READ = {
    "Follow.__init__": "since when Postgres has not answered, in a log line",
    "Follow._poll_session": "since when Postgres has not answered, in a log line",
    "question": "how long Airflow shows the question; an apply is refused by the database's clock",
    "swap_question": "how long Airflow shows the question; the maintenance discards by the database's clock",
    "clock_ahead_s": "compared with the database's clock, in a finding",
    "describe": "for how long a member was not seen, in a table",
    "now_s": "how long a token is used before the next one is asked for",
    "_age_s": "the age of a file in the cache",
    "_exercise": "a record of the class-data archive, which is thrown away",
}
"""Functions that may read the wall clock, and why. None of them passes it to a statement."""
STAND_STILL = {"0002_offsets.sql": ["transaction_timestamp"]}
"""A column that says when a transaction began."""
SESSIONS = {"cur", "cursor", "connection"}
"""A function that gets one of these may run a statement."""


def functions(tree: ast.AST, owner: str = "") -> Iterator[tuple[str, ast.AST]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef):
            yield from functions(node, f"{node.name}.")
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield f"{owner}{node.name}", node


def reads_wall_clock(tree: ast.AST) -> bool:
    return any(isinstance(node, ast.Attribute) and WALL_CLOCK.search(ast.unparse(node)) for node in ast.walk(tree))


@pytest.fixture(scope="module")
def readers() -> dict[Path, ast.Module]:
    """The sources that read the wall clock, or mention it in a text."""
    texts = {path: path.read_text(encoding="utf-8") for path in SOURCES}
    return {path: ast.parse(text) for path, text in texts.items() if WALL_CLOCK.search(text)}


def test_wall_clock_is_read_only_where_a_person_sees_it(readers: dict[Path, ast.Module]) -> None:
    """A new reader of Python's clock must be added to `MAY_READ`. Durations are measured by `time.monotonic`, which is not a wall clock."""
    assert {name for tree in readers.values() for name, node in functions(tree) if reads_wall_clock(node)} == set(MAY_READ)
    for path, tree in readers.items():
        outside = [node for node in tree.body if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)]
        assert not any(map(reads_wall_clock, outside)), f"{path} reads the clock when it is imported"


def kept(tree: ast.AST) -> set[str]:
    """The names of the variables and attributes in which a module may keep a reading of the wall clock."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None and reads_wall_clock(node.value):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                found |= {ast.unparse(name) for name in (target.elts if isinstance(target, ast.Tuple) else [target])}
    return found


def statements_with_a_time(tree: ast.AST) -> list[str]:
    """Calls that run SQL, or may run it, with a reading of the wall clock in their arguments."""
    times = kept(tree)
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            arguments = [*node.args, *(keyword.value for keyword in node.keywords)]
            runs = isinstance(node.func, ast.Attribute) and node.func.attr in {"execute", "executemany"}
            runs = runs or any(isinstance(one, ast.Name) and one.id in SESSIONS for one in arguments)
            inside = {ast.unparse(part) for one in arguments for part in ast.walk(one) if isinstance(part, ast.Name | ast.Attribute)}
            if runs and (inside & times or any(reads_wall_clock(one) for one in arguments)):
                found.append(ast.unparse(node))
    return found


def test_no_statement_is_given_a_time_of_python(readers: dict[Path, ast.Module]) -> None:
    """Neither a reading nor a variable that holds one is an argument of a call that runs SQL."""
    assert [one for tree in readers.values() for one in statements_with_a_time(tree)] == []


@pytest.mark.parametrize(
    "code",
    [
        "cur.execute(SQL, {'now': datetime.now(UTC)})",
        "now = time.time()\nmove(cur, now)",
        "self.at, n = datetime.now(UTC), 1\ncur.execute(SQL, (self.at,))",
    ],
)
def test_a_time_in_a_statement_would_be_found(code: str) -> None:
    """Checks that the test above can fail."""
    assert len(statements_with_a_time(ast.parse(code))) == 1


OTHER_CLOCKS = r"(?i)\bnow\s*\(|\b(?:current|local)_?timestamp\b|\b(?:statement|transaction)_timestamp\b|\btimeofday\b"
MOMENT, PARAMETER, COMPARED = r"[\w.]*(?:due_at|deadline|expires_at|seen_at|session_ends|ends_at)\b", r"%\(\w+\)s", r"\s*(?:<=?|>=?)\s*"


@pytest.mark.parametrize(
    "path", sorted([*LIBRARY.rglob("*.sql"), *(ROOT / "sql").glob("*.sql")]), ids=lambda path: str(path.relative_to(ROOT))
)
def test_statements_read_one_clock(path: Path) -> None:
    """``now()`` and its like stand still in a transaction, which may have waited for a lock, so only ``clock_timestamp()`` is used. No
    deadline is compared with a parameter, which would be a time from another clock."""
    text = re.sub(r"--.*", "", path.read_text(encoding="utf-8"))
    assert re.findall(OTHER_CLOCKS, re.sub("'[^']*'", "", text)) == STAND_STILL.get(path.name, [])
    assert re.findall(f"{MOMENT}{COMPARED}{PARAMETER}|{PARAMETER}(?:::\\w+)?{COMPARED}{MOMENT}", text) == []

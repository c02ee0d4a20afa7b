"""Documentation, docstrings, comments and messages are in plain technical English: banned phrases must not come back."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.support.documented import PAGES, ROOT

BANNED = {
    r"for ever\b": "permanently, indefinitely",
    r"mend(?:s|ed|ing)?\b": "fix, repair, edit",
    r"left out\b": "(default: …), omitted",
    r"(?:is|are) told\b": "gets, is notified",
    r"nobody (?:knows|heard|hears)\b": "unknown",
    r"who(?:so)?ever\b": "the process that, the user who",
    r"takes nothing\b": "cannot publish to, accepts nothing",
    r"(?:made|makes|make|published|built) anew\b": "again",
    r"is no (?:change|failure|batch|lost|DAG|UTF-8|moment)\b": "is not a",
    r"if need be\b": "if necessary",
    r"what becomes of\b": "what happens to",
    r"goes on behind\b": "continues after",
    r"99 %": "p99",
    r"to and fro\b": "back and forth",
    r"sent round\b": "redriven, sent again",
    r"lets? go of\b": "releases",
    r"time-out\b": "timeout",
}


@pytest.mark.parametrize("page", PAGES)
def test_page_has_no_banned_phrase(page: str) -> None:
    """Code blocks and inline code are exempt."""
    text = re.sub(r"^```.*?^```|`[^`\n]+`", "", (ROOT / page).read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    found = {match[0]: instead for phrase, instead in BANNED.items() for match in re.finditer(rf"\b{phrase}", text, re.IGNORECASE)}
    assert found == {}


@pytest.mark.parametrize("folder", ["include", "dags", "spark_jobs", "demo", "template", "docker", "benchmarks", "tests"])
def test_source_has_no_banned_phrase(folder: str) -> None:
    """This covers docstrings, comments, messages and SQL statements."""
    found = [
        f"{path.relative_to(ROOT)}: {match[0]}: {instead}"
        for path in sorted((ROOT / folder).rglob("*"))
        if path.suffix in {".py", ".sql", ".yaml", ".sh", ".md"} and path != Path(__file__)
        for phrase, instead in BANNED.items()
        for match in re.finditer(rf"\b{phrase}", path.read_text(encoding="utf-8"), re.IGNORECASE)
    ]
    assert found == []

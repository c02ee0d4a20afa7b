"""Documentation, docstrings, comments and messages are in plain technical English: exits with 1 if one of these phrases is in them.

``make lint`` runs it. Code blocks and inline code of the pages are exempt.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ("include", "dags", "spark_jobs", "demo", "template", "docker", "benchmarks", "tests")
KINDS = {".py", ".sql", ".yaml", ".sh", ".md"}
INSTEAD = {
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


def texts() -> Iterator[tuple[Path, str]]:
    """Each file, and what of it is checked. Blank code keeps the numbers of the lines."""
    for page in sorted((*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md"))):
        text = page.read_text(encoding="utf-8")
        yield page, re.sub(r"^```.*?^```|`[^`\n]+`", lambda code: "\n" * code[0].count("\n"), text, flags=re.MULTILINE | re.DOTALL)
    for folder in SOURCES:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in KINDS:
                yield path, path.read_text(encoding="utf-8")


def main() -> int:
    found = [
        f"{path.relative_to(ROOT)}:{text.count(chr(10), 0, match.start()) + 1}: {match[0]!r}: write {instead}"
        for path, text in texts()
        for phrase, instead in INSTEAD.items()
        for match in re.finditer(rf"\b{phrase}", text, re.IGNORECASE)
    ]
    sys.stdout.write("".join(f"{line}\n" for line in found))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

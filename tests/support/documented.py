"""The fenced blocks of the documentation, for users to copy and for the tests to run."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import typer

from tidemark import project
from tidemark.cli.main import app
from tidemark.transform import Record

ROOT = project.root()
PAGES = sorted(
    str(path.relative_to(ROOT))
    for path in (*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md"), ROOT / "template" / "README.md")
    if "build" not in path.parts
)
CLI = typer.main.get_command(app)


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block, identified by its page and the line after the opening fence."""

    page: str
    line: int
    language: str
    code: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(*languages: str, page: str | None = None) -> list[Block]:
    """All fenced blocks in these languages (all languages if none is named), of one page or of all pages, including blocks inside lists."""
    found = [
        Block(name, text[: match.start(3)].count("\n") + 1, match[2], re.sub(rf"^{match[1]}", "", match[3], flags=re.MULTILINE))
        for name in PAGES
        if page in (None, name)
        for text in (text_of(name),)
        for match in re.finditer(r"^( *)```(\w*)[^\n]*\n(.*?)^ *```$", text, re.MULTILINE | re.DOTALL)
    ]
    return [one for one in found if not languages or one.language in languages]


def snippets(page: str, language: str) -> list[str]:
    return [block.code for block in blocks(language, page=page)]


def outputs(page: str) -> dict[Block, str]:
    """The shell blocks of a page, in order, and what the page says that each one prints: the block of text that follows it, or nothing."""
    shown: dict[Block, str] = {}
    for block in blocks("sh", "text", page=page):
        if block.language == "sh":
            shown[block] = ""
        else:
            shown[list(shown)[-1]] += block.code
    return shown


def with_words(code: str, instead: Mapping[str, str]) -> str:
    """A block's code with other words. Each replaced word must be in it."""
    for old, new in instead.items():
        assert old in code, f"{old!r} is not in {code}"
        code = code.replace(old, new)
    return code


VARYING = re.compile(r"…|─+|\s+|\d{4}-\d\d-\d\d|\b\d\d-\d\d\b|\d\d:\d\d(?::\d\d)?|\b\d+(?:\.\d+)? (?:ms|s|min|h)\b")
"""The parts of a page's line that may differ in the output: times, durations, the widths of columns, and ``…`` for omitted text."""


def line_pattern(line: str) -> str:
    """A regular expression for the printed lines that match a line of a page."""
    kinds = {"…": ".*", "─": "─+", " ": r"\s+"}
    pattern, end = "", 0
    for match in VARYING.finditer(line):
        pattern += re.escape(line[end : match.start()]) + kinds.get(match[0][0], r"(?:[\d.:-]+(?: \w+)?|an? \w+(?: \w+)?)")
        end = match.end()
    return pattern + re.escape(line[end:])


def missing_line(shown: str, printed: str) -> str | None:
    """The first line of the page's text that is missing from the output or out of order. The output may have more lines."""
    printed_lines = iter(line.strip() for line in printed.splitlines())
    for line in shown.splitlines():
        if not any(re.fullmatch(line_pattern(line.strip()), printed_line) for printed_line in printed_lines):
            return line
    return None


def record(value: object) -> Record:
    """A record whose value is JSON, for the transforms in the documentation. None is a tombstone."""
    return Record("cities", 0, 7, datetime(2026, 1, 1, tzinfo=UTC), None, None if value is None else json.dumps(value).encode())


def grants(page: str) -> list[str]:
    """The SQL blocks on a page that grant something, in order."""
    return [code for code in snippets(page, "sql") if "GRANT" in code]


HEREDOC = re.compile(r" <<'EOF'\n(.*?)^EOF$", re.MULTILINE | re.DOTALL)


def commands(code: str) -> Iterator[list[str]]:
    """The simple commands of a shell block, each as a list of words, including those inside ``"$(...)"``. A word after ``>`` is a file and
    is not included."""
    code = HEREDOC.sub("", re.sub(r"(?:^|[ \t]+)# .*$", "", code, flags=re.MULTILINE))
    code = re.sub(r'"\$\(([^"]*)\)"', r"( \1 )", code.replace("\\\n", ""))
    words = shlex.shlex(code, posix=True, punctuation_chars=";&|<>()\n")
    words.whitespace, words.whitespace_split, words.commenters = " \t", True, ""
    command: list[str] = []
    to_file = False
    for word in [*words, ";"]:
        if set(word) <= set(";&|()\n"):
            if command:
                yield command
            command = []
        elif set(word) <= set("<>"):
            to_file = True
        elif to_file:
            to_file = False
        else:
            command.append(word)


def find_command(words: list[str]) -> tuple[Any, list[str]]:
    """The command of Tidemark that the words name, and its arguments."""
    command: Any = CLI
    while words and words[0] in getattr(command, "commands", {}):
        command, words = command.commands[words[0]], words[1:]
    return command, words

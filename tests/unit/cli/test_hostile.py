"""What comes from records and people is printed as text: no terminal obeys it, no line is forged, no spreadsheet computes it."""

from __future__ import annotations

import ast
import io
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.table import Table

from tidemark.cli import common
from tidemark.text.wording import indented, one_line, spreadsheet_cell, visible

LIBRARY = Path(common.__file__).parents[1]

OBEYED = {chr(code) for code in (*range(32), *range(0x7F, 0xA0))} - {"\n", "\t"} | set("\u202e\u2066\u200b\u2028\u2029\ud800")


MARKUP = st.sampled_from(["[", "]", "\\", "/", "=", "[link=http://x]", "[/x]", "[/]", "[red]", ":warning:", "\\[/x]", "a"])


@given(st.lists(MARKUP, max_size=8).map("".join))
def test_text_is_no_markup(text: str) -> None:
    """Whatever stands before a bracket. A link would reach the terminal with its target."""
    console = common.SafeConsole(file=io.StringIO(), width=200, color_system="truecolor", force_terminal=True, emoji=False)
    table = common.plain_table("", "text")
    table.add_row(common.plain(text))
    console.print(table)
    console.print(common.plain(text))
    console.print("[link=http://x]a[/link]")
    assert "\x1b]8" not in console.file.getvalue()
    assert text in console.file.getvalue()


def test_what_comes_from_others_is_written_in_one_place() -> None:
    """`common` has the ways to write to a terminal. What writes by itself writes addresses and versions of our own."""
    writes = re.compile(r"(typer\.echo|print|sys\.std(out|err)\.write)\(|csv\.writer\(sys")
    calls = ((path, node) for path in LIBRARY.rglob("*.py") for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call))
    found = {str(path.relative_to(LIBRARY)) for path, node in calls if writes.match(ast.unparse(node))}
    assert found == {"cli/common.py", "cli/local.py", "cli/main.py", "spark/build_archive.py"}


@given(st.text(st.sampled_from(sorted(OBEYED)) | st.characters(), max_size=30))
def test_line_after_the_first_is_indented(text: str) -> None:
    first, *more = indented(f"x{text}").split("\n")
    assert first.startswith("x")
    assert all(line.startswith("  ") for line in more)
    assert not OBEYED & set(indented(text))


@given(st.text(st.sampled_from(sorted(OBEYED)) | st.characters(), max_size=30))
def test_no_character_that_a_terminal_obeys_is_printed(text: str) -> None:
    """This holds for every way to print: a line, a cell of a table, markup."""
    console = common.SafeConsole(file=io.StringIO(), width=200, color_system=None)
    table = Table()
    table.add_row(common.plain(text))
    console.print(text, markup=False, highlight=False)
    console.print(table)
    assert not OBEYED & set(console.file.getvalue())
    assert not OBEYED & set(visible(text))


def test_text_without_such_characters_is_printed_as_it_is() -> None:
    console = common.SafeConsole(file=io.StringIO(), width=200, color_system=None)
    console.print("süß [x] 日本 \\x1b\nnext", markup=False, highlight=False)
    assert console.file.getvalue() == "süß [x] 日本 \\x1b\nnext\n"


def test_both_consoles_of_the_commands_are_safe() -> None:
    assert isinstance(common.stdout, common.SafeConsole)
    assert isinstance(common.stderr, common.SafeConsole)


@given(st.text())
def test_line_of_a_record_stays_one_line(text: str) -> None:
    assert len(one_line(text).splitlines()) <= 1


@pytest.mark.parametrize(
    "formula",
    [
        "=HYPERLINK(1)",
        "+1",
        "-1",
        "@x",
        "\t=1",
        "\r=1",
        " =1",
        "\n=1",
        "\xa0=1",
        "\ufeff=1",
        "\u200b+1",
        '"=1',
        "\uff1d1",
        "\uff0b1",
        "\uff0d1",
        "\uff201",
    ],
)
def test_formula_gets_an_apostrophe_in_csv(formula: str) -> None:
    assert spreadsheet_cell(formula) == f"'{formula}"


@pytest.mark.parametrize(("value", "cell"), [(None, ""), (7, "7"), ("a=1", "a=1"), ("", "")])
def test_other_values_are_cells_as_they_are(value: object, cell: str) -> None:
    assert spreadsheet_cell(value) == cell

"""What comes from records and people is printed as text: no terminal obeys it, no line is forged, no spreadsheet computes it."""

from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.table import Table

from tidemark.cli import common
from tidemark.text.wording import one_line, spreadsheet_cell, visible

OBEYED = {chr(code) for code in (*range(32), *range(0x7F, 0xA0))} - {"\n", "\t"} | set("\u202e\u2066\u200b\u2028\u2029\ud800")


@given(st.text(st.sampled_from(sorted(OBEYED)) | st.characters(), max_size=30))
def test_no_character_that_a_terminal_obeys_is_printed(text: str) -> None:
    """This holds for every way to print: a line, a cell of a table, markup."""
    console = common.SafeConsole(file=io.StringIO(), width=200, color_system=None)
    table = Table()
    table.add_row(common.plain(text))
    console.print(text, markup=False, highlight=False)
    console.print(table)
    console.print(f"[bold]{common.plain(text)}[/bold]")
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


@pytest.mark.parametrize("formula", ["=HYPERLINK(1)", "+1", "-1", "@x", "\t=1", "\r=1"])
def test_formula_gets_an_apostrophe_in_csv(formula: str) -> None:
    assert spreadsheet_cell(formula) == f"'{formula}"


@pytest.mark.parametrize(("value", "cell"), [(None, ""), (7, "7"), ("a=1", "a=1"), ("", "")])
def test_other_values_are_cells_as_they_are(value: object, cell: str) -> None:
    assert spreadsheet_cell(value) == cell

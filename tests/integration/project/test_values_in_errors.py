"""What Postgres says of a row never reaches the text or the traceback of an error of Tidemark's sessions, whatever raised it."""

from __future__ import annotations

import ast
import io
import json
import traceback
from collections.abc import Iterator
from pathlib import Path

import psycopg2
import psycopg2.errorcodes
import psycopg2.errors
import pytest

from tidemark.cli import main
from tidemark.db import Connection, is_outage, session

LIBRARY = Path(__file__).parents[3] / "include" / "tidemark"
VALUE, NUMBER = "secretxyz", 98_765
OF_TEXT = (
    "v::regclass IS NULL", "v::regconfig IS NULL", "v::regrole IS NULL", "v::regnamespace IS NULL", "nextval(v::text) > 0", "v::int > 0",
    "v::jsonb IS NULL", "v::date IS NULL", "current_setting(v) IS NULL", "set_config(v, v, true) IS NULL", "date_trunc(v, now()) IS NULL",
    "('2026-01-01 ' || v)::timestamptz IS NULL", "v ~ (v || '[')", "('$.' || v || '[')::jsonpath IS NULL", "(v || ' &')::tsquery IS NULL",
    "decode(v, v) IS NULL", "unistr(v || '\\') IS NULL", "convert_to(v, v) IS NULL", "xmlparse(document v) IS NULL", "v::uuid IS NULL",
)  # fmt: skip
OF_NUMBERS = (
    "make_date(1987, n, 6) IS NULL", "get_byte('x', n) > 0", "set_masklen('10.0.0.0/8'::cidr, n) IS NULL", "setseed(n) IS NULL",
    "lo_get(n::oid) IS NULL", "n::smallint > 0", "(10 ^ n)::numeric(4, 2) > 0", "make_interval(secs => 1e300 * n) IS NULL", "n / 0 > 1",
    "chr(n * 20) IS NULL", "substring('x' from 1 for -n) IS NULL", "to_char(make_time(n, 0, 0), 'x') IS NULL",
    "repeat('x', n * 20000) = 'x'",
)  # fmt: skip
IN_A_FUNCTION = (
    "RAISE EXCEPTION 'not %', NEW.v", "ASSERT false, NEW.v", "EXECUTE format('SELECT %I()', NEW.v)",
    "EXECUTE format('SELECT * FROM %I', NEW.v)",
    "EXECUTE format('SELECT %I FROM pg_class', NEW.v)", "EXECUTE NEW.v", "NEW.v := NEW.v::regclass", "PERFORM NEW.v::int",
)  # fmt: skip
TRIGGER = """
CREATE OR REPLACE FUNCTION pg_temp.refuse() RETURNS trigger LANGUAGE plpgsql AS $f$ BEGIN {act}; RETURN NEW; END $f$;
CREATE CONSTRAINT TRIGGER refuses AFTER INSERT ON pg_temp.held DEFERRABLE INITIALLY {when} FOR EACH ROW EXECUTE FUNCTION pg_temp.refuse();
"""


@pytest.fixture
def connection(database_url: str) -> Iterator[Connection]:
    with session(database_url) as connection:
        yield connection


def refusal(connection: Connection, setup: str, check: str = "true", *, copied: bool = False) -> psycopg2.Error:
    """The error of a row with `VALUE` and `NUMBER`, for a table with this CHECK and trigger. It may come with COMMIT."""
    with pytest.raises(psycopg2.Error) as caught, connection, connection.cursor() as cursor:  # noqa: PT012 - the block is one attempt
        cursor.execute(f"CREATE TEMPORARY TABLE held (v text, n int, CHECK ({check})) ON COMMIT DROP; {setup}")
        if copied:
            cursor.copy_expert("COPY pg_temp.held FROM STDIN", io.StringIO(f"{VALUE}\t{NUMBER}\n"))
        else:
            cursor.execute("INSERT INTO pg_temp.held VALUES (%s, %s)", (VALUE, NUMBER))
    return caught.value


def assert_quotes_nothing(error: psycopg2.Error) -> None:
    text = "".join(traceback.format_exception(error)) + repr(error)
    assert [value for value in (VALUE, str(NUMBER)) if value in text] == []


@pytest.mark.parametrize("copied", [False, True], ids=["INSERT", "COPY"])
def test_no_expression_over_a_row_quotes_it(connection: Connection, *, copied: bool) -> None:
    for check in (*OF_TEXT, *OF_NUMBERS, "v = ''"):
        error = refusal(connection, "", check, copied=copied)
        assert_quotes_nothing(error)
        assert len(str(error)) >= len("division by zero"), check


@pytest.mark.parametrize("when", ["IMMEDIATE", "DEFERRED"])
def test_no_function_of_the_table_quotes_a_row(connection: Connection, when: str) -> None:
    for act in IN_A_FUNCTION:
        error = refusal(connection, TRIGGER.format(act=act, when=when))
        assert_quotes_nothing(error)
        assert str(error).startswith("the function pg_temp.refuse() ") or "the function pg_temp_" in str(error)


def test_no_error_that_a_function_raises_quotes_a_row_or_is_an_outage(connection: Connection) -> None:
    """Whichever SQLSTATE it takes, and wherever it puts the value."""
    codes = {code for name, code in vars(psycopg2.errorcodes).items() if name.isupper() and len(str(code)) == 5 and code != "00000"}
    for code in sorted(codes | {"TM001"}):
        places = ", ".join(f"{place} = NEW.v" for place in ("DETAIL", "HINT", "COLUMN", "CONSTRAINT", "TABLE"))
        error = refusal(connection, TRIGGER.format(act=f"RAISE EXCEPTION '%', NEW.v USING ERRCODE = '{code}', {places}", when="IMMEDIATE"))
        assert error.pgcode == code
        assert_quotes_nothing(error)
        assert not is_outage(error)


KEPT = {
    "SELECT nothing FROM pg_class": 'column "nothing" does not exist.',
    "SELECT relnam FROM pg_class": 'column "relnam" does not exist. Perhaps you meant to reference the column "pg_class.relname"',
    "SELECT 1 FROM lake.missing": 'relation "lake.missing" does not exist.',
    "SELECT missing(1)": "function missing(integer) does not exist. ",
    "INSERT INTO pg_temp.named VALUES (NULL)": 'null value in column "v" of relation "named" violates not-null constraint',
    "INSERT INTO pg_temp.named VALUES ('abcdef')": "value too long for type character varying(5)",
    "INSERT INTO pg_temp.named VALUES ('7'), ('7')": 'duplicate key value violates unique constraint "named_pkey"',
    "SELECT 'x'::int": "invalid input syntax for type integer: …",
}


def test_names_and_types_are_kept(connection: Connection) -> None:
    said = {}
    for statement in KEPT:
        with pytest.raises(psycopg2.Error) as caught, connection, connection.cursor() as cursor:  # noqa: PT012 - the block is one attempt
            cursor.execute("CREATE TEMPORARY TABLE named (v varchar(5) PRIMARY KEY) ON COMMIT DROP")
            cursor.execute(statement)
        said[statement] = str(caught.value)
    assert {statement: text[: len(KEPT[statement])] for statement, text in said.items()} == KEPT


def test_value_that_postgres_cannot_compute_with_ends_a_command_with_a_text(
    connection: Connection, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A role may have stored it. Everything else that no code expects stays a traceback."""

    def compute(numbers: str) -> None:
        with connection.cursor() as cursor:
            cursor.execute(f"SELECT {numbers}")

    monkeypatch.setattr(main, "app", lambda: compute(f"{2**63 - 1} + 1"))
    monkeypatch.setattr("sys.argv", ["tidemark", "lag", "cities", "--output", "json"])
    with pytest.raises(SystemExit) as ended:
        main.main()
    printed = capsys.readouterr()
    assert (ended.value.code, json.loads(printed.out)["error"]["type"]) == (1, "NumericValueOutOfRange")
    assert printed.err.startswith("Postgres cannot compute this from what is stored: bigint out of range.")
    connection.rollback()
    monkeypatch.setattr(main, "app", lambda: compute("nothing"))
    with pytest.raises(psycopg2.errors.UndefinedColumn):
        main.main()


def test_only_one_module_reads_what_postgres_says() -> None:
    """`tidemark.db` removes values from the text of each error. Its attributes still have them."""
    nodes = ((path, node) for path in LIBRARY.rglob("*.py") for node in ast.walk(ast.parse(path.read_text())))
    found = {path.name for path, node in nodes if isinstance(node, ast.Attribute) and node.attr in {"diag", "pgerror"}}
    assert found == {"db.py"}

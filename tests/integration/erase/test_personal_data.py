"""Compares docs/personal-data.md with the schema: each column that could hold a payload is classified."""

from __future__ import annotations

import contextlib
import re

import psycopg2

from tidemark import project
from tidemark.migrations import BOOKKEEPING

PAGE = (project.root() / "docs" / "personal-data.md").read_text(encoding="utf-8")

COLUMNS = """
SELECT relname || '.' || attname FROM pg_attribute JOIN pg_class ON pg_class.oid = attrelid JOIN pg_type kind ON kind.oid = atttypid
 WHERE relnamespace = 'tidemark'::regnamespace AND relkind IN ('r', 'p') AND attnum > 0 AND NOT attisdropped
   AND coalesce((SELECT element.typname FROM pg_type element WHERE element.oid = kind.typelem AND kind.typcategory = 'A'), kind.typname)
       IN ('bytea', 'text', 'varchar', 'bpchar', 'json', 'jsonb', 'name')
   AND relname !~ %s
"""


def test_every_column_that_could_hold_a_payload_is_classified(database_url: str) -> None:
    """A column of a bytes, text or JSON type is in exactly one of the page's lists: columns with payloads, or columns without."""
    with contextlib.closing(psycopg2.connect(database_url)) as connection, connection.cursor() as cur:
        cur.execute(COLUMNS, (f"^(_?yoyo|{BOOKKEEPING.split('.')[1]})",))
        there = {name for (name,) in cur.fetchall()}
    with_payloads, without = PAGE.split("## Columns without payloads")
    holds = [
        name
        for row in with_payloads.splitlines()
        if row.startswith("|")
        for name in re.findall(r"`tidemark\.(\w+\.\w+)`", row.split("|")[1])
    ]
    rest = re.findall(r"^\| `(\w+)` \| (.*) \|$", without, re.MULTILINE)
    holds_none = [f"{table}.{column}" for table, columns in rest for column in re.findall(r"`(\w+)`", columns)]
    assert len(set(holds + holds_none)) == len(holds + holds_none)
    assert set(holds + holds_none) == there

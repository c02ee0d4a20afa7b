"""Code that a stolen role leaves for others to run, and whether they did."""

from __future__ import annotations

import contextlib
import re
from typing import Any

import psycopg2

from tests.support.fetching import fetched
from tidemark import project

NOTE = "PERFORM pg_catalog.nextval('planted.calls')"
YES = "planted.yes(0)"


class Trap:
    """Functions that count their calls, also those of a transaction that is rolled back."""

    def __init__(self, owner: str, attacker: str) -> None:
        """Takes the URLs of a role that may create a schema, and of the one that plants."""
        self.owner, self.attacker = owner, attacker
        ((role,),) = self.plant("SELECT current_user")
        run(owner, f"CREATE SCHEMA planted; GRANT USAGE ON SCHEMA planted TO PUBLIC; GRANT CREATE ON SCHEMA planted TO {role}")
        self.plant(
            "CREATE SEQUENCE planted.calls; GRANT ALL ON SEQUENCE planted.calls TO PUBLIC",
            f"CREATE FUNCTION planted.yes(anyelement) RETURNS boolean LANGUAGE plpgsql IMMUTABLE AS $$BEGIN {NOTE}; RETURN true; END$$",
            f"CREATE FUNCTION planted.fire() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN {NOTE}; RETURN OLD; END$$",
            "CREATE TYPE planted.odd AS (n bigint)",
            f"CREATE FUNCTION planted.cast(planted.odd) RETURNS bigint LANGUAGE plpgsql AS $$BEGIN {NOTE}; RETURN 1; END$$",
            "CREATE CAST (planted.odd AS bigint) WITH FUNCTION planted.cast(planted.odd) AS ASSIGNMENT",
        )

    def plant(self, *statements: str) -> list[tuple[Any, ...]]:
        """Runs statements as the attacker."""
        return run(self.attacker, *statements)

    def overloads(self, schema: str) -> None:
        """Creates a function in ``schema`` for each that Tidemark's SQL calls, with one to four arguments that match most calls better."""
        texts = [path.read_text(encoding="utf-8") for path in (project.root() / "include" / "tidemark").rglob("*.sql")]
        body = f"LANGUAGE plpgsql AS $$BEGIN {NOTE}; RETURN NULL; END$$"
        self.plant(*(
            f'CREATE FUNCTION {schema}."{name}"({", ".join([kind] * count)}) RETURNS {kind} {body}'
            for name in sorted({name for text in texts for name in re.findall(r"\b([a-z_]+)\(", text)})
            for kind in ("text", "anyelement", "jsonb")
            for count in range(1, 5)
        ))  # fmt: skip

    def calls(self) -> int:
        """How often anything planted has run since the last call of this."""
        ((calls,),) = run(self.owner, "SELECT CASE WHEN is_called THEN last_value ELSE 0 END FROM planted.calls")
        run(self.owner, "SELECT setval('planted.calls', 1, false)")
        return int(calls)


def run(url: str, *statements: str) -> list[tuple[Any, ...]]:
    """Runs statements in one transaction, and returns the rows of the last one."""
    with contextlib.closing(psycopg2.connect(url)) as connection, connection, connection.cursor() as cur:
        for statement in statements:
            cur.execute(statement)
        return fetched(cur)

"""``tidemark migrate``: migrates the database, and renews the grants of roles."""

from __future__ import annotations

from typing import Annotated

import typer

from tidemark import migrations
from tidemark.cli.common import Output, OutputFormat, print_json, print_note, who
from tidemark.connections import database_url
from tidemark.profiles import Profile


def migrate(
    grant_to: Annotated[str | None, typer.Option(metavar="ROLE", help="Also grant this role the rights of --as, and no others.")] = None,
    as_: Annotated[list[Profile] | None, typer.Option("--as", help="A profile for --grant-to (docs/security.md). Repeatable.")] = None,
    output: Output = OutputFormat.TABLE,
) -> None:
    if (grant_to is None) != (not as_):
        raise typer.BadParameter("use both or neither", param_hint="--grant-to and --as")
    applied = migrations.migrate(database_url(), by=who(), grant_to=grant_to, profiles=as_ or [])
    print_note("\n".join(f"applied {name}" for name in applied) or "nothing to apply: the database is current")
    if grant_to is not None:
        print_note(f"granted {grant_to} the rights of {', '.join(as_ or [])}")
    if output is OutputFormat.JSON:
        print_json({"applied": applied} | ({"granted": {grant_to: as_}} if grant_to else {}))

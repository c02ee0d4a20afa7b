"""``tidemark consumers new``: writes a consumer without code to start from."""

from __future__ import annotations

from pathlib import Path

from tidemark import project
from tidemark.author.new_consumer import Sketch, sketched
from tidemark.cli.common import OutputFormat, print_json, print_raw, stderr
from tidemark.text.wording import quoted


def new_consumer(topic: str, name: str | None, table: str | None, sample: int, consumers: Path | None, output: OutputFormat) -> None:
    """Writes the files, and prints the DDL of the table. Raises what `sketched` raises."""
    made = sketched(topic, name or topic, table, sample, consumers or project.consumers())
    made.write()
    for path in made.files:
        _say(f"wrote {path}")
    say_left_out(made)
    if output is OutputFormat.JSON:
        print_json({"consumer": made.name, "files": [str(path) for path in made.files], "ddl": made.ddl, "left_out": made.left_out})
        return
    print_raw(made.ddl)
    _say(f"Next: read the DDL and run it, then `tidemark consumers check {made.name}` and `tidemark try {made.name}`")


def say_left_out(made: Sketch) -> None:
    for field in made.left_out:
        _say(f"not loaded, because it cannot be the name of a column: {quoted(field)}")


def _say(text: str) -> None:
    stderr.print(text, markup=False, highlight=False, soft_wrap=True)

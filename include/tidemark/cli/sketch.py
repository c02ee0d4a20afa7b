"""``tidemark consumers new``: writes a consumer without code to start from."""

from __future__ import annotations

from pathlib import Path

from tidemark import project
from tidemark.author.new_consumer import Sketch, sketched
from tidemark.cli.common import OutputFormat, print_json, print_raw, stderr
from tidemark.text.wording import quoted


def new_consumer(topic: str, name: str | None, table: str | None, sample: int, consumers: Path | None, output: OutputFormat) -> None:
    """Writes the files, and prints the DDL of the table. Raises as `sketched` does."""
    sketch = sketched(topic, name or topic, table, sample, consumers or project.consumers())
    sketch.write()
    for path in sketch.files:
        _print_note(f"wrote {path}")
    report_omitted_fields(sketch)
    if output is OutputFormat.JSON:
        print_json({"consumer": sketch.name, "files": [str(path) for path in sketch.files], "ddl": sketch.ddl, "left_out": sketch.left_out})
        return
    print_raw(sketch.ddl)
    _print_note(f"Next: read the DDL and run it, then `tidemark consumers check {sketch.name}` and `tidemark try {sketch.name}`")


def report_omitted_fields(sketch: Sketch) -> None:
    for field in sketch.left_out:
        _print_note(f"not loaded, because it cannot be the name of a column: {quoted(field)}")


def _print_note(text: str) -> None:
    stderr.print(text, markup=False, highlight=False, soft_wrap=True)

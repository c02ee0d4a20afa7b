"""``tidemark doctor``: prints what `tidemark.doctor` finds."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rich.text import Text

from tidemark import project
from tidemark.cli.common import OutputFormat, plain, print_json, stdout
from tidemark.connections import from_env
from tidemark.doctor.examine import examine
from tidemark.doctor.finding import Finding, Level, failure
from tidemark.spec import find_consumer, read_folder
from tidemark.text.wording import counted

STYLES = {Level.OK: "green", Level.WARNING: "yellow", Level.FAILURE: "red"}


def show_findings(names: Sequence[str], consumers: Path | None, output: OutputFormat) -> bool:
    """Examines these consumers, or all, and prints each finding when it is made. Returns whether nothing will fail."""
    folder = consumers or project.consumers()
    found: list[Finding] = []
    broken: list[Finding] = []
    if names:
        specs = [find_consumer(name, folder) for name in names]
    else:
        good, bad = read_folder(folder)
        specs = list(good.values())
        broken = [failure(f"{error.name}: file", str(error), "") for error in bad]
    for one in itertools.chain(broken, examine(from_env(), specs)):
        found.append(one)
        if output is OutputFormat.TABLE:
            _print(one)
    if output is OutputFormat.JSON:
        print_json(found)
    else:
        levels = Counter(one.level for one in found)
        stdout.print(f"{counted(levels[Level.FAILURE], 'failure')}, {counted(levels[Level.WARNING], 'warning')}")
    return all(one.level is not Level.FAILURE for one in found)


def _print(one: Finding) -> None:
    stdout.print(Text.assemble((f"{one.level:<8}", STYLES[one.level]), f" {one.subject}: {one.found}"))
    if one.fix:
        stdout.print(plain(f"         {one.fix}"))

"""``tidemark doctor``: prints the findings of `tidemark.doctor`."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Annotated

import typer
from rich.text import Text

from tidemark import project
from tidemark.cli import completion
from tidemark.cli.common import Output, OutputFormat, plain, print_json, stdout
from tidemark.connections import from_env
from tidemark.doctor.examine import examine
from tidemark.doctor.finding import Finding, Level, failure, warning
from tidemark.spec import find_consumer, read_folder
from tidemark.text.wording import counted

NO_CONSUMERS = "Run this in the project's folder, set TIDEMARK_HOME to it, or write a first consumer: tidemark consumers new TOPIC."
Names = Annotated[
    list[str] | None,
    typer.Argument(metavar="[NAME]...", help="Consumers to examine (default: all).", autocompletion=completion.consumers),
]
STYLES = {Level.OK: "green", Level.WARNING: "yellow", Level.FAILURE: "red"}


def doctor(
    names: Names = None,
    output: Output = OutputFormat.TABLE,
) -> None:
    findings: list[Finding] = []
    broken: list[Finding] = []
    if names:
        specs = [find_consumer(name) for name in names]
    elif project.consumers().is_dir():
        good, bad = read_folder()
        specs = list(good.values())
        broken = [failure(f"{error.name}: file", str(error), "") for error in bad]
    else:
        specs = []
        broken = [warning("consumers", f"there is no folder {project.consumers()}", NO_CONSUMERS)]
    for finding in itertools.chain(broken, examine(from_env(), specs, [project.transforms()])):
        findings.append(finding)
        if output is OutputFormat.TABLE:
            _print(finding)
    if output is OutputFormat.JSON:
        print_json(findings)
    else:
        levels = Counter(finding.level for finding in findings)
        stdout.print(f"{counted(levels[Level.FAILURE], 'failure')}, {counted(levels[Level.WARNING], 'warning')}")
    if any(finding.level is Level.FAILURE for finding in findings):
        raise typer.Exit(1)


def _print(finding: Finding) -> None:
    stdout.print(Text.assemble((f"{finding.level:<8}", STYLES[finding.level]), f" {finding.subject}: {finding.found}"))
    if finding.fix:
        stdout.print(plain(f"         {finding.fix}"))

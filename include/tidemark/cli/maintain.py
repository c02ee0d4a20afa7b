"""``tidemark maintain``: removes old archives and payloads."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer

from tidemark import maintenance
from tidemark.cli.common import Output, OutputFormat, print_json, print_note, stdout, who
from tidemark.cli.servers import connected, kafka_cluster
from tidemark.errors import TidemarkError
from tidemark.keep import default_keep, parse_keep
from tidemark.profiles import Profile
from tidemark.rewind.rows.overwritten import KEPT
from tidemark.spec import read_folder
from tidemark.text.wording import counted


def maintain(
    keep: Annotated[
        str | None,
        typer.Option(metavar="DURATION", help="How long to keep it (default: 30d); at least TIDEMARK_KEEP_AT_LEAST (7d)."),
    ] = None,
    output: Output = OutputFormat.TABLE,
) -> None:
    """Also closes attempts whose drivers are gone, samples the lag of the project's consumers, and publishes mirrored positions."""
    period = parse_keep(default_keep() if keep is None else keep)
    with connected(needs=Profile.REWINDER) as connection:
        try:
            good, _ = read_folder()
            mirrored, problems = maintenance.sample_and_mirror(connection, kafka_cluster(), good.values())
        except TidemarkError as error:
            mirrored, problems = {}, [f"lag not sampled, or positions not mirrored: {error}"]
        for problem in problems:
            print_note(problem)
        result = maintenance.maintain(connection, period, by=who())
    removed, emptied, ended = result.removed, result.emptied, result.ended
    if output is OutputFormat.JSON:
        print_json(
            {"removed": [dataclasses.asdict(archive) for archive in removed], "emptied": emptied, "ended": ended, "mirrored": mirrored}
        )
        return
    for archive in removed:
        action = "overwritten after" if archive.relation == KEPT else "taken out by"
        stdout.print(f"removed {counted(archive.rows, 'row')} {action} rewind {archive.rewind_id}", highlight=False)
    if emptied:
        stdout.print(f"removed the payloads of {counted(emptied, 'settled failed record')}", highlight=False)
    for attempt_id in ended:
        stdout.print(f"closed attempt {attempt_id}, whose driver is gone", highlight=False)
    for name, drift in mirrored.items():
        stdout.print(f"mirrored {counted(drift.partitions, 'position')} of {name}, {drift.differed} had drifted", highlight=False)
    if not removed and not emptied and not ended and not mirrored:
        stdout.print("nothing to do")

"""``tidemark maintain``: removes old archives and payloads."""

from __future__ import annotations

import dataclasses

from tidemark import maintenance, project
from tidemark.cli.common import OutputFormat, connected, kafka_cluster, print_json, stderr, stdout, who
from tidemark.db import Connection
from tidemark.errors import TidemarkError
from tidemark.keep import default_keep, parse_keep
from tidemark.offsets.mirror import Drift, republish_all
from tidemark.offsets.sampling import sample_all
from tidemark.profiles import Profile
from tidemark.rewind.rows.overwritten import KEPT
from tidemark.spec import read_folder
from tidemark.text.wording import counted


def _look_at_kafka(connection: Connection) -> tuple[dict[str, Drift], list[str]]:
    """Samples the lag of the project's consumers and publishes positions that are mirrored; returns what was published, and what failed.
    It is not what the command is for."""
    try:
        good, _ = read_folder(project.consumers())
        cluster = kafka_cluster()
        unsampled = sample_all(connection, cluster, good.values())
        published, unpublished = republish_all(connection, cluster, good.values())
    except TidemarkError as error:
        return {}, [f"lag not sampled: {error}"]
    failed = [f"lag not sampled: {name}: {error}" for name, error in unsampled.items()]
    return published, failed + [f"positions not mirrored: {name}: {error}" for name, error in unpublished.items()]


def maintain(keep: str | None, output: OutputFormat) -> None:
    """Removes the rows archived by rewinds older than ``keep``, and the payloads of failed records settled before that. Closes attempts
    whose drivers are gone, samples the lag of the project's consumers, and publishes positions that are mirrored to Kafka."""
    length = parse_keep(default_keep() if keep is None else keep)
    with connected(needs=Profile.REWINDER) as connection:
        done = maintenance.maintain(connection, length, by=who())
        mirrored, problems = _look_at_kafka(connection)
    for problem in problems:
        stderr.print(problem, markup=False, highlight=False)
    removed, emptied, ended = done.removed, done.emptied, done.ended
    if output is OutputFormat.JSON:
        print_json({"removed": [dataclasses.asdict(one) for one in removed], "emptied": emptied, "ended": ended, "mirrored": mirrored})
        return
    for one in removed:
        what = "overwritten after" if one.relation == KEPT else "taken out by"
        stdout.print(f"removed {counted(one.rows, 'row')} {what} rewind {one.rewind_id}", highlight=False)
    if emptied:
        stdout.print(f"removed the payloads of {counted(emptied, 'settled failed record')}", highlight=False)
    for attempt_id in ended:
        stdout.print(f"closed attempt {attempt_id}, whose driver is gone", highlight=False)
    for name, drift in mirrored.items():
        stdout.print(f"mirrored {counted(drift.partitions, 'position')} of {name}, {drift.differed} had drifted", highlight=False)
    if not removed and not emptied and not ended and not mirrored:
        stdout.print("nothing to do")

"""``tidemark validate``: does what Airflow's task `validate` does, for runs that Airflow did not start."""

from __future__ import annotations

import logging
from pathlib import Path

from tidemark.cli.common import OutputFormat, connected, plain_table, print_json, spec_of, stderr, stdout
from tidemark.connections import database_url
from tidemark.profiles import Profile
from tidemark.quality import Reaction, ValidatedRun, reaction, suite_files, unjudged, validate


def validate_runs(name: str, consumers: Path | None, output: OutputFormat) -> bool:
    """Validates each such run, oldest first, and prints the verdicts. Returns whether all of them pass under the consumer's file.

    A critical verdict never rewinds anything, whatever ``on_failure`` says. Use `tidemark rewind`.
    """
    logging.getLogger("great_expectations").setLevel(logging.WARNING)
    spec, url = spec_of(name, consumers), database_url()
    with connected(needs=Profile.RUNNER) as connection:
        attempts = unjudged(connection, spec.group)
    verdicts = {
        attempt: validate(url, ValidatedRun(attempt_id=attempt), group=spec.group, suites=suite_files(spec), upsert=spec.upserts)
        for attempt in attempts
    }
    if output is OutputFormat.JSON:
        print_json({"group": spec.group, "validations": [{"attempt": attempt, **one.as_json()} for attempt, one in verdicts.items()]})
    elif not verdicts:
        stdout.print(f"{spec.group}: nothing to validate", markup=False, highlight=False)
    else:
        deletes = any(one.counts.deleted for one in verdicts.values())
        table = plain_table(f"{spec.group}, validations", "attempt", "rows", *(["deletes"] * deletes), "failed checks", "verdict")
        for attempt, one in verdicts.items():
            failed = sum(not result.success for result in one.results)
            deleted = [f"{one.counts.deleted:,}"] * deletes
            table.add_row(str(attempt), f"{one.counts.sink_rows:,}", *deleted, str(failed), one.verdict.value)
        stdout.print(table)
    for one in verdicts.values():
        for result in one.results:
            if not result.success:
                stderr.print(f"{result.severity}: {result.text}", style="red", markup=False, highlight=False, soft_wrap=True)
    return all(reaction(one.verdict, spec.validation) is Reaction.PUBLISH for one in verdicts.values())

"""``tidemark validate``: does what Airflow's task `validate` does, for all runs without a verdict or with a critical one."""

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
        waiting = unjudged(connection, spec.group, critical=True)
    for each in waiting:
        if each.running is not None:
            why = f"the driver of attempt {each.running} is at work. Validate again when it has ended"
            stderr.print(f"{each.run}: not validated, because {why}.", style="yellow", markup=False, highlight=False, soft_wrap=True)
    suites = suite_files(spec)
    verdicts = {
        each.run: validate(url, each.run, group=spec.group, suites=suites, upsert=spec.upserts) for each in waiting if each.running is None
    }
    if output is OutputFormat.JSON:
        print_json({"group": spec.group, "validations": [{**_names(run), **one.as_json()} for run, one in verdicts.items()]})
    elif not verdicts:
        stdout.print(f"{spec.group}: nothing to validate", markup=False, highlight=False)
    else:
        deletes = any(one.counts.deleted for one in verdicts.values())
        table = plain_table(f"{spec.group}, validations", "run", "rows", *(["deletes"] * deletes), "failed checks", "verdict")
        for run, one in verdicts.items():
            failed = sum(not result.success for result in one.results)
            deleted = [f"{one.counts.deleted:,}"] * deletes
            table.add_row(str(run), f"{one.counts.sink_rows:,}", *deleted, str(failed), one.verdict.value)
        stdout.print(table)
    for one in verdicts.values():
        for result in one.results:
            if not result.success:
                stderr.print(f"{result.severity}: {result.text}", style="red", markup=False, highlight=False, soft_wrap=True)
    return all(reaction(one.verdict, spec.validation) is Reaction.PUBLISH for one in verdicts.values())


def _names(run: ValidatedRun) -> dict[str, object]:
    """A run outside Airflow is an attempt."""
    return {"attempt": run.attempt_id} if run.attempt_id is not None else {"dag_id": run.dag_id, "run_id": run.run_id}

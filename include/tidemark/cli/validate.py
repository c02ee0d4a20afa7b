"""``tidemark validate``: validates all runs without a verdict or with a critical one, as Airflow's task `validate` does."""

from __future__ import annotations

import logging
from pathlib import Path

from tidemark.cli.common import OutputFormat, connected, plain_table, print_json, spec_of, stderr, stdout
from tidemark.connections import database_url
from tidemark.profiles import Profile
from tidemark.quality import Reaction, ValidatedRun, reaction, suite_files, unjudged, validate


def validate_runs(name: str, consumers: Path | None, output: OutputFormat) -> bool:
    """Validates these runs, oldest first, and prints the verdicts. Returns whether all of them pass under the consumer's file.

    A critical verdict never rewinds anything, whatever ``on_failure`` says. Use `tidemark rewind`.
    """
    logging.getLogger("great_expectations").setLevel(logging.WARNING)
    spec, url = spec_of(name, consumers), database_url()
    with connected(needs=Profile.RUNNER) as connection:
        unjudged_runs = unjudged(connection, spec.group, critical=True)
    for pending in unjudged_runs:
        if pending.running is not None:
            reason = f"the driver of attempt {pending.running} is at work. Validate again when it has ended"
            stderr.print(f"{pending.run}: not validated, because {reason}.", style="yellow", markup=False, highlight=False, soft_wrap=True)
    suites = suite_files(spec)
    validations = {
        pending.run: validate(url, pending.run, group=spec.group, suites=suites, upsert=spec.upserts)
        for pending in unjudged_runs
        if pending.running is None
    }
    if output is OutputFormat.JSON:
        print_json(
            {"group": spec.group, "validations": [{**_run_keys(run), **validation.as_json()} for run, validation in validations.items()]}
        )
    elif not validations:
        stdout.print(f"{spec.group}: nothing to validate", markup=False, highlight=False)
    else:
        deletes = any(validation.counts.deleted for validation in validations.values())
        table = plain_table(f"{spec.group}, validations", "run", "rows", *(["deletes"] * deletes), "failed checks", "verdict")
        for run, validation in validations.items():
            failed = sum(not result.success for result in validation.results)
            deleted = [f"{validation.counts.deleted:,}"] * deletes
            table.add_row(str(run), f"{validation.counts.sink_rows:,}", *deleted, str(failed), validation.verdict.value)
        stdout.print(table)
    for validation in validations.values():
        for result in validation.results:
            if not result.success:
                stderr.print(f"{result.severity}: {result.text}", style="red", markup=False, highlight=False, soft_wrap=True)
    return all(reaction(validation.verdict, spec.validation) is Reaction.PUBLISH for validation in validations.values())


def _run_keys(run: ValidatedRun) -> dict[str, object]:
    """Identifies a run: by its attempt if it ran outside Airflow."""
    return {"attempt": run.attempt_id} if run.attempt_id is not None else {"dag_id": run.dag_id, "run_id": run.run_id}

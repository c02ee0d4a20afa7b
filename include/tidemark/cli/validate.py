"""``tidemark validate``: validates all runs without a verdict or with a critical one, as Airflow's task `validate` does."""

from __future__ import annotations

import logging

import typer

from tidemark.cli.common import Name, Output, OutputFormat, plain_table, print_json, print_note, print_text, stdout
from tidemark.cli.servers import connected
from tidemark.connections import database_url
from tidemark.profiles import Profile
from tidemark.quality import Reaction, ValidatedRun, reaction, suite_files, unjudged
from tidemark.quality import validate as validate_run
from tidemark.spec import find_consumer


def validate(name: Name, output: Output = OutputFormat.TABLE) -> None:
    """A critical verdict never rewinds anything, whatever ``on_failure`` says. Use `tidemark rewind`."""
    logging.getLogger("great_expectations").setLevel(logging.WARNING)
    spec, url = find_consumer(name), database_url()
    with connected(needs=Profile.RUNNER) as connection:
        unjudged_runs = unjudged(connection, spec.group, critical=True)
    for pending in unjudged_runs:
        if pending.running is not None:
            reason = f"the driver of attempt {pending.running} is at work. Validate again when it has ended"
            print_note(f"{pending.run}: not validated, because {reason}.", style="yellow")
    suites = suite_files(spec)
    validations = {
        pending.run: validate_run(url, pending.run, group=spec.group, suites=suites, upsert=spec.upserts)
        for pending in unjudged_runs
        if pending.running is None
    }
    if output is OutputFormat.JSON:
        print_json(
            {"group": spec.group, "validations": [{**_run_keys(run), **validation.as_json()} for run, validation in validations.items()]}
        )
    elif not validations:
        print_text(f"{spec.group}: nothing to validate")
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
                print_note(f"{result.severity}: {result.text}", style="red")
    if any(reaction(validation.verdict, spec.validation) is not Reaction.PUBLISH for validation in validations.values()):
        raise typer.Exit(1)


def _run_keys(run: ValidatedRun) -> dict[str, object]:
    """Identifies a run: by its attempt if it ran outside Airflow."""
    return {"attempt": run.attempt_id} if run.attempt_id is not None else {"dag_id": run.dag_id, "run_id": run.run_id}

"""``tidemark validate``: what Airflow's task `validate` does, for runs that Airflow did not start."""

from __future__ import annotations

import logging
from pathlib import Path

from tidemark import project, schema
from tidemark.cli.options import OutputFormat, plain_table, print_json, stderr, stdout
from tidemark.connections import database_url
from tidemark.db import session
from tidemark.quality import Outcome, Run, unjudged, validate
from tidemark.spec import OnFailure, find_consumer


def validate_runs(name: str, consumers: Path | None, output: OutputFormat) -> bool:
    """Judges each such run, the oldest first, and prints the verdicts; returns whether the consumer's file lets all of them pass.

    A critical verdict takes nothing back, whatever ``on_failure`` says: `tidemark rewind` does.
    """
    logging.getLogger("great_expectations").setLevel(logging.WARNING)
    spec, url = find_consumer(name, consumers or project.consumers()), database_url()
    suite = project.expectations() / f"{spec.validation.suite}.json" if spec.validation else None
    with session(url) as connection:
        schema.require_current(connection)
        attempts = unjudged(connection, spec.group)
    verdicts = {
        attempt: validate(url, Run(attempt_id=attempt), group=spec.group, table=spec.sink.table, suite=suite, upsert=bool(spec.sink.key))
        for attempt in attempts
    }
    if output is OutputFormat.JSON:
        print_json({"group": spec.group, "validations": [{"attempt": attempt, **one.as_json()} for attempt, one in verdicts.items()]})
    elif not verdicts:
        stdout.print(f"{spec.group}: nothing to validate", markup=False, highlight=False)
    else:
        table = plain_table(f"{spec.group}, validations", "attempt", "rows", "failed checks", "verdict")
        for attempt, one in verdicts.items():
            failed = sum(not result.success for result in one.results)
            table.add_row(str(attempt), f"{one.counts.sink_rows:,}", str(failed), one.verdict.value)
        stdout.print(table)
    for one in verdicts.values():
        for result in one.results:
            if not result.success:
                stderr.print(f"{result.severity}: {result.text}", style="red", markup=False, highlight=False, soft_wrap=True)
    reports = spec.validation is not None and spec.validation.on_failure is OnFailure.REPORT
    return reports or all(one.verdict is not Outcome.CRITICAL for one in verdicts.values())

"""The process of a contestant. It gets one line of JSON for each request to prepare or to run.

    python -m benchmarks.harness.seat module:Class

The harness writes ``prepare JOB`` or ``run JOB``, and reads ``{"ok": true}`` or ``{"error": text}`` when it is done. Between the two, this
module does no work of its own, so the harness can time the contestant. The seat ends when its standard input does.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from typing import Protocol

from benchmarks.harness.site import Job, Site

SITE = "TIDEMARK_BENCH_SITE"


class Contestant(Protocol):
    """Built once, with a `Site`, and used by one thread."""

    def prepare(self, job: Job) -> None:
        """Do what a warm contestant has already done: open sessions, find the position. Not timed."""

    def run(self, job: Job) -> None:
        """Load the job's records into the table. Returns when the last one is committed. Timed."""

    def close(self) -> None:
        """End everything that was started."""


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print goes to the seat's log
    module, _, name = sys.argv[1].partition(":")
    contestant: Contestant | None = None
    try:
        for line in sys.stdin:
            word, _, text = line.partition(" ")
            try:
                job = Job.from_json(text)
                if contestant is None:
                    contestant = getattr(importlib.import_module(module), name)(Site.from_json(os.environ[SITE]))
                (contestant.prepare if word == "prepare" else contestant.run)(job)
                answer: dict[str, object] = {"ok": True}
            except Exception as error:  # noqa: BLE001 - whatever it is, it is this contestant's result
                traceback.print_exc()
                answer = {"error": f"{type(error).__name__}: {error}"}
            answers.write(json.dumps(answer) + "\n")
    finally:
        if contestant is not None:
            contestant.close()


if __name__ == "__main__":
    main()

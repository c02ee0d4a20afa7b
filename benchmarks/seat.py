"""The process in which a contestant lives: it is told to prepare and to run, one line of JSON each. Standard library only.

    python -m benchmarks.seat module:Class

The harness writes ``prepare JOB`` or ``run JOB``, and gets ``{"ok": true}`` or ``{"error": text}`` when it is done. Between the two
only waiting happens here, so that the harness's clock is the contestant's. The seat ends with its standard input.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from typing import Protocol

from benchmarks.site import Job, Site

SITE = "TIDEMARK_BENCH_SITE"


class Contestant(Protocol):
    """Made with a `Site`, once; used by one thread."""

    def prepare(self, job: Job) -> None:
        """What a warm contestant has done before: sessions, a place to start from. Not timed."""

    def run(self, job: Job) -> None:
        """Load the job's records into the table; returns when the last one is committed. Timed."""

    def close(self) -> None:
        """End what was started."""


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever a library prints goes to the seat's log
    module, _, name = sys.argv[1].partition(":")
    contestant: Contestant | None = None
    try:
        for line in sys.stdin:
            word, _, told = line.partition(" ")
            try:
                job = Job.from_json(told)
                if contestant is None:
                    contestant = getattr(importlib.import_module(module), name)(Site.from_json(os.environ[SITE]))
                (contestant.prepare if word == "prepare" else contestant.run)(job)
                said: dict[str, object] = {"ok": True}
            except Exception as error:  # noqa: BLE001 - whatever it is, it is this contestant's result
                traceback.print_exc()
                said = {"error": f"{type(error).__name__}: {error}"}
            answers.write(json.dumps(said) + "\n")
    finally:
        if contestant is not None:
            contestant.close()


if __name__ == "__main__":
    main()

"""A small scheduled run: seconds from the start of the driver to the first commit, and to the end of the run.

A keeper starts the driver, and its shared application is running, as for most runs in Airflow. What Airflow does between the schedule and
the task (scheduler, supervisor, parsing of the DAG) is not included.
"""

from __future__ import annotations

import time

import pytest
from benchmarks.harness.consumer import FORMS, drive, write_spec
from benchmarks.harness.processes import spread
from benchmarks.harness.site import TABLE, Job, Topic
from benchmarks.harness.stage import autocommit
from benchmarks.measurement import Bar, Bench, Figures, Measurement, Table

from tidemark.driver import keeper_client

RECORDS = 1000
WARM_UP = 3


def measure(bench: Bench, rounds: int) -> Figures:
    """A row per form."""
    topic = bench.stage.topic(Topic("events-small", 1, RECORDS, bench.width))
    rows = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIDEMARK_STATE", bench.site.folder)
        try:
            for form in FORMS:
                runs = [_one(bench, form, topic) for _ in range(WARM_UP + rounds)][WARM_UP:]
                rows.append({"form": form, **{what: spread([run[what] for run in runs]) for what in runs[0]}})
        finally:
            keeper_client.stop_keepers()
    return {"rows": rows}


def _one(bench: Bench, form: str, topic: Topic) -> dict[str, float]:
    """Seconds from the start of a run."""
    bench.stage.empty()
    spec = write_spec(bench.site, FORMS[form], topic.name, f"bench-warm-{time.monotonic_ns()}")
    start = time.time()
    drive(bench.site, spec, with_keeper=True)
    end = time.time() - start
    if error := bench.stage.wrong(Job(topic), TABLE):
        raise RuntimeError(f"{form} form: {error}")
    with autocommit(bench.site.database_url) as cur:
        cur.execute(
            "SELECT extract(epoch FROM min(committed_at))::float FROM tidemark.batch WHERE committed_at > to_timestamp(%s)", (start,)
        )
        ((committed,),) = cur.fetchall()
    bench.report(f"warm run, {form} form: first commit after {committed - start:.2f} s, end {end:.2f} s")
    return {"committed": committed - start, "end": end}


_SPREAD = "{%s[median]:.2f} (at most {%s[max]:.2f})"
_COMMITTED, _END = (_SPREAD.replace("%s", name) for name in ("committed", "end"))
MEASUREMENT = Measurement(
    "warm",
    measure,
    Table(
        f"A run of {RECORDS:,} records in the shared application, in seconds",
        "form | first commit | end",
        f"{{form}} | {_COMMITTED} | {_END}",
    ),
    bars=[Bar("first commit of a warm run, {form} form, s", lambda row: row["committed"]["median"], "rows", at_most=1.5)],
    full={"rounds": 3},
    quick={"rounds": 1},
)

"""How fast records are read again: by a replay beside, into its shadow, and by the run after an ordinary rewind, into the table.

Runs the product end to end in the Arrow form, as in `benchmarks.harness.consumer`. Before each, a new group reads the topic and is rewound
to the start. They take turns, also at going first.
"""

from __future__ import annotations

import contextlib
import statistics
from typing import Any

from benchmarks.harness.consumer import FORMS, Consumer
from benchmarks.harness.processes import spread, timed
from benchmarks.harness.site import TABLE, Job
from benchmarks.harness.stage import Stage
from benchmarks.measurement import Bar, Bench, Figures, Measurement, Table

from tidemark.db import session, transaction
from tidemark.kafka.cluster import Cluster
from tidemark.rewind import beside
from tidemark.rewind.apply import apply
from tidemark.rewind.plan import PlanRequest, plan
from tidemark.rewind.plan_model import ToEarliest
from tidemark.spec.scope import Scope

ORDINARY, BESIDE = "run after an ordinary rewind", "replay beside"


class _Rewound(Consumer):
    def replay(self, stage: Stage, job: Job, what: str) -> float:
        """Seconds of a run that reads all records again. Checks the rows that it has loaded."""
        stage.empty()
        self.prepare(job)
        self.run(job)
        cluster = Cluster({"bootstrap.servers": self._site.servers})
        request = PlanRequest(
            [self.spec], Scope.parse([]), ToEarliest(), reason="a measurement of its rate", by="bench", beside=what == BESIDE
        )
        with session(self._site.database_url) as connection:
            rewind_id = plan(connection, lambda _: cluster, request).rewind_id
            apply(connection, lambda _: cluster, lambda _: self.spec, rewind_id, by="bench")
            stage.execute("CHECKPOINT")
            took = timed(lambda: self.run(job, of_rewind=rewind_id if what == BESIDE else None))
            table = TABLE
            if what == BESIDE:
                with transaction(connection) as cur:
                    table = beside.find(cur, self.spec.group, rewind_id).shadow(TABLE)
            if wrong := stage.wrong(job, table):
                raise RuntimeError(f"{what}: {wrong}")
            if what == BESIDE:
                beside.discard(connection, rewind_id, by="bench")
            else:
                stage.execute(f"DROP TABLE tidemark_archive.rewound_{rewind_id}_1")
        return took


def measure(bench: Bench, rounds: int) -> Figures:
    """Records/s of both, and their ratio."""
    job, rates = Job(bench.events()), dict[str, list[float]]({ORDINARY: [], BESIDE: []})
    with contextlib.closing(_Rewound(bench.site, FORMS["Arrow"])) as consumer:
        for number in range(rounds + 1):
            for what in (ORDINARY, BESIDE) if number % 2 else (BESIDE, ORDINARY):
                rate = job.topic.records / consumer.replay(bench.stage, job, what)
                bench.report(f"replay  {what:<40} {rate:>9,.0f} records/s{'' if number else '  (warm-up)'}")
                rates[what] += [rate] if number else []
    ratio = statistics.median(rates[BESIDE]) / statistics.median(rates[ORDINARY])
    rows: list[dict[str, Any]] = [{"what": what, **spread(of)} for what, of in rates.items()]
    return {"records": job.topic.records, "ratio": ratio, "rows": rows}


MEASUREMENT = Measurement(
    "replay",
    measure,
    Table(
        "{records:,} records read again after a rewind, Arrow form: records a second",
        "| median | min | max",
        "{what} | {median:,.0f} | {min:,.0f} | {max:,.0f}",
    ),
    bars=[Bar("replay beside / run after an ordinary rewind", lambda of: of["ratio"], at_least=0.9)],
    full={"rounds": 3},
    quick={"rounds": 1},
)

"""What a rewind costs: an apply that supersedes 1,000,000 rows, compared with the plain statement that moves the same rows.

- *plain*: ``WITH gone AS (DELETE ... RETURNING *) INSERT INTO ...``, one statement that moves rows of the sink into a table without an
  index, in its own transaction. It does not change positions, epochs, failed records or the ledger.
- *apply*: `tidemark.rewind.apply.apply` of a stored plan, from call to return, including Kafka's answers and the commit.

Before each, the table is filled again and a checkpoint is made. They take turns, also at going first. Some rows of the sink stay, so both
have to look for those that go.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.harness.processes import spread, timed
from benchmarks.harness.site import COLUMNS, LINEAGE, TABLE, Topic
from benchmarks.harness.stage import Stage, autocommit
from benchmarks.measurement import Bar, Bench, Figures, Measurement, Table

from tidemark.db import connect, statements
from tidemark.kafka.cluster import Cluster
from tidemark.offsets import store
from tidemark.rewind.apply import apply
from tidemark.rewind.plan import PlanRequest, plan
from tidemark.rewind.plan_model import ToEarliest
from tidemark.spec import ConsumerSpec, load_consumer
from tidemark.spec.scope import Scope

TOPIC = "rewound"
MOVED, PARTITIONS = 4, 5
"""Partitions of the rewind, and of the topic."""
BATCH = 25_000
"""Records per batch of the ledger."""
REASON = "a measurement of what it costs"
SQL = statements("benchmarks.database", "rewind.sql")
PLAIN, APPLY = "plain DELETE ... RETURNING into a table", "apply of a rewind"


def measure(bench: Bench, rows: int, rounds: int) -> Figures:
    """Seconds of both, and their ratio."""
    with _sink(bench.stage, rows) as sink:
        seconds: dict[str, list[float]] = {PLAIN: [], APPLY: []}
        for number in range(rounds + 1):
            for what in (PLAIN, APPLY) if number % 2 else (APPLY, PLAIN):
                seconds[what].append(sink.plain() if what == PLAIN else sink.apply())
                bench.report(f"rewind  {what:<40} {seconds[what][-1]:6.2f} s{'' if number else '  (warm-up)'}")
    times = {what: spread(taken[1:]) for what, taken in seconds.items()}
    ratio = times[APPLY]["median"] / times[PLAIN]["median"]
    return {"superseded": rows, "ratio": ratio, "rows": [{"what": what, **of} for what, of in times.items()]}


class _Sink:
    """The stage's table, and a group that has read the whole topic."""

    def __init__(self, stage: Stage, cur: Any, spec: ConsumerSpec, each: int) -> None:
        self._stage, self._cur, self._spec, self._each = stage, cur, spec, each
        self._cluster = Cluster({"bootstrap.servers": stage.servers})
        self._topic = stage.topic(Topic(TOPIC, PARTITIONS, PARTITIONS * each, 0, form="empty")).topic_id
        self._group = store.ensure_group(cur, spec.group)
        self._attempt = store.new_attempt(cur, self._group, store.TaskIdentity())
        for partition in range(PARTITIONS):
            store.start_partition(cur, self._group, self._topic, partition, 0)
        stage.empty()
        self._sql("CREATE TABLE bench.rewound_seed AS " + SQL["rows"], topic=self._topic, each=each, partitions=PARTITIONS)

    def plain(self) -> float:
        self._fill()
        self._sql(f"CREATE TABLE bench.rewound_plain (LIKE {TABLE})")
        self._sql("CHECKPOINT")
        gone = f"DELETE FROM {TABLE} WHERE kafka_topic_id = %(topic)s::smallint AND kafka_partition < %(moved)s RETURNING *"
        move = f"WITH gone AS ({gone}) INSERT INTO bench.rewound_plain SELECT * FROM gone"
        took = timed(lambda: self._sql(move, topic=self._topic, moved=MOVED))
        self._drop("bench.rewound_plain")
        return took

    def apply(self) -> float:
        """Seconds of an apply. Its plan is made before."""
        self._fill()
        with contextlib.closing(connect(self._stage.database_url, application="tidemark rewind")) as connection:
            scope = Scope.parse([f"{TOPIC}:0-{MOVED - 1}"])
            planned = plan(
                connection, lambda _: self._cluster, PlanRequest([self._spec], scope, ToEarliest(), reason=REASON, by="bench")
            ).rewind_id
            self._sql("CHECKPOINT")
            took = timed(lambda: apply(connection, lambda _: self._cluster, lambda _: self._spec, planned, by="bench"))
        self._drop(f"tidemark_archive.rewound_{planned}_1")
        return took

    def _fill(self) -> None:
        """Restores the sink, the positions and the ledger to the state after a run."""
        self._stage.empty()
        names = ", ".join(name for name, _ in (*COLUMNS, *((one, "") for one in LINEAGE)))
        self._sql(f"INSERT INTO {TABLE} ({names}) SELECT {names} FROM bench.rewound_seed")
        for name in ("forget", "position", "ledger"):
            self._sql(SQL[name], group=self._group, attempt=self._attempt, each=self._each, batch=BATCH)
        self._sql(f"VACUUM ANALYZE {TABLE}")

    def _drop(self, relation: str) -> None:
        """Drops the table with the rows that were moved, after counting them."""
        rows = self._each * MOVED
        self._cur.execute(f"SELECT count(*) FROM {relation}")
        ((count,),) = self._cur.fetchall()
        assert count == rows, f"{relation} has {count} rows, not {rows}"
        self._sql(f"DROP TABLE {relation}")

    def _sql(self, statement: str, **parameters: Any) -> None:
        self._cur.execute(statement, parameters or None)


@contextlib.contextmanager
def _sink(stage: Stage, rows: int) -> Iterator[_Sink]:
    with autocommit(stage.database_url) as cur, tempfile.TemporaryDirectory(prefix="tidemark-bench-rewind-") as folder:
        file = Path(folder) / "rewound.yaml"
        file.write_text(f"group: bench-rewind\ntopics: [{TOPIC}]\ntransform: bench_arrow:transform\nsink: {{table: {TABLE}}}\n")
        yield _Sink(stage, cur, load_consumer(file), rows // MOVED)
        cur.execute("DROP TABLE bench.rewound_seed")


MEASUREMENT = Measurement(
    "rewind",
    measure,
    Table(
        "A rewind that supersedes {superseded:,} rows, in seconds", "| median | min | max", "{what} | {median:.2f} | {min:.2f} | {max:.2f}"
    ),
    bars=[Bar("supersede/delete_returning", lambda of: of["ratio"], at_most=1.5)],
    full={"rows": 1_000_000, "rounds": 5},
    quick={"rows": 40_000, "rounds": 1},
)

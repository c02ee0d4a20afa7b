"""What a rewind costs: an apply that supersedes 1,000,000 rows, and the swap of a replay beside, compared with plain statements.

- *plain*: ``WITH gone AS (DELETE ... RETURNING *) INSERT INTO ...``, one statement that moves rows of the sink into a table without an
  index, in its own transaction. It does not change positions, epochs, failed records or the ledger.
- *apply*: `tidemark.rewind.apply.apply` of a stored plan, from call to return, including Kafka's answers and the commit.
- *insert*: ``INSERT INTO ... SELECT``, one statement that copies the same rows from a table without an index into the sink without them.
- *swap*: `tidemark.rewind.apply.catch_up_and_swap` of a replay that has reached its group, and whose shadow has the same rows again. It
  takes the old ones out and puts the new ones in.

Before each, the table is filled again and a checkpoint is made. They take turns, also at going first. Some rows of the sink stay, so all
have to look for those that go. Beside each, one session looks up a row that moves, and one updates the position of a partition that moves,
as a commit of the group does, every 20 ms. Their longest waits are figures too.
"""

from __future__ import annotations

import contextlib
import statistics
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.harness.processes import repeated, spread, timed
from benchmarks.harness.site import COLUMNS, LINEAGE, TABLE, Topic
from benchmarks.harness.stage import Stage, autocommit
from benchmarks.measurement import Bar, Bench, Figures, Measurement, Table

from tidemark.db import Connection, connect, statements
from tidemark.kafka.cluster import Cluster
from tidemark.offsets import store
from tidemark.rewind import beside
from tidemark.rewind.apply import apply, catch_up_and_swap
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
INSERT, SWAP = "plain INSERT ... SELECT from a table", "swap of a replay beside"
EVERY_S = 0.02
"""How often a reader looks, and a commit updates a position."""


def measure(bench: Bench, rows: int, rounds: int) -> Figures:
    """Seconds of all four, and the three ratios."""
    with _sink(bench.stage, rows) as sink:
        acts: dict[str, Callable[[], dict[str, float]]] = {PLAIN: sink.plain, APPLY: sink.apply, INSERT: sink.insert, SWAP: sink.swap}
        taken: dict[str, list[dict[str, float]]] = {what: [] for what in acts}
        for number in range(rounds + 1):
            for what in acts if number % 2 else reversed(acts):
                taken[what].append(acts[what]())
                bench.report(f"rewind  {what:<40} {_shown(taken[what][-1])}{'' if number else '  (warm-up)'}")
    counted = {what: of[1:] for what, of in taken.items()}
    medians = {what: statistics.median(of["s"] for of in runs) for what, runs in counted.items()}
    table = [{"what": what, **spread([of["s"] for of in runs]), **_waits(runs)} for what, runs in counted.items()]
    return {
        "superseded": rows,
        "ratio": medians[APPLY] / medians[PLAIN],
        "swap_ratio": medians[SWAP] / (medians[APPLY] + medians[INSERT]),
        "wait_ratio": _waits(counted[SWAP])["commit"] / _waits(counted[APPLY])["commit"],
        "rows": table,
    }


def _waits(runs: list[dict[str, float]]) -> dict[str, float]:
    return {who: max(of[who] for of in runs) for who in ("reader", "commit")}


def _shown(run: dict[str, float]) -> str:
    return f"{run['s']:6.2f} s; longest waits: reader {run['reader']:.3f} s, commit {run['commit']:.3f} s"


class _Sink:
    """The stage's table, and a group that has read the whole topic."""

    def __init__(self, stage: Stage, cur: Any, spec: ConsumerSpec, each: int) -> None:
        self._stage, self._cur, self._spec, self._each = stage, cur, spec, each
        self._names = ", ".join([*(name for name, _ in COLUMNS), *LINEAGE])
        self._cluster = Cluster({"bootstrap.servers": stage.servers})
        self._topic = stage.topic(Topic(TOPIC, PARTITIONS, PARTITIONS * each, 0, form="empty")).topic_id
        self._group = store.ensure_group(cur, spec.group)
        self._attempt = store.new_attempt(cur, self._group, store.TaskIdentity())
        for partition in range(PARTITIONS):
            store.start_partition(cur, self._group, self._topic, partition, 0)
        stage.empty()
        self._sql("CREATE TABLE bench.rewound_seed AS " + SQL["rows"], topic=self._topic, each=each, partitions=PARTITIONS)

    def plain(self) -> dict[str, float]:
        self._fill()
        self._sql(f"CREATE TABLE bench.rewound_plain (LIKE {TABLE})")
        gone = f"DELETE FROM {TABLE} WHERE kafka_topic_id = %(topic)s::smallint AND kafka_partition < %(moved)s RETURNING *"
        move = f"WITH gone AS ({gone}) INSERT INTO bench.rewound_plain SELECT * FROM gone"
        took = self._watched(lambda: self._sql(move, topic=self._topic, moved=MOVED), {0, 1})
        self._drop("bench.rewound_plain")
        return took

    def apply(self) -> dict[str, float]:
        """An apply. Its plan is made before."""
        self._fill()
        with self._session() as connection:
            planned = self._plan(connection)
            took = self._watched(lambda: apply(connection, lambda _: self._cluster, lambda _: self._spec, planned, by="bench"), {0, 1})
        self._drop(f"tidemark_archive.rewound_{planned}_1")
        return took

    def insert(self) -> dict[str, float]:
        self._fill()
        names = self._names
        self._sql(f"DELETE FROM {TABLE} WHERE kafka_partition < {MOVED}")
        self._sql(f"VACUUM ANALYZE {TABLE}")
        copy = f"INSERT INTO {TABLE} ({names}) SELECT {names} FROM bench.rewound_seed WHERE kafka_partition < {MOVED}"
        took = self._watched(lambda: self._sql(copy), {0, 1})
        self._require(TABLE, self._each * PARTITIONS)
        return took

    def swap(self) -> dict[str, float]:
        """A swap. Its replay is begun before, and has reached the group."""
        self._fill()
        with self._session() as connection:
            planned = self._plan(connection, beside=True)
            apply(connection, lambda _: self._cluster, lambda _: self._spec, planned, by="bench")
            replay = beside.find(self._cur, self._spec.group, planned)
            shadow = replay.shadow(TABLE)
            self._sql(f"INSERT INTO {shadow} ({self._names}) SELECT {self._names} FROM bench.rewound_seed WHERE kafka_partition < {MOVED}")
            self._read(replay.side_id)
            self._sql(f"VACUUM ANALYZE {shadow}")
            of = (lambda _: self._cluster, lambda _: self._spec)
            took = self._watched(lambda: catch_up_and_swap(connection, *of, planned, read_on=lambda: None, by="bench"), {1})
        self._require(TABLE, self._each * PARTITIONS)
        self._drop(f"tidemark_archive.rewound_{planned}_2")
        return took

    def _session(self) -> contextlib.closing[Connection]:
        return contextlib.closing(connect(self._stage.database_url, application="tidemark rewind"))

    def _plan(self, connection: Connection, *, beside: bool = False) -> int:
        scope = Scope.parse([f"{TOPIC}:0-{MOVED - 1}"])
        request = PlanRequest([self._spec], scope, ToEarliest(), reason=REASON, by="bench", beside=beside)
        return plan(connection, lambda _: self._cluster, request).rewind_id

    def _watched(self, act: Callable[[], object], looks: set[int]) -> dict[str, float]:
        """Seconds of a call after a checkpoint, and the longest waits of a reader and of a commit meanwhile. ``looks``: how many rows a
        reader may see of a record that moves."""
        waits: dict[str, list[float]] = {"reader": [], "commit": []}
        seen: set[int] = set()
        url, ids = self._stage.database_url, {"group": self._group, "topic": self._topic}
        with autocommit(url) as reading, autocommit(url) as committing:

            def look() -> None:
                waits["reader"].append(timed(lambda: reading.execute(SQL["look"].format(table=TABLE), ids)))
                seen.add(reading.fetchone()[0])

            def commit() -> None:
                waits["commit"].append(timed(lambda: committing.execute(SQL["commit"], ids)))

            self._sql("CHECKPOINT")
            with repeated(look, EVERY_S), repeated(commit, EVERY_S):
                took = timed(act)
        assert seen <= looks, f"a reader saw {seen} rows of one record"
        return {"s": took, **{who: max(of) for who, of in waits.items()}}

    def _fill(self) -> None:
        """Restores the sink, the positions and the ledger to the state after a run."""
        self._stage.empty()
        self._sql(f"INSERT INTO {TABLE} ({self._names}) SELECT {self._names} FROM bench.rewound_seed")
        self._sql(SQL["forget"], group=self._group)
        self._read(self._group)
        self._sql(f"VACUUM ANALYZE {TABLE}")

    def _read(self, group_id: int) -> None:
        """Stores positions and ledger of a group as if it had read its partitions."""
        for name in ("position", "ledger"):
            self._sql(SQL[name], group=group_id, attempt=self._attempt, each=self._each, batch=BATCH)

    def _drop(self, relation: str) -> None:
        """Drops the table with the rows that were moved, after counting them."""
        self._require(relation, self._each * MOVED)
        self._sql(f"DROP TABLE {relation}")

    def _require(self, relation: str, rows: int) -> None:
        self._cur.execute(f"SELECT count(*) FROM {relation}")
        ((count,),) = self._cur.fetchall()
        assert count == rows, f"{relation} has {count} rows, not {rows}"

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
        "A rewind that supersedes {superseded:,} rows, in seconds",
        "| median | min | max | longest wait of a reader | longest wait of a commit",
        "{what} | {median:.2f} | {min:.2f} | {max:.2f} | {reader:.2f} | {commit:.2f}",
    ),
    bars=[
        Bar("supersede/delete_returning", lambda of: of["ratio"], at_most=1.5),
        Bar("swap/(supersede + insert)", lambda of: of["swap_ratio"], at_most=1.5),
        Bar("wait of a commit, swap/supersede", lambda of: of["wait_ratio"], at_most=1.0),
    ],
    full={"rows": 1_000_000, "rounds": 5},
    quick={"rows": 40_000, "rounds": 1},
)

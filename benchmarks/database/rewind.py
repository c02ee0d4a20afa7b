"""What a rewind costs: an apply that supersedes 1,000,000 rows, compared with the plain statement that moves the same rows.

- *plain*: ``WITH gone AS (DELETE ... RETURNING *) INSERT INTO ...``, one statement that moves rows of the sink into a table without an
  index, in its own transaction. It does not change positions, epochs, failed records or the ledger.
- *apply*: `tidemark.rewind.apply.apply` of a stored plan, from call to return, including Kafka's answers and the commit.

Before each, the table is filled again and a checkpoint is made. They take turns, also at going first. Some rows of the sink stay, so both
have to look for those that go. Further applies, which are not timed, show the memory of the backend and of the process that applies, by
the number of superseded rows, and how long others wait: a commit on a partition that moves, one on a partition that stays, and a reader of
the sink.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from benchmarks.harness.processes import MIB, repeated, spread, timed
from benchmarks.harness.site import COLUMNS, LINEAGE, TABLE, Topic
from benchmarks.harness.stage import Stage, autocommit
from benchmarks.measurement import Bar, Bench, Figures, Measurement, Table

from tidemark.db import Connection, connect, statements
from tidemark.kafka.cluster import Cluster
from tidemark.offsets import store
from tidemark.rewind.apply import apply
from tidemark.rewind.plan import PlanRequest, plan
from tidemark.rewind.plan_model import ToEarliest
from tidemark.spec import ConsumerSpec, load_consumer
from tidemark.spec.scope import Scope

RATIO, BAR = "supersede/delete_returning", 1.5
TOPIC = "rewound"
MOVED, PARTITIONS = 4, 5
"""Partitions of the rewind, and of the topic."""
BATCH = 25_000
"""Records per batch of the ledger."""
REASON = "a measurement of what it costs"
SQL = statements("benchmarks.database", "rewind.sql")
PLAIN, APPLY = "plain DELETE ... RETURNING into a table", "apply of a rewind"


def measure(bench: Bench, rows: int, fewer: int, rounds: int) -> Figures:
    """``sides``: seconds of both, and their ratio; ``memory``: peaks for ``fewer`` and for all rows; ``locks``: the longest waits."""
    with _sink(bench.stage, rows) as sink:
        seconds: dict[str, list[float]] = {PLAIN: [], APPLY: []}
        for number in range(rounds + 1):
            for what in (PLAIN, APPLY) if number % 2 else (APPLY, PLAIN):
                seconds[what].append(sink.plain() if what == PLAIN else sink.apply())
                bench.report(f"rewind  {what:<40} {seconds[what][-1]:6.2f} s{'' if number else '  (warm-up)'}")
        memory = [sink.memory(count) for count in (fewer, rows)]
        locks = [{"what": what, "longest_s": waited} for what, waited in sink.locks().items()]
    times = {what: spread(taken[1:]) for what, taken in seconds.items()}
    ratio = times[APPLY]["median"] / times[PLAIN]["median"]
    sides = [{"what": what, "last": f"{of['max']:.2f}", **of} for what, of in times.items()]
    bar = {"what": RATIO, "median": ratio, "last": f"bar {BAR:g} at most"}
    return {"rows": rows, "ratio": ratio, "sides": [*sides, bar], "memory": memory, "locks": locks}


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
        self._fill(self._each)
        self._sql(f"CREATE TABLE bench.rewound_plain (LIKE {TABLE})")
        self._sql("CHECKPOINT")
        gone = f"DELETE FROM {TABLE} WHERE kafka_topic_id = %(topic)s::smallint AND kafka_partition < %(moved)s RETURNING *"
        move = f"WITH gone AS ({gone}) INSERT INTO bench.rewound_plain SELECT * FROM gone"
        took = timed(lambda: self._sql(move, topic=self._topic, moved=MOVED))
        self._drop("bench.rewound_plain", self._each * MOVED)
        return took

    def apply(
        self, each: int | None = None, watched: Callable[[Connection], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    ) -> float:
        """Seconds of an apply. Its plan is made before."""
        each = each or self._each
        self._fill(each)
        with contextlib.closing(connect(self._stage.database_url, application="tidemark rewind")) as connection:
            scope = Scope.parse([f"{TOPIC}:0-{MOVED - 1}"])
            planned = plan(
                connection, lambda _: self._cluster, PlanRequest([self._spec], scope, ToEarliest(), reason=REASON, by="bench")
            ).rewind_id
            self._sql("CHECKPOINT")
            with watched(connection):
                took = timed(lambda: apply(connection, lambda _: self._cluster, lambda _: self._spec, planned, by="bench"))
        self._drop(f"tidemark_archive.rewound_{planned}_1", each * MOVED)
        return took

    def memory(self, rows: int) -> dict[str, Any]:
        """The peak of the backend's private memory, and the growth of this process."""
        peaks = {"backend": 0, "client": 0}

        @contextlib.contextmanager
        def watched(connection: Connection) -> Iterator[None]:
            backend, client = psutil.Process(connection.info.backend_pid), psutil.Process()
            before = client.memory_full_info().uss

            def look() -> None:
                peaks["backend"] = max(peaks["backend"], backend.memory_full_info().uss)
                peaks["client"] = max(peaks["client"], client.memory_full_info().uss - before)

            with repeated(look):
                yield

        self.apply(rows // MOVED, watched)
        return {"rows": rows, **{f"{name}_mib": peak / MIB for name, peak in peaks.items()}}

    def locks(self) -> dict[str, float]:
        """The longest wait of each while a rewind is applied."""
        position = "SELECT next_offset FROM tidemark.partition_offset WHERE group_id = %s AND partition = %s FOR UPDATE"
        probes: dict[str, tuple[str, tuple[int, ...]]] = {
            "a commit on a partition that moves": (position, (self._group, MOVED - 1)),
            "a commit on another partition": (position, (self._group, MOVED)),
            "a reader of the sink": (f"SELECT * FROM {TABLE} LIMIT 100", ()),
        }
        longest = dict.fromkeys(probes, 0.0)

        def probe(what: str, cur: Any) -> None:
            began = time.perf_counter()
            cur.execute(*probes[what])
            cur.fetchall()
            longest[what] = max(longest[what], time.perf_counter() - began)

        @contextlib.contextmanager
        def watched(_: Connection) -> Iterator[None]:
            with contextlib.ExitStack() as stack:
                for what in probes:
                    cur = stack.enter_context(autocommit(self._stage.database_url))
                    stack.enter_context(repeated(partial(probe, what, cur)))
                yield

        took = self.apply(watched=watched)
        return {"the apply itself": took, **longest}

    def _fill(self, each: int) -> None:
        """Restores the sink, the positions and the ledger to the state after a run."""
        self._stage.empty()
        names = ", ".join(name for name, _ in (*COLUMNS, *((one, "") for one in LINEAGE)))
        self._sql(f"INSERT INTO {TABLE} ({names}) SELECT {names} FROM bench.rewound_seed WHERE kafka_offset < %(each)s", each=each)
        for name in ("forget", "position", "ledger"):
            self._sql(SQL[name], group=self._group, attempt=self._attempt, each=each, batch=BATCH)
        self._sql(f"VACUUM ANALYZE {TABLE}")

    def _drop(self, relation: str, rows: int) -> None:
        """Drops the table with the rows that were moved, after counting them."""
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
        "A rewind that supersedes {rows:,} rows, in seconds", "| median | min | max", "{what} | {median:.2f} | {min:.2f} | {last}", "sides"
    ),
    Table(
        "Memory of an apply at its peak, in MiB",
        "rows | its backend | more in the process that applies",
        "{rows:,} | {backend_mib:.0f} | {client_mib:.0f}",
        "memory",
    ),
    Table("What an apply keeps waiting, in seconds", "| longest", "{what} | {longest_s:.2f}", "locks"),
    bars=[Bar(RATIO, lambda of: of["ratio"], at_most=BAR)],
    full={"rows": 1_000_000, "fewer": 250_000, "rounds": 5},
    quick={"rows": 40_000, "fewer": 10_000, "rounds": 1},
)

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
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import psycopg2

from benchmarks.site import COLUMNS, LINEAGE, TABLE
from benchmarks.stage import Stage
from tidemark.db import Connection, connect
from tidemark.kafka.cluster import Cluster
from tidemark.offsets import store
from tidemark.rewind.apply import apply
from tidemark.rewind.plan import PlanRequest, plan
from tidemark.rewind.plan_model import ToEarliest
from tidemark.spec import ConsumerSpec, load_consumer
from tidemark.spec.scope import Scope

RATIO = "supersede/delete_returning"
BAR = 1.5
"""The bar: at most."""
TOPIC = "rewound"
MOVED, PARTITIONS = 4, 5
"""Partitions of the rewind, and of the topic."""
BATCH = 25_000
"""Records per batch of the ledger."""
EVERY_S = 0.02
MIB = 2**20
REASON = "a measurement of what it costs"


@dataclass(frozen=True, slots=True)
class Extent:
    """Superseded rows: in the rounds of the ratio, and fewer for the comparison of memory."""

    rows: int
    fewer: int
    rounds: int


FULL = Extent(1_000_000, 250_000, 5)
QUICK = Extent(40_000, 10_000, 1)


def measure(stage: Stage, extent: Extent, report: Callable[[str], None]) -> dict[str, Any]:
    """``ratio`` and the figures of both sides, ``memory``, and ``locks``."""
    with _Sink(stage, extent) as sink:
        seconds: dict[str, list[float]] = {"plain": [], "apply": []}
        for number in range(extent.rounds + 1):
            for what in ("plain", "apply") if number % 2 else ("apply", "plain"):
                took = sink.plain() if what == "plain" else sink.apply()
                if number:  # the first round warms up
                    seconds[what].append(took)
                report(f"rewind  {what:<6} {took:6.2f} s{'' if number else '  (warm-up)'}")
        memory = [sink.memory(rows) for rows in (extent.fewer, extent.rows)]
        for one in memory:
            report(
                f"rewind  {one['rows']:,} rows: backend {one['backend_mib']:.1f} MiB, the process that applies +{one['client_mib']:.1f} MiB"
            )
        locks = sink.locks()
        report("rewind  waits: " + ", ".join(f"{what} {waited:.2f} s" for what, waited in locks.items()))
    medians = {what: statistics.median(times) for what, times in seconds.items()}
    ratio = medians["apply"] / medians["plain"]
    report(f"rewind  {RATIO} {ratio:.2f}, bar {BAR}")
    sides = {what: {"median_s": medians[what], "min_s": min(times), "max_s": max(times)} for what, times in seconds.items()}
    return {"rows": extent.rows, "ratio": ratio, "bar": BAR, **sides, "memory": memory, "locks": locks}


def table(found: dict[str, Any]) -> list[tuple[str, list[str], list[list[str]]]]:
    """Titles, columns and rows, as `benchmarks.report` prints them."""
    sides = [
        [name, *(f"{found[what][figure]:.2f}" for figure in ("median_s", "min_s", "max_s"))]
        for what, name in (("plain", "plain DELETE ... RETURNING into a table"), ("apply", "apply of a rewind"))
    ]
    ratio = [RATIO, f"{found['ratio']:.2f}", "", f"bar {found['bar']:g} at most"]
    memory = [[f"{one['rows']:,}", f"{one['backend_mib']:.0f}", f"{one['client_mib']:.0f}"] for one in found["memory"]]
    locks = [[what, f"{waited:.2f}"] for what, waited in found["locks"].items()]
    return [
        (f"A rewind that supersedes {found['rows']:,} rows, in seconds", ["", "median", "min", "max"], [*sides, ratio]),
        ("Memory of an apply at its peak, in MiB", ["rows", "its backend", "more in the process that applies"], memory),
        ("What an apply keeps waiting, in seconds", ["", "longest"], locks),
    ]


class _Sink:
    """The stage's table, and a group that has read the whole topic."""

    def __init__(self, stage: Stage, extent: Extent) -> None:
        self._stage, self._each, self._rows = stage, extent.rows // MOVED, extent.rows
        self._ends = contextlib.ExitStack()
        self._connection = self._ends.enter_context(contextlib.closing(psycopg2.connect(stage.database_url)))
        self._connection.autocommit = True
        self._cluster = Cluster({"bootstrap.servers": stage.servers})

    def __enter__(self) -> _Sink:
        uuid = empty_records(self._stage.servers, self._cluster, TOPIC, PARTITIONS, self._each)
        folder = Path(self._ends.enter_context(tempfile.TemporaryDirectory(prefix="tidemark-bench-rewind-")))
        file = folder / "rewound.yaml"
        file.write_text(f"group: bench-rewind\ntopics: [{TOPIC}]\ntransform: bench_arrow:transform\nsink: {{table: {TABLE}}}\n")
        self._spec: ConsumerSpec = load_consumer(file)
        with self._connection.cursor() as cur:
            self._group = store.ensure_group(cur, self._spec.group)
            self._topic = store.ensure_topic(cur, TOPIC, uuid)
            self._attempt = store.new_attempt(cur, self._group, store.TaskIdentity())
            for partition in range(PARTITIONS):
                store.start_partition(cur, self._group, self._topic, partition, 0)
        self._stage.empty()
        self._sql("CREATE TABLE bench.rewound_seed AS " + _ROWS, {"topic": self._topic, "each": self._each, "partitions": PARTITIONS})
        return self

    def __exit__(self, *_: object) -> None:
        self._sql("DROP TABLE IF EXISTS bench.rewound_seed")
        self._ends.close()

    def plain(self) -> float:
        self._fill(self._each)
        self._sql(f"CREATE TABLE bench.rewound_plain (LIKE {TABLE}); CHECKPOINT")
        began = time.perf_counter()
        self._sql(
            f"WITH gone AS (DELETE FROM {TABLE} WHERE kafka_topic_id = %(topic)s::smallint AND kafka_partition < %(moved)s RETURNING *)"
            " INSERT INTO bench.rewound_plain SELECT * FROM gone",
            {"topic": self._topic, "moved": MOVED},
        )
        took = time.perf_counter() - began
        self._require("bench.rewound_plain", self._rows)
        self._sql("DROP TABLE bench.rewound_plain")
        return took

    def apply(
        self, each: int | None = None, watched: Callable[[Connection], contextlib.AbstractContextManager[Any]] | None = None
    ) -> float:
        """Seconds of an apply. Its plan is made before."""
        each = each or self._each
        self._fill(each)
        with contextlib.closing(connect(self._stage.database_url, application="tidemark rewind")) as connection:
            scope = Scope.parse([f"{TOPIC}:0-{MOVED - 1}"])
            made = plan(connection, lambda _: self._cluster, PlanRequest([self._spec], scope, ToEarliest(), reason=REASON, by="bench"))
            self._sql("CHECKPOINT")
            with watched(connection) if watched else contextlib.nullcontext():
                began = time.perf_counter()
                apply(connection, lambda _: self._cluster, lambda _: self._spec, made.rewind_id, by="bench")
                took = time.perf_counter() - began
        self._require(f"tidemark_archive.rewound_{made.rewind_id}_1", each * MOVED)
        self._sql(f"DROP TABLE tidemark_archive.rewound_{made.rewind_id}_1")
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

            with again_and_again(look):
                yield

        self.apply(rows // MOVED, watched)
        return {"rows": rows, "backend_mib": peaks["backend"] / MIB, "client_mib": peaks["client"] / MIB}

    def locks(self) -> dict[str, float]:
        """The longest wait of each while a rewind is applied."""
        position = "SELECT next_offset FROM tidemark.partition_offset WHERE group_id = %(group)s AND partition = %(partition)s FOR UPDATE"
        asked: dict[str, tuple[str, dict[str, int]]] = {
            "a commit on a partition that moves": (position, {"group": self._group, "partition": MOVED - 1}),
            "a commit on another partition": (position, {"group": self._group, "partition": MOVED}),
            "a reader of the sink": (f"SELECT * FROM {TABLE} LIMIT 100", {}),
        }
        longest = dict.fromkeys(asked, 0.0)

        @contextlib.contextmanager
        def watched(_: Connection) -> Iterator[None]:
            with contextlib.ExitStack() as probes:
                for what, (statement, parameters) in asked.items():
                    session = probes.enter_context(contextlib.closing(psycopg2.connect(self._stage.database_url)))
                    session.autocommit = True

                    def probe(what: str = what, statement: str = statement, parameters: Any = parameters, session: Any = session) -> None:
                        began = time.perf_counter()
                        with session.cursor() as cur:
                            cur.execute(statement, parameters)
                            cur.fetchall()
                        longest[what] = max(longest[what], time.perf_counter() - began)

                    probes.enter_context(again_and_again(probe))
                yield

        took = self.apply(watched=watched)
        return {"the apply itself": took, **longest}

    def _fill(self, each: int) -> None:
        """Restores the sink, the positions and the ledger to the state after a run."""
        self._stage.empty()
        parameters = {"group": self._group, "topic": self._topic, "attempt": self._attempt, "each": each, "batch": BATCH}
        names = ", ".join(name for name, _ in (*COLUMNS, *((one, "") for one in LINEAGE)))
        self._sql(f"INSERT INTO {TABLE} ({names}) SELECT {names} FROM bench.rewound_seed WHERE kafka_offset < %(each)s", parameters)
        self._sql(_LEDGER, parameters)
        self._sql(f"VACUUM ANALYZE {TABLE}")

    def _require(self, relation: str, rows: int) -> None:
        with self._connection.cursor() as cur:
            cur.execute(f"SELECT count(*) FROM {relation}")
            found = cur.fetchone()
        assert found == (rows,), f"{relation} has {found} rows, not {rows}"

    def _sql(self, statements: str, parameters: dict[str, Any] | None = None) -> None:
        with self._connection.cursor() as cur:
            for statement in statements.split("; "):
                cur.execute(statement, parameters)


_ROWS = """
SELECT number AS event_id, '2026-01-01T00:00:00Z'::timestamptz + number * interval '1 ms' AS happened_at,
       'customer-' || lpad((number * 7919 %% 100000)::text, 6, '0') AS customer, 'purchase' AS kind,
       number %% 100000 / 100.0::double precision AS amount, (number %% 20)::integer AS quantity, 'lorem ipsum dolor sit amet' AS note,
       %(topic)s::smallint AS kafka_topic_id, (number %% %(partitions)s)::integer AS kafka_partition,
       number / %(partitions)s AS kafka_offset, 0 AS kafka_seq
  FROM generate_series(0, %(each)s::bigint * %(partitions)s - 1) number"""
_LEDGER = """
DELETE FROM tidemark.batch WHERE group_id = %(group)s; \
UPDATE tidemark.partition_offset SET next_offset = %(each)s, validated_offset = 0 WHERE group_id = %(group)s; \
INSERT INTO tidemark.batch (group_id, topic_id, partition, start_offset, end_offset, owner_epoch, attempt_id,
                            loaded, skipped, retried, failed, unaccounted, sink_rows)
SELECT group_id, topic_id, partition, start, least(start + %(batch)s, next_offset), owner_epoch, %(attempt)s,
       least(start + %(batch)s, next_offset) - start, 0, 0, 0, 0, least(start + %(batch)s, next_offset) - start
  FROM tidemark.partition_offset CROSS JOIN LATERAL generate_series(0, next_offset - 1, %(batch)s) start WHERE group_id = %(group)s"""


def empty_records(servers: str, cluster: Cluster, name: str, partitions: int, each: int) -> str:
    """Creates a topic with so many empty records in each partition: a rewind only looks at offsets. Returns the topic's UUID."""
    from confluent_kafka import Producer
    from confluent_kafka.admin import AdminClient, NewTopic

    if not cluster.topics([name], missing_ok=True):
        admin = AdminClient({"bootstrap.servers": servers})
        admin.create_topics([NewTopic(name, partitions, 1, config={"retention.ms": "-1"})])[name].result()
    (topic,) = cluster.topics([name])
    ends = cluster.stable_ends(topic.all())
    producer = Producer(
        {
            "bootstrap.servers": servers,
            "enable.idempotence": True,
            "linger.ms": 50,
            "queue.buffering.max.messages": 1_000_000,
            "log_level": 0,
        }
    )
    for partition, end in ends.items():
        for _ in range(max(0, each - end)):
            producer.produce(name, value=b"", partition=partition.partition)
        assert producer.flush(120) == 0
    return topic.kafka_uuid


@contextlib.contextmanager
def again_and_again(act: Callable[[], None]) -> Iterator[None]:
    """Repeats a call while the block runs, and once more after it."""
    ended = threading.Event()

    def loop() -> None:
        while not ended.wait(EVERY_S):
            act()

    thread = threading.Thread(target=loop, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()

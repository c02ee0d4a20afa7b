"""A table that changes at random, a consumer without code that follows it, and a comparison of the two tables."""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from queue import Empty, Queue
from random import Random
from typing import Any

from tenacity import Retrying, retry_if_exception_type, stop_after_attempt

from tests.support.attempts import FAST_JVM, Attempt, all_gone
from tests.support.by_hand import ByHand
from tests.support.change_data import ChangeSource, Followed, avro_converter, json_converter
from tests.support.change_load import COLUMNS, ENUM, Load, Rows, differences
from tests.support.ledger import in_thread
from tests.support.points import points_among
from tests.support.scenario import Scenario, Stored
from tests.support.waiting import until
from tidemark.db import session, transaction
from tidemark.driver.launch import DriverDied
from tidemark.kafka.cluster import Cluster
from tidemark.offsets.store import TaskIdentity
from tidemark.quality import check_conservation
from tidemark.records.ranges import Slice
from tidemark.rewind.apply import StalePlan
from tidemark.rewind.plan_model import Scenario as Rewind
from tidemark.sink.steps import Step

SINK = COLUMNS.replace(" inet", " text")
"""The columns of the sink. If Tidemark cannot write a type, the column is text."""
BEFORE = 20
"""The number of transactions before the connector starts."""

INSERTED, UPDATED, MOVED, DELETED, ADDED = "rows inserted", "rows updated", "primary keys changed", "rows deleted", "columns added"


@dataclass(frozen=True)
class Form:
    """The format in which the connector writes changes, and which the consumer's file declares."""

    value: str
    schemas: bool = False

    def converter(self, registry: str | None) -> dict[str, str]:
        if self.value == "json":
            return json_converter(schemas=self.schemas)
        assert registry is not None
        return avro_converter(registry)


JSON, JSON_WITH_SCHEMAS, AVRO = Form("json"), Form("json", schemas=True), Form("avro")


class Story:
    """A source table under load, and the consumer that follows it. ``seed`` is the seed of the load. A column that the load adds to the
    source is added to the sink first, as a user would do it."""

    def __init__(self, source: ChangeSource, scenario: Scenario, followed: Followed, load: Load, seed: int) -> None:
        self.source, self.scenario, self.followed, self.load, self.seed = source, scenario, followed, load, seed
        self.topic = followed.topic(load.table)
        self.changes: Counter[str] = Counter()
        """The number of changes so far, by kind."""
        self.soft = scenario.keys["sink"]["deletes"] == "soft"
        self.rewound = False
        self._runs = 0

    # ---- the source

    def change(self, transactions: int) -> None:
        for statements in self.load.transactions(transactions):
            for statement, _ in statements:
                kind = _kind(statement)
                self.changes[kind] += 1
                if kind == ADDED:
                    self.scenario.sql(statement.replace(self.load.table, self.scenario.table))
            self.source.transaction(statements)

    def insert(self) -> None:
        """Inserts a row, whose record has every column so far. A column that was added only appears in later records."""
        self.changes[INSERTED] += 1
        self.source.transaction([self.load._insert()])

    @contextlib.contextmanager
    def changing(self, transactions: int) -> Iterator[Future[None]]:
        """Changes the table while the block runs, and waits for the last change."""
        with in_thread(lambda: self.change(transactions)) as load:
            yield load
            load.result()

    # ---- the consumer

    def run(self, *, rewind: Rewind | None = None) -> None:
        """Runs the consumer once. ``rewind`` is applied to the group during the first batch."""
        due = Queue[Rewind](1)
        if rewind is not None:
            due.put(rewind)

        def before(_: Slice) -> None:
            with contextlib.suppress(Empty):
                self.rewind(due.get_nowait())

        self.scenario.run(before=before)

    def kill(self) -> int:
        """Kills a driver while the transaction of a batch is open, after the same run has committed other batches. Returns the driver's
        process id. Needs two batches of unread records in partition 0."""
        self._runs += 1
        task = TaskIdentity("consume__changes", f"run {self._runs}", "consume", -1, 1)
        start = self.scenario.positions()[self.topic, 0]
        with points_among(self.scenario.folders[0]) as points:
            point = points.at(Step.COMMIT, partition=0, start=start + 1)
            attempt = Attempt(self.scenario.spec, self.scenario.connections, self.scenario.folder, task)
            try:
                until(lambda: point.is_reached or not attempt.running, "the driver is in a commit")
                assert point.is_reached, attempt.log
                tree = attempt.tree()
                attempt.driver.kill()
                assert isinstance(attempt.wait(), DriverDied), attempt.log
                until(lambda: all_gone(tree), "driver, JVM and workers gone")
                return attempt.driver.pid
            finally:
                attempt.end()

    def rewind(self, to: Rewind) -> None:
        """Rewinds the group. Plans again if a column was added in the meantime."""
        self.rewound = True
        for again in Retrying(retry=retry_if_exception_type(StalePlan), stop=stop_after_attempt(20), reraise=True):
            with again:
                ByHand(self.scenario).rewind(to)

    # ---- what is stored

    def rows(self) -> Rows:
        """The sink's rows that are not deleted, with only the columns that the source has."""
        query = "SELECT attname FROM pg_attribute WHERE attrelid = %s::regclass AND attnum > 0 ORDER BY attnum"
        names = [name for (name,) in self.source.ask(query, self.load.table)]
        found = self.scenario.rows(", ".join(names), where="NOT kafka_deleted" if self.soft else "true")
        return {row[0]: dict(zip(names, row, strict=True)) for row in found}

    def records(self) -> list[Stored]:
        """The records of the table's topic, partition by partition."""
        (described,) = Cluster(self.scenario.connections.kafka).topics([self.topic])
        return [record for part in described.all() for record in self.scenario.records(self.topic, part.partition).values()]

    def check(self) -> None:
        """Reads the rest. Then checks that both tables are equal and that each record is accounted for once."""
        self.followed.catch_up()
        self.run()
        found = differences(self.rows(), self.source.rows(self.load.table))
        assert found == [], found
        self.check_conserved()
        records = self.records()
        tombstones = sum(record.value is None for record in records)
        counts = self.scenario.counts()
        assert counts["loaded"] + counts.get("skipped", 0) == len(records)
        if not self.rewound:  # if a rewind has cut a batch, its records without rows count as skipped
            assert counts.get("skipped", 0) == tombstones
            assert counts.get("deleted", 0) == self.changes[DELETED] + self.changes[MOVED]

    def check_conserved(self) -> None:
        with session(self.scenario.database_url) as connection, transaction(connection) as cur:
            assert check_conservation(cur, self.scenario.spec.group, [self.scenario.table], upsert=True) == []


def _kind(statement: str) -> str:
    if " SET id = " in statement:
        return MOVED
    return {"INSERT": INSERTED, "UPDATE": UPDATED, "DELETE": DELETED, "ALTER": ADDED}[statement.split()[0]]


@contextlib.contextmanager
def story(
    source: ChangeSource,
    scenario: Scenario,
    form: Form = JSON,
    *,
    registry: str | None = None,
    identity: str = "FULL",
    deletes: str = "hard",
    partitions: int = 1,
    config: Mapping[str, str] | None = None,
    more: str = "",
    table: str | None = None,
    prefix: str | None = None,
    **keys: Any,
) -> Iterator[Story]:
    """A source table with some rows, its connector, and a consumer that has not read anything yet.

    ``more``: columns that only the sink has. ``table``: the name of the source table. ``prefix``: the name of the connector. ``keys``:
    further keys of the consumer's file.
    """
    seed = random.randrange(10**9)
    source.execute(ENUM)
    load = Load(Random(seed), source.create(COLUMNS, identity=identity, table=table))
    for statements in load.transactions(BEFORE):
        source.transaction(statements)
    converter = form.converter(registry)
    with source.follow(load.table, converter=converter, partitions=partitions, config=config, name=prefix) as followed:
        own = {"url": registry} if registry else None
        scenario.connections = dataclasses.replace(scenario.connections, registry=own, spark_master="local[1]", spark_conf=FAST_JVM)
        scenario.write(
            None,
            topics=followed.topic(load.table),
            format={"value": form.value, "key": form.value, "envelope": "debezium"},
            sink={"table": scenario.table, "mode": "upsert", "key": ["id"], "deletes": deletes},
            **keys,
        )
        scenario.sql(ENUM)
        added = [f"{name} text" for name in load.added]
        soft = ["kafka_deleted boolean NOT NULL DEFAULT false"] if deletes == "soft" else []
        scenario.make_sink(", ".join([SINK, *added, *soft, *([more] if more else [])]))
        yield Story(source, scenario, followed, load, seed)

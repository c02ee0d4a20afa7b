"""Data for the page's tests: seven consumers with something to see, from real runs, validations and rewinds in this process."""

from __future__ import annotations

import itertools
import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from tests.support.kafka_topics import Topics
from tests.support.scenario import Scenario

from tidemark.db import session, transaction
from tidemark.errors import BadInput, Fenced
from tidemark.kafka.cluster import Cluster
from tidemark.offsets import samples, store
from tidemark.offsets.store import TaskIdentity
from tidemark.offsets.window import Observation
from tidemark.quality import ValidatedRun, validate
from tidemark.records.ranges import Slice
from tidemark.rewind import apply as applying
from tidemark.rewind import beside
from tidemark.rewind.plan import PlanRequest, plan
from tidemark.rewind.plan_model import ToOffset
from tidemark.spec.scope import Scope

EVIL = '<script>globalThis.stolen = 1</script><img src=x onerror="globalThis.stolen = 1">'
"""The payload of a record, and the text of its error."""
REASON = "fares were doubled since noon"

TRANSFORM = """
    from tidemark.transform import Delete, Fail, Record, Retry, Skip


    def transform(record: Record) -> dict | Delete:
        word = (record.value or b"").decode()
        if word.startswith("<"):
            raise Fail(f"no city: {word}")
        if word == "fail":
            raise Fail("no carrier")
        if word == "later":
            raise Retry("the service is busy")
        number = int(word)
        return Delete(number=-number) if number < 0 else {"number": number}
"""
DOUBLED = """
    from tidemark.transform import Record, Skip


    def transform(record: Record) -> dict:
        word = (record.value or b"").decode()
        if word == "free":
            raise Skip("costs nothing")
        return {"number": 2 * int(word)}
"""
REPAIRED = """
    from tidemark.transform import Fail, Record


    def transform(record: Record) -> dict:
        word = (record.value or b"").decode()
        if word == "13":
            raise Fail("no such class")
        return {"number": 0 if word == "free" else int(word)}
"""
SUITE = {
    "name": "numbers",
    "expectations": [
        {"type": "expect_column_values_to_be_between", "kwargs": {"column": "number", "max_value": 100}, "severity": "critical"},
        {"type": "expect_column_values_to_not_be_null", "kwargs": {"column": "number"}, "severity": "warning"},
    ],
}
BAD = "topics: [weather]\ntransform: weather:transform\nsink: {table: lake.weather}\nschedule: '*/5 * * *'\nasignment: [range]\n"


def topic(consumer: str) -> str:
    """The consumer's topic, which no other test uses."""
    return f"shop.{consumer}"


class Data:
    """The consumers by name, in one database. The file of `bad` has problems, and the database of `away` does not answer."""

    def __init__(self, folder: Path, url: str, topics: Topics) -> None:
        self.folder, self.url, self.topics = folder, url, topics
        for name in ("consumers", "transforms", "expectations"):
            (folder / name).mkdir(exist_ok=True)
        (folder / "expectations" / "numbers.json").write_text(json.dumps(SUITE))
        self.runs = 0
        self.with_runs: dict[str, Scenario] = {}

    def make(self) -> None:
        """Seven consumers, each with something to see."""
        self.make_orders()
        self.make_rides()
        self.make_fares()
        self.make_trips()
        self.make_tolls()
        self.consumer("away", 1, connections={"postgres": "elsewhere"}, with_runs=False)
        (self.folder / "consumers" / "bad.yaml").write_text(BAD)

    def make_for_pictures(self) -> None:
        """Consumers as in an ordinary week: some replay, have failed records or are blocked, and some have no problem."""
        self.make_orders()
        self.make_rides(payload="<none>")
        self.make_fares()
        self.make_tolls()
        for name, owner in (("departures", "ann"), ("payments", "bob")):
            healthy = self.consumer(name, 2, schedule="*/10 * * * *", airflow={"owner": owner, "tags": ["lake"]})
            for partition in range(2):
                self.topics.produce(topic(name), [str(number) for number in range(20)], partition=partition)
            self.run(healthy)

    def make_orders(self) -> None:
        orders = self.consumer("orders", 3, schedule="*/10 * * * *", airflow={"owner": "ann", "tags": ["lake", "gold"]})
        for round_ in range(4):
            for partition in range(3):
                self.topics.produce(topic("orders"), [str(round_ * 10 + each) for each in range(20 + 10 * partition)], partition=partition)
            if round_ == 1:
                self.zombie(orders)
            elif round_ == 2:
                orders.set(members=2)
            self.run(orders, seat=max(0, round_ - 2))
        self.rewind(orders, f"{topic('orders')}:0-1", 5)  # these two partitions replay
        self.rewind(orders, f"{topic('orders')}:2", 5, applied=False)
        self.age("orders")
        self.sample("orders")

    def make_rides(self, payload: str = EVIL) -> None:
        rides = self.consumer("rides", 2, retry={"delays": ["20m", "2h"]}, airflow={"owner": "bob"})
        self.topics.produce(topic("rides"), ["1", "later", "2", "fail", "later", payload, "3"], headers=[("trace", payload)], key=payload)
        self.topics.produce(topic("rides"), ["4", "later", "5"], partition=1)
        self.run(rides)

    def make_fares(self) -> None:
        sink = {"table": "lake.fares", "mode": "upsert", "key": ["number"], "deletes": "hard"}
        fares = self.consumer("fares", 1, "number bigint NOT NULL UNIQUE", validation={"suite": "numbers"}, sink=sink)
        self.topics.produce(topic("fares"), ["1", "2"])
        self.run(fares)
        self.topics.produce(topic("fares"), ["50", "400", "500", "-2"])
        self.run(fares)

    def make_trips(self) -> None:
        trips = self.consumer("trips", 1)
        self.topics.produce(topic("trips"), ["1", "2"])
        self.run(trips)
        trips.sql(f"ALTER TABLE lake.trips ADD COLUMN note text DEFAULT '{EVIL}'")
        trips.sql("ALTER TABLE lake.trips ALTER COLUMN note DROP DEFAULT")  # the rows that the rewind removes have a note
        self.rewind(trips, topic("trips"), 0)
        self.run(trips)
        self.topics.produce(topic("trips"), ["3"])
        self.run(trips, failing=True)

    def make_tolls(self) -> None:
        """A rewind from the command line that is read beside. The group has read one more record since."""
        tolls = self.consumer("tolls", 2, validation={"suite": "numbers"})
        tolls.transform(DOUBLED)
        self.topics.produce(topic("tolls"), ["0", "10", "20", "13", "free"])
        self.topics.produce(topic("tolls"), ["0", "30", "40"], partition=1)
        self.run(tolls)
        tolls.transform(REPAIRED)
        self.replay(tolls, self.rewind(tolls, "all", 0, beside=True))
        self.topics.produce(topic("tolls"), ["50"])
        self.run(tolls)
        self.age("tolls")

    def replay(self, one: Scenario, rewind_id: int) -> None:
        """Reads a replay beside to where the group is, and validates it."""
        one.run(of_rewind=rewind_id)
        with session(self.url) as connection, transaction(connection) as cur:
            replay = beside.find(cur, one.name, rewind_id)
        suites = {replay.shadow(one.table): self.suite(one)}
        validate(self.url, ValidatedRun(None, None, one.attempt_id), group=replay.side, suites=suites, upsert=one.spec.upserts)

    def suite(self, one: Scenario) -> Path | None:
        return self.folder / "expectations" / "numbers.json" if one.spec.validation else None

    def consumer(self, name: str, partitions: int, ddl: str = "number bigint", *, with_runs: bool = True, **keys: Any) -> Scenario:
        made = Scenario(self.folder, self.url, self.topics)
        made.name, made.table = name, f"lake.{name}"
        made.write(TRANSFORM, topics=topic(name), **keys)
        if with_runs:
            self.with_runs[name] = made
            self.topics.create(partitions, name=topic(name))
            made.make_sink(ddl)
        return made

    def task(self, one: Scenario, try_number: int = 1, seat: int = -1) -> TaskIdentity:
        run_id = f"scheduled__{datetime.now(UTC):%Y-%m-%d}T00:{self.runs:02}:00+00:00"
        return TaskIdentity(f"consume__{one.name}", run_id, "consume", seat, try_number)

    def zombie(self, one: Scenario) -> None:
        """The first try still reads when the second one has taken its partitions. The first is fenced and stores nothing."""
        self.runs += 1
        calls = itertools.count()

        def second_try(_: Slice) -> None:
            if next(calls) == 0:
                one.run(task=self.task(one, 2))

        with pytest.raises(Fenced):
            one.run(task=self.task(one), before=second_try)

    def run(self, one: Scenario, *, failing: bool = False, seat: int = 0) -> None:
        """Makes one run as a task of Airflow, and its validation. ``seat`` only matters if the consumer has members."""
        self.runs += 1
        task = self.task(one, seat=seat if one.spec.members > 1 else -1)

        def break_down(_: Slice) -> None:
            raise BadInput(what="column fare", found="it does not exist in lake.trips", fix="Add it to the table.")

        try:
            one.run(task=task, before=break_down if failing else lambda _: None)
        except BadInput:
            assert failing
        else:
            suites = {one.table: self.suite(one)}
            validate(self.url, ValidatedRun(task.dag_id, task.run_id), group=one.name, suites=suites, upsert=one.spec.upserts)

    def age(self, group: str) -> None:
        """Moves times into the past, as if there were 25 minutes between the runs and 12 between the generations."""
        aged = """
            UPDATE tidemark.{changed} AS row SET {columns}
              FROM (SELECT one.{key}, (count(*) OVER (ORDER BY one.{key} DESC) - 1) * interval '{apart}' AS age
                      FROM tidemark.{table} one JOIN tidemark.consumer_group USING (group_id) WHERE name = %s) old
             WHERE row.{key} = old.{key}
        """
        with session(self.url) as connection, transaction(connection) as cur:
            for changed, columns, table, key, apart in (
                ("attempt", ("started_at", "ended_at"), "attempt", "attempt_id", "25 min"),
                ("batch", ("committed_at",), "attempt", "attempt_id", "25 min"),
                ("rebalance", ("at",), "rebalance", "generation", "12 min"),
            ):
                moved = ", ".join(f"{column} = {column} - age" for column in columns)
                cur.execute(aged.format(changed=changed, columns=moved, table=table, key=key, apart=apart), (group,))

    def sample(self, group: str) -> None:
        """Stores samples of the lag in the last hours: records kept arriving, and a rewind has just moved two partitions back."""
        with session(self.url) as connection, transaction(connection) as cur:
            found = store.positions(cur, group)
            group_id = store.ensure_group(cur, group)
            now, applied = samples.state(cur, group_id)
            cur.execute("DELETE FROM tidemark.lag_partition WHERE group_id = %s", (group_id,))  # the samples of its runs, a minute ago
            cur.execute("DELETE FROM tidemark.lag_history WHERE group_id = %s", (group_id,))
            for step in (*range(30, 0, -1), 0.2, 0):  # the last two see the rewind, and yield a rate
                at, rewound = now - timedelta(minutes=5 * step), step < 1
                seen = {
                    (each.topic_id, each.partition.partition): Observation(
                        at=at,
                        position=each.position if rewound else 70 - int(step),
                        log_start=0,
                        log_end=190 - int(5 * step) if rewound else 70 - int(step) + int(step) * 7 % 13,
                        next_at=at - timedelta(minutes=4) if rewound else at - timedelta(seconds=int(step) * 7 % 13),
                        committed_at=each.committed_at,
                        applied_no=applied if rewound else 0,
                        replay_until=80 + 40 * each.partition.partition if rewound and each.partition.partition < 2 else None,
                    )
                    for each in found
                }
                assert samples.store(cur, group_id, seen)

    def rewind(self, one: Scenario, scope: str, offset: int, *, applied: bool = True, **options: Any) -> int:
        """Plans a rewind, applies it (or begins it, if it is read beside), and returns its number."""
        cluster = Cluster(one.connections.kafka)
        request = PlanRequest([one.spec], Scope.parse([scope]), ToOffset(offset), reason=REASON, by="ann", **options)
        with session(self.url) as connection:
            made = plan(connection, lambda _: cluster, request)
            if applied:
                approved_by = None if request.beside else "bob"
                applying.apply(connection, lambda _: cluster, lambda _: one.spec, made.rewind_id, by="ann", approved_by=approved_by)
        return made.rewind_id

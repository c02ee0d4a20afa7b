"""A long history does not make the product's work more expensive.

The product does the same work in two databases; the second has ten times the history of the first. The measure is the number of pages of
tables and indexes that the statements touch, cached or not, by Postgres' counters (`tests.support.buffers`).
"""

from __future__ import annotations

import contextlib
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from tests.support.buffers import Spent, counted
from tests.support.kafka_topics import Topics
from tests.support.ledger import all_loaded, payloads

from tidemark import events, migrations
from tidemark.airflow.web.detail import group_facts, recent_rewinds
from tidemark.airflow.web.replays import of_group
from tidemark.airflow.web.retries import growth, open_errors
from tidemark.connections import Connections
from tidemark.consume import run
from tidemark.db import Connection, Cursor, session, statements, transaction
from tidemark.doctor.database import examine_database
from tidemark.group.coordinator import list_groups
from tidemark.kafka.cluster import Cluster
from tidemark.keep import KEEP
from tidemark.local import LocalStack
from tidemark.maintenance import maintain
from tidemark.metrics.serve import PostgresCollector
from tidemark.offsets import lag, store
from tidemark.offsets.store import TaskIdentity
from tidemark.quality import ValidatedRun, Verdict, validate
from tidemark.quality import stored_verdicts as verdicts
from tidemark.quality.validation import unjudged
from tidemark.records.ranges import Slice, TopicPartition
from tidemark.retry import admin, pending, redrive
from tidemark.retry import store as retries
from tidemark.retry.filter import Filter, RecordState
from tidemark.retry.relay import relay
from tidemark.rewind import reaction
from tidemark.rewind import store as rewinds
from tidemark.rewind.apply import apply
from tidemark.rewind.plan import PlanRequest, plan
from tidemark.rewind.plan_model import RewindState, Scenario, ShiftBy, ToBatch, ToValidated, Undo
from tidemark.sink.commit import commit_slice
from tidemark.sink.table import Column, Layout
from tidemark.sink.target import Target
from tidemark.spec import ConsumerSpec, load_consumer
from tidemark.spec.scope import Scope
from tidemark.text.duration import parse_duration

GROWS = 2
"""Work grows with the history if, with ten times the history, it touches more than this many times the pages, and at least `FEW` more: a
larger index may have one more level."""
FEW = 60
LAYOUT = Layout("shop.orders", (Column("city", "text"), Column("population", "bigint")))
REASON = "a measurement of what it costs"
OFFERS = ("runs", "first_failed_batch")
CONSUMER = """
group: orders_1
topics: [{topic}]
transform: orders:transform
sink: {{table: shop.orders}}
retry: {{delays: [5m, 30m]}}
"""
WITHOUT_STATISTICS = (
    "claims and the commit of a slice",
    "the end of an attempt",
    "validation of a run",
    "the plan of a drain",
    "the relay",
)
"""This work of runs must not depend on ANALYZE: a database that was restored from a dump has no statistics at first."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A history: ``groups`` consumers with ``partitions`` partitions each. Each run commits ``slices`` slices in each partition. One run in
    ``every`` runs has a rewind, a redrive and a lost range."""

    runs: int
    groups: int = 12
    partitions: int = 2
    slices: int = 2
    every: int = 25


@dataclass(frozen=True, slots=True)
class Place:
    """A database with a history."""

    url: str
    servers: str
    shape: Shape
    spec: ConsumerSpec


@pytest.mark.sampled
@pytest.mark.parametrize("analyzed", [True, False])
def test_work_touches_no_more_pages_with_ten_times_the_history(stack: LocalStack, topics: Topics, tmp_path: Path, analyzed: bool) -> None:
    only = None if analyzed else WITHOUT_STATISTICS
    both = []
    for shape in (Shape(runs=100), Shape(runs=1_000)):
        with filled(stack, topics, tmp_path, shape, analyzed=analyzed) as place:
            both.append(pages(place, only))
    assert growing(*both) == []


def growing(small: dict[str, list[Spent]], large: dict[str, list[Spent]]) -> list[tuple[str, int, int, str]]:
    """The work that grows: its name, its pages in both databases, and the statement whose pages grow most."""
    rows = []
    for path, spent in large.items():
        before, after = _by_statement(small[path]), _by_statement(spent)
        few, many = before.total(), after.total()
        if many > few * GROWS and many > few + FEW:
            rows.append((path, few, many, (after - before).most_common(1)[0][0]))
    return rows


def _by_statement(spent: list[Spent]) -> Counter[str]:
    pages_of: Counter[str] = Counter()
    for one in spent:
        pages_of[" ".join(one.statement.split())[:200]] += one.buffers
    return pages_of


@contextlib.contextmanager
def filled(stack: LocalStack, topics: Topics, folder: Path, shape: Shape, *, analyzed: bool) -> Iterator[Place]:
    """A database with that history, dropped after the block. Without ``analyzed``, the planner has no statistics."""
    topic = topics.create(shape.partitions)
    for partition in range(shape.partitions):
        topics.produce(topic, [""] * shape.runs * shape.slices, partition=partition)
    name, servers = f"history_{uuid.uuid4().hex[:8]}", topics.servers
    uuid_of_topic = Cluster({"bootstrap.servers": servers}).topics([topic])[0].kafka_uuid
    file = folder / "orders_1.yaml"
    file.write_text(CONSUMER.format(topic=topic))
    url = stack.create_database(name)
    try:
        migrations.migrate(url)
        with session(url) as connection:
            connection.autocommit = True
            with connection.cursor() as cur:
                _fill(cur, {"topic": topic, "uuid": uuid_of_topic, **asdict(shape)})
                cur.execute("VACUUM (ANALYZE)" if analyzed else "SELECT")
        yield Place(url, servers, shape, load_consumer(file))
    finally:
        with session(stack.postgres.url("postgres")) as connection:
            connection.autocommit = True
            with connection.cursor() as cur:
                cur.execute(f"DROP DATABASE {name} WITH (FORCE)")


def _fill(cur: Cursor, values: dict[str, Any]) -> None:
    """Turns off autovacuum for our tables, and triggers and foreign keys for this session: the rows are right by construction."""
    cur.execute(
        "SELECT format('ALTER TABLE tidemark.%I SET (autovacuum_enabled = off)', tablename) FROM pg_tables WHERE schemaname = 'tidemark'"
    )
    for (statement,) in cur.fetchall():
        cur.execute(statement)
    cur.execute("SET session_replication_role TO replica; SET jit TO off")
    for statement in Path(__file__).with_name("history.sql").read_text().format(**values).split(";\n"):
        cur.execute(statement, {})


def pages(place: Place, only: Collection[str] | None = None) -> dict[str, list[Spent]]:
    """The statements of each path of the product's work, with their pages."""
    spent_by = {}
    with session(place.url, application="tidemark bench") as connection:
        for name, act in _paths(place, connection).items():
            if only is None or name in only:
                with counted(connection) as spent:
                    act()
                spent_by[name] = spent
    return spent_by


def _paths(place: Place, connection: Connection) -> dict[str, Callable[[], object]]:
    spec, shape, url = place.spec, place.shape, place.url
    cluster = Cluster({"bootstrap.servers": place.servers})
    last = ("consume__orders_1", f"scheduled__{shape.runs}")
    task = TaskIdentity("consume__orders_1", f"scheduled__{shape.runs + 1}", "consume", -1, 1)
    groups = [f"orders_{n}" for n in range(1, shape.groups + 1)]
    metrics: list[PostgresCollector] = []
    ids: dict[str, int] = {}

    def within(act: Callable[[Cursor], object]) -> Callable[[], object]:
        def run_it() -> object:
            with transaction(connection) as cur:
                return act(cur)

        return run_it

    def idle() -> None:
        connections = Connections(url, {"bootstrap.servers": place.servers})
        assert run.consume(spec, connections, run.open_attempt(url, spec.group, task), None)

    def commit() -> None:
        with session(url) as own, transaction(own) as cur:
            attempt = store.new_attempt(cur, 2, replace(task, dag_id="consume__orders_2"))
            claims = [
                store.claim(cur, 2, 2, TopicPartition("shop.orders-2", part), store.Owner(store.next_generation(cur), "me"))
                for part in range(shape.partitions)
            ]
            store.plan_attempt(cur, attempt, [{"partition": 0}])
        part = Slice(claims[0].partition, 2, claims[0].position, claims[0].position + 10, claims[0].epoch)
        ids["attempt"] = attempt
        commit_slice(Target(url, 2, attempt, (LAYOUT,)), part, all_loaded(part), payloads)

    def end(cur: Cursor) -> None:
        store.earlier_attempts(cur, ids["attempt"])
        store.has_newer_attempt(cur, ids["attempt"])
        store.dag_run_planned(cur, ids["attempt"])
        store.attempt_ledger(cur, ids["attempt"])
        store.attempt_lost(cur, ids["attempt"])
        store.end_attempt(cur, ids["attempt"])

    def planned(scenario: Scenario) -> int:
        return plan(
            connection,
            lambda _: cluster,
            PlanRequest([spec], Scope.parse([f"{spec.topics[0]}:0"]), scenario, reason=REASON, by="bench"),
        ).rewind_id

    def rewind() -> None:
        ids["rewind"] = planned(ShiftBy(-1))

    def undo() -> None:
        ids["undo"] = planned(Undo(ids["rewind"]))

    def applied(which: str) -> Callable[[], object]:
        return lambda: apply(connection, lambda _: cluster, lambda _: spec, ids[which], by="bench")

    def drain(cur: Cursor) -> None:
        assert retries.due(cur, 3)
        retries.publish_stranded(cur, 3)
        part = Slice(TopicPartition("orders_3.retry.5m", 0), shape.groups + 2, 0, 10, store.Epoch(0))
        retries.in_order(cur, 3, retries.lock_due(cur, 3, part, retries.read_due(cur, 3, part)))

    def scrape() -> None:
        metrics.append(PostgresCollector(url))
        list(metrics[0].collect())

    return {
        "a run with nothing to read": idle,
        "claims and the commit of a slice": commit,
        "the end of an attempt": within(end),
        "validation of a run": lambda: validate(url, ValidatedRun(*last), group="orders_1", suites={"shop.orders": None}),
        "what is not validated yet": lambda: unjudged(connection, "orders_4"),
        "checks before a rewind by a validation": lambda: (
            reaction.taken_back(connection, "orders_1", ValidatedRun(*last)),
            reaction._repeated_failures(connection, "orders_1", ValidatedRun(*last)),
            reaction._seen_by_readers(connection, "orders_1", ValidatedRun(*last)),
        ),
        "the plan of a rewind to a run": lambda: planned(ToBatch(None, *last)),
        "the plan of a rewind to the validated offset": lambda: planned(ToValidated()),
        "the plan of a rewind": rewind,
        "its application": applied("rewind"),
        "the plan of its undo": undo,
        "the undo": applied("undo"),
        "the plan of a drain": within(drain),
        "the relay": lambda: relay(connection, {"bootstrap.servers": place.servers}, spec),
        "the plan of a redrive": lambda: redrive.plan(connection, redrive.RedriveRequest(spec, Filter(), reason=REASON, by="bench")),
        "what a DAG of a redrive finds of its own": lambda: redrive.of_run(connection, "redrive", "manual__none"),
        "what a DAG of a rewind finds of its own": lambda: rewinds.of_run(connection, "rewind", "manual__none"),
        "groups with retries": lambda: pending.busy(connection),
        "tidemark groups list": lambda: (list_groups(connection), within(lag.groups)()),
        "tidemark offsets": within(lambda cur: store.positions(cur, "orders_5")),
        "tidemark retries list": lambda: admin.list_records(connection, "orders_5", Filter(), limit=50),
        "tidemark retries list --state FAILED": lambda: admin.list_records(
            connection, "orders_5", Filter(states=(RecordState.FAILED,)), limit=50
        ),
        "tidemark retries redrives": lambda: redrive.history(connection, "orders_5", limit=4),
        "tidemark rewind list": lambda: rewinds.history(connection, limit=40),
        "tidemark migrate": lambda: migrations.migrate(url),
        "tidemark doctor": lambda: list(examine_database(url, [])),
        "the page: groups": within(lambda cur: lag.groups(cur, names=groups)),
        "the page: lines": within(lambda cur: _ask(cur, "overview", "trends", groups=groups, period=timedelta(hours=3))),
        "the page: a group": within(lambda cur: _group(cur, spec.group)),
        "the page: the replay of a group without any": lambda: of_group(connection, spec.group),
        "the page: rewinds of a consumer without any": lambda: rewinds.summaries(connection, "orders_none", limit=50),
        "the page: retries": lambda: open_errors(connection, groups),
        "the page: retries lately": lambda: growth(connection, groups),
        "the page: forms": within(lambda cur: [_ask(cur, "offers", name, group=spec.group, limit=3) for name in OFFERS]),
        "the page: retries of a consumer": lambda: (
            admin.due_by_tier(connection, "orders_5", seconds=60, buckets=10),
            admin.count_records(connection, "orders_5", Filter(states=(RecordState.WAITING, RecordState.HELD, RecordState.FAILED))),
            pending.tried(connection, "orders_5"),
            pending.due(connection, "orders_5"),
        ),
        "the page: rewinds that were undone": lambda: rewinds.summaries(connection, *groups, limit=50, state=RewindState.UNDONE),
        "the page: critical validations": lambda: verdicts.newest(connection, groups, of_each=20, most=200, verdict=Verdict.CRITICAL),
        "the page: validations": lambda: verdicts.newest(connection, groups, of_each=20, most=200),
        "the page: audit": lambda: events.newest(connection, groups, whole=True, limit=100),
        "the page: audit of a consumer": lambda: events.newest(connection, ["orders_3"], limit=100),
        "a scrape of the metrics": scrape,
        "tidemark maintain": lambda: maintain(connection, parse_duration(KEEP), by="bench"),
    }


def _ask(cur: Cursor, module: str, name: str, **values: object) -> list[Any]:
    cur.execute(statements("tidemark.airflow.web", f"{module}.sql")[name], values)
    return cur.fetchall()


def _group(cur: Cursor, name: str) -> None:
    group_facts(cur, name, store.require_group(cur, name), store.positions(cur, name))
    recent_rewinds(cur, name)

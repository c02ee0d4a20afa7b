"""Sinks that evolve: runs add missing columns to their tables, once, and change nothing else."""

from __future__ import annotations

import contextlib
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import psycopg2
import pytest
from tests.support.kafka_topics import Topics
from tests.support.orders import NEWER, Orders, order
from tests.support.rewound import rewound, undone
from tests.support.roles import Roles
from tests.support.scenario import ARROW, SPARK, Scenario, tidy_imports
from tests.support.shell import tidemark
from tests.support.shop import FORMS, Shop
from tests.support.spark_here import run_here
from tests.support.waiting import until

from tidemark.author.describe import OutputUnknown
from tidemark.consume import evolve
from tidemark.consume.evolve import ColumnsRefused, TableInUse
from tidemark.db import session
from tidemark.doctor.database import examine_database
from tidemark.doctor.finding import Level
from tidemark.group.member import MemberSettings
from tidemark.group.requests import GroupConfig
from tidemark.offsets.store import TaskIdentity
from tidemark.profiles import Profile
from tidemark.records.ranges import Slice
from tidemark.rewind.verify import verify
from tidemark.sink.fit import SinkMismatch
from tidemark.values.fields import FieldsRefused


def more(arrow: str = ARROW) -> str:
    """The transform with one more column."""
    return arrow.replace('[*lineage, "payload"])', '[*lineage, "payload"]).append_column("more", batch["offset"])')


def added(scenario: Scenario) -> list[Any]:
    """The tables and columns of the `COLUMNS ADDED` events, oldest first."""
    found = scenario.sql("SELECT details FROM tidemark.audit_event WHERE kind = 'COLUMNS ADDED' ORDER BY event_id")
    return [(details["table"], details["columns"]) for (details,) in found]


def columns(scenario: Scenario, table: str | None = None) -> dict[str, bool]:
    """The table's columns, and whether they are NOT NULL or have a default."""
    query = "SELECT attname, attnotnull OR atthasdef FROM pg_attribute WHERE attrelid = %s::regclass AND attnum > 0 AND NOT attisdropped"
    return dict(scenario.sql(query, table or scenario.table))


def evolving(orders: Orders, **sink: Any) -> Scenario:
    """A consumer of one order, loaded before its schema gained a field."""
    scenario = orders.scenario
    orders.produce(order(1))
    scenario.write(None, topics=orders.topic, format={"value": "avro"}, sink={"table": scenario.table, "evolve": "add", **sink}).make_sink()
    scenario.run()
    return scenario


def test_new_field_becomes_a_nullable_column_once(orders: Orders, caplog: pytest.LogCaptureFixture) -> None:
    """Just before the first commit, and not if there is nothing to read. One event names the attempt and the column. The view of validated
    rows has the column too, and keeps its rights."""
    scenario = evolving(orders)
    view = f"{scenario.table}_validated"
    scenario.sql(f"GRANT SELECT ON {view} TO PUBLIC")
    orders.written(order(2, channel="web"), schema=NEWER)  # registers the schema
    scenario.run()
    assert "channel" not in columns(scenario)
    for number in (2, 3):
        orders.produce(order(number, channel="web"), schema=NEWER)
        scenario.run()
    assert scenario.rows("id, channel") == [(1, None), (2, "web"), (3, "web")]
    assert added(scenario) == [(scenario.table, ["channel text"])]
    assert columns(scenario)["channel"] is False
    event = "SELECT group_name, (details->>'attempt')::bigint FROM tidemark.audit_event WHERE kind = 'COLUMNS ADDED'"
    assert scenario.sql(event) == [(scenario.name, scenario.attempt_id - 1)]
    assert "lacks the new columns" not in caplog.text
    assert "channel" in columns(scenario, view)
    assert scenario.sql("SELECT has_table_privilege('pg_monitor', %s, 'SELECT')", view) == [(True,)]
    scenario.check()


@pytest.mark.parametrize(
    "changed",
    [
        "DROP VIEW {view}; CREATE VIEW {view} AS SELECT id, md5(city) AS city FROM {table}",
        "ALTER VIEW {view} SET (security_barrier = true)",
        "GRANT SELECT (id) ON {view} TO PUBLIC",
    ],
)
def test_view_that_was_changed_stays_and_the_run_says_so(orders: Orders, caplog: pytest.LogCaptureFixture, changed: str) -> None:
    """To replace it would show what its owner hides, or lose options. `sink alter` refuses it too."""
    scenario = evolving(orders)
    view = f"{scenario.table}_validated"
    scenario.sql(changed.format(view=view, table=scenario.table))
    orders.produce(order(2, channel="web"), schema=NEWER)
    scenario.run()
    said = f"view {view} lacks the new columns until its statement is run again: tidemark sink ddl prints it"
    assert caplog.messages.count(said) == 1
    assert "channel" not in columns(scenario, view)
    done = tidemark(scenario, "sink", "alter", scenario.name, "--run")
    assert done.returncode == 1
    assert f"{view} is not the view that `tidemark sink ddl` creates" in done.stderr


def test_view_of_an_older_table_gets_all_its_columns(orders: Orders) -> None:
    """It lacks a column that was added to the table before, by hand."""
    scenario = evolving(orders)
    view = f"{scenario.table}_validated"
    scenario.sql(f"ALTER TABLE {scenario.table} ADD COLUMN note text")
    orders.produce(order(2, channel="web"), schema=NEWER)
    scenario.run()
    assert {"note", "channel"} <= columns(scenario, view).keys()


def test_members_that_add_at_once_take_turns(orders: Orders, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both wait, one for the table and one for the other member. The second one finds that the column already exists."""
    monkeypatch.setattr(evolve, "LOCK_MS", 120_000)
    patient = partial(MemberSettings, config=GroupConfig(initial_rebalance_delay_ms=60_000))
    monkeypatch.setattr("tidemark.group.member.MemberSettings", patient)
    orders.topic = orders.scenario.topics.create(2)
    scenario = evolving(orders)
    scenario.set(members=2)
    for partition in (0, 1):
        values = [orders.written(order(10 * partition + number, channel="web"), NEWER) for number in range(5)]
        scenario.topics.produce(orders.topic, values, partition=partition)
    waiting = "SELECT count(*) FROM pg_locks WHERE NOT granted AND locktype IN ('advisory', 'relation')"
    with contextlib.closing(psycopg2.connect(scenario.database_url)) as holder, ThreadPoolExecutor(2) as pool:
        with holder, holder.cursor() as cur:
            cur.execute(f"SELECT FROM {scenario.table}")
            runs = [pool.submit(scenario.run, task=TaskIdentity("dag", "run", "consume", member, 1)) for member in range(2)]
            until(lambda: scenario.sql(waiting) == [(2,)], "both members wait")
        done = [run.result(180).records for run in runs]
    assert sorted(done) == [5, 5]
    assert added(scenario) == [(scenario.table, ["channel text"])]
    assert scenario.sql(f"SELECT count(*), count(channel) FROM {scenario.table}") == [(11, 10)]
    scenario.check()


@pytest.mark.thorough
def test_member_that_runs_goes_on_when_another_adds_a_column(orders: Orders) -> None:
    """It started with the older schema, so its rows have no value in the new column."""
    orders.topic = orders.scenario.topics.create(2)
    scenario = evolving(orders)
    scenario.set(members=2, batch={"max_records": 4})
    for partition in (0, 1):
        values = [orders.written(order(100 * partition + number)) for number in range(40)]
        scenario.topics.produce(orders.topic, values, partition=partition)
    stands, go_on = threading.Event(), threading.Event()

    def slow(_: Slice) -> None:
        stands.set()
        assert go_on.wait(60)

    members = "SELECT count(*) FROM tidemark.group_member"
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(scenario.run, task=TaskIdentity("dag", "run", "consume", 0, 1), before=slow)
        assert stands.wait(60)
        for partition in (0, 1):
            values = [orders.written(order(200 + 100 * partition + number, channel="web"), NEWER) for number in range(5)]
            scenario.topics.produce(orders.topic, values, partition=partition)
        second = pool.submit(scenario.run, task=TaskIdentity("dag", "run", "consume", 1, 1))
        until(lambda: scenario.sql(members) == [(2,)], "the second has joined")
        go_on.set()
        counts = [first.result(180).records, second.result(180).records]
    assert min(counts) > 0
    assert added(scenario) == [(scenario.table, ["channel text"])]
    scenario.run(task=TaskIdentity("dag", "run 2", "consume", 0, 1))
    assert scenario.sql(f"SELECT count(*) FROM {scenario.table}") == [(91,)]
    scenario.check()


def test_table_in_use_stops_the_run_and_the_next_one_adds(orders: Orders, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other transactions on the table queue behind the run, so it does not wait long. The error names the session that uses the table."""
    scenario = evolving(orders)
    orders.produce(order(2, channel="web"), schema=NEWER)
    before = scenario.positions()
    with contextlib.closing(psycopg2.connect(scenario.database_url, application_name="a report")) as holder, holder.cursor() as cur:
        cur.execute(f"SELECT FROM {scenario.table}")
        with monkeypatch.context() as patch:
            patch.setattr(evolve, "LOCK_MS", 200)
            with pytest.raises(TableInUse, match=rf"lacks channel, .* in use by a report \(pid {holder.info.backend_pid}, role "):
                scenario.run()
        assert (scenario.positions(), scenario.attempt()["error"]["kind"]) == (before, "unavailable")
        assert "channel" not in columns(scenario)
        holder.rollback()
        scenario.run()
    assert scenario.rows("id, channel") == [(1, None), (2, "web")]


def test_run_changes_no_type_and_adds_nothing_if_it_is_refused(orders: Orders) -> None:
    scenario = orders.scenario
    orders.produce(order(1))
    scenario.write(None, topics=orders.topic, format={"value": "avro"}, sink={"table": scenario.table, "evolve": "add"})
    scenario.make_sink("id bigint, city boolean, total numeric(12,2), at timestamptz")
    with pytest.raises(SinkMismatch) as refused:
        scenario.run()
    assert refused.value.problems == [
        "column city: the output is string, the table is boolean; cast it to bool, or change the column",
        "the table has no column place",
    ]
    assert refused.value.ddl.splitlines()[0].endswith(
        'ALTER COLUMN "city" TYPE text; -- first drop views of the column; rewrites the whole table'
    )
    assert "place" not in columns(scenario)
    scenario.sql(refused.value.ddl.splitlines()[0])
    scenario.run()
    assert scenario.rows("id, place") == [(1, {"country": "CH"})]


@pytest.mark.parametrize(("field", "said"), [("xmin", "conflicts with a system column name"), ("x" * 64, "has a name of 64 bytes")])
def test_name_that_postgres_does_not_take(orders: Orders, field: str, said: str) -> None:
    scenario = evolving(orders)
    orders.produce({**order(2), field: "a"}, schema={**NEWER, "fields": [*NEWER["fields"][:-1], {"name": field, "type": "string"}]})
    with pytest.raises((ColumnsRefused, FieldsRefused), match=said):
        scenario.run()
    assert added(scenario) == []


def test_older_transform_leaves_new_columns_null(scenario: Scenario) -> None:
    """In an upsert sink, an existing row keeps its value."""
    topic = scenario.topics.create()
    sink = {"table": scenario.table, "evolve": "add", "mode": "upsert", "key": ["payload"]}
    scenario.write(ARROW, topics=topic, sink=sink).make_sink("payload bytea NOT NULL UNIQUE")
    scenario.transform(more())
    scenario.topics.produce(topic, ["a", "b"])
    scenario.run()
    scenario.transform(ARROW)
    scenario.topics.produce(topic, ["b", "c"])
    scenario.run()
    assert scenario.rows("payload, more, kafka_offset") == [(b"a", 0, 0), (b"b", 1, 2), (b"c", None, 3)]
    assert added(scenario) == [(scenario.table, ["more bigint"])]


def test_each_of_several_tables_evolves_and_none_if_one_is_refused(scenario: Scenario) -> None:
    shop = Shop(scenario, "arrow")
    sinks = scenario.keys["sinks"]
    scenario.set(sinks={name: {**sink, "evolve": "add"} for name, sink in sinks.items()})
    newer = FORMS["arrow"].replace('("customer", pa.string())', '("customer", pa.string()), ("note", pa.string())')
    newer = newer.replace('("quantity", pa.int32())', '("quantity", pa.int32()), ("note", pa.string())')
    scenario.transform(newer.replace('("order_id", pa.int64())', '("order_id", pa.int16())'))
    shop.produce({"id": 1, "lines": [3]})
    with pytest.raises(SinkMismatch, match="column order_id"):
        shop.run()
    assert added(scenario) == []
    scenario.transform(newer)
    shop.run()
    assert added(scenario) == [(shop.orders, ["note text"]), (shop.lines, ["note text"])]
    assert shop.loaded() == {1: [3]}


def test_plain_function_for_several_tables_cannot_evolve(scenario: Scenario) -> None:
    shop = Shop(scenario, "function")
    scenario.set(sinks={name: {**sink, "evolve": "add"} for name, sink in scenario.keys["sinks"].items()})
    shop.produce({"id": 1})
    with pytest.raises(OutputUnknown, match="Remove evolve: add, or write the transform in the Arrow or the Spark form"):
        shop.run()


@pytest.mark.thorough
def test_spark_transform_adds_its_column(session_here: Path, scenario: Scenario) -> None:
    topic = scenario.topics.create()
    scenario.write(SPARK.replace('"value AS payload"', '"value AS payload", "offset AS more"'), topics=topic)
    scenario.set(sink={"table": scenario.table, "evolve": "add"})
    scenario.make_sink("payload bytea")
    scenario.topics.produce(topic, ["a"])
    run_here(scenario)
    assert scenario.rows("payload, more") == [(b"a", 0)]
    assert added(scenario) == [(scenario.table, ["more bigint"])]


# ---- roles


def test_role_must_own_the_table(roles: Roles, project_dir: Path, topics: Topics) -> None:
    """The error says what to run. The profile `runner` and ownership of the table are enough."""
    with tidy_imports():
        owners = Scenario(project_dir, roles.url(roles.owner), topics)
        roles.give(roles.run, Profile.RUNNER)
        topic = topics.create()
        topics.produce(topic, ["a"])
        owners.write(ARROW, topics=topic, sink={"table": owners.table, "evolve": "add"}).make_sink()
        owners.transform(more())
        roles.give_sink(roles.run, owners.table)
        runs = Scenario(project_dir, roles.url(roles.run), topics)
        runs.name, runs.table, runs.keys = owners.name, owners.table, owners.keys
        grant = f'GRANT "{roles.owner}" TO "{roles.run}";'
        with pytest.raises(ColumnsRefused) as refused:
            runs.run()
        assert grant in str(refused.value)
        assert f"its owner is {roles.owner}." in str(refused.value)
        assert refused.value.ddl.endswith('ADD COLUMN "more" bigint;')
        assert grant in runs.command("sink", "diff", runs.name).stdout
        found = [one.found for one in examine_database(runs.database_url, [runs.spec]) if one.level is Level.WARNING]
        assert f"this role does not own {runs.table}, so it cannot add columns" in found
        roles.admin(grant)
        runs.run()
        assert runs.rows("payload, more") == [(b"a", 0)]
        owners.sql(f"ALTER TABLE {runs.table} ADD COLUMN own text")
        assert added(runs) == [(runs.table, ["more bigint"])]
        runs.sql(f"DROP TABLE {runs.table} CASCADE")


# ---- rewinds


def test_undo_puts_rows_back_without_a_value_in_a_column_added_since(orders: Orders) -> None:
    """A replay fills the column, also for old records if the schema has a default. Undos keep the column and restore the earlier values."""
    scenario = evolving(orders)
    orders.produce(order(2), order(3))
    scenario.run()
    done = rewound(scenario, "--to-offset", "1")
    orders.produce(order(4, channel="web"), schema=NEWER)
    scenario.run()
    replayed = [(1, None), (2, "shop"), (3, "shop"), (4, "web")]
    assert scenario.rows("id, channel") == replayed
    with session(scenario.database_url) as connection:
        (found,) = verify(connection, done, {scenario.name: scenario.spec.keys})
    assert (found.equal, found.changed, found.gone, found.new) == (2, 0, 0, 0)  # compares the columns that both have
    undo = undone(scenario, done)
    assert scenario.rows("id, channel") == [(1, None), (2, None), (3, None)]
    undone(scenario, undo)
    assert scenario.rows("id, channel") == replayed
    scenario.check()


KEYED = """
    import pyarrow as pa
    import pyarrow.compute as pc


    def transform(batch: pa.RecordBatch) -> pa.RecordBatch:
        lineage = ["kafka_topic", "kafka_partition", "kafka_offset"]
        text = batch["value"].cast(pa.string())
        made = batch.select(lineage).append_column("name", pc.utf8_slice_codeunits(text, 0, 1)).append_column("whole", text)
        return made
"""


@pytest.mark.parametrize("early", [True, False], ids=["overwritten before the column", "overwritten after it"])
def test_undo_restores_rows_of_an_upsert_sink_that_were_overwritten(scenario: Scenario, early: bool) -> None:
    """Covers rows that were overwritten before the column was added, and rows overwritten since."""
    topic = scenario.topics.create()
    sink = {"table": scenario.table, "evolve": "add", "mode": "upsert", "key": ["name"]}
    scenario.write(KEYED, topics=topic, sink=sink).make_sink("name text NOT NULL UNIQUE, whole text")
    scenario.topics.produce(topic, ["a0", "b1"])
    scenario.run()
    done = rewound(scenario, "--to-offset", "1")
    fixed = KEYED.replace("text, 0, 1)", "pc.replace_substring(text, 'b', 'a'), 0, 1)")
    newer = fixed.replace("return made", 'return made.append_column("more", batch["offset"])')
    scenario.transform(fixed if early else newer)
    scenario.run()
    assert scenario.rows("name, whole") == [("a", "b1")]
    scenario.transform(newer)
    scenario.topics.produce(topic, ["c2"])
    scenario.run()
    replayed = [("a", "b1", None if early else 1), ("c", "c2", 2)]
    assert scenario.rows("name, whole, more") == replayed
    undo = undone(scenario, done)
    assert scenario.rows("name, whole, more") == [("a", "a0", None), ("b", "b1", None)]
    undone(scenario, undo)
    assert scenario.rows("name, whole, more") == replayed


# ---- output


def test_diff_shows_what_a_run_would_add_and_what_could_be_wider(orders: Orders) -> None:
    scenario = evolving(orders)
    scenario.sql(f"DROP VIEW {scenario.table}_validated")
    scenario.sql(f"ALTER TABLE {scenario.table} ALTER COLUMN city TYPE varchar(10), ALTER COLUMN total TYPE numeric(10,2)")
    orders.produce(order(2, channel="web"), schema=NEWER)
    diff = ("sink", "diff", scenario.name)
    table = '"' + scenario.table.replace(".", '"."') + '"'
    later = "; -- first drop views of the column"
    changes = [
        ("add", "the table has no column channel", 'ADD COLUMN "channel" text;'),
        ("widen", "column city could be text, the table is character varying(10)", f'ALTER COLUMN "city" TYPE text{later}'),
        ("widen", "column total could be numeric(12,2), the table is numeric(10,2)", f'ALTER COLUMN "total" TYPE numeric(12,2){later}'),
    ]
    wanted = [{"change": change, "problem": problem, "ddl": f"ALTER TABLE {table} {ddl}"} for change, problem, ddl in changes]
    shown = tidemark(scenario, *diff, "--output", "json")
    assert shown.returncode == 0
    assert json.loads(shown.stdout) == [{"table": scenario.table, "evolve": "add", "ok": True, "differences": wanted}]
    text = tidemark(scenario, *diff)
    assert text.returncode == 0
    assert "  add        the table has no column channel" in text.stdout
    checked = tidemark(scenario, "consumers", "check", scenario.name)
    assert (checked.returncode, f"a run adds to {scenario.table}: channel text" in checked.stdout) == (0, True)
    tried = json.loads(tidemark(scenario, "try", scenario.name, "--records", "1", "--output", "json").stdout)
    assert tried["notes"] == ["a run first adds channel text to the table"]
    assert tried["records"][0]["rows"][0]["channel"] == "web"
    assert "channel" not in columns(scenario)
    scenario.set(sink={"table": scenario.table})
    refused = tidemark(scenario, *diff)
    assert refused.returncode == 1
    assert "not ready" in refused.stdout
    for each in wanted[1:]:  # the suggested statements work
        scenario.sql(str(each["ddl"]))
    scenario.set(sink={"table": scenario.table, "evolve": "add"})
    scenario.run()
    done = tidemark(scenario, *diff)
    assert (done.returncode, "no differences" in done.stdout) == (0, True)


def test_diff_of_several_tables_and_of_one_that_is_missing(scenario: Scenario) -> None:
    shop = Shop(scenario, "arrow")
    scenario.sql(f"DROP TABLE {shop.lines}; ALTER TABLE {shop.orders} ALTER COLUMN id TYPE integer")
    found = tidemark(scenario, "sink", "diff", scenario.name, "--output", "json")
    assert found.returncode == 1
    orders, lines = json.loads(found.stdout)
    assert [(each["change"], each["ddl"].split(" TYPE ")[1]) for each in orders["differences"]] == [
        ("refuse", "bigint; -- first drop views of the column; rewrites the whole table")
    ]
    assert (lines["ok"], [each["ddl"] for each in lines["differences"]]) == (False, [None])
    assert "does not exist" in lines["differences"][0]["problem"]

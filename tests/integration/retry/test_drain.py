"""The ladder from the first read to the end: which records are tried when, through which topics, and where they end up."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
from tests.integration.retry.lab import DELAYS, SERVICE, Lab, lab_on, minutes
from tests.integration.retry.outbox import FIT
from tests.support.buffers import counted
from tests.support.kafka_topics import Topics
from tests.support.ledger import in_thread
from tests.support.scenario import Scenario
from tests.support.waiting import until

from tidemark.airflow.lineage.facets import Consumed
from tidemark.airflow.lineage.openlineage import of_attempts
from tidemark.airflow.web.detail import group_facts
from tidemark.db import session, transaction
from tidemark.metrics.families import of_state
from tidemark.offsets import lag
from tidemark.records.ranges import Slice
from tidemark.retry import store
from tidemark.retry.filter import Filter
from tidemark.rewind.plan_model import ToEarliest
from tidemark.sink import commit as commit_module
from tidemark.sink.steps import Step


def test_drain_tries_no_more_records_in_a_second_than_the_spec_allows(lab: Lab) -> None:
    """Scenario 38: records that failed because a service was down do not overload it when it is back."""
    lab.consumer.set(retry={"delays": list(DELAYS), "per_second": 4})
    lab.read(*"abcdefghij", answers={"*": "retry"})
    lab.say({})
    lab.make_due(minutes(5))
    began = time.monotonic()
    assert lab.drain().records == 10
    assert time.monotonic() - began >= 2
    assert [row[1:3] for row in lab.drains()] == [(0, 4), (4, 8), (8, 10)]
    lab.check()


def test_drain_stops_in_front_of_the_first_record_that_is_not_due(lab: Lab) -> None:
    """Scenarios 18, 19: records that came to the topic later wait for a later run. A drain with nothing due starts no engine and commits
    nothing, because Postgres shows what is waiting."""
    lab.read("a", "b", answers={"*": "retry"})
    lab.make_due(minutes(3))
    lab.produce("c")
    lab.run()
    lab.make_due(minutes(1))
    assert (lab.drain().records, lab.consumer.engine, lab.drains()) == (0, None, [])
    lab.age(minutes(1))
    lab.say({})
    lab.drain()
    assert lab.loaded() == ["a", "b"]
    assert lab.drain().records == 0
    lab.age(minutes(3))
    lab.drain()
    assert lab.loaded() == ["a", "b", "c"]
    assert lab.drains() == [("retry.5m", 0, 2, 2, 0, 0, 0, 0), ("retry.5m", 2, 3, 1, 0, 0, 0, 0)]
    lab.check()


def test_permanent_error_ends_the_way_at_once_also_in_the_middle_of_the_ladder(lab: Lab) -> None:
    """Scenario 3: `Fail`, an exception that the spec declares permanent, and one with such an exception as its cause."""
    lab.consumer.set(retry={"delays": list(DELAYS), "permanent": ["ValueError"]})
    lab.read("a", "b", "c", "d", "e", answers={"a": "fail", "b": "raise", "c": "retry", "d": "retry", "e": "retry"})
    assert lab.hops() == {0: "failed", 1: "failed"} | dict.fromkeys((2, 3, 4), "retry.5m")
    lab.climb(minutes(5))
    lab.say({"c": "fail", "d": "raise", "e": "wrap"})
    lab.climb(minutes(5))
    assert lab.hops() == dict.fromkeys(range(5), "failed")
    assert lab.failed("record_offset, retry_number, error_type") == [
        (0, 0, "Fail"),
        (1, 0, "ValueError"),
        (2, 2, "Fail"),
        (3, 2, "ValueError"),
        (4, 2, "RuntimeError"),
    ]
    assert [row[0] for row in lab.failed("disposition")] == ["fail", "fail", "retry", "retry", "retry"]
    lab.check()


def test_no_try_is_begun_behind_the_budget(lab: Lab) -> None:
    """Scenario 5: a failure is final if the next retry would come after the end of the budget."""
    lab.consumer.set(retry={"delays": list(DELAYS), "budget": "30m"})
    lab.read("a", answers={"a": "retry"})
    lab.climb(minutes(5))
    assert lab.states() == {"WAITING": 1}
    lab.climb(minutes(5))
    assert lab.failed("state, retry_number, retry_topic") == [("FAILED", 2, f"{lab.group}.failed")]
    lab.check()


def test_ladder_that_was_changed_goes_on_behind_as_many_delays_as_the_record_has_had(lab: Lab) -> None:
    """A longer or another one continues with its own next delay; a shorter one has ended."""
    lab.read("a", answers={"a": "retry"})
    lab.consumer.set(retry={"delays": ["1m", "2h", "3h"]})
    lab.climb(minutes(5))
    assert lab.failed("state, retry_number, retry_topic") == [("WAITING", 2, f"{lab.group}.retry.2h")]
    lab.consumer.set(retry={"delays": ["1m", "1m"]})
    lab.climb(minutes(120))
    assert lab.failed("state, retry_number, retry_topic") == [("FAILED", 2, f"{lab.group}.failed")]
    lab.check()


@pytest.mark.parametrize("sink", [{}, {"mode": "upsert", "key": ["payload"]}], ids=["append", "upsert"])
def test_row_that_has_to_wait_for_another_one_climbs_the_ladder(scenario: Scenario, topics: Topics, sink: dict[str, Any]) -> None:
    """A child before its parent, also if it has to wait longer than for one retry. Without a ladder, such a record fails at once."""
    scenario.sql("CREATE SCHEMA lake; CREATE TABLE lake.parents (payload bytea PRIMARY KEY)")
    ddl = "payload bytea NOT NULL UNIQUE REFERENCES lake.parents"
    with lab_on(scenario, topics, ddl=ddl, sink={"table": scenario.table, **sink}) as lab:
        lab.sql("INSERT INTO lake.parents VALUES ('a'), ('c')")
        lab.read("a", "b", "c", answers={})
        assert lab.failed("record_offset, state, disposition, error_type") == [(1, "WAITING", "retry", "ForeignKeyViolation")]
        lab.climb(minutes(5))
        assert lab.failed("state, retry_number") == [("WAITING", 2)]
        lab.sql("INSERT INTO lake.parents VALUES ('b')")
        lab.climb(minutes(5))
        assert lab.loaded() == ["a", "b", "c"]
        lab.consumer.set(retry=None)
        lab.produce("d")
        lab.run()
        assert lab.failed("record_offset, state, disposition") == [(1, "LOADED", "retry"), (3, "FAILED", "fail")]
        lab.check()


def test_row_that_postgres_refuses_in_a_drain_fails_for_good_and_the_others_are_loaded(scenario: Scenario, topics: Topics) -> None:
    """The bad rows are found individually, among retries from two partitions whose records have the same offsets."""
    with lab_on(scenario, topics, partitions=2) as lab:
        lab.sql(f"ALTER TABLE {lab.table} ADD CHECK (payload <> 'bad')")
        lab.say({"*": "retry"})
        for partition in (0, 1):
            lab.produce("a", "bad", "b", partition=partition)
        lab.run()
        lab.say({"b": "three"})
        lab.climb(minutes(5))
        told = [(0, "LOADED", 1), (1, "FAILED", 0), (2, "LOADED", 3)]
        assert lab.failed("record_offset, state, sink_rows") == told * 2
        assert lab.hops() == {0: None, 1: "failed", 2: None}
        assert lab.drains() == [("retry.5m", 0, 6, 4, 0, 0, 2, 0)]
        lab.check()


# ---- which messages are tried


def test_message_that_nobody_is_registered_at_is_read_past(lab: Lab) -> None:
    """Scenarios 9, 10, 21: the topic contains duplicates from a relay that died before it could register them, and a foreign message with
    forged headers. Only the registered message is tried, once."""
    lab.read("a", answers={"a": "retry"})
    tier = f"{lab.group}.retry.5m"
    lab.make_topic(tier)
    lab.topics.produce(tier, [b"a"])
    lab.topics.produce(tier, [b"forged"], headers=[("tidemark.retry_number", b"1"), ("tidemark.retry_timestamp", b"0")])
    assert lab.relay() == 1
    lab.topics.produce(tier, [b"a"])
    lab.say({})
    lab.age(minutes(5))
    lab.drain()
    assert lab.loaded() == ["a"]
    assert lab.drains() == [("retry.5m", 2, 3, 1, 0, 0, 0, 0)]
    lab.read("b", answers={"b": "retry"})
    lab.say({})
    lab.climb(minutes(5))
    assert lab.drains()[1:] == [("retry.5m", 3, 5, 1, 0, 0, 0, 1)]
    assert lab.loaded() == ["a", "b"]
    lab.check()


@pytest.mark.parametrize("loss", ["trimmed", "recreated", "deleted"])
def test_record_whose_message_is_gone_from_kafka_is_published_anew(lab: Lab, loss: str, caplog: pytest.LogCaptureFixture) -> None:
    """Scenario 15: retention removed the message, or its topic was deleted. The record is in Postgres, so nothing is lost (I7), and nothing
    that counts, shows or logs lost records says so."""
    lab.read("a", "b", answers={"*": "retry"})
    lab.climb(minutes(5))
    lab.relay()
    tier = f"{lab.group}.retry.5m"
    if loss == "trimmed":
        lab.topics.trim(tier, {0: 3})
    elif loss == "recreated":
        lab.topics.recreate(tier, **FIT)
    else:
        lab.topics.delete(tier)
    lab.age(minutes(5))
    lab.say({})
    first = lab.drain()
    lab.relay()
    lab.drain()
    assert lab.loaded() == ["a", "b"]
    lab.check()
    with lab.watch.cursor() as cur:
        counted_as_lost = next(family for family in of_state(cur) if family.name == "tidemark_lost_records").samples
        lags = lag.group(cur, lab.group)
        assert lags is not None
        assert (first.lost, lags.lost_ranges, counted_as_lost, group_facts(cur, lab.group, lab.group_id, [])["lost"]) == ((), 0, [], [])
    assert "records lost" not in caplog.text


# ---- unexpected messages in a retry topic


def test_message_that_is_another_records_is_never_loaded_as_the_registered_one(lab: Lab) -> None:
    """After a log was truncated and has grown again, a registered offset may hold another payload. That message is ignored, and the record
    is published again from Postgres. A message with the same key and value is accepted."""
    lab.read("a", "b", "c", "same", "same", answers={"*": "retry"})
    lab.relay()
    for swap in ((0, 1), (3, 4)):
        places = dict(lab.sql("SELECT record_offset, retry_offset FROM tidemark.failed_record"))
        first, second = swap
        for offset, place in ((first, 99), (second, places[first]), (first, places[second])):
            lab.sql(
                "UPDATE tidemark.failed_record SET retry_offset = %(place)s WHERE record_offset = %(offset)s", place=place, offset=offset
            )
    lab.say({})
    lab.age(minutes(5))
    lab.drain()
    assert lab.failed("record_offset, state") == [(0, "WAITING"), (1, "WAITING"), (2, "LOADED"), (3, "LOADED"), (4, "LOADED")]
    assert lab.loaded() == ["c", "same", "same"]
    lab.check()
    lab.drain()
    assert lab.relay() == 2
    lab.drain()
    assert lab.loaded() == ["a", "b", "c", "same", "same"]
    lab.check()


# ---- lineage


def test_drain_has_its_retry_topics_as_inputs(lab: Lab) -> None:
    """Their ranges are offsets of the retry topics, and only those that the drain read. The consumer's topic is not an input."""
    lab.read("a", "b", answers={"a": "retry"})
    lab.make_due(minutes(5))
    lab.say({})
    lab.drain()
    ((retry_topic, start, end),) = lab.sql(
        "SELECT name, start_offset, end_offset FROM tidemark.batch JOIN tidemark.topic USING (topic_id) WHERE drained"
    )
    servers = lab.consumer.connections.kafka["bootstrap.servers"]
    lineage = of_attempts([Consumed(lab.group, lab.consumer.attempt_id, (lab.table,), (), servers, lab.url)])
    assert [(one.name, one.inputFacets["tidemark_offsets"].ranges) for one in lineage.inputs] == [
        (retry_topic, [{"partition": 0, "start": start, "end": end}])
    ]
    assert retry_topic != lab.topic
    assert [(one.name.rpartition(".")[2], one.outputFacets["outputStatistics"].rowCount) for one in lineage.outputs] == [
        (lab.table.rpartition(".")[2], 1)
    ]


# ---- a slow transform

SLOW_SERVICE = SERVICE.replace("    import json\n", "    import json\n    import time\n", 1).replace(
    '        word = (record.value or b"").decode()\n', '        word = (record.value or b"").decode()\n        time.sleep(0.5)\n'
)


@pytest.mark.parametrize("sink", ["append", "upsert"])
def test_slow_transform_drains_into_any_sink(scenario: Scenario, topics: Topics, monkeypatch: pytest.MonkeyPatch, sink: str) -> None:
    """The transform ends before the transaction begins: no session idles in one, even if a row is refused, and no lock is held."""
    keys = {"sink": {"table": scenario.table, "mode": "upsert", "key": ["payload"]}} if sink == "upsert" else {}
    ddl = "payload bytea CHECK (payload <> '7')" + (" PRIMARY KEY" if sink == "upsert" else "")
    with lab_on(scenario, topics, transform=SLOW_SERVICE, ddl=ddl, **keys) as lab:
        words = list(map(str, range(10)))
        lab.read(*words, answers={"*": "retry"})
        lab.say({})
        monkeypatch.setattr(commit_module, "IDLE_TIMEOUT_MS", 4000)
        assert lab.climb(minutes(5)).records == 10
        assert lab.states() == {"LOADED": 9, "FAILED": 1}
        assert lab.loaded() == [word for word in words if word != "7"]
        lab.check()


NOWHERE = "retry_topic_id = NULL, retry_partition = NULL, retry_offset = NULL"


def test_rewind_waits_for_no_transform_of_a_drain(lab: Lab) -> None:
    """The lock that keeps rewinds of the group out is taken after the transform. A rewind during the transform goes first, and the
    transform's results are dropped."""
    lab.read("a", "b", answers={"a": "retry", "b": "retry"})
    lab.make_due(minutes(5))
    pipe = lab.consumer.folder / "transforms" / "answers.json"
    pipe.unlink()
    os.mkfifo(pipe)
    with in_thread(lab.drain) as drain:
        answers = pipe.open("w")  # returns when the transform has opened it
        here = "database = (SELECT oid FROM pg_database WHERE datname = current_database())"
        assert lab.sql(f"SELECT 1 FROM pg_locks WHERE locktype = 'advisory' AND {here}") == []
        lab.rewind(ToEarliest())
        pipe.unlink()
        lab.say({})  # before the first record gets its answer, so that the second finds a regular file
        answers.write("{}")
        answers.close()
        assert drain.result(180).records == 2
    assert (lab.rows(), lab.failed()) == ([], [])
    assert [row[3:] for row in lab.drains()] == [(0, 0, 0, 0, 2)]


def test_record_that_changes_while_it_is_tried_is_not_loaded(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Changes that an operator or a relay made meanwhile stand: discarded, to be published again, due later. The transform's result for
    such a record is dropped."""
    words = ["load", "skip", "retry", "fail", "three", "load", "load"]
    lab.read(*(f"{word} {number}" for number, word in enumerate(words)), answers={"*": "retry"})
    lab.make_due(minutes(5))
    lab.say({f"{word} {number}": word for number, word in enumerate(words)})

    def change(step: Step, _part: Slice) -> None:
        if step is Step.BEGIN:
            lab.discard(Filter(from_offset=0, to_offset=4))
            lab.sql(f"UPDATE tidemark.failed_record SET {NOWHERE} WHERE record_offset = 4")
            lab.sql("UPDATE tidemark.failed_record SET due_at = clock_timestamp() + interval '5 minutes' WHERE record_offset = 5")

    with monkeypatch.context() as patched:
        patched.setattr(commit_module, "reached", change)
        lab.drain()
    assert lab.failed("state, retry_number") == [("DISCARDED", 1)] * 4 + [("WAITING", 1)] * 2 + [("LOADED", 1)]
    assert lab.rows() == [(6, 0)]
    assert lab.drains() == [("retry.5m", 0, 7, 1, 0, 0, 0, 6)]
    lab.check()
    lab.climb(minutes(5))
    lab.climb(minutes(0))  # the drain before has passed the record that was due later, so it is published again
    assert lab.rows() == [(4, 0), (4, 1), (4, 2), (5, 0), (6, 0)]
    lab.check()


HISTORY = """INSERT INTO tidemark.failed_record (group_id, topic_id, partition, record_offset, headers, disposition, error_type, error_text,
                                                 attempt_id, state, sink_rows)
             SELECT group_id, topic_id, 100, number, '[]', 'retry', 'Timeout', 'no answer', attempt_id, 'LOADED', 1
               FROM (SELECT * FROM tidemark.failed_record LIMIT 1) record, generate_series(1, 100000) number"""


def read_sequentially(lab: Lab) -> int:
    """The number of failed records read by sequential scans, in this session and in those that have ended."""
    lab.sql("SELECT pg_stat_force_next_flush()")
    return int(lab.sql("SELECT seq_tup_read FROM pg_stat_user_tables WHERE relid = 'tidemark.failed_record'::regclass")[0][0])


def test_drain_does_not_read_the_records_that_were_settled_long_ago(lab: Lab) -> None:
    """With up-to-date statistics, Postgres would scan all of them to find a few thousand."""
    words = list(map(str, range(5_000)))
    lab.read(*words, answers={"*": "retry"})
    lab.make_due(minutes(5))
    lab.sql(HISTORY)
    lab.sql("VACUUM ANALYZE tidemark.failed_record")
    lab.say({})
    before = read_sequentially(lab)
    changed = "SELECT n_tup_upd FROM pg_stat_user_tables WHERE relid = 'tidemark.failed_record'::regclass"
    updates = lab.sql(changed)[0][0]
    assert lab.drain().records == 5_000
    until(lambda: lab.sql(changed)[0][0] >= updates + 5_000)
    assert read_sequentially(lab) - before < 100_000


def test_look_up_of_what_a_drain_has_passed_does_not_read_all_that_waits(lab: Lab) -> None:
    """Each drain begins with this lookup, and Postgres' statistics may be older than the backlog."""
    lab.read("a", answers={"*": "retry"})
    lab.make_due(minutes(5))
    lab.drain()  # from now on the retry topic has a position
    lab.sql("ANALYZE tidemark.failed_record")
    lab.produce(*map(str, range(3_000)))
    lab.run()
    lab.relay()
    with session(lab.url) as connection, counted(connection) as spent, transaction(connection) as cur:
        assert store.publish_stranded(cur, lab.group_id) == 0
    assert sum(each.buffers for each in spent) < 100

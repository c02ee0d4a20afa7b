"""A rewind of the origin also withdraws its records' retries, whatever their state; its undo puts them back (I4)."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from psycopg2.extensions import cursor as PostgresCursor
from tests.integration.retry.lab import Lab, lab_on, minutes
from tests.support.deaths import hooked
from tests.support.kafka_topics import Topics
from tests.support.ledger import in_thread
from tests.support.scenario import Scenario
from tests.support.waiting import until

from tidemark.errors import Refused
from tidemark.rewind.plan_model import ToEarliest
from tidemark.sink import commit as commit_module
from tidemark.sink.steps import Step


@pytest.fixture
def mixed(lab: Lab) -> Lab:
    """Of eight records, three were loaded at once, one was loaded later with three rows, one is skipped, one waits in a topic, one waits to
    be published, and one has failed."""
    lab.read("a", "later", "no", "waits", "bad", "b", answers={"later": "retry", "no": "retry", "waits": "retry", "bad": "fail"})
    lab.make_due(minutes(5))
    lab.say({"later": "three", "no": "skip", "waits": "retry", "new": "retry"})
    lab.drain()
    lab.relay()
    lab.produce("c", "new")
    lab.run()
    assert [row[1] for row in lab.failed()] == ["LOADED", "SKIPPED", "WAITING", "FAILED", "WAITING"]
    assert len(lab.rows()) == 6
    lab.check()
    return lab


def test_rewind_takes_along_what_drains_have_loaded_and_withdraws_what_waits(mixed: Lab) -> None:
    """Rows have the lineage of their origin and are removed with it. Messages in a retry topic then belong to no record."""
    mixed.rewind(ToEarliest())
    assert (mixed.rows(), mixed.failed()) == ([], [])
    mixed.check()
    mixed.age(minutes(60))
    assert mixed.drain().records == 0
    mixed.say({"waits": "retry"})
    mixed.run()
    assert mixed.loaded() == ["a", "later", "no", "bad", "b", "c", "new"]
    mixed.check()
    mixed.say({})
    mixed.climb(minutes(5))
    assert mixed.loaded() == ["a", "later", "no", "waits", "bad", "b", "c", "new"]
    assert sum(row[7] for row in mixed.drains()) == 1  # the message from before the rewind
    mixed.check()


def test_undo_puts_retries_back_and_has_them_published_anew(mixed: Lab) -> None:
    """Drains may have passed their messages meanwhile. Nothing is loaded twice, and no record gets stuck."""
    columns = "record_offset, state, retry_number, due_at, retry_topic, story, sink_rows, error_text, changed_at"
    before, rows = mixed.failed(columns), mixed.rows()
    done = mixed.rewind(ToEarliest())
    mixed.say({})
    mixed.run()
    mixed.check()
    mixed.undo(done.rewind_id)
    assert (mixed.failed(columns), mixed.rows()) == (before, rows)
    assert {row[0] for row in mixed.failed("retry_offset")} == {None}
    mixed.check()
    mixed.make_due(minutes(5))
    mixed.drain()
    assert mixed.states() == {"LOADED": 3, "SKIPPED": 1, "FAILED": 1}
    assert len(mixed.rows()) == 8
    mixed.check()


def test_retry_topics_are_no_part_of_a_rewind_or_of_a_run(scenario: Scenario, topics: Topics) -> None:
    """Not even if the consumer's pattern matches their names. Only drains move their positions."""
    with lab_on(scenario, topics) as lab:
        lab.consumer.set(topics=None, topic_pattern=f"{lab.topic}|{lab.consumer.name}.*")
        lab.read("a", "b", answers={"a": "retry"})
        lab.climb(minutes(5))
        lab.relay()
        lab.run()
        positions = "SELECT drained, next_offset, owner_epoch FROM tidemark.partition_offset ORDER BY drained"
        ((_, at, _), (drained, end, epoch)) = lab.sql(positions)
        assert (at, drained, end) == (2, True, 1)
        done = lab.rewind(ToEarliest())
        assert [str(part.partition) for _, part in done] == [f"{lab.topic}/0"]
        assert lab.sql(positions)[1] == (True, 1, epoch)
        with pytest.raises(Refused):
            lab.rewind(ToEarliest(), f"{lab.group}.retry.5m")
        lab.check()


# ---- races


def test_rewind_waits_for_a_drain_that_is_committing_and_takes_its_rows_along(mixed: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """A drain that has begun to commit ends first. The rewind then finds its rows, and nothing unaccounted stays behind."""
    mixed.make_due(minutes(60))
    mixed.say({})
    there, go = threading.Event(), threading.Event()

    def hold(reached: Step, _part: Any) -> None:
        if reached is Step.LEDGER:
            there.set()
            assert go.wait(60)

    monkeypatch.setattr(commit_module, "reached", hold)
    with in_thread(mixed.drain) as drain:
        assert there.wait(60)
        planned = mixed.plan(ToEarliest())
        with in_thread(lambda: mixed.apply(planned.rewind_id)) as applied:
            until(mixed.waits)
            assert not applied.done()
            go.set()
            applied.result(180)
        drain.result(180)
    assert (mixed.rows(), mixed.failed()) == ([], [])
    mixed.check()


def test_drain_waits_for_a_rewind_that_is_being_applied_and_then_tries_none_of_its_records(mixed: Lab) -> None:
    """The drain had found due records. When it can commit, they have been withdrawn, so it only passes their messages."""
    mixed.make_due(minutes(60))
    mixed.say({})
    planned = mixed.plan(ToEarliest())
    drains: list[Future[Any]] = []
    with ThreadPoolExecutor(1) as pool:

        def begin_drain(_cursor: PostgresCursor, _number: int, query: str) -> None:
            if "tidemark.take_from_ledger" in query:
                drains.append(pool.submit(mixed.drain))
                until(lambda: mixed.waits(f"tidemark/{mixed.group_id}/%"))

        mixed.apply(planned.rewind_id, cursor=hooked(after=begin_drain))
        drains[0].result(180)
    assert (mixed.rows(), mixed.failed()) == ([], [])
    tried = [row for row in mixed.drains() if row[3:7] != (0, 0, 0, 0)]
    assert len(tried) == 1  # the drain from before the rewind
    mixed.check()


# ---- upsert


def test_late_record_does_not_replace_what_a_later_one_of_its_key_has_written(scenario: Scenario, topics: Topics) -> None:
    """In an upsert sink the last record of a key wins, even if an earlier one is loaded after it. A key of another partition is refused."""
    transform = """
        import json
        import pathlib

        from tidemark.transform import Record, Retry

        DOWN = pathlib.Path(__file__).with_name("answers.json")


        def transform(record: Record) -> dict:
            if record.value.decode() in json.loads(DOWN.read_text()):
                raise Retry("later")
            return {"name": record.key.decode(), "payload": record.value}
    """
    sink = {"table": scenario.table, "mode": "upsert", "key": ["name"]}
    with lab_on(scenario, topics, partitions=2, transform=transform, ddl="name text NOT NULL UNIQUE, payload bytea", sink=sink) as lab:
        lab.say({"a1": "", "b1": "", "c1": "", "d0": ""})
        for key, value in (("a", "a1"), ("a", "a2"), ("b", "b1"), ("c", "c1"), ("d", "d1")):
            lab.produce(value, key=key)
        lab.produce("d0", key="d", partition=1)
        lab.run()
        lab.say({})
        lab.climb(minutes(5))
        stored = dict(lab.sql(f"SELECT name, convert_from(payload, 'utf8') FROM {lab.table}"))
        assert stored == {"a": "a2", "b": "b1", "c": "c1", "d": "d1"}
        assert lab.failed("partition, record_offset, state, error_type") == [
            (0, 0, "LOADED", "Retry"), (0, 2, "LOADED", "Retry"), (0, 3, "LOADED", "Retry"), (1, 0, "FAILED", "KeyOfOtherPartition")
        ]  # fmt: skip
        lab.check()
        lab.produce("b2", key="b")
        lab.run()
        assert dict(lab.sql(f"SELECT name, convert_from(payload, 'utf8') FROM {lab.table}"))["b"] == "b2"
        lab.check()

"""Reading, failing, publishing, draining, dying, rewinding and waiting in any order: every record stays accounted for, after every step.

The service's answers and the ladder change at random. Time passes by ageing rows. The records that the service is asked about in a drain
are compared with those due by the database's clock: none may be tried before its time, or twice in one attempt.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule
from tests.integration.retry.lab import Lab, minutes
from tests.integration.retry.machine import LADDERS, STEPS, RetryMachine
from tests.support.kafka_topics import Topics
from tests.support.machines import run_machine
from tests.support.scenario import Scenario

from tidemark.sink.steps import Step

WORDS = ("a", "b", "c")
ANSWERS = st.dictionaries(st.sampled_from(WORDS), st.sampled_from(("load", "three", "skip", "retry", "retry", "fail")))
RECORD = "topic_id, partition, record_offset"
DUE = "state = 'WAITING' AND retry_offset IS NOT NULL AND due_at <= clock_timestamp()"

MUST = f"""
    SELECT partition, record_offset FROM tidemark.failed_record record
     WHERE group_id = %(group_id)s AND {DUE}
       AND NOT EXISTS (SELECT FROM tidemark.failed_record other
                        WHERE other.group_id = record.group_id AND other.retry_topic_id = record.retry_topic_id
                          AND other.retry_partition = record.retry_partition AND other.retry_offset < record.retry_offset
                          AND other.state = 'WAITING' AND other.due_at > clock_timestamp())
       AND NOT EXISTS (SELECT FROM tidemark.partition_offset pos
                        WHERE pos.group_id = record.group_id AND pos.topic_id = record.retry_topic_id
                          AND pos.partition = record.retry_partition AND pos.next_offset > record.retry_offset)"""


class Retries(RetryMachine):
    make: Callable[[], Lab]

    @initialize()
    def begin(self) -> None:
        self.start(self.make())
        self.late: list[tuple[int, str, int, int]] = []

    def teardown(self) -> None:
        """Once the service stays up, three drains settle all waiting records."""
        if not hasattr(self, "lab"):
            return
        lab = self.lab
        lab.say({})
        lab.run()
        for _ in range(3):
            lab.make_due(minutes(60))
            lab.drain()
        assert not self.open()
        self.everything_is_accounted_for()
        lab.close()

    # ---- environment

    @rule(answers=ANSWERS)
    def service_changes(self, answers: dict[str, str]) -> None:
        self.lab.say(answers)

    @rule(words=st.lists(st.sampled_from(WORDS), min_size=1, max_size=6))
    def records_come(self, words: list[str]) -> None:
        self.lab.produce(*words)

    @rule(by=st.sampled_from((1, 5, 30)))
    def time_passes(self, by: int) -> None:
        self.lab.age(minutes(by))

    @rule(delays=st.sampled_from(LADDERS))
    def ladder_changes(self, delays: list[str]) -> None:
        self.lab.consumer.set(retry={"delays": delays})

    # ---- runs

    @rule(step=STEPS)
    def run(self, step: Step | None) -> None:
        with self.dying(step):
            self.lab.run()
        self.lab.calls()

    @rule(step=STEPS)
    def drain(self, step: Step | None) -> None:
        due, must = self._due()
        before = self.lab.failed(f"{RECORD}, state, retry_number"), self.lab.rows()
        records = self.lab.failed("failed_record_id")
        with self.dying(step):
            self.lab.drain()
        tried = Counter(self.lab.calls())
        assert set(tried.values()) <= {1}
        assert set(tried) <= due, "a record was tried before its time, or without being registered"
        assert step or must <= set(tried), "a record that was due, with nothing before it that was not, was not tried"
        assert self.lab.failed("failed_record_id") == records
        if step not in (None, Step.RECEIPT):
            assert (self.lab.failed(f"{RECORD}, state, retry_number"), self.lab.rows()) == before

    # ---- relays

    @rule(limit=st.one_of(st.none(), st.integers(1, 4)))
    def relay_publishes(self, limit: int | None) -> None:
        self.lab.relay(limit=limit)

    @precondition(lambda self: self.lab.states().get("WAITING", 0))
    @rule(register=st.booleans(), data=st.data())
    def relay_dies_or_is_slow(self, register: bool, data: Any) -> None:
        """A message is in the topic, but is registered late or never."""
        waiting = self.rows("failed_record_id, retry_topic", "state = 'WAITING' AND retry_offset IS NULL")
        if waiting:
            number, topic = data.draw(st.sampled_from(waiting))
            self.lab.make_topic(topic)
            self.lab.topics.produce(topic, [b"a"])
            end = self.lab.ends(topic) - 1
            if register:
                self.late.append((number, topic, 0, end))

    @precondition(lambda self: self.late)
    @rule()
    def slow_relay_says_where(self) -> None:
        """A relay holds the record's lock meanwhile, so it registers the message only if the record has not been published or changed."""
        number, topic, partition, offset = self.late.pop()
        if self.rows("1", f"failed_record_id = {number} AND state = 'WAITING' AND retry_offset IS NULL AND retry_topic = '{topic}'"):
            self.lab.register(number, topic, partition, offset)

    @rule(data=st.data())
    def somebody_writes_into_a_retry_topic(self, data: Any) -> None:
        topic = data.draw(st.sampled_from(self.lab.ladder.topics))
        self.lab.make_topic(topic)
        self.lab.topics.produce(topic, [b"a"], headers=[("tidemark.retry_number", b"1")])

    def _due(self) -> tuple[set[tuple[int, int]], set[tuple[int, int]]]:
        """Partition and offset of the records that may be tried, and of those that must be tried: no record before them in their topic
        waits without being due, and no drain has passed them."""
        may = self.rows("partition, record_offset", DUE)
        return set(may), {tuple(row) for row in self.lab.sql(MUST, group_id=self.lab.group_id)}


def test_records_in_any_order_of_failures_drains_deaths_and_rewinds_stay_accounted_for(
    database_url: str, topics: Topics, project_dir: Path
) -> None:
    """Each example has a separate topic, group and sink."""

    def make() -> Lab:
        return Lab(Scenario(project_dir, database_url, topics), topics, retry={"delays": LADDERS[0]})

    run_machine(Retries, database_url, number=8, steps=20, make=staticmethod(make))

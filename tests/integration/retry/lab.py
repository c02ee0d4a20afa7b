"""A consumer with a ladder, on a real topic and a real Postgres. The test decides how its service answers and how much time passes."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import Any

import pytest
from tests.integration.retry.outbox import FIT
from tests.support.by_hand import WHY, ByHand
from tests.support.kafka_topics import Topics
from tests.support.scenario import Scenario

from tidemark.db import session, transaction
from tidemark.driver import launch
from tidemark.kafka.producer import Publishers
from tidemark.offsets import store
from tidemark.quality import check_conservation
from tidemark.quality.audit import audit
from tidemark.records.ranges import Slice, TopicPartition
from tidemark.retry import Ladder, admin, redrive
from tidemark.retry.filter import Filter
from tidemark.retry.redrive import Destination
from tidemark.retry.relay import relay
from tidemark.retry.topics import ensure_topics
from tidemark.sink import commit as commit_module
from tidemark.sink.steps import Step
from tidemark.spec.retry_topics import now_topic

DELAYS = ("5m", "5m", "30m", "30m", "30m", "1h")
"""The ladder of the design: six retries in 2 h 40 min, through three topics."""

SERVICE = """
    import functools
    import json
    import pathlib

    from tidemark.transform import Fail, Record, Retry, Skip

    HERE = pathlib.Path("@HERE@")
    ANSWERS, CALLS = HERE / "answers.json", HERE / "calls"


    @functools.lru_cache(maxsize=1)
    def answers(changed_ns: int) -> dict:
        return json.loads(ANSWERS.read_text())


    def transform(record: Record):
        word = (record.value or b"").decode()
        with CALLS.open("a") as calls:
            calls.write(f"{record.partition} {record.offset}\\n")
        said = answers(ANSWERS.stat().st_mtime_ns)
        answer = said.get(word, said.get("*", "load"))
        if answer == "retry":
            raise Retry(f"the service is down for {word}")
        if answer == "fail":
            raise Fail(f"{word} is broken")
        if answer == "skip":
            raise Skip(f"{word} is not wanted")
        if answer == "raise":
            raise ValueError(f"{word} is not a number")
        if answer == "wrap":
            raise RuntimeError(f"{word} cannot be read") from ValueError(f"{word} is not a number")
        rows = [{"payload": record.value}]
        return rows * 3 if answer == "three" else rows
"""
"""Looks up the outcome of a record by its value, as set by `Lab.say`: load, three (rows), skip, retry, fail,
raise (a ValueError), or wrap (a RuntimeError that a ValueError has caused)."""


class Lab(ByHand):
    """One group over one topic."""

    def __init__(
        self,
        consumer: Scenario,
        topics: Topics,
        *,
        partitions: int = 1,
        topic: str | None = None,
        transform: str = SERVICE,
        ddl: str = "payload bytea",
        runner: Callable[..., launch.Progress] = Scenario.run,
        **keys: Any,
    ) -> None:
        super().__init__(consumer)
        self.topics, self._run = topics, runner
        self.topic = topic or topics.create(partitions)
        self.say({})
        self.consumer.write(
            transform.replace("@HERE@", str(consumer.folder / "transforms")),
            topics=self.topic,
            **{"retry": {"delays": list(DELAYS)}, **keys},
        )
        self.consumer.make_sink(ddl)
        self._publishers = Publishers(consumer.connections.kafka)
        with self.watch.cursor() as cur:
            self.group_id = store.ensure_group(cur, self.spec.group)

    @property
    def ladder(self) -> Ladder:
        return Ladder.of(self.spec)

    # ---- environment

    def say(self, answers: Mapping[str, str]) -> None:
        """Sets the service's answers from now on, by record value. ``*`` stands for all other values, which otherwise get ``load``."""
        (self.consumer.folder / "transforms" / "answers.json").write_text(json.dumps(dict(answers)))

    def calls(self) -> list[tuple[int, int]]:
        """Returns partition and offset of each record that the service was asked about since the last call of this method."""
        file = self.consumer.folder / "transforms" / "calls"
        lines = file.read_text().splitlines() if file.exists() else []
        file.unlink(missing_ok=True)
        return [(int(partition), int(offset)) for partition, offset in (line.split() for line in lines)]

    def produce(self, *values: str | bytes | None, partition: int = 0, **options: Any) -> None:
        self.topics.produce(self.topic, values, partition=partition, **options)

    def age(self, by: timedelta) -> None:
        """Simulates that time passes: moves all times of the group's failed records back by ``by``."""
        self.sql(
            "UPDATE tidemark.failed_record SET due_at = due_at - %(by)s, created_at = created_at - %(by)s,"
            " ladder_at = ladder_at - %(by)s, changed_at = changed_at - %(by)s WHERE group_id = %(group_id)s",
            by=by,
            group_id=self.group_id,
        )

    # ---- actions

    def run(self, **options: Any) -> launch.Progress:
        """One run of the consumer over its topic."""
        return self._run(self.consumer, **options)

    def read(self, *values: str, answers: Mapping[str, str], **options: Any) -> None:
        """Produces records and runs the consumer. The service gives these answers from now on."""
        self.say(answers)
        self.produce(*values, **options)
        self.run()

    def drain(self, **options: Any) -> launch.Progress:
        """One drain of the consumer's retry topics."""
        return self._run(self.consumer, drain=True, **options)

    def relay(self, *, limit: int | None = None) -> int:
        """Publishes the outbox, to topics that are deleted after the test. Returns the number of records."""
        held = now_topic(self.group)
        for topic in {held if state == "HELD" else topic for state, topic in self.failed("state, retry_topic")} - {None}:
            self.make_topic(topic)
        with session(self.url) as connection:
            done = relay(connection, self.consumer.connections.kafka, self.spec, limit=limit, publishers=self._publishers)
        assert not done.refused
        assert not done.blocked
        return done.records

    def redrive(self, wanted: Filter = Filter(), to: Destination = Destination.LADDER) -> redrive.Preview:  # noqa: B008 - frozen
        """Makes a plan and applies it at once."""
        if to is Destination.NOW:
            self.make_topic(now_topic(self.group))
        return self.apply_redrive(self.plan_redrive(wanted, destination=to).redrive.redrive_id)

    def discard(self, wanted: Filter) -> int:
        with session(self.url) as connection:
            return admin.discard(connection, self.group, wanted, **WHY)

    def register(self, number: int, topic: str, partition: int, offset: int) -> None:
        """Registers where the message of a record is."""
        (described,) = self.cluster.topics([topic])
        with session(self.url) as connection, transaction(connection) as cur:
            topic_id = store.ensure_topic(cur, topic, described.kafka_uuid)
        self.sql(
            "UPDATE tidemark.failed_record SET retry_topic_id = %(topic_id)s, retry_partition = %(partition)s, retry_offset = %(offset)s"
            " WHERE failed_record_id = %(number)s",
            number=number,
            topic_id=topic_id,
            partition=partition,
            offset=offset,
        )

    def ends(self, topic: str, partition: int = 0) -> int:
        """Returns the end offset of a partition."""
        self.cluster.topics([topic])  # so that its client knows the leaders, even if it has looked before the topic existed
        place = TopicPartition(topic, partition)
        return self.cluster.stable_ends([place])[place]

    def make_topics(self) -> None:
        """Creates the consumer's retry topics as Tidemark does. They are deleted after the test."""
        self.topics.adopt(one.topic.name for one in ensure_topics(self.cluster, self.spec, create=True))

    def make_topic(self, name: str) -> None:
        """Creates a retry or failed topic if it does not exist. It is deleted after the test."""
        if not self.cluster.topics([name], missing_ok=True):
            self.topics.create(self.spec.retry.topics.partitions, name=name, **FIT)

    def climb(self, by: timedelta) -> launch.Progress:
        """Publishes, lets this much time pass, and drains."""
        self.make_due(by)
        return self.drain()

    def make_due(self, by: timedelta) -> None:
        """Publishes, and lets this much time pass."""
        self.relay()
        self.age(by)

    # ---- stored state

    def failed(self, columns: str = "record_offset, state, retry_number") -> list[tuple[Any, ...]]:
        """Returns the failed records, ordered by lineage."""
        query = f"SELECT {columns} FROM tidemark.failed_record WHERE group_id = %(group_id)s ORDER BY topic_id, partition, record_offset"
        return [tuple(map(_plain, row)) for row in self.sql(query, group_id=self.group_id)]

    def states(self) -> dict[str, int]:
        """Returns the number of failed records in each state."""
        query = "SELECT state, count(*) FROM tidemark.failed_record WHERE group_id = %(group_id)s GROUP BY state"
        return dict(self.sql(query, group_id=self.group_id))

    def hops(self) -> dict[int, str | None]:
        """Returns, by offset, the topic that each failed record is in or goes to, without the group's name."""
        return {offset: topic and topic.removeprefix(f"{self.group}.") for offset, topic in self.failed("record_offset, retry_topic")}

    def rows(self) -> list[tuple[int, int]]:
        """Returns offset and sequence number of each row in the sink."""
        query = f"SELECT kafka_offset, kafka_seq FROM {self.table} ORDER BY kafka_topic_id, kafka_partition, kafka_offset, kafka_seq"
        return [tuple(row) for row in self.sql(query)]

    def loaded(self) -> list[str]:
        """Returns the sink's values, ordered by lineage."""
        query = f"SELECT payload FROM {self.table} ORDER BY kafka_topic_id, kafka_partition, kafka_offset, kafka_seq"
        return [bytes(value).decode() for (value,) in self.sql(query)]

    def drains(self) -> list[tuple[Any, ...]]:
        """Returns the drains' ledger rows: tier, start, end, loaded, skipped, retried, failed, unaccounted."""
        columns = "start_offset, end_offset, loaded, skipped, retried, failed, unaccounted"
        query = (
            f"SELECT name, {columns} FROM tidemark.batch JOIN tidemark.topic USING (topic_id)"
            " WHERE group_id = %(group_id)s AND drained ORDER BY batch_id"
        )
        return [(name.removeprefix(f"{self.group}."), *rest) for name, *rest in self.sql(query, group_id=self.group_id)]

    def check(self) -> None:
        """Checks that every record is accounted for (I3), with the conservation check and with the audit."""
        with self.watch.cursor() as cur:
            assert check_conservation(cur, self.group, [self.table], upsert=self.spec.upserts) == []
        with session(self.url) as connection:
            found = audit(connection, self.cluster, self.spec)
        assert found.differences == ()


@contextlib.contextmanager
def lab_on(consumer: Scenario, topics: Topics, **options: Any) -> Iterator[Lab]:
    with contextlib.closing(Lab(consumer, topics, **options)) as lab:
        yield lab


@contextlib.contextmanager
def dying_at(step: Step, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Lets every commit in this process die just before this step."""

    def die(reached: Step, _part: Slice) -> None:
        if reached is step:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(commit_module, "reached", die)
        yield


def minutes(number: float) -> timedelta:
    return timedelta(minutes=number)


def _plain(value: Any) -> Any:
    return bytes(value) if isinstance(value, memoryview) else value

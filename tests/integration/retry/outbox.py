"""Failed records as a hand-off leaves them, inserted by hand, and their topics. Tests of relay, admin and redrive start from them."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import pty
import subprocess
import sys
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

from tests.support.by_hand import ByHand
from tests.support.kafka_topics import Topics
from tests.support.scenario import Scenario, Stored

from tidemark.db import Connection
from tidemark.kafka.producer import Publishers
from tidemark.offsets import store
from tidemark.offsets.store import TaskIdentity
from tidemark.retry.ladder import Ladder
from tidemark.retry.messages import COUNT, HEADER_BYTES
from tidemark.retry.relay import Relayed, relay
from tidemark.spec.retry_topics import failed_topic, now_topic

Headers = Sequence[tuple[str, bytes | None]]

FIT = {"message_timestamp_type": "LogAppendTime", "max_message_bytes": "2000000"}
"""Topic settings that pass the check of retry topics."""
TIME = datetime(2026, 3, 24, 13, 0, tzinfo=UTC)
"""The timestamp of each record."""


class Outbox(ByHand):
    """A group positioned at offset 0 of a topic with three partitions."""

    application = "tidemark retries"

    def __init__(self, consumer: Scenario, topics: Topics) -> None:
        super().__init__(consumer)
        self.topics = topics
        self.topic = topics.create(3)
        consumer.write(topics=self.topic, retry={"delays": ["5m", "5m", "1h"]})
        self.kafka = consumer.connections.kafka
        (described,) = self.cluster.topics([self.topic])
        with self.watch.cursor() as cur:
            self.group_id = store.ensure_group(cur, self.group)
            self.topic_id = store.ensure_topic(cur, self.topic, described.kafka_uuid)
            for partition in described.all():
                store.start_partition(cur, self.group_id, self.topic_id, partition.partition, 0)
            self.attempt = store.new_attempt(cur, self.group_id, TaskIdentity())
        self.next_offset = 0
        self.publishers = Publishers(self.kafka)

    @property
    def name(self) -> str:
        return self.consumer.name

    @property
    def tiers(self) -> tuple[str, ...]:
        """All topics that the group publishes to."""
        return (*Ladder.of(self.spec).topics, now_topic(self.group), failed_topic(self.group))

    def make_topics(self, partitions: int = 1, *, without: Sequence[str] = (), largest: int | None = None) -> None:
        """``largest``: their ``max.message.bytes``. The consumer's own topic gets a smaller limit, so that they pass the check."""
        if largest is not None:
            self.topics.alter(self.topic, max_message_bytes=str(largest - HEADER_BYTES))
        for name in self.tiers:
            if name not in without:
                self.make_topic(name, partitions, **({} if largest is None else {"max_message_bytes": str(largest)}))

    def make_topic(self, name: str, partitions: int = 1, **config: str) -> None:
        self.topics.create(partitions, name=name, **(FIT | config))

    def adopt_topics(self) -> None:
        """Topics that Tidemark created are deleted after the test."""
        self.topics.adopt(topic.name for topic in self.cluster.topics(self.tiers, missing_ok=True))

    # ---- records

    def add(
        self,
        value: bytes | None = b"value",
        *,
        key: bytes | None = None,
        headers: Headers = (),
        partition: int = 0,
        error: tuple[str, str] = ("KeyError", "no such city"),
        number: int = 1,
        failed: bool = False,
    ) -> int:
        """Adds a record that waits for retry ``number``, or has failed permanently. It is not published yet. Returns its id."""
        rung = dict(enumerate(Ladder.of(self.spec).rungs, 1)).get(number)
        offset, self.next_offset = self.next_offset, self.next_offset + 1
        written = [[name, None if each is None else base64.b64encode(each).decode()] for name, each in headers]
        belongs = failed_topic(self.group) if failed or rung is None else rung.topic
        values = {
            "group_id": self.group_id, "topic_id": self.topic_id, "partition": partition, "record_offset": offset,
            "record_timestamp": TIME, "key": key, "value": value, "headers": json.dumps(written),
            "disposition": "fail" if failed else "retry", "error_type": error[0], "error_text": error[1], "attempt_id": self.attempt,
            "state": "FAILED" if failed else "WAITING", "retry_number": number - 1 if failed else number,
            "due_at": None if failed or rung is None else datetime.now(UTC) + rung.delay, "retry_topic": belongs,
        }  # fmt: skip
        names = ", ".join(values)
        ((made,),) = self.sql(
            f"INSERT INTO tidemark.failed_record ({names}) VALUES ({', '.join(f'%({name})s' for name in values)})"
            " RETURNING failed_record_id",
            **values,
        )
        return int(made)

    def add_many(self, count: int, *, failed: bool = False) -> None:
        """Adds ``count`` records at once, spread over the three partitions."""
        self.sql(
            "INSERT INTO tidemark.failed_record (group_id, topic_id, partition, record_offset, record_timestamp, key, value, headers,"
            " disposition, error_type, error_text, attempt_id, state, retry_number, due_at, retry_topic)"
            " SELECT %(group_id)s, %(topic_id)s, number %% 3, %(first)s + number, %(time)s, convert_to('key ' || number %% 1000, 'UTF8'),"
            " convert_to(rpad('value ' || number, 100, '.'), 'UTF8'), '[[\"trace\", \"YWJj\"]]', %(disposition)s, 'TimeoutError',"
            " 'the service did not answer in time', %(attempt)s, %(state)s, %(number)s,"
            " CASE WHEN NOT %(failed)s THEN clock_timestamp() + interval '5 minutes' END, %(topic)s"
            " FROM generate_series(0, %(count)s - 1) number",
            group_id=self.group_id, topic_id=self.topic_id, first=self.next_offset, time=TIME, attempt=self.attempt, count=count,
            failed=failed, disposition="fail" if failed else "retry", state="FAILED" if failed else "WAITING", number=0 if failed else 1,
            topic=failed_topic(self.group) if failed else Ladder.of(self.spec).topics[0],
        )  # fmt: skip
        self.next_offset += count

    # ---- actions

    def relay(self, connection: Connection | None = None, **options: Any) -> Relayed:
        with contextlib.ExitStack() as stack:
            used = connection or stack.enter_context(self.session())
            return relay(used, self.kafka, self.spec, **{"publishers": self.publishers, **options})

    def in_terminal(self, *words: str) -> list[str]:
        """Returns the lines that ``tidemark`` prints in a dumb terminal of 80 columns."""
        here, there = pty.openpty()
        command = [sys.executable, "-m", "tidemark.cli.main", *words]
        with os.fdopen(here, "rb", buffering=0) as screen:
            done = subprocess.Popen(
                command, stdout=there, stderr=subprocess.DEVNULL, cwd=self.consumer.folder, env=self.consumer.env() | {"TERM": "dumb"}
            )
            os.close(there)
            printed = b""
            with contextlib.suppress(OSError):  # how a terminal reports that all writers have closed it
                while read := screen.read(65_536):
                    printed += read
            assert done.wait(60) == 0
        return printed.decode().splitlines()

    # ---- stored state

    def record(self, number: int) -> dict[str, Any]:
        """Returns a row of ``failed_record``, with `memoryview` values as `bytes`."""
        with self.watch.cursor() as cur:
            cur.execute("SELECT * FROM tidemark.failed_record WHERE failed_record_id = %s", (number,))
            (row,) = cur.fetchall()
            assert cur.description is not None
            names = [column.name for column in cur.description]
        return {name: bytes(value) if isinstance(value, memoryview) else value for name, value in zip(names, row, strict=True)}

    def waiting(self) -> int:
        """Returns the number of records that are still to be published and that the broker has not rejected."""
        ((count,),) = self.sql(
            "SELECT count(*) FROM tidemark.failed_record WHERE retry_topic IS NOT NULL AND retry_offset IS NULL AND publish_error IS NULL"
        )
        return int(count)

    def hops(self) -> dict[int, tuple[str, int, int]]:
        """Returns, by record id, the topic, partition and offset at which the record is registered."""
        found = self.sql(
            "SELECT failed_record_id, topic.name, retry_partition, retry_offset FROM tidemark.failed_record"
            " JOIN tidemark.topic ON topic.topic_id = retry_topic_id ORDER BY 1"
        )
        return {number: (topic, partition, offset) for number, topic, partition, offset in found}

    def messages(self, topic: str) -> dict[tuple[int, int], Stored]:
        """Returns a topic's messages by partition and offset. Empty if the topic does not exist."""
        return {
            (partition.partition, offset): stored
            for described in self.cluster.topics([topic], missing_ok=True)
            for partition in described.all()
            for offset, stored in self.consumer.records(topic, partition.partition).items()
        }

    def check_published(self) -> None:
        """Checks that each registered record has its own message: same key, value and headers byte for byte, followed by our headers."""
        logs: dict[str, dict[tuple[int, int], Stored]] = {}
        for number, (topic, partition, offset) in self.hops().items():
            if topic not in logs:
                logs[topic] = self.messages(topic)
            record, message = self.record(number), logs[topic][partition, offset]
            headers = [(name, None if text is None else base64.b64decode(text)) for name, text in record["headers"]]
            assert (record["retry_topic"], message.key, message.value) == (topic, record["key"], record["value"])
            assert message.headers[:-COUNT] == headers
            assert dict(message.headers[len(headers) :])["tidemark.record"] == str(number).encode()


@contextlib.contextmanager
def outbox_on(consumer: Scenario, topics: Topics) -> Iterator[Outbox]:
    with contextlib.closing(Outbox(consumer, topics)) as outbox:
        yield outbox

"""A loop written by hand: poll, `json.loads`, `execute_values`, the offset in the same transaction. Exactly once."""

from __future__ import annotations

import json
from typing import Any

import psycopg2
from benchmarks.harness.remote import Remote
from benchmarks.harness.site import COLUMNS, LINEAGE, SCHEMA, TABLE, Job, Site
from benchmarks.throughput.in_memory import run_all, start_positions
from confluent_kafka import Consumer, TopicPartition
from psycopg2.extras import execute_values

RECORDS_A_TRANSACTION = 10_000
PAGE = 1000


class Loop:
    """In as many processes as it has connections."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._workers: list[Remote] = []

    def prepare(self, job: Job) -> None:
        self.close()
        numbers, count = start_positions(self._site, job), job.connections
        self._workers = [Remote(_Worker, self._site, job, numbers[first::count]) for first in range(count)]
        for worker in self._workers:
            worker.ask("is_ready")

    def run(self, job: Job) -> None:
        run_all(self._workers)

    def close(self) -> None:
        for worker in self._workers:
            worker.close()
        self._workers.clear()


class _Worker:
    """A process. It stays until its CPU time has been read."""

    def __init__(self, site: Site, job: Job, partitions: list[int]) -> None:
        self._connection = psycopg2.connect(site.database_url)
        self._consumer = Consumer({"bootstrap.servers": site.servers, "group.id": "bench-loop", "enable.auto.commit": False})
        self._job, self._partitions = job, partitions

    def is_ready(self) -> bool:
        return True

    def run(self) -> None:
        job, names = self._job, [name for name, _ in COLUMNS]
        insert = f"INSERT INTO {TABLE} ({', '.join([*names, *LINEAGE])}) VALUES %s"
        position = dict.fromkeys(self._partitions, 0)
        self._consumer.assign([TopicPartition(job.topic.name, number, 0) for number in self._partitions])
        left = job.topic.each * len(self._partitions)
        while left:
            messages: list[Any] = self._consumer.consume(min(left, RECORDS_A_TRANSACTION), 1.0)
            rows: list[Any] = []
            first = dict(position)
            for message in messages:
                if message.error():
                    raise RuntimeError(str(message.error()))
                event = json.loads(message.value())
                rows.append((*(event[name] for name in names), job.topic.topic_id, message.partition(), message.offset(), 0))
                position[message.partition()] = message.offset() + 1
            if rows:
                self._insert(insert, rows, first, position)
            left -= len(rows)

    def _insert(self, insert: str, rows: list[Any], first: dict[int, int], position: dict[int, int]) -> None:
        move = f"UPDATE {SCHEMA}.position SET next_offset = %s WHERE kafka_partition = %s AND next_offset = %s"
        with self._connection, self._connection.cursor() as cur:
            for number in self._partitions:
                if position[number] != first[number]:
                    cur.execute(move, (position[number], number, first[number]))
                    assert cur.rowcount == 1
            execute_values(cur, insert, rows, page_size=PAGE)

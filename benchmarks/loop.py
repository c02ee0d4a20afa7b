"""A loop written by hand: poll, `json.loads`, `execute_values`, the offset in the same transaction. Exactly once, in 1 or 2 processes."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
from typing import Any

import psycopg2
from confluent_kafka import Consumer, TopicPartition
from psycopg2.extras import execute_values

from benchmarks.site import COLUMNS, LINEAGE, SCHEMA, TABLE, Job, Site

RECORDS_A_TRANSACTION = 10_000
PAGE = 1000


class Loop:
    def __init__(self, site: Site) -> None:
        self._site = site
        self._workers: list[tuple[Any, Any]] = []

    def prepare(self, job: Job) -> None:
        self.close()
        with contextlib.closing(psycopg2.connect(self._site.database_url)) as connection, connection, connection.cursor() as cur:
            cur.execute(f"DELETE FROM {SCHEMA}.position")
            cur.executemany(f"INSERT INTO {SCHEMA}.position VALUES (%s, 0, 1)", [(number,) for number in range(job.topic.partitions)])
        count = int(job.parameters["processes"])
        context = multiprocessing.get_context("spawn")
        for number in range(count):
            ours, theirs = context.Pipe()
            partitions = list(range(number, job.topic.partitions, count))
            process = context.Process(target=_serve, args=(theirs, self._site, job, partitions), daemon=True)
            process.start()
            theirs.close()
            self._workers.append((process, ours))
        for _, pipe in self._workers:
            assert pipe.recv() == "ready"

    def run(self, job: Job) -> None:
        for _, pipe in self._workers:
            pipe.send("go")
        for error in [pipe.recv() for _, pipe in self._workers]:
            if error is not None:
                raise RuntimeError(error)

    def close(self) -> None:
        for process, pipe in self._workers:
            pipe.close()
            process.join(10)
        self._workers.clear()


def _serve(pipe: Any, site: Site, job: Job, partitions: list[int]) -> None:
    connection = psycopg2.connect(site.database_url)
    consumer = Consumer({"bootstrap.servers": site.servers, "group.id": "bench-loop", "enable.auto.commit": False})
    pipe.send("ready")
    with contextlib.suppress(EOFError):
        pipe.recv()
        try:
            _load(connection, consumer, job, partitions)
        except Exception as error:  # noqa: BLE001 - told to the parent, whatever it is
            pipe.send(f"{type(error).__name__}: {error}")
        else:
            pipe.send(None)
        pipe.recv()  # stays until its CPU has been read
    os._exit(0)


def _load(connection: Any, consumer: Consumer, job: Job, partitions: list[int]) -> None:
    names = [name for name, _ in COLUMNS]
    insert = f"INSERT INTO {TABLE} ({', '.join([*names, *LINEAGE])}) VALUES %s"
    move = f"UPDATE {SCHEMA}.position SET next_offset = %s WHERE kafka_partition = %s AND next_offset = %s"
    position = dict.fromkeys(partitions, 0)
    consumer.assign([TopicPartition(job.topic.name, number, 0) for number in partitions])
    left = job.topic.each * len(partitions)
    while left:
        messages = consumer.consume(min(left, RECORDS_A_TRANSACTION), 1.0)
        rows = []
        first = dict(position)
        for message in messages:
            if message.error():
                raise RuntimeError(str(message.error()))
            event = json.loads(message.value())
            rows.append((*(event[name] for name in names), job.topic.topic_id, message.partition(), message.offset(), 0))
            position[message.partition()] = message.offset() + 1
        if not rows:
            continue
        with connection, connection.cursor() as cur:
            for number in partitions:
                if position[number] != first[number]:
                    cur.execute(move, (position[number], number, first[number]))
                    assert cur.rowcount == 1
            execute_values(cur, insert, rows, page_size=PAGE)
        left -= len(rows)

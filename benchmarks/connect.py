"""Debezium's JDBC sink on a standalone Kafka Connect worker, which is warm: each round is a connector of its own, with a group of its own.

At least once with inserts. Its records carry a schema, as the sink asks for and as JSON without a registry does it: the same events, with
the description of their fields in each. Ends when the last offset of every partition is in the table.
"""

from __future__ import annotations

import itertools
import os
import time
from pathlib import Path

import psycopg2
from tests.connect_worker import Worker

from benchmarks.site import CONNECT_TABLE, Job, Site

SILENCE_S = 60
LOOK_S = 3
POLL_S = 0.02
# Its UNNEST inserts would be a tenth faster, but 3.5.0 fails in them when Kafka's coordinates are the key.
TUNED = {
    "batch.size": "5000",
    "consumer.override.max.poll.records": "5000",
    "consumer.override.fetch.max.bytes": "67108864",
    "consumer.override.max.partition.fetch.bytes": "8388608",
}


class Debezium:
    def __init__(self, site: Site) -> None:
        self._site = site
        folder = Path(site.folder) / "connect"
        folder.mkdir(parents=True, exist_ok=True)
        self._numbers = itertools.count()
        self._name: str | None = None
        settings = {
            "value.converter.schemas.enable": "true",
            "connector.client.config.override.policy": "All",
            "consumer.heartbeat.interval.ms": "200",  # else one task works alone until the others' first heartbeat, seconds later
        }
        self._worker = Worker(folder, site.servers, classes=site.jars["connect"], settings=settings, java_options=["-Xmx1g"])
        self._worker.wait()
        self._connection = psycopg2.connect(site.database_url)
        self._connection.autocommit = True

    def prepare(self, job: Job) -> None:
        if self._name is not None:  # deleting is not part of a load
            self._worker.delete(self._name)
            time.sleep(0.5)
        self._name = f"bench-{next(self._numbers)}-{os.getpid()}"

    def run(self, job: Job) -> None:
        assert self._name is not None
        options = "?reWriteBatchedInserts=true" if job.parameters.get("tuned") else ""
        config = {
            "connector.class": "io.debezium.connector.jdbc.JdbcSinkConnector",
            "tasks.max": str(min(job.topic.partitions, self._site.cores)),
            "topics": job.topic.name,
            "connection.url": self._site.jdbc_url(options),
            "connection.username": self._site.database["user"],
            "connection.password": self._site.database["password"],
            "insert.mode": "insert",
            "primary.key.mode": "kafka",
            "schema.evolution": "none",
            "collection.name.format": CONNECT_TABLE,
            "consumer.override.auto.offset.reset": "earliest",
            **(TUNED if job.parameters.get("tuned") else {}),
        }
        self._worker.configure(self._name, config)
        left = set(range(job.topic.partitions))
        heard, last = time.monotonic(), -1
        with self._connection.cursor() as cur:
            while left:
                sum_ = 0
                for number in range(job.topic.partitions):
                    cur.execute(
                        f"SELECT __connect_offset FROM {CONNECT_TABLE} WHERE __connect_topic = %s AND __connect_partition = %s"
                        " ORDER BY __connect_offset DESC LIMIT 1",
                        (job.topic.name, number),
                    )
                    row = cur.fetchone()
                    sum_ += row[0] if row else 0
                    if row and row[0] == job.topic.each - 1:
                        left.discard(number)
                if sum_ != last:
                    heard, last = time.monotonic(), sum_
                elif time.monotonic() - heard > LOOK_S:
                    self._look(self._name, time.monotonic() - heard)
                time.sleep(POLL_S)

    def _look(self, name: str, silent_s: float) -> None:
        """Raises if a task has failed, or if nothing has come for too long."""
        self._worker.check(name)
        if silent_s > SILENCE_S:
            raise RuntimeError(f"no progress for {SILENCE_S} s")

    def close(self) -> None:
        self._worker.close()

"""Debezium's JDBC sink on a warm standalone Kafka Connect worker. Each round is a new connector with a new group.

With inserts, it delivers at least once. The sink requires a schema; in JSON without a registry, each record includes it. A run ends when
the last offset of every partition is in the table. With change data (`benchmarks.records.accounts`) it upserts and deletes.
"""

from __future__ import annotations

import itertools
import os
import time
from pathlib import Path
from typing import Any

import psycopg2
from benchmarks.harness.site import CONNECT_ACCOUNTS, CONNECT_TABLE, Job, Site
from benchmarks.records import accounts
from tests.support.change_data import avro_converter, json_converter, plugins
from tests.support.connect_worker import Worker

SILENCE_S = 60
LOOK_S = 3
POLL_S = 0.02
EVENTS = {"insert.mode": "insert", "primary.key.mode": "kafka", "collection.name.format": CONNECT_TABLE}
CHANGES = {
    "insert.mode": "upsert",
    "primary.key.mode": "record_key",
    "delete.enabled": "true",
    "use.reduction.buffer": "true",
    "collection.name.format": CONNECT_ACCOUNTS,
}
# UNNEST inserts would load events 10 % faster, but with them 3.5.0 fails if Kafka's coordinates are the key, and on dates.
TUNED = {
    "batch.size": "5000",
    "consumer.override.max.poll.records": "5000",
    "consumer.override.fetch.max.bytes": "67108864",
    "consumer.override.max.partition.fetch.bytes": "8388608",
}


class Debezium:
    def __init__(self, site: Site) -> None:
        self._site = site
        folder = Path(site.folder) / f"connect-{os.getpid()}"  # left by a seat that failed
        folder.mkdir(parents=True, exist_ok=True)
        self._numbers = itertools.count()
        self._name: str | None = None
        settings = {
            "value.converter.schemas.enable": "true",
            "connector.client.config.override.policy": "All",
            "consumer.heartbeat.interval.ms": "200",  # otherwise one task works alone for seconds, until the others' first heartbeat
        }
        if site.registry:
            settings["plugin.path"] = str(plugins(folder / "plugins", "converter"))
        self._worker = Worker(folder, site.servers, classes=site.jars["connect"], settings=settings, java_options=["-Xmx1g"])
        self._worker.wait()
        self._connection = psycopg2.connect(site.database_url)
        self._connection.autocommit = True

    def prepare(self, job: Job) -> None:
        if self._name is not None:  # deleting is not part of a load
            self._worker.delete(self._name)
            time.sleep(0.5)
        self._name = f"bench-{next(self._numbers)}-{os.getpid()}"
        self._left = self._ask(f"SELECT count(*) FROM {job.topic.remaining}") if job.topic.changes else 0

    def run(self, job: Job) -> None:
        assert self._name is not None
        config = {
            "connector.class": "io.debezium.connector.jdbc.JdbcSinkConnector",
            "tasks.max": str(min(job.topic.partitions, self._site.cores)),
            "topics": job.topic.name,
            "connection.url": self._site.jdbc_url("?reWriteBatchedInserts=true"),
            "connection.username": self._site.database["user"],
            "connection.password": self._site.database["password"],
            "schema.evolution": "none",
            "consumer.override.auto.offset.reset": "earliest",
            **TUNED,
            **(self._of_changes(job) if job.topic.changes else EVENTS),
        }
        self._worker.configure(self._name, config)
        progress = self._changed if job.topic.changes else self._inserted
        moved, last, done = time.monotonic(), -1, False
        while not done:
            number, done = progress(job)
            silent_s = time.monotonic() - moved
            if number != last:
                moved, last = time.monotonic(), number
            elif silent_s > LOOK_S:
                self._worker.check(self._name)  # raises if a task has failed
                if silent_s > SILENCE_S:
                    raise RuntimeError(f"no progress for {SILENCE_S} s")
            time.sleep(POLL_S)

    def _of_changes(self, job: Job) -> dict[str, str]:
        avro = job.topic.form == "accounts-avro"
        return {**CHANGES, **(avro_converter(str(self._site.registry)) if avro else json_converter(schemas=True))}

    def _inserted(self, job: Job) -> tuple[int, bool]:
        """A number that grows with progress, and whether the last record of every partition is in the table."""
        query = f"SELECT max(__connect_offset) FROM {CONNECT_TABLE} WHERE __connect_topic = %s AND __connect_partition = %s"
        offsets = [self._ask(query, job.topic.name, number) for number in range(job.topic.partitions)]
        return sum(offset or 0 for offset in offsets), offsets == [job.topic.each - 1] * job.topic.partitions

    def _changed(self, job: Job) -> tuple[int, bool]:
        """Likewise. The deletes of a batch may come after the account of the last record, so rows are counted as well."""
        last = [accounts.last_id(number) for number in range(job.topic.partitions)]
        arrived = self._ask(f"SELECT count(*) FROM {CONNECT_ACCOUNTS} WHERE id = ANY(%s)", last) == len(last)
        done = arrived and self._ask(f"SELECT count(*) FROM {CONNECT_ACCOUNTS}") == self._left
        relation = f"relid = '{CONNECT_ACCOUNTS}'::regclass"
        return self._ask(f"SELECT n_tup_ins + n_tup_upd + n_tup_del FROM pg_stat_user_tables WHERE {relation}"), done

    def _ask(self, query: str, *parameters: Any) -> Any:
        with self._connection.cursor() as cur:
            cur.execute(query, parameters)
            return (cur.fetchone() or (None,))[0]

    def close(self) -> None:
        self._worker.close()

"""Debezium's JDBC sink on a standalone Kafka Connect worker, which is warm: each round is a connector of its own, with a group of its own.

At least once with inserts. Its records carry a schema, as the sink asks for and as JSON without a registry does it: the same events, with
the description of their fields in each. Ends when the last offset of every partition is in the table.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import psycopg2

from benchmarks.site import CONNECT_TABLE, Job, Site
from tidemark.jvm.java import find_java
from tidemark.local import ports

START_S = 120
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
        self._folder = Path(site.folder) / "connect"
        self._folder.mkdir(parents=True, exist_ok=True)
        self._numbers = itertools.count()
        self._url = f"http://127.0.0.1:{ports.find_free()}"
        self._name: str | None = None
        (self._folder / "worker.properties").write_text(
            f"bootstrap.servers={site.servers}\n"
            f"listeners={self._url}\n"
            f"offset.storage.file.filename={self._folder}/offsets\n"
            "key.converter=org.apache.kafka.connect.storage.StringConverter\n"
            "value.converter=org.apache.kafka.connect.json.JsonConverter\n"
            "value.converter.schemas.enable=true\n"
            "connector.client.config.override.policy=All\n"
            "consumer.heartbeat.interval.ms=200\n"  # else one task works alone until the others' first heartbeat, seconds later
        )
        log4j = self._folder / "log4j2.properties"
        log4j.write_text(
            "appender.out.type=Console\nappender.out.name=out\nappender.out.layout.type=PatternLayout\n"
            "rootLogger.level=warn\nrootLogger.appenderRef.out.ref=out\n"
        )
        command: list[str] = [
            *(str(find_java()), "-Xmx1g", f"-Dlog4j2.configurationFile={log4j}", "-cp", os.pathsep.join(site.jars["connect"])),
            *("org.apache.kafka.connect.cli.ConnectStandalone", str(self._folder / "worker.properties")),
        ]
        self._worker = subprocess.Popen(command, cwd=self._folder, stdin=subprocess.DEVNULL)
        self._until_it_answers()
        self._connection = psycopg2.connect(site.database_url)
        self._connection.autocommit = True

    def prepare(self, job: Job) -> None:
        if self._name is not None:  # deleting is not part of a load
            self._ask("DELETE", f"/connectors/{self._name}")
            time.sleep(0.5)
        self._name = f"bench-{next(self._numbers)}-{os.getpid()}"

    def run(self, job: Job) -> None:
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
        self._ask("PUT", f"/connectors/{self._name}/config", config)
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
                    self._look(time.monotonic() - heard)
                time.sleep(POLL_S)

    def _look(self, silent_s: float) -> None:
        """Raises if a task has failed, or if nothing has come for too long."""
        status = self._ask("GET", f"/connectors/{self._name}/status") or {}
        for trace in [task["trace"] for task in status.get("tasks", ()) if task.get("trace")]:
            raise RuntimeError(trace.split("Caused by: ")[-1].splitlines()[0])
        if silent_s > SILENCE_S:
            raise RuntimeError(f"no progress for {SILENCE_S} s")

    def close(self) -> None:
        self._worker.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._worker.wait(20)
        self._worker.kill()

    def _until_it_answers(self) -> None:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline and self._worker.poll() is None:
            with contextlib.suppress(RuntimeError):  # it answers 404 before it knows its own pages
                if self._ask("GET", "/connectors") is not None:
                    return
            time.sleep(0.2)
        self.close()
        raise RuntimeError("the worker did not start")

    def _ask(self, method: str, path: str, body: dict[str, str] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data=data, method=method, headers={"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                text = answer.read()
        except urllib.error.HTTPError as error:
            raise RuntimeError(f"{method} {path}: {error.read().decode(errors='replace')}") from error
        except (urllib.error.URLError, ConnectionError):
            return None
        return json.loads(text) if text else {}

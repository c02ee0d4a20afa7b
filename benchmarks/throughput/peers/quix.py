"""Quix Streams' Postgres sink, at its defaults. At least once: it writes, then commits the offsets to Kafka.

Runs in a separate environment without Tidemark, and imports nothing of it.
"""

from __future__ import annotations

import itertools
from typing import Any

from benchmarks.harness.site import COLUMNS, LINEAGE, SCHEMA, TABLE, Job, Site


class Quix:
    def __init__(self, site: Site) -> None:
        self._site = site
        self._numbers = itertools.count()
        self._app: Any = None
        self._run = f"bench-quix-{id(self)}"

    def prepare(self, job: Job) -> None:
        from quixstreams import Application, message_context
        from quixstreams.sinks.community.postgresql import PostgreSQLSink

        database = self._site.database
        self._app = Application(
            broker_address=self._site.servers,
            consumer_group=f"{self._run}-{next(self._numbers)}",
            auto_offset_reset="earliest",
            auto_create_topics=False,
            state_dir=f"{self._site.folder}/quix",
        )
        sink = PostgreSQLSink(
            host=database["host"],
            port=int(database["port"]),
            dbname=database["dbname"],
            user=database["user"],
            password=database["password"],
            table_name=TABLE.split(".")[1],
            schema_name=SCHEMA,
            schema_auto_update=False,  # the table exists: this saves a catalogue look-up per batch
            include_metadata=False,
        )
        names = [name for name, _ in COLUMNS]
        topic_id = job.topic.topic_id

        def row(event: dict[str, Any]) -> dict[str, Any]:
            context = message_context()
            columns = {name: event[name] for name in names}
            columns.update(zip(LINEAGE, (topic_id, context.partition, context.offset, 0), strict=True))
            return columns

        self._app.dataframe(self._app.topic(job.topic.name, value_deserializer="json")).apply(row).sink(sink)

    def run(self, job: Job) -> None:
        self._app.run(count=job.topic.records)

    def close(self) -> None: ...

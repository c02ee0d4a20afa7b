"""A group with its ledger and its sink, written with SQL in the states in which consumers leave them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.support.fetching import fetched
from tidemark.offsets import store
from tidemark.quality import ValidatedRun, ValidationReport, Violation, check_conservation, validate

GROUP = "departures"
TABLE = "analytics.departures"
DDL = f"""
    CREATE SCHEMA analytics;
    CREATE TABLE {TABLE} (
        carrier text, delay float8, origin text, kafka_topic_id smallint NOT NULL, kafka_partition integer NOT NULL,
        kafka_offset bigint NOT NULL, kafka_seq integer NOT NULL,
        UNIQUE (kafka_topic_id, kafka_partition, kafka_offset, kafka_seq))
"""


def add_row(sql: Callable[..., Any], table: str, values: Mapping[str, Any]) -> None:
    sql(f"INSERT INTO tidemark.{table} ({', '.join(values)}) VALUES ({', '.join(['%s'] * len(values))})", *values.values())


class Departures:
    """``topic`` has one partition; `partition` adds others."""

    def __init__(self, url: str, folder: Path, connection: Any, group: str = GROUP, topic: str = "flights") -> None:
        self.url, self.folder, self.connection, self.group = url, folder, connection, group
        self.attempts: dict[str, int] = {}
        with connection.cursor() as cur:
            self.group_id, self.topic_id = store.ensure_group(cur, group), store.ensure_topic(cur, topic, f"uuid-{topic}")
        self.partition(0)

    def sql(self, statement: str, *parameters: Any) -> list[Any]:
        with self.connection.cursor() as cursor:
            cursor.execute(statement, parameters or None)
            return fetched(cursor)

    def insert(self, table: str, **values: Any) -> None:
        add_row(self.sql, table, {"group_id": self.group_id, "topic_id": self.topic_id, **values})

    def partition(self, partition: int, at: int = 0) -> None:
        self.insert("partition_offset", partition=partition, next_offset=at, validated_offset=at)

    def attempt(self, run: str) -> int:
        if run not in self.attempts:
            columns = "INSERT INTO tidemark.attempt (group_id, dag_id, run_id, state, ended_at)"
            ended = f"{columns} VALUES (%s, 'consume', %s, 'COMMITTED', now()) RETURNING attempt_id"
            ((self.attempts[run],),) = self.sql(ended, self.group_id, run)
        return self.attempts[run]

    def batch(self, run: str, start: int, end: int, partition: int = 0, *, retried: int = 0, failed: int = 0, seqs: int = 1) -> None:
        """Writes a batch as a consumer commits it: the last records failed, those before them are to be retried, the rest are loaded."""
        attempt, loaded = self.attempt(run), end - start - retried - failed
        self.sql(
            f"""INSERT INTO {TABLE} SELECT 'UA', n %% 300, 'JFK', %s, %s, n, seq
                  FROM generate_series(%s::bigint, %s::bigint - 1) n, generate_series(0, %s - 1) seq""",
            *(self.topic_id, partition, start, start + loaded, seqs),
        )
        of = {"partition": partition, "attempt_id": attempt}
        for offset in range(start + loaded, end):
            word = "retry" if offset < end - failed else "fail"
            self.insert("failed_record", **of, record_offset=offset, headers="[]", disposition=word, error_type="E", error_text="e")
        counts = {"loaded": loaded, "skipped": 0, "retried": retried, "failed": failed, "unaccounted": 0, "sink_rows": loaded * seqs}
        self.insert("batch", **of, start_offset=start, end_offset=end, owner_epoch=1, **counts)
        self.move(end, partition)

    def lost(self, start: int, end: int | None) -> None:
        attempt = self.attempt("lost")
        self.insert("lost_range", partition=0, start_offset=start, end_offset=end, reason="retention", attempt_id=attempt)
        if end is not None:
            self.move(end)

    def move(self, end: int, partition: int = 0) -> None:
        ours = "group_id = %s AND partition = %s"
        self.sql(f"UPDATE tidemark.partition_offset SET next_offset = %s WHERE {ours}", end, self.group_id, partition)

    def rewind(self, at: int, epoch: int) -> None:
        """What a rewind of partition 0 to the start of a batch leaves: no rows or batches from there on, and an archive of the batches."""
        columns = "scenario, allow_loss, reason, planned_by, expires_at, digest"
        add = f"INSERT INTO tidemark.rewind ({columns}) VALUES ('{{}}', false, 'for the test', 'test', now(), '') RETURNING rewind_id"
        ((rewind_id,),) = self.sql(add)
        of = {"rewind_id": rewind_id, "group_id": self.group_id}
        group = {"consumer": self.group, "group_name": self.group, "sink": TABLE, "basis": "{}", "group_state": "Empty"}
        add_row(self.sql, "rewind_group", of | group | {"in_flight": 0, "lag": 0, "announced_assets": []})
        moved = {"target": at, "planned_offset": at, "new_offset": at, "superseded_from": at}
        add_row(self.sql, "rewind_partition", of | {"topic_id": self.topic_id, "partition": 0, "hold": False} | moved)
        self.sql("SELECT tidemark.take_from_ledger(%s)", rewind_id)
        self.sql(f"DELETE FROM {TABLE} WHERE kafka_topic_id = %s AND kafka_partition = 0 AND kafka_offset >= %s", self.topic_id, at)
        positions = "next_offset = %s, validated_offset = least(validated_offset, %s), owner_epoch = %s"
        self.sql(f"UPDATE tidemark.partition_offset SET {positions} WHERE topic_id = %s AND partition = 0", at, at, epoch, self.topic_id)

    def suite(self, *expectations: dict[str, Any], name: str = "departures") -> Path:
        path = self.folder / f"{name}.json"
        path.write_text(json.dumps({"name": name, "expectations": expectations}))
        return path

    def validate(self, run: str, *expectations: dict[str, Any], **options: Any) -> ValidationReport:
        suite = self.suite(*expectations) if expectations else None
        return validate(self.url, ValidatedRun("consume", run), **{"group": GROUP, "suites": {TABLE: suite}} | options)

    def validated(self, partition: int = 0) -> int:
        of_group = "FROM tidemark.partition_offset WHERE group_id = %s AND partition = %s"
        return int(self.sql(f"SELECT validated_offset {of_group}", self.group_id, partition)[0][0])

    def violations(self) -> list[Violation]:
        with self.connection.cursor() as cursor:
            return check_conservation(cursor, self.group, [TABLE])

    def stored_rows(self, number: int) -> list[tuple[int, int, int]]:
        columns = "kafka_partition, kafka_offset, kafka_seq"
        return self.sql(f"SELECT {columns} FROM tidemark.validation_row WHERE number = %s ORDER BY 1, 2, 3", number)

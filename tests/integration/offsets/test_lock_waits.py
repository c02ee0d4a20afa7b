"""Who holds a lock, as a transaction sees it that has looked before."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path
from typing import Any

import psycopg2
import pytest
from tests.support.departures import DDL, Departures
from tests.support.waiting import until

from tidemark.offsets.locks import LockWait, held_by_writer


def opened(url: str, application: str) -> Any:
    return contextlib.closing(psycopg2.connect(url, application_name=application))


def test_session_that_begins_after_the_first_look_is_seen(database_url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A rewind is one transaction. Postgres shows it the sessions of its first look, unless it asks again."""
    with opened(database_url, "tidemark rewind") as connection:
        connection.autocommit = True
        with connection.cursor() as cur:
            cur.execute(DDL)
        made = Departures(database_url, tmp_path, connection)
        connection.autocommit = False
        position = {"group_id": made.group_id, "topic_id": made.topic_id, "partition": 0}
        with connection.cursor() as cur:
            write = "UPDATE tidemark.partition_offset SET next_offset = 1 WHERE group_id = %s"
            with opened(database_url, "tidemark/early/1") as early, early.cursor() as writing:
                writing.execute(write, (made.group_id,))
                assert held_by_writer(cur, **position)
            until(lambda: not held_by_writer(cur, **position))
            with opened(database_url, "tidemark/late/1") as later, later.cursor() as writing:
                writing.execute(write, (made.group_id,))
                assert held_by_writer(cur, **position)
                with caplog.at_level(logging.WARNING):
                    LockWait("position").report_holders(cur, {**position, "class": 0})
                assert "held_by=tidemark/late/1 (pid" in caplog.text
            until(lambda: not held_by_writer(cur, **position))

"""A consumer that a test handles in its own process: it looks at what is stored, and plans and applies rewinds and redrives."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import psycopg2
import pytest
from psycopg2.extensions import cursor as PostgresCursor

from tests.support.fetching import fetched
from tests.support.scenario import Scenario as Consumer
from tidemark.db import Connection, connect
from tidemark.kafka.cluster import Cluster
from tidemark.retry import redrive
from tidemark.retry.filter import Filter
from tidemark.rewind import apply as applying
from tidemark.rewind.apply import Applied
from tidemark.rewind.plan import PlanRequest, plan
from tidemark.rewind.plan_model import Plan, Scenario, Undo
from tidemark.spec import ConsumerSpec
from tidemark.spec.scope import Scope

REASON = "the transform was wrong"
WHY = {"reason": "the service is back again", "by": "ann"}
"""Who redrives records, and why."""


class ByHand:
    """One consumer with its database and cluster."""

    application = "tidemark rewind"

    def __init__(self, consumer: Consumer) -> None:
        self.consumer, self.url, self.table = consumer, consumer.database_url, consumer.table
        self.cluster = Cluster(consumer.connections.kafka)

    @property
    def spec(self) -> ConsumerSpec:
        return self.consumer.spec

    @property
    def group(self) -> str:
        return self.spec.group

    @functools.cached_property
    def watch(self) -> Connection:
        """A session outside any transaction."""
        watch = psycopg2.connect(self.url)
        watch.autocommit = True
        return watch

    def close(self) -> None:
        self.watch.close()

    def sql(self, statement: str, *parameters: Any, **named: Any) -> list[Any]:
        with self.watch.cursor() as cur:
            cur.execute(statement, named or parameters or None)
            return fetched(cur)

    def waits(self, application: str = "tidemark rewind") -> bool:
        """Whether a session of this application (a LIKE pattern) waits for a lock."""
        query = "SELECT FROM pg_stat_activity WHERE datname = current_database() AND application_name LIKE %s AND wait_event_type = 'Lock'"
        return bool(self.sql(query, application))

    @contextlib.contextmanager
    def session(self, cursor: type[PostgresCursor] | None = None) -> Iterator[Connection]:
        with contextlib.closing(connect(self.url, application=self.application)) as connection:
            connection.cursor_factory = cursor or connection.cursor_factory
            yield connection

    def plan(
        self,
        scenario: Scenario,
        *scope: str,
        connection: Connection | None = None,
        cursor: type[PostgresCursor] | None = None,
        **options: Any,
    ) -> Plan:
        request = PlanRequest([self.spec], Scope.parse(scope), scenario, **{"reason": REASON, "by": "ann", **options})
        with contextlib.nullcontext(connection) if connection else self.session(cursor) as used:
            return plan(used, lambda _: self.cluster, request)

    def apply(
        self, rewind_id: int, *, connection: Connection | None = None, cursor: type[PostgresCursor] | None = None, **options: Any
    ) -> Applied:
        with contextlib.nullcontext(connection) if connection else self.session(cursor) as used:
            return applying.apply(used, lambda _: self.cluster, lambda _: self.spec, rewind_id, **{"by": "bob", **options})

    def swap(
        self,
        rewind_id: int,
        read_on: Callable[[], object] = lambda: None,
        *,
        connection: Connection | None = None,
        cursor: type[PostgresCursor] | None = None,
    ) -> Applied:
        """Without ``read_on``, only a replay that has reached its group is swapped."""
        of = (lambda _: self.cluster, lambda _: self.spec)
        with contextlib.nullcontext(connection) if connection else self.session(cursor) as used:
            return applying.catch_up_and_swap(used, *of, rewind_id, read_on=read_on, by="bob")

    def rewind(self, scenario: Scenario, *scope: str, **options: Any) -> Plan:
        """Makes a plan and applies it at once."""
        return self.apply(self.plan(scenario, *scope, **options).rewind_id).plan

    def undo(self, rewind_id: int) -> Plan:
        return self.rewind(Undo(rewind_id))

    def plan_redrive(self, wanted: Filter | None = None, *, cursor: type[PostgresCursor] | None = None, **options: Any) -> redrive.Preview:
        request = redrive.RedriveRequest(self.spec, wanted or Filter(), **{**WHY, **options})
        with self.session(cursor) as connection:
            return redrive.plan(connection, request)

    def apply_redrive(
        self, redrive_id: int, *, cursor: type[PostgresCursor] | None = None, portion: int = redrive.PORTION, **options: Any
    ) -> redrive.Preview:
        with self.session(cursor) as connection, pytest.MonkeyPatch.context() as patch:
            patch.setattr(redrive, "PORTION", portion)
            return redrive.apply(connection, self.cluster, lambda _: self.spec, redrive_id, **{"by": "bob", **options})

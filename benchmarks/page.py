"""The page in Airflow and the metrics process, with 1,000 consumers of 100 partitions each.

A real api-server answers one request after the other, for a user who may see everything; Airflow's metadata is in SQLite. A figure of the
page is the time that the client waits. The CPU time of the metrics process is without Postgres.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import tempfile
import time
import unittest.mock
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import httpx
import psycopg2
from prometheus_client import CollectorRegistry, generate_latest
from tests.e2e.served import served

from benchmarks.stage import Stage
from tidemark import migrations
from tidemark.db import Connection, Cursor, DatabaseUrl, session
from tidemark.local.airflow_settings import connections_env
from tidemark.metrics import serve
from tidemark.metrics.serve import PostgresCollector
from tidemark.offsets import samples

LIMIT_MS = 300
"""The bar for p95."""
CONSUMER = """
topics: [shop.orders-{number}]
transform: orders:transform
sink: {{table: shop.orders_{number}}}
schedule: "*/5 * * * *"
retry: {{delays: [5m, 30m, 1h]}}
airflow: {{owner: shop, tags: [shop]}}
"""
VIEWS = {
    "Groups": "groups",
    "their lines": "trends",
    "a group": "groups/orders_7",
    "Rewinds": "rewinds",
    "a rewind": "groups/orders_7/rewinds/7",
    "Retries": "retries",
    "retries of a consumer": "groups/orders_7/retries",
    "its records": "groups/orders_7/records",
    "Validations": "validations",
    "validations of a consumer": "validations?consumer=orders_7",
    "Audit": "audit",
    "audit of a consumer": "audit?consumer=orders_7",
    "the rewind form": "groups/orders_7/form",
}
SCRAPE_EVERY_S = 60
SUMS = "INSERT INTO tidemark.lag_group " + samples.OF_GROUPS.replace("{which}", "true")


@dataclass(frozen=True, slots=True)
class Extent:
    groups: int
    partitions: int
    requests: int
    """Requests to each view."""


FULL = Extent(1_000, 100, 100)
QUICK = Extent(20, 10, 3)


def measure(stage: Stage, extent: Extent, report: Callable[[str], None]) -> dict[str, Any]:
    """``views``: milliseconds and KiB of each view. ``metrics``: the figures of a scrape."""
    began = time.monotonic()
    url = _database(stage, extent)
    report(f"page    {extent.groups:,} consumers with {extent.partitions} partitions each are stored ({time.monotonic() - began:.0f} s)")
    with tempfile.TemporaryDirectory(prefix="tidemark-bench-page-") as folder:
        views = _views(Path(folder), url, stage.servers, extent, report)
    metrics = _scrapes(url, 2 if extent is QUICK else 10)
    report(f"page    scrape {metrics['seconds']:.2f} s, CPU {metrics['cpu_s']:.2f} s, {metrics['queries']} queries")
    return {"groups": extent.groups, "partitions": extent.partitions, "requests": extent.requests, "views": views, "metrics": metrics}


def tables(found: dict[str, Any]) -> list[tuple[str, list[str], list[list[str]]]]:
    """Titles, columns and rows, as `benchmarks.report` prints them."""
    size = f"{found['groups']:,} consumers with {found['partitions']} partitions each"
    views = [
        [one["view"], f"{one['p50']:.0f}", f"{one['p95']:.0f}", f"{one['p95'] / LIMIT_MS:.2f}", f"{one['kib']:,.0f}"]
        for one in found["views"]
    ]
    metrics, hourly = found["metrics"], 3600 / SCRAPE_EVERY_S
    scrapes = [
        [
            *(f"{metrics[name]:.2f}" for name in ("seconds", "cpu_s")),
            str(metrics["queries"]),
            f"{metrics['cpu_s'] * hourly:.0f}",
            f"{metrics['queries'] * hourly:.0f}",
            f"{metrics['series']:,}",
        ]
    ]
    columns = ["a scrape, s", "its CPU, s", "queries", "CPU s an hour", "queries an hour", "series"]
    return [
        (f"The page with {size}: ms", ["view", "p50", "p95", f"p95 / {LIMIT_MS} ms", "KiB"], views),
        (f"The metrics process with {size}, scraped once a minute", columns, scrapes),
    ]


def _database(stage: Stage, extent: Extent) -> str:
    url = urlunsplit(urlsplit(stage.database_url)._replace(path="/page"))
    for at, statements in ((stage.database_url, ("DROP DATABASE IF EXISTS page WITH (FORCE)", "CREATE DATABASE page")), (url, ())):
        connection = psycopg2.connect(at)
        connection.autocommit = True
        with connection.cursor() as cur:
            for statement in statements:
                cur.execute(statement)
            if not statements:
                migrations.migrate(url)
                text = Path(__file__).with_suffix(".sql").read_text().format(groups=extent.groups, partitions=extent.partitions)
                for statement in (*text.split(";\n"), SUMS):
                    if statement.strip():
                        cur.execute(statement, {"groups": None})
        connection.close()
    return url


def _views(home: Path, url: str, servers: str, extent: Extent, report: Callable[[str], None]) -> list[dict[str, Any]]:
    env = {
        **connections_env(url, {"bootstrap.servers": servers}, "local[1]"),
        "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_USERS": "ann:admin",
        "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_PASSWORDS_FILE": str(home / "passwords.json"),
    }
    (home / "consumers").mkdir()
    for number in range(1, extent.groups + 1):
        (home / "consumers" / f"orders_{number}.yaml").write_text(CONSUMER.format(number=number))
    views = []
    with served(home, env) as where, httpx.Client(base_url=where, trust_env=False, timeout=60) as client:
        login = {"username": "ann", "password": json.loads((home / "passwords.json").read_text())["ann"]}
        client.cookies.set("_token", client.post("/auth/token", json=login).raise_for_status().json()["access_token"])
        for view, path in VIEWS.items():
            waited = []
            for number in range(extent.requests + 1):
                began = time.perf_counter()
                answer = client.get(f"/tidemark/api/{path}").raise_for_status()
                if number:  # the first one reads files and plans queries
                    waited.append((time.perf_counter() - began) * 1000)
            found, size = answer.json(), len(answer.content)
            assert not found.get("banners"), (view, [banner["problem"] for banner in found["banners"]])
            assert size > 500, (view, found)
            p95 = statistics.quantiles(waited, n=20)[-1]
            views.append({"view": view, "p50": statistics.median(waited), "p95": p95, "kib": size / 1024})
            report(f"page    {view}: p50 {views[-1]['p50']:.0f} ms, p95 {p95:.0f} ms, {size / 1024:,.0f} KiB")
    return views


def _scrapes(url: str, rounds: int) -> dict[str, Any]:
    registry = CollectorRegistry()
    registry.register(PostgresCollector(url))  # scrapes once
    seconds, cpu, text = [], [], b""
    for _ in range(rounds):
        began, busy = time.perf_counter(), time.process_time()
        text = generate_latest(registry)
        seconds.append(time.perf_counter() - began)
        cpu.append(time.process_time() - busy)
    queries = _queries(lambda: generate_latest(registry))
    series = sum(1 for line in text.splitlines() if not line.startswith(b"#"))
    return {"seconds": statistics.median(seconds), "cpu_s": statistics.median(cpu), "queries": queries, "series": series}


def _queries(scrape: Callable[[], object]) -> int:
    """The statements that a scrape executes."""
    found: list[str] = []

    class Noting(Cursor):
        def execute(self, query: Any, arguments: Any = None) -> None:
            found.append(str(query))
            super().execute(query, arguments)

    @contextlib.contextmanager
    def noted(url: DatabaseUrl, *, application: str) -> Iterator[Connection]:
        with session(url, application=application) as connection:
            connection.cursor_factory = Noting
            yield connection

    with unittest.mock.patch.object(serve, "session", noted):
        scrape()
    return len(found)

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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
from benchmarks.harness.stage import autocommit, created
from benchmarks.measurement import Bench, Figures, Measurement, Table
from prometheus_client import CollectorRegistry, generate_latest
from tests.e2e.served import served
from tests.support.statements import counted

from tidemark import migrations
from tidemark.db import Connection, DatabaseUrl, session
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
HOURLY = 60
"""Scrapes an hour."""
SUMS = "INSERT INTO tidemark.lag_group " + samples.OF_GROUPS.replace("{which}", "true")


def measure(bench: Bench, groups: int, partitions: int, requests: int, scrapes: int) -> Figures:
    """``views``: milliseconds and KiB of each view. ``metrics``: the figures of a scrape."""
    with created(bench.stage.database_url, "page") as url:
        migrations.migrate(url)
        text = Path(__file__).with_suffix(".sql").read_text().format(groups=groups, partitions=partitions)
        with autocommit(url) as cur:
            for statement in (*text.split(";\n"), SUMS):
                if statement.strip():
                    cur.execute(statement, {"groups": None})
        with tempfile.TemporaryDirectory(prefix="tidemark-bench-page-") as folder:
            views = _views(bench, Path(folder), url, groups, requests)
        metrics = _scrapes(url, scrapes)
    return {"groups": groups, "partitions": partitions, "views": views, "metrics": [metrics]}


def _views(bench: Bench, home: Path, url: str, groups: int, requests: int) -> list[dict[str, Any]]:
    env = {
        **connections_env(url, {"bootstrap.servers": bench.site.servers}, "local[1]"),
        "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_USERS": "ann:admin",
        "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_PASSWORDS_FILE": str(home / "passwords.json"),
    }
    (home / "consumers").mkdir()
    for number in range(1, groups + 1):
        (home / "consumers" / f"orders_{number}.yaml").write_text(CONSUMER.format(number=number))
    views = []
    with served(home, env) as where, httpx.Client(base_url=where, trust_env=False, timeout=60) as client:
        login = {"username": "ann", "password": json.loads((home / "passwords.json").read_text())["ann"]}
        client.cookies.set("_token", client.post("/auth/token", json=login).raise_for_status().json()["access_token"])
        for view, path in VIEWS.items():
            waited = []
            for _ in range(requests + 1):
                began = time.perf_counter()
                answer = client.get(f"/tidemark/api/{path}").raise_for_status()
                waited.append((time.perf_counter() - began) * 1000)
            content, size = answer.json(), len(answer.content)
            assert not content.get("banners"), (view, [banner["problem"] for banner in content["banners"]])
            assert size > 500, (view, content)
            waited = waited[1:]  # the first one reads files and plans queries
            p95 = statistics.quantiles(waited, n=20)[-1]
            views.append({"view": view, "p50": statistics.median(waited), "p95": p95, "to_bar": p95 / LIMIT_MS, "kib": size / 1024})
            bench.report(f"page    {view}: p95 {p95:.0f} ms, {size / 1024:,.0f} KiB")
    return views


def _scrapes(url: str, count: int) -> dict[str, Any]:
    registry = CollectorRegistry()
    registry.register(PostgresCollector(url))  # scrapes once
    seconds, cpu, text, statements = [], [], b"", list[str]()
    for _ in range(count):
        began, busy = time.perf_counter(), time.process_time()
        text = generate_latest(registry)
        seconds.append(time.perf_counter() - began)
        cpu.append(time.process_time() - busy)

    @contextlib.contextmanager
    def noted(url: DatabaseUrl, *, application: str) -> Iterator[Connection]:
        with session(url, application=application) as connection:
            yield counted(connection, statements)

    with unittest.mock.patch.object(serve, "session", noted):
        generate_latest(registry)
    cpu_s, queries = statistics.median(cpu), len(statements)
    series = sum(1 for line in text.splitlines() if not line.startswith(b"#"))
    hourly = {"cpu_s_an_hour": cpu_s * HOURLY, "queries_an_hour": queries * HOURLY}
    return {"seconds": statistics.median(seconds), "cpu_s": cpu_s, "queries": queries, **hourly, "series": series}


_SIZE = "{groups:,} consumers with {partitions} partitions each"
MEASUREMENT = Measurement(
    "page",
    measure,
    Table(
        f"The page with {_SIZE}: ms",
        f"view | p50 | p95 | p95 / {LIMIT_MS} ms | KiB",
        "{view} | {p50:.0f} | {p95:.0f} | {to_bar:.2f} | {kib:,.0f}",
        "views",
    ),
    Table(
        f"The metrics process with {_SIZE}, scraped once a minute",
        "a scrape, s | its CPU, s | queries | CPU s an hour | queries an hour | series",
        "{seconds:.2f} | {cpu_s:.2f} | {queries} | {cpu_s_an_hour:.0f} | {queries_an_hour:.0f} | {series:,}",
        "metrics",
    ),
    full={"groups": 1_000, "partitions": 100, "requests": 100, "scrapes": 10},
    quick={"groups": 20, "partitions": 10, "requests": 3, "scrapes": 2},
)

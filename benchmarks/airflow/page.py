"""The page in Airflow with 1,000 consumers of 100 partitions each.

A real api-server answers one request after the other, for a user who may see everything; Airflow's metadata is in SQLite. A figure is the
time that the client waits.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
from benchmarks.harness.stage import autocommit, created
from benchmarks.measurement import Bar, Bench, Figures, Measurement, Table
from tests.e2e.served import served

from tidemark import migrations
from tidemark.local.airflow_settings import connections_env
from tidemark.offsets import samples

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
SUMS = "INSERT INTO tidemark.lag_group " + samples.OF_GROUPS.replace("{which}", "true")


def measure(bench: Bench, groups: int, partitions: int, requests: int) -> Figures:
    """Milliseconds and KiB of each view."""
    with created(bench.stage.database_url, "page") as url:
        migrations.migrate(url)
        text = Path(__file__).with_suffix(".sql").read_text().format(groups=groups, partitions=partitions)
        with autocommit(url) as cur:
            for statement in (*text.split(";\n"), SUMS):
                if statement.strip():
                    cur.execute(statement, {"groups": None})
        with tempfile.TemporaryDirectory(prefix="tidemark-bench-page-") as folder:
            views = _views(bench, Path(folder), url, groups, requests)
    slowest = max(views, key=lambda view: view["p95"])
    return {"groups": groups, "partitions": partitions, "rows": views, "slowest": [slowest]}


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
            views.append({"view": view, "p50": statistics.median(waited), "p95": p95, "kib": size / 1024})
            bench.report(f"page    {view}: p95 {p95:.0f} ms, {size / 1024:,.0f} KiB")
    return views


_SIZE = "{groups:,} consumers with {partitions} partitions each"
MEASUREMENT = Measurement(
    "page",
    measure,
    Table(
        f"The page with {_SIZE}: ms",
        "view | p50 | p95 | KiB",
        "{view} | {p50:.0f} | {p95:.0f} | {kib:,.0f}",
    ),
    bars=[Bar("the slowest view of the page, {view}: p95, ms", lambda row: row["p95"], "slowest", at_most=300)],
    full={"groups": 1_000, "partitions": 100, "requests": 100},
    quick={"groups": 20, "partitions": 10, "requests": 3},
)

"""The metrics: counters of committed work and gauges of pending work. A real Prometheus scrapes `tidemark metrics serve` and evaluates the
documented alert rules and the dashboard."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg2
import pytest
import yaml
from tests.integration.rewind.lab import Lab, lab_on
from tests.support import needs
from tests.support.kafka_topics import Topics
from tests.support.ledger import in_thread
from tests.support.scenario import Scenario
from tests.support.waiting import until

from tidemark import project
from tidemark.connections import BOOTSTRAP_SERVERS, DATABASE_URL
from tidemark.db import session, transaction
from tidemark.local.ports import find_free
from tidemark.metrics.families import of_state, of_work
from tidemark.metrics.ledger import LedgerTotals, Totals
from tidemark.offsets import store
from tidemark.records.outcome import RecordCounts
from tidemark.rewind.plan_model import ToOffset

MONITORING = project.root() / "docs" / "monitoring"


@pytest.fixture
def consumer(scenario: Scenario) -> Scenario:
    """A consumer that has read 10 records of its topic, with 5 more to read."""
    topic = scenario.topics.create()
    scenario.write(topics=topic).make_sink()
    scenario.topics.produce(topic, [b"%d" % number for number in range(10)])
    scenario.run()
    scenario.topics.produce(topic, [b"%d" % number for number in range(5)])
    return scenario


@contextlib.contextmanager
def metrics(consumer: Scenario) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Starts the process as a user would, and yields it with its address."""
    env = {DATABASE_URL: consumer.database_url, BOOTSTRAP_SERVERS: consumer.topics.servers, "PATH": "/usr/bin:/bin"}
    env["TIDEMARK_CONSUMERS"] = str(consumer.folder / "consumers")
    command = [sys.executable, "-m", "tidemark.cli.main", "metrics", "serve", "--port", "0", "--every", "1s"]

    with subprocess.Popen(command, env=env, cwd=consumer.folder, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            line = process.stderr.readline()
            found = re.search(r"http://(127\.0\.0\.1:\d+)/metrics", line)
            assert found, line + process.stderr.read()
            yield process, found[1]
        finally:
            process.kill()


@contextlib.contextmanager
def prometheus(address: str, folder: Path) -> Iterator[str]:
    """Starts a Prometheus that scrapes the address every second, and yields its URL."""
    program = needs.program("prometheus")
    assert program is not None
    config = folder / "prometheus.yml"
    scrape = {"job_name": "tidemark", "scrape_interval": "1s", "static_configs": [{"targets": [address], "labels": {"cluster_name": "c"}}]}
    settings = {"global": {"evaluation_interval": "1s"}, "rule_files": [str(MONITORING / "alerts.yml")], "scrape_configs": [scrape]}
    config.write_text(yaml.safe_dump(settings))
    port = find_free()
    options = [f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}", f"--web.listen-address=127.0.0.1:{port}"]
    with (folder / "prometheus.log").open("w") as log, subprocess.Popen([program, *options], stderr=log, stdout=log) as process:
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()


def ask(url: str, expression: str) -> list[Any] | None:
    """Returns the samples that a query finds, or `None` while Prometheus is not ready."""
    try:
        with urllib.request.urlopen(f"{url}/api/v1/query?" + urllib.parse.urlencode({"query": expression}), timeout=30) as answer:
            return list(json.load(answer)["data"]["result"])
    except urllib.error.HTTPError as error:
        if error.code == 503:
            return None
        raise AssertionError(f"{expression}: {error.read().decode()}") from error
    except urllib.error.URLError:
        return None


def found(url: str, expression: str) -> list[Any]:
    """Waits until a query finds samples, and returns them."""
    return until(lambda: ask(url, expression) or [], expression)


def scraped(address: str) -> list[str]:
    """The samples that the process exposes."""
    text = urllib.request.urlopen(f"http://{address}/metrics", timeout=60).read().decode()
    return [line for line in text.splitlines() if not line.startswith("#")]


def rules() -> list[str]:
    (group,) = yaml.safe_load((MONITORING / "alerts.yml").read_text())["groups"]
    return [rule["expr"] for rule in group["rules"]]


def documented() -> set[str]:
    """The metrics in the table of docs/operating.md."""
    page = (project.root() / "docs" / "operating.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1] for line in page.splitlines() if re.match(r"\| `(tidemark|kafka)_", line)]
    return {name for row in rows for name in re.findall(r"`([a-z_]+)`", row)}


def panels(group: str) -> list[str]:
    board = json.loads((MONITORING / "grafana.json").read_text())
    return [target["expr"].replace("$group", group) for panel in board["panels"] for target in panel["targets"]]


@pytest.mark.needs("prometheus")
def test_rules_and_dashboard_ask_for_metrics_that_are_scraped(consumer: Scenario, tmp_path: Path) -> None:
    """Prometheus answers every query of both. Each query uses only metrics that the process exposes."""
    group = consumer.spec.group
    with metrics(consumer) as (process, address), prometheus(address, tmp_path) as url:
        (lag,) = found(url, f'kafka_consumergroup_group_sum_lag{{group="{group}"}} == 5')
        assert lag["metric"]["cluster_name"] == "c"
        assert found(url, f'kafka_consumergroup_group_lag_seconds{{group="{group}", partition="0"}} > 0')
        assert found(url, f'kafka_partition_latest_offset{{topic="{consumer.spec.topics[0]}", partition="0"}} == 15')
        assert found(url, "tidemark_up == 1")
        consumer.run()
        assert found(url, f'tidemark_records_total{{group="{group}", outcome="loaded"}} == 5')
        assert found(url, f'kafka_consumergroup_group_sum_lag{{group="{group}"}} == 0')
        exposed = urllib.request.urlopen(f"http://{address}/metrics", timeout=30).read().decode()
        known = set(re.findall(r"^# TYPE (\S+) ", exposed, re.MULTILINE))
        assert known == documented()
        for expression in [*rules(), *panels(group)]:
            assert ask(url, expression) is not None
            for name in re.findall(r"\b(?:tidemark|kafka)_[a-z_]+", expression):
                assert name in known or name.removesuffix("_bucket") in known, name
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


def test_outage_of_the_database_is_a_metric(consumer: Scenario) -> None:
    """During an outage, a scrape has only the sample `tidemark_up` with 0, so that no old number is taken for a current one."""
    name = consumer.database_url.rpartition("/")[2].partition("?")[0]
    with metrics(consumer) as (_, address):
        assert "tidemark_up 1.0" in scraped(address)
        admin = consumer.database_url.replace(f"/{name}", "/postgres")
        with contextlib.closing(psycopg2.connect(admin)) as connection, connection.cursor() as cur:
            connection.autocommit = True
            cur.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS false")
            assert scraped(address) == ["tidemark_up 0.0"]
            cur.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS true")
        assert "tidemark_up 1.0" in scraped(address)


@pytest.fixture
def lab(scenario: Scenario, topics: Topics) -> Iterator[Lab]:
    with lab_on(scenario, topics, [100, 100]) as lab:
        yield lab


def read(lab: Lab, ledger: LedgerTotals) -> Totals:
    with session(lab.url) as connection, transaction(connection) as cur:
        ledger.read(cur)
    return ledger.totals[lab.spec.group]


def test_counters_count_each_commit_once_from_the_first_scrape_on(lab: Lab) -> None:
    """Earlier commits are not counted, nor are the batches that a rewind cuts or an undo restores."""
    ledger = LedgerTotals()
    lab.read(20, step=10)
    assert read(lab, ledger).commits == 0
    lab.read(40, step=10)
    totals = read(lab, ledger)
    assert (totals.commits, totals.rows, dict(totals.records)) == (
        2, 18, {"loaded": 14, "skipped": 2, "retried": 2, "failed": 2, "unaccounted": 0},
    )  # fmt: skip
    assert 0 < totals.commit_seconds < 60
    assert sum(totals.slower_than.values()) == 2
    done = lab.rewind(ToOffset(35))
    assert read(lab, ledger).commits == 2
    lab.undo(done.rewind_id)
    assert read(lab, ledger).commits == 2
    lab.read(50)
    assert read(lab, ledger).commits == 3


def test_commit_that_took_its_id_before_another_is_counted_when_it_is_visible(lab: Lab) -> None:
    """Ids are assigned in the order of insertion: a slower commit has the lower id, but becomes visible later."""
    ledger = LedgerTotals()
    read(lab, ledger)
    inserted, go_on = threading.Event(), threading.Event()

    def slow() -> None:
        part, target = lab.slice(10), lab.target()
        with session(lab.url) as connection, transaction(connection) as cur:
            store.move_offset(cur, lab.group_id, part)
            store.insert_batch(cur, lab.group_id, target.attempt_id, part, RecordCounts(0, 10, 0, 0, 0, 0))
            inserted.set()
            assert go_on.wait(60)

    with in_thread(slow):
        assert inserted.wait(60)
        lab.read(10, 1)
        assert read(lab, ledger).commits == 1
        go_on.set()
    assert [read(lab, ledger).commits for _ in range(2)] == [2, 2]


def test_attempts_are_counted_by_how_they_ended(lab: Lab) -> None:
    ledger = LedgerTotals()
    read(lab, ledger)
    lab.read(10)
    with lab.watch.cursor() as cur:
        attempt = store.new_attempt(cur, lab.group_id, store.TaskIdentity())
        assert read(lab, ledger).attempts == {"committed": 1}
        store.end_attempt(cur, attempt, {"kind": "fenced", "type": "OffsetFenced", "text": "a newer owner"})
    for _ in range(2):
        assert read(lab, ledger).attempts == {"committed": 1, "fenced": 1}


def test_gauges_show_what_is_pending_and_counters_have_the_names_of_prometheus(lab: Lab) -> None:
    ledger = LedgerTotals()
    read(lab, ledger)
    lab.read(20)
    lab.sql("UPDATE tidemark.failed_record SET state = 'WAITING', due_at = clock_timestamp() - interval '90 s' WHERE record_offset = 1")
    read(lab, ledger)
    lab.rewind(ToOffset(15))
    totals = read(lab, ledger)
    with session(lab.url) as connection, transaction(connection) as cur:
        families = (*of_work({lab.spec.group: totals}), *of_state(cur))
    samples = [one for family in families for one in family.samples]
    found = {(one.name, *(value for name, value in one.labels.items() if name != "group")): one.value for one in samples}
    assert found["tidemark_records_total", "loaded"] == 14
    assert found["tidemark_rows_total",] == 18
    assert found["tidemark_commit_seconds_count",] == found["tidemark_commit_seconds_bucket", "+Inf"] == 1
    assert found["tidemark_failed_records", "WAITING"] == 1
    assert found["tidemark_failed_records", "FAILED"] == 3
    assert 90 <= found["tidemark_retry_overdue_seconds",] < 3600
    assert found["tidemark_rewinds_total",] == 1
    assert ("tidemark_validation_passed",) not in found

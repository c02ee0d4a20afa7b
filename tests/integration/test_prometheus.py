"""A real Prometheus scrapes `tidemark metrics serve`, and the documented alert rules and dashboard query it."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import signal
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg2
import pytest
import yaml
from tests.support.scenario import Scenario
from tests.support.waiting import until

from tidemark import project
from tidemark.connections import BOOTSTRAP_SERVERS, DATABASE_URL
from tidemark.local.ports import find_free

MONITORING = project.root() / "docs" / "monitoring"
PROMETHEUS = shutil.which("prometheus")

pytestmark = pytest.mark.skipif(PROMETHEUS is None, reason="needs Prometheus, Debian's package `prometheus`")


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
    command = [sys.executable, "-m", "tidemark.cli.main", "metrics", "serve", "--port", "0", "--every", "1s"]
    command += ["--consumers", str(consumer.folder / "consumers")]
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
    assert PROMETHEUS is not None
    config = folder / "prometheus.yml"
    scrape = {"job_name": "tidemark", "scrape_interval": "1s", "static_configs": [{"targets": [address], "labels": {"cluster_name": "c"}}]}
    settings = {"global": {"evaluation_interval": "1s"}, "rule_files": [str(MONITORING / "alerts.yml")], "scrape_configs": [scrape]}
    config.write_text(yaml.safe_dump(settings))
    port = find_free()
    options = [f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}", f"--web.listen-address=127.0.0.1:{port}"]
    with (folder / "prometheus.log").open("w") as log, subprocess.Popen([PROMETHEUS, *options], stderr=log, stdout=log) as process:
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


def rules() -> dict[str, str]:
    (group,) = yaml.safe_load((MONITORING / "alerts.yml").read_text())["groups"]
    return {rule["alert"]: rule["expr"] for rule in group["rules"]}


def documented() -> set[str]:
    """The metrics in the table of docs/operating.md."""
    page = (project.root() / "docs" / "operating.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1] for line in page.splitlines() if re.match(r"\| `(tidemark|kafka)_", line)]
    return {name for row in rows for name in re.findall(r"`([a-z_]+)`", row)}


def panels(group: str) -> list[str]:
    board = json.loads((MONITORING / "grafana.json").read_text())
    return [target["expr"].replace("$group", group) for panel in board["panels"] for target in panel["targets"]]


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
        for expression in [*rules().values(), *panels(group)]:
            assert ask(url, expression) is not None
            for name in re.findall(r"\b(?:tidemark|kafka)_[a-z_]+", expression):
                assert name in known or name.removesuffix("_bucket") in known, name
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


def test_outage_of_the_database_is_a_metric(consumer: Scenario) -> None:
    """During an outage, a scrape has only the sample `tidemark_up` with 0, so that no old number is taken for a current one."""
    name = consumer.database_url.rpartition("/")[2].partition("?")[0]
    with metrics(consumer) as (_, address):
        admin = consumer.database_url.replace(f"/{name}", "/postgres")
        assert "tidemark_up 1.0" in urllib.request.urlopen(f"http://{address}/metrics", timeout=60).read().decode()
        with contextlib.closing(psycopg2.connect(admin)) as connection:
            connection.autocommit = True
            connection.cursor().execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS false")
            down = urllib.request.urlopen(f"http://{address}/metrics", timeout=60).read().decode()
            connection.cursor().execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS true")
        assert [line for line in down.splitlines() if not line.startswith("#")] == ["tidemark_up 0.0"]
        assert "tidemark_up 1.0" in urllib.request.urlopen(f"http://{address}/metrics", timeout=60).read().decode()

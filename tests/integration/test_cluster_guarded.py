"""A Spark standalone cluster that is not on loopback: applications are authenticated and encrypted, or the user accepts that they are
not."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from tests.support import spark_cluster
from tests.support.attempts import FAST_JVM
from tests.support.kafka_topics import Topics
from tests.support.scenario import ARROW, Scenario, as_json
from tests.support.spark_cluster import SparkCluster
from tests.support.waiting import until

SECRET = "a-secret-of-the-whole-cluster"
RECORDS = 50
FAST_JVMS = FAST_JVM | {"spark.executor.extraJavaOptions": FAST_JVM["spark.driver.extraJavaOptions"]}


@pytest.fixture(scope="module")
def cluster() -> Iterator[SparkCluster]:
    """A cluster on this machine's network address, started with the script from docker-compose.yaml."""
    with tempfile.TemporaryDirectory(prefix="tidemark-spark-") as folder, spark_cluster.running(Path(folder), address(), SECRET) as cluster:
        yield cluster


def address() -> str:
    found = [one.address for each in psutil.net_if_addrs().values() for one in each if one.family == socket.AF_INET]
    away = [one for one in found if not one.startswith("127.")]
    if not away:
        pytest.skip("this machine has no address but loopback")
    return away[0]


def settings(cluster: SparkCluster, **conf: str) -> dict[str, str]:
    """A user's settings. The driver listens on the same address, and one executor is enough."""
    usual = {"spark.cores.max": "1", "spark.executor.memory": "512m", "spark.driver.host": cluster.host, **FAST_JVMS}
    return {"TIDEMARK_SPARK_MASTER": cluster.master, "TIDEMARK_SPARK_CONF": json.dumps(usual | conf)}


@pytest.fixture
def consumer(scenario: Scenario, topics: Topics) -> Scenario:
    topic = topics.create()
    topics.produce(topic, [str(number) for number in range(RECORDS)])
    return scenario.write(ARROW, topics=topic).make_sink("payload bytea")


def test_an_application_that_is_not_authenticated_is_refused_before_any_task(consumer: Scenario) -> None:
    """Nothing listens at the address: the run is refused before it contacts the master. The error names what to set or to accept, and
    doctor reports the same."""
    env = {"TIDEMARK_SPARK_MASTER": "spark://spark.example:7077", "TIDEMARK_SPARK_CONF": json.dumps(FAST_JVM)}
    done = consumer.command("consume", consumer.name, env=env)
    assert done.returncode == 1
    told = " ".join(done.stderr.split())
    assert "Spark at spark://spark.example:7077 is not authenticated: spark.authenticate is not set" in told
    assert "spark.authenticate.secret" in told
    assert "set spark.authenticate to false" in told
    assert consumer.attempt(1)["error"]["kind"] == "refused"
    assert consumer.counts() == {}
    found = as_json(consumer.command("doctor", "--output", "json", env=env).stdout)
    failures = [one["found"] for one in found if one["subject"] == "executors" and one["level"] == "FAILURE"]
    assert failures == [consumer.attempt(1)["error"]["text"]]


def test_tasks_run_with_the_clusters_secret_and_no_argument_shows_it(consumer: Scenario, cluster: SparkCluster) -> None:
    """The secret comes from a file. RPC and shuffles are encrypted without a setting, as the executor's command line shows."""
    file = consumer.folder / "spark.json"
    env = consumer.env() | settings(cluster)
    conf = json.loads(env.pop("TIDEMARK_SPARK_CONF")) | {"spark.authenticate": "true", "spark.authenticate.secret": SECRET}
    file.write_text(json.dumps(conf))
    command = [sys.executable, "-m", "tidemark.cli.main", "consume", consumer.name]
    env |= {"TIDEMARK_SPARK_CONF_FILE": str(file)}
    lines: set[str] = set()
    with subprocess.Popen(command, env=env, cwd=consumer.folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as run:
        try:
            until(lambda: _seen(lines, psutil.Process(run.pid), cluster) or run.poll() is not None, within_s=240)
            told, _ = run.communicate(timeout=240)
        finally:
            run.kill()
    assert run.returncode == 0, told
    assert consumer.counts() == {"loaded": RECORDS, "sink_rows": RECORDS}
    consumer.check()
    (executor,) = {line for line in lines if "CoarseGrainedExecutorBackend" in line}
    assert "-Dspark.network.crypto.enabled=true" in executor
    assert [line for line in lines if SECRET in line] == []


def _seen(lines: set[str], run: psutil.Process, cluster: SparkCluster) -> bool:
    """Collects the command lines of the driver and the cluster. Returns whether an executor was among them."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in [*run.children(recursive=True), *cluster.family()]:
            with contextlib.suppress(psutil.NoSuchProcess):
                lines.add(" ".join(process.cmdline()))
    return any("CoarseGrainedExecutorBackend" in line for line in lines)

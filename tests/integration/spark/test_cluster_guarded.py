"""The same job on a Spark standalone cluster: a master and two workers whose executors get all they need from the driver.

One cluster is on this machine's network address, where applications are authenticated and encrypted; the other is on loopback."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.support import spark_cluster
from tests.support.attempts import FAST_JVM
from tests.support.kafka_topics import Topics
from tests.support.scenario import Scenario, as_json
from tests.support.spark_cluster import SPARK_HOME, SparkCluster
from tests.support.waiting import until

from tidemark import project
from tidemark.jvm.jars import spark_jars
from tidemark.local import ports

FAST_JVMS = FAST_JVM | {"spark.executor.extraJavaOptions": FAST_JVM["spark.driver.extraJavaOptions"]}
SECRET = "a-secret-of-the-whole-cluster"
PARTITIONS = 4
RECORDS = 3_000
"""Per partition: enough that an executor with a task is still busy when the next task is assigned."""

ARROW = """
    import os

    import helper
    import pyarrow as pa


    def transform(batch: pa.RecordBatch) -> pa.RecordBatch:
        made = batch.select(["kafka_topic", "kafka_partition", "kafka_offset", "value"]).rename_columns(
            ["kafka_topic", "kafka_partition", "kafka_offset", "payload"]
        )
        where = pa.array([os.getcwd()] * batch.num_rows, pa.string())
        python = pa.array([os.environ.get(helper.VARIABLE)] * batch.num_rows, pa.string())
        return made.append_column("place", where).append_column("python", python)
"""
"""Makes one row of each record, with the folder and the environment of the Python worker."""

SPARK = """
    from pyspark.sql import DataFrame


    def transform(records: DataFrame) -> DataFrame:
        return records.selectExpr(
            "kafka_topic", "kafka_partition", "kafka_offset", "value AS payload",
            "reflect('java.lang.System', 'getProperty', 'user.dir') AS place", "CAST(NULL AS string) AS python",
        )
"""
"""The same, with the folder of the executor's JVM."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[SparkCluster]:
    """Started with the script from docker-compose.yaml."""
    found = [one.address for each in psutil.net_if_addrs().values() for one in each if one.family == socket.AF_INET]
    away = next(one for one in found if not one.startswith("127."))
    with tempfile.TemporaryDirectory(prefix="tidemark-spark-") as folder, spark_cluster.running(Path(folder), away, SECRET) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def loopback() -> Iterator[SparkCluster]:
    with tempfile.TemporaryDirectory(prefix="tidemark-spark-") as folder, spark_cluster.running(Path(folder)) as cluster:
        yield cluster


@pytest.fixture
def topic(topics: Topics) -> str:
    """A topic with a few thousand records in each of four partitions."""
    topic = topics.create(PARTITIONS)
    for partition in range(PARTITIONS):
        topics.produce(topic, (f"{partition}-{number}" for number in range(RECORDS)), partition=partition)
    return topic


def prepared(scenario: Scenario, transform: str, topic: str) -> Scenario:
    (scenario.folder / "transforms" / "helper.py").write_text('VARIABLE = "TIDEMARK_TEST_ENVIRONMENT"\n')
    return scenario.write(transform, topics=topic).make_sink("payload bytea, place text, python text")


def settings(scenario: Scenario, cluster: SparkCluster, **conf: str) -> dict[str, str]:
    """A user's settings for this cluster, in a file. Tasks are assigned once both executors are registered."""
    conf |= {"spark.cores.max": "2", "spark.executor.memory": "512m", "spark.scheduler.minRegisteredResourcesRatio": "1.0", **FAST_JVMS}
    if cluster.secret:
        conf |= {"spark.driver.host": cluster.host, "spark.authenticate": "true", "spark.authenticate.secret": cluster.secret}
    else:
        conf |= {"spark.authenticate": "false"}
    file = scenario.folder / "spark.json"
    file.write_text(json.dumps(conf))
    return {"TIDEMARK_SPARK_MASTER": cluster.master, "TIDEMARK_SPARK_CONF_FILE": str(file)}


def consume(scenario: Scenario, cluster: SparkCluster, **conf: str) -> dict[str, Any]:
    done = scenario.command("consume", scenario.name, "--output", "json", env=settings(scenario, cluster, **conf))
    assert done.returncode == 0, done.stderr
    told: dict[str, Any] = as_json(done.stdout)
    return told


def workers(scenario: Scenario, cluster: SparkCluster) -> set[str]:
    """The workers that computed the sink's rows."""
    return {cluster.worker_of(place) for (place,) in scenario.sql(f"SELECT DISTINCT place FROM {scenario.table}")}


def command_line(process: psutil.Process) -> str:
    """Empty if the process has ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def check_exact(scenario: Scenario) -> None:
    """Each record has exactly one row, and the position of every partition is at its end."""
    assert scenario.counts() == {"loaded": PARTITIONS * RECORDS, "sink_rows": PARTITIONS * RECORDS}
    assert set(scenario.positions().values()) == {RECORDS}
    scenario.check()


def check_free(cluster: SparkCluster) -> None:
    """Waits until no executor is left; then all cores are free again."""
    until(lambda: not cluster.state()["activeapps"] and not cluster.executors())
    until(lambda: [worker["coresused"] for worker in cluster.state()["workers"] if worker["state"] == "ALIVE"] == [0, 0])


def test_an_application_that_is_not_authenticated_is_refused_before_any_task(scenario: Scenario, topics: Topics) -> None:
    """Nothing listens at the address: the run is refused before it contacts the master. The error names what to set or to accept, and
    doctor reports the same."""
    topic = topics.create()
    topics.produce(topic, ["x"])
    scenario.write(topics=topic).make_sink()
    env = {"TIDEMARK_SPARK_MASTER": "spark://spark.example:7077", "TIDEMARK_SPARK_CONF": json.dumps(FAST_JVM)}
    done = scenario.command("consume", scenario.name, env=env)
    assert done.returncode == 1
    told = " ".join(done.stderr.split())
    assert "Spark at spark://spark.example:7077 is not authenticated: spark.authenticate is not set" in told
    assert "spark.authenticate.secret" in told
    assert "set spark.authenticate to false" in told
    assert scenario.attempt(1)["error"]["kind"] == "refused"
    assert scenario.counts() == {}
    found = as_json(scenario.command("doctor", "--output", "json", env=env).stdout)
    failures = [one["found"] for one in found if one["subject"] == "executors" and one["level"] == "FAILURE"]
    assert failures == [scenario.attempt(1)["error"]["text"]]


@pytest.mark.thorough
def test_a_killed_driver_leaves_no_executor_and_the_next_run_completes(scenario: Scenario, cluster: SparkCluster, topic: str) -> None:
    """Executors end when their driver is gone. What they had committed stays, and the next run does the rest.

    RPC and shuffles are encrypted without a setting, as the executors' command lines show. None of them has the cluster's secret, which
    comes from a file. The next run's executors take their Python from a packed environment, which ``spark.archives`` ships and
    ``spark.pyspark.python`` names. The driver keeps using its own. Transforms, and modules next to them, come from the driver.
    """
    slow = ARROW.replace("import os\n", "import os\n    import time\n", 1).replace(
        "made = ", "time.sleep(600 if batch.num_rows else 0)\n        made = "
    )
    prepared(scenario, slow, topic)
    command = [sys.executable, "-m", "tidemark.cli.main", "consume", scenario.name]
    env = scenario.env() | settings(scenario, cluster)
    run = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=scenario.folder)
    try:
        until(lambda: executors_in_python(cluster) == 2)
        lines = [command_line(process) for process in (*psutil.Process(run.pid).children(recursive=True), *cluster.family())]
        (driver,) = [child for child in psutil.Process(run.pid).children() if "consume.py" in command_line(child)]
        os.killpg(driver.pid, signal.SIGKILL)
        assert run.wait(180) == 1
    finally:
        run.kill()  # its driver ends with it
        run.wait()
    assert all("-Dspark.network.crypto.enabled=true" in line for line in lines if "CoarseGrainedExecutorBackend" in line)
    assert [line for line in lines if SECRET in line] == []
    check_free(cluster)
    scenario.transform(ARROW)
    archive = packed(scenario.folder)
    consume(scenario, cluster, **{"spark.archives": f"{archive}#environment", "spark.pyspark.python": "./environment/bin/python"})
    assert set(scenario.rows("python")) == {"packed"}
    assert workers(scenario, cluster) == {"worker-1", "worker-2"}
    check_exact(scenario)
    check_free(cluster)


@pytest.mark.thorough
def test_the_spark_form_uses_both_workers_and_loads_every_record_once(scenario: Scenario, loopback: SparkCluster, topic: str) -> None:
    """The connector's jars come from the driver. The Python workers import from the same paths as the driver, as with a shared image."""
    prepared(scenario, SPARK, topic)
    assert consume(scenario, loopback)["loaded"] == PARTITIONS * RECORDS
    assert workers(scenario, loopback) == {"worker-1", "worker-2"}
    check_exact(scenario)
    check_free(loopback)


@pytest.mark.thorough
def test_spark_submit_starts_the_same_run_with_jars_of_its_own(scenario: Scenario, loopback: SparkCluster, topic: str) -> None:
    """``spark-submit spark_jobs/consume.py NAME`` takes the master, the settings and the connector's jars from spark-submit."""
    prepared(scenario, SPARK, topic)
    file = settings(scenario, loopback)["TIDEMARK_SPARK_CONF_FILE"]
    conf = json.loads(Path(file).read_text()) | {"spark.driver.host": "127.0.0.1", "spark.driver.memory": "512m"}
    words = ["--master", loopback.master, "--jars", ",".join(str(jar) for jar in spark_jars())]
    words += [word for key, value in conf.items() for word in ("--conf", f"{key}={value}")]
    command = [str(SPARK_HOME / "bin" / "spark-submit"), *words, str(project.consume_job()), scenario.name]
    python = {"PYSPARK_PYTHON": sys.executable, "PYSPARK_DRIVER_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"}
    done = subprocess.run(command, env=scenario.env() | python, cwd=scenario.folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    assert workers(scenario, loopback) == {"worker-1", "worker-2"}
    check_exact(scenario)


def executors_in_python(cluster: SparkCluster) -> int:
    """The number of executors that run Python. Each has one daemon, a child of the JVM, which forks the Python workers."""
    found = 0
    for process in cluster.executors():
        with contextlib.suppress(psutil.NoSuchProcess):
            parent = process.parent()
            found += "pyspark.daemon" in process.cmdline() and parent is not None and "pyspark.daemon" not in parent.cmdline()
    return found


def packed(folder: Path) -> Path:
    """An archive laid out like venv-pack's. Its Python is a script that identifies itself by a variable and runs the test's Python."""
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nTIDEMARK_TEST_ENVIRONMENT=packed exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    archive = folder / "environment.tar.gz"
    with tarfile.open(archive, "w:gz") as out:
        out.add(python, "bin/python")
    return archive


@pytest.mark.thorough
def test_doctor_looks_at_the_servers_from_the_executors(scenario: Scenario, loopback: SparkCluster, topic: str):
    """The brokers are reachable, the database is not."""
    scenario.write(topics=topic)
    nowhere = f"postgresql://x@{ports.HOST}:{ports.find_free()}/x"
    env = settings(scenario, loopback, **{"spark.pyspark.python": sys.executable}) | {"TIDEMARK_DATABASE_URL": nowhere}
    done = scenario.command("doctor", "--output", "json", env=env)
    assert done.returncode == 1, done.stderr
    (found,) = [one for one in as_json(done.stdout) if one["subject"].startswith("executor ")]
    assert found["level"] == "FAILURE"
    assert re.match(r"not reachable from there: Postgres \((?!.*Kafka)", found["found"])
    check_free(loopback)

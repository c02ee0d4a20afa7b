"""Runs on a YARN cluster: the driver beside its caller, and the driver on the cluster. What dies there and here, and what follows it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from tests.support import yarn
from tests.support.scenario import ARROW, PLAIN, SPARK, Scenario
from tests.support.waiting import until
from tests.support.yarn import YarnCluster

from tidemark.connections import DEPLOY_MODE
from tidemark.local.airflow_settings import connections_env

pytestmark = pytest.mark.thorough

MARK = "kafka-mark-5e1f"
"""A password, which must not appear anywhere."""

HELD = """
    import time
    from pathlib import Path

    from tidemark.transform import Record

    FOLDER = Path({folder!r})


    def transform(record: Record):
        (FOLDER / "reached").touch()
        while not (FOLDER / "open").exists():
            time.sleep(0.05)
        return {{"payload": record.value}}
"""
"""One row for each record, once the gate is open."""

TASK = """
import sys
from types import SimpleNamespace
from tidemark.airflow import ConsumeOperator
ti = SimpleNamespace(dag_id="d", run_id="r", task_id="consume", map_index=-1, try_number=1, xcom_push=print)
ConsumeOperator(task_id="consume", consumer=sys.argv[1]).execute({"ti": ti})
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[YarnCluster]:
    with yarn.running(tmp_path_factory.mktemp("yarn")) as cluster:
        yield cluster


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    folder = tmp_path / "gate"
    folder.mkdir()
    return folder


@pytest.fixture
def held(scenario: Scenario, gate: Path) -> Scenario:
    """A consumer with a record, whose transform waits for the file ``open`` in the gate."""
    scenario.feed([b"a", b"b"], HELD.format(folder=str(gate)), ddl="payload bytea")
    return scenario


@pytest.fixture
def airflow(cluster: YarnCluster, scenario: Scenario, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scenario:
    """In this process and its children, Airflow has a connection to YARN with ``deploy-mode: cluster``."""
    kafka = {"bootstrap.servers": scenario.topics.servers}
    spark = {"conn_type": "spark", "host": "yarn", "extra": {"deploy-mode": "cluster", "conf": yarn.spark_conf(cluster)}}
    env = {
        **connections_env(scenario.database_url, kafka, "yarn"),
        "AIRFLOW_CONN_TIDEMARK_SPARK": json.dumps(spark),
        "AIRFLOW_HOME": str(tmp_path / "airflow"),
        "HADOOP_CONF_DIR": str(cluster.conf),
        "TIDEMARK_CONSUMERS": str(scenario.folder / "consumers"),
        "TIDEMARK_TRANSFORMS": str(scenario.folder / "transforms"),
    }
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    return scenario


def env_of(cluster: YarnCluster, **conf: str) -> dict[str, str]:
    settings = json.dumps({**yarn.spark_conf(cluster), DEPLOY_MODE: "cluster", **conf})
    kafka = json.dumps({"sasl.password": MARK})
    return {
        "TIDEMARK_SPARK_MASTER": "yarn",
        "HADOOP_CONF_DIR": str(cluster.conf),
        "TIDEMARK_SPARK_CONF": settings,
        "TIDEMARK_KAFKA_CONFIG": kafka,
    }


@contextlib.contextmanager
def started(scenario: Scenario, env: dict[str, str], *command: str) -> Iterator[subprocess.Popen[str]]:
    """A command that runs in the background: by default ``tidemark consume``. It is killed after the block."""
    words = command or (sys.executable, "-m", "tidemark.cli.main", "consume", scenario.name)
    quiet: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    process = subprocess.Popen(words, env=env, text=True, cwd=scenario.folder, **quiet)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def context() -> Any:
    """The context of a task's second try, which runs in this process."""
    ti = SimpleNamespace(dag_id="d", run_id="r", task_id="consume", map_index=-1, try_number=2, xcom_push=print)
    return {"ti": ti}


def attempts(scenario: Scenario) -> list[tuple[str, str | None, str | None]]:
    """State, kind and type of each attempt."""
    return scenario.sql("SELECT state, error ->> 'kind', error ->> 'type' FROM tidemark.attempt ORDER BY attempt_id")


def wait_for(gate: Path, cluster: YarnCluster) -> None:
    until((gate / "reached").exists, "a transform runs on the cluster" + cluster.logs()[-4000:], 240)


def ended(cluster: YarnCluster) -> str:
    """Waits until the newest application has ended; its final state."""
    return until(lambda: (state := cluster.applications()[-1]["finalStatus"]) != "UNDEFINED" and state, "the application ends")


# ---- runs


@pytest.mark.parametrize("form", [PLAIN, ARROW, SPARK], ids=["function", "arrow", "spark"])
@pytest.mark.parametrize("mode", ["client", "cluster"])
def test_each_form_loads_every_record_on_yarn(cluster: YarnCluster, scenario: Scenario, mode: str, form: str) -> None:
    """Consumer, transform, schemas and the jars of Kafka's connector travel with the driver."""
    scenario.feed([b"a", b"b", None], form, ddl="payload bytea", partitions=2)
    env = env_of(cluster, **{DEPLOY_MODE: mode}) | {"TIDEMARK_KAFKA_CONFIG": ""}
    done = scenario.command("consume", scenario.name, "--output", "json", env=env)
    assert done.returncode == 0, done.stderr + cluster.logs()[-8000:]
    result: Any = json.loads(done.stdout)
    assert (result["state"], result["loaded"]) == ("COMMITTED", 6)
    assert ended(cluster) == "SUCCEEDED"
    scenario.check()


def test_secrets_are_in_no_argument_no_environment_no_log_and_no_answer_of_yarn(cluster: YarnCluster, held: Scenario, gate: Path) -> None:
    """They are in a file of the application, which only its user may read. The staging folder is gone afterwards, like the file here."""
    password = held.database_url.split(":")[2].split("@")[0]
    before = set(Path("/tmp").glob("tidemark-submit-*"))
    with started(held, held.env() | env_of(cluster)) as caller:
        wait_for(gate, cluster)
        own = {os.getpid(), caller.pid}
        texts = {"yarn": json.dumps(cluster.get("apps")), "logs": cluster.logs()}
        for process in cluster.family():
            with contextlib.suppress(psutil.Error):
                texts[f"arguments of {process}"] = " ".join(process.cmdline())
                if process.pid not in own and process.name() == "java":
                    texts[f"environment of {process}"] = str(process.environ())
        staged = [file for file in (cluster.folder / "staging").rglob("*.json") if MARK in file.read_text()]
        local = [file for file in cluster.folder.glob("node-*/local/usercache/*/filecache/*/*.json") if MARK in file.read_text()]
        assert len(staged) == 1
        assert staged[0].parent.stat().st_mode & 0o077 == 0
        assert local
        assert all(file.stat().st_mode & 0o077 == 0 for file in local)
        assert [what for what, text in texts.items() if MARK in text or password in text] == []
        assert set(Path("/tmp").glob("tidemark-submit-*")) == before
        (gate / "open").touch()
        output, _ = caller.communicate(timeout=240)
    assert MARK not in output
    assert password not in output
    assert ended(cluster) == "SUCCEEDED"
    until(lambda: not list((cluster.folder / "staging").rglob("*.json")), "the staging folder is removed")
    held.check()


# ---- deaths


def kill_driver(cluster: YarnCluster) -> None:
    """Kills the application master, in which the driver runs."""
    for process in cluster.drivers():
        process.kill()


def kill_node(cluster: YarnCluster) -> None:
    """Kills the node manager of the driver. Its containers go on, until YARN tells the application master that it has lost its node."""
    node = cluster.node_of(cluster.drivers()[0])
    cluster.processes[node].kill()
    cluster.processes[node].wait()


@pytest.mark.parametrize("death", [kill_driver, kill_node])
def test_driver_or_its_node_is_killed_and_the_next_run_loads_every_record_once(
    cluster: YarnCluster, held: Scenario, gate: Path, death: Callable[[YarnCluster], None]
) -> None:
    """The attempt ends as unavailable: by the driver that loses its node, or with YARN's reason. YARN starts no second driver, or one that
    reads nothing."""
    with started(held, held.env() | env_of(cluster)) as caller:
        wait_for(gate, cluster)
        death(cluster)
        output, _ = caller.communicate(timeout=240)
    assert caller.returncode == 1, output
    assert [attempt[:2] for attempt in attempts(held)] == [("FAILED", "unavailable")]
    if death is kill_driver:
        assert attempts(held)[0][2] == "DriverEnded"
        assert "ended without a result: application application_" in output
    assert ended(cluster) == "FAILED"
    assert held.rows() == []
    until(lambda: not list((cluster.folder / "staging").rglob("*.json")), "the staging folder is removed")
    for name, process in list(cluster.processes.items()):
        if process.poll() is not None:
            cluster.start_node(name)
    (gate / "open").touch()
    done = held.command("consume", held.name, env=env_of(cluster))
    assert done.returncode == 0, done.stderr
    held.check()


def test_task_is_killed_and_its_next_try_follows_the_driver_that_still_runs(
    cluster: YarnCluster, airflow: Scenario, held: Scenario, gate: Path
) -> None:
    """Nothing is submitted a second time, and the summary is that of the first attempt."""
    from tidemark.airflow import ConsumeOperator

    before = len(cluster.applications())
    with started(held, dict(os.environ), sys.executable, "-c", TASK, held.name) as task:
        wait_for(gate, cluster)
        task.kill()
    threading.Timer(3, (gate / "open").touch).start()
    summary = ConsumeOperator(task_id="consume", consumer=held.name).execute(context())
    assert (summary["attempt_id"], summary["loaded"]) == (1, 2)
    assert attempts(held) == [("COMMITTED", None, None)]
    assert len(cluster.applications()) == before + 1
    held.check()


def test_task_is_killed_while_it_submits_and_its_next_try_loads_every_record_once(
    cluster: YarnCluster, airflow: Scenario, held: Scenario, gate: Path
) -> None:
    """The next try follows the application, if YARN has it by then, or submits another one: the row decides which driver reads."""
    from tidemark.airflow import ConsumeOperator

    (gate / "open").touch()
    with started(held, dict(os.environ), sys.executable, "-c", TASK, held.name) as task:
        until(lambda: held.sql("SELECT FROM tidemark.attempt WHERE application IS NOT NULL"), "the submission begins")
        task.kill()
    assert ConsumeOperator(task_id="consume", consumer=held.name).execute(context())["loaded"] == 2
    held.check()


def test_deferred_task_ends_like_one_that_waits(cluster: YarnCluster, airflow: Scenario, held: Scenario, gate: Path) -> None:
    """While the cluster works, only the trigger follows the attempt. It asks the task to look at a driver that does not start."""
    from airflow.sdk.exceptions import TaskDeferred

    from tidemark.airflow import ConsumeOperator

    def task(call: Callable[[ConsumeOperator], Any]) -> Any:
        operator = ConsumeOperator(task_id="consume", consumer=held.name, deferrable=True)
        try:
            return call(operator)
        except TaskDeferred as deferred:
            return deferred

    result = task(lambda operator: operator.execute(context()))
    threading.Thread(target=lambda: (wait_for(gate, cluster), (gate / "open").touch())).start()
    while isinstance(result, TaskDeferred):
        deferral = result
        path, arguments = deferral.trigger.serialize()
        assert path == "tidemark.airflow.triggers.attempt.AttemptTrigger"
        assert json.loads(json.dumps(arguments)) == arguments
        event = asyncio.run(one_event(deferral.trigger))
        result = task(lambda operator: operator.resume(context(), event, **(deferral.kwargs or {})))  # noqa: B023
    assert (result["attempt_id"], result["loaded"]) == (1, 2)
    held.check()


async def one_event(trigger: Any) -> Any:
    return (await anext(trigger.run())).payload


# ---- ends


def test_interrupted_command_kills_its_application(cluster: YarnCluster, held: Scenario, gate: Path) -> None:
    with started(held, held.env() | env_of(cluster)) as caller:
        wait_for(gate, cluster)
        caller.send_signal(signal.SIGINT)
        caller.communicate(timeout=240)
    assert ended(cluster) == "KILLED"
    assert [state for state, _, _ in attempts(held)] == ["FAILED"]
    assert held.rows() == []


def test_killed_task_kills_its_application(cluster: YarnCluster, airflow: Scenario, held: Scenario, gate: Path) -> None:
    """`on_kill` returns at once, and the application is killed even if the task process is gone by then."""
    from tidemark.airflow import ConsumeOperator
    from tidemark.driver.on_cluster import DriverStopped

    operator = ConsumeOperator(task_id="consume", consumer=held.name)

    def kill() -> None:
        wait_for(gate, cluster)
        operator.on_kill()

    threading.Thread(target=kill).start()
    with pytest.raises(DriverStopped):
        operator.execute(context())
    assert attempts(held) == [("FAILED", "unavailable", "DriverStopped")]
    assert ended(cluster) == "KILLED"


def test_driver_that_waits_too_long_in_its_queue_is_killed_with_the_queues_reason(cluster: YarnCluster, held: Scenario) -> None:
    done = held.command("consume", held.name, env=env_of(cluster, **{"spark.yarn.queue": "narrow", "spark.tidemark.startLimit": "15s"}))
    assert done.returncode == 1
    assert "did not start within 15s and was killed" in done.stderr
    assert "queue" in held.attempt(1)["error"]["text"]
    assert attempts(held) == [("FAILED", "unavailable", "DriverNotStarted")]
    assert ended(cluster) == "KILLED"
    assert not list((cluster.folder / "staging").rglob("*.json"))


def test_queue_that_takes_nothing_is_named(cluster: YarnCluster, held: Scenario) -> None:
    done = held.command("consume", held.name, env=env_of(cluster, **{"spark.yarn.queue": "closed"}))
    assert done.returncode == 1
    assert "could not be submitted to yarn" in done.stderr
    assert "closed" in done.stderr
    assert attempts(held) == [("FAILED", "unavailable", "SubmissionFailed")]


def test_refused_settings_leave_no_attempt(cluster: YarnCluster, held: Scenario) -> None:
    for env, message in (
        ({"HADOOP_CONF_DIR": ""}, "HADOOP_CONF_DIR: it is not set, and the master is yarn"),
        ({"TIDEMARK_SPARK_MASTER": "local[2]"}, "local[2] cannot run drivers"),
    ):
        done = held.command("consume", held.name, env=env_of(cluster) | env)
        assert done.returncode == 1
        assert message in done.stderr
    assert attempts(held) == []


def test_doctor_finds_queues_that_take_no_driver_and_settings_that_are_refused(cluster: YarnCluster, held: Scenario) -> None:
    """It submits nothing."""
    before = len(cluster.applications())

    def found(env: dict[str, str], subject: str) -> list[tuple[str, str]]:
        done = held.command("doctor", held.name, "--output", "json", env=env_of(cluster) | env)
        findings = [finding for finding in json.loads(done.stdout) if finding["subject"] == subject]
        return [(finding["level"], finding["found"]) for finding in findings]

    def with_queue(name: str) -> dict[str, str]:
        return {"TIDEMARK_SPARK_CONF": env_of(cluster, **{"spark.yarn.queue": name})["TIDEMARK_SPARK_CONF"]}

    assert found({}, "yarn") == [("OK", "queue default takes applications")]
    assert found(with_queue("closed"), "yarn") == [("FAILURE", "its queue closed is STOPPED")]
    assert found(with_queue("nowhere"), "yarn") == [("FAILURE", "it has no queue nowhere")]
    (refused,) = found({"HADOOP_CONF_DIR": ""}, f"{held.name}: driver on the cluster")
    assert refused == ("FAILURE", "HADOOP_CONF_DIR: it is not set, and the master is yarn")
    assert len(cluster.applications()) == before

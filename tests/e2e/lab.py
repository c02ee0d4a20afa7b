"""What the end-to-end tests of a consumer's DAG share: an Airflow, consumers, points inside commits, and the final checks."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit, urlunsplit

import psutil
from tests.e2e.statsd import Statsd
from tests.support.documented import snippets
from tests.support.fetching import fetched
from tests.support.kafka_topics import Topics
from tests.support.points import Point, Points
from tests.support.scenario import LocalEngine
from tests.support.waiting import until, until_scheduler_looped

from tidemark import migrations, project
from tidemark.author.check import sink_ddl
from tidemark.connections import Connections
from tidemark.consume.run import consume, open_attempt
from tidemark.db import session, transaction
from tidemark.local import LocalStack
from tidemark.local.airflow import LocalAirflow
from tidemark.local.airflow_client import AirflowClient
from tidemark.local.airflow_settings import MARK, connections_env
from tidemark.local.processes import wait_gone
from tidemark.offsets.store import TaskIdentity
from tidemark.quality import check_conservation
from tidemark.sink.steps import Step
from tidemark.spec import find_consumer
from tidemark.spec.user_transform import load_transform

USERS = ("ann", "bob")
"""Users whose Airflow role allows them to trigger, clear, mark and answer, and nothing else."""

PASSWORD = "pg-mark-7f3a p@ss/w:rd%"
KAFKA_PASSWORD = "kafka-mark-9c1e"
SPARK_PASSWORD = "spark-mark-4d2b"
MARKS = ("pg-mark-7f3a", KAFKA_PASSWORD, SPARK_PASSWORD)
"""Parts of passwords, which must not appear anywhere. The part of the first password ends before the first character that an encoding would
change."""

TRANSFORM = '''
"""Records are numbers; each makes a row."""
import json
from pathlib import Path
from typing import TypedDict

from tidemark.transform import Fail, Record, Retry


class Row(TypedDict):
    number: int


def transform(record: Record) -> Row | None:
    return {"number": int(record.value or b"0")}


def times(record: Record) -> Row | None:
    """By a factor that is looked up, and may be wrong for a time."""
    return {"number": int(record.value or b"0") * int(Path("FACTOR").read_text())}


def served(record: Record) -> Row:
    """A service, which is a file, decides what happens to each record."""
    word = (record.value or b"").decode()
    answer = json.loads(Path("ANSWERS").read_text()).get(word)
    if answer == "retry":
        raise Retry(f"the service is down for {word}")
    if answer == "fail":
        raise Fail(f"{word} is broken")
    return {"number": int(word)}
'''

SUITE = """
{"name": "numbers", "expectations": [
  {"type": "expect_column_values_to_be_between", "kwargs": {"column": "number", "max_value": 1000000}, "severity": "critical"},
  {"type": "expect_column_values_to_be_between", "kwargs": {"column": "number", "min_value": 0}, "severity": "warning"}
]}
"""

SLEEPER = """
import os, subprocess, sys, time
from airflow.sdk import dag, task

@dag(schedule=None, catchup=False)
def sleeper():
    @task
    def sleeps():
        quiet = dict(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        driver = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True, **quiet)
        print("driver", driver.pid, "task", os.getpid())
        time.sleep(600)
    sleeps()

sleeper()
"""
"""A DAG whose task starts a process in another session and outlives the scheduler."""

DAEMONS = {"pyspark.daemon", "tidemark.spark.daemon"}

BATCH = 400
"""Records per batch: a run over a topic with 1000 records has three batches."""

CONSUMERS: dict[str, str] = {
    "happy": "",
    "empty": "",
    "word-lost": "",
    "driver-killed": "",
    "marked-failed": "",
    "marked-success": "",
    "timed-out": "airflow: {retries: 0, execution_timeout: 30s}",
    "critical": "validation: {suite: numbers}",
    "taken-back": "validation: {suite: numbers, on_failure: rewind}",
    "warning": "validation: {suite: numbers}",
    "nowhere": "connections: {postgres: no_such_connection}",
    "no-broker": "connections: {kafka: no_such_connection}",
    "no-pool": "airflow: {pool: no_such_pool}",
    "steps-1-2": "",
    "steps-3-4": "",
    "steps-5-7": "airflow: {retries: 3, retry_delay: 0s}",
    "team": "members: 2",
    "traced": "members: 2\nvalidation: {suite: numbers}",
    "asked": "",
    "unasked": "rewind: {approval: none}",
    "unsound": "rewind: {approval: none}\nvalidation: {suite: numbers}",
    "strict": "rewind: {own: false}",
    "live": "run: continuous",
    "followed": "",
    "owned": "rewind: {approval: none}\naccess: {}",
    "promised": "slo: {failed: 0}\nairflow: {owner: team-orders, retries: 2, retry_delay: 0s}",
    **dict.fromkeys(("ladder", "sound", "rotten"), "retry: {delays: [1h, 2h]}\nvalidation: {suite: numbers}"),  # nothing is due by itself
}
"""Consumers by name, with the special keys of each. Airflow knows all of them from the start. Each is used by one test, or by those of one
module."""
TRANSFORMS = {"live": "times", **dict.fromkeys(("ladder", "sound", "rotten"), "served")}
"""The functions of the consumers that do not use `transform`."""

ALARMS = """

_alarm = alarm


def alarm(context):
    _alarm(context)
    with open("ALARMED", "a") as file:
        print(context["dag_run"].run_id, context["task"].task_id, context["exception"], file=file)
"""
"""Extends the callback from the documentation: each call also adds a line to a file."""

COMMON = """
topics: [{name}]
transform: e2e_numbers:{transform}
sink: {{table: e2e.{table}}}
batch: {{max_records: {batch}}}
{special}
"""

BAD = """
topics: [bad]
transform: e2e_numbers:transform
sink: {table: e2e.bad}
batches: {max_records: 5}
"""


@dataclass
class Run:
    """A DAG run, whether a user or a program started it."""

    lab: Lab
    dag: str
    run_id: str

    @property
    def path(self) -> str:
        return f"dags/{self.dag}/dagRuns/{quote(self.run_id, safe='')}/taskInstances"

    def wait(self, timeout_s: float = 180) -> str:
        return self.lab.client.wait(self.dag, self.run_id, timeout_s)

    def tasks(self) -> dict[str, str | None]:
        return {task.task_id: task.state for task in self.lab.client.task_instances(self.dag, self.run_id)}

    def tries(self, task: str = "consume", map_index: int = -1) -> list[str | None]:
        return [one.state for one in self.lab.client.tries(self.dag, self.run_id, task, map_index)]

    def log(self, task: str = "consume", try_number: int = 1) -> str:
        return self.lab.client.log(self.dag, self.run_id, task, try_number)

    def xcom(self, task: str) -> Any:
        return self.lab.client.xcom(self.dag, self.run_id, task)

    def mark(self, state: str, task: str = "consume") -> None:
        self.lab.client.mark(state, self.dag, self.run_id, task)

    def question(self, task: str = "apply") -> dict[str, Any]:
        """Returns the task's question to the user, once it can be answered."""
        until(lambda: self.tasks().get(task) in {"awaiting_input", "failed", "upstream_failed"}, what="somebody is asked")
        assert self.tasks()[task] == "awaiting_input", self.log(task)
        instance = self.lab.client.get(f"{self.path}/{task}")["id"]
        until(lambda: not self.lab.works_at(instance), what="the executor has reported the task")
        until_scheduler_looped(self.lab.client)
        found: dict[str, Any] = self.lab.client.get(f"{self.path}/{task}/-1/hitlDetails")
        return found

    def answer(self, option: str, task: str = "apply", *, client: AirflowClient | None = None) -> None:
        """Answers as the admin, or as the user of ``client``."""
        (client or self.lab.client).patch(f"{self.path}/{task}/-1/hitlDetails", {"chosen_options": [option], "params_input": {}})


@dataclass
class Consumer:
    """One of `CONSUMERS`, with its topic, sink and processes."""

    lab: Lab
    name: str
    produced: int = 0
    brakes: list[Point] = field(default_factory=list)

    @property
    def dag(self) -> str:
        return f"consume__{self.name}"

    @property
    def table(self) -> str:
        return f"e2e.{table_name(self.name)}"

    def produce(self, *numbers: int, partition: int = 0) -> None:
        self.lab.topics.produce(self.name, [str(number) for number in numbers], partition=partition)
        self.produced += len(numbers)

    def trigger(self) -> Run:
        run = self.lab.trigger(self.dag)
        self.lab.client.unpause(self.dag)
        return run

    def read_here(self, task: TaskIdentity | None = None) -> None:
        """Reads the records of the topic in this process, as a try of ``task``. A test that is not about runs does not need a driver."""
        spec = find_consumer(self.name, self.lab.folder / "consumers")
        connections = Connections(self.lab.url, {"bootstrap.servers": self.lab.topics.servers}, "local[1]")
        transform = load_transform(spec, [self.lab.folder / "transforms"])
        attempt_id = open_attempt(self.lab.url, spec.group, task or TaskIdentity())
        consume(spec, connections, attempt_id, lambda *_: LocalEngine(spec, transform, connections, ()))

    # The brake

    def brake(self, from_offset: int = BATCH) -> None:
        """Stops the first commit of a slice that starts at ``from_offset`` or later just before COMMIT, until `release`."""
        self.brakes.append(self.lab.points.at(Step.COMMIT, topic=self.name, start=from_offset))

    def release(self) -> None:
        for point in self.brakes:
            point.release()

    def trigger_and_stop_in_the_middle(self) -> tuple[Run, psutil.Process]:
        """Starts a run that commits its first batch and stops before the COMMIT of its second. Returns the run and its driver."""
        self.brake()
        run = self.trigger()
        driver = self.lab.driver(self.brakes[-1].reached().attempt_id)
        assert driver is not None
        return run, driver

    # Postgres

    def rows(self) -> list[int]:
        return [number for (number,) in self.lab.sql(f"SELECT number FROM {self.table} ORDER BY kafka_partition, kafka_offset")]

    def validated(self) -> list[int]:
        return [number for (number,) in self.lab.sql(f"SELECT number FROM {self.table}_validated ORDER BY kafka_offset")]

    def position(self) -> int:
        found = self.lab.sql(
            "SELECT next_offset FROM tidemark.partition_offset JOIN tidemark.consumer_group USING (group_id) WHERE name = %s", self.name
        )
        return int(found[0][0])

    def attempts(self) -> list[tuple[str, int, str | None]]:
        """The state, try number and kind of error of every attempt, oldest first."""
        return self.lab.sql(
            "SELECT attempt.state, try_number, error ->> 'type' FROM tidemark.attempt JOIN tidemark.consumer_group USING (group_id)"
            " WHERE name = %s ORDER BY attempt_id",
            self.name,
        )


class Lab:
    """The session's Airflow and everything around it."""

    def __init__(self, folder: Path, stack: LocalStack) -> None:
        self.folder = folder
        self.stack = stack
        self.points = Points(folder / "points")
        self.topics = Topics(stack.kafka.bootstrap_servers())
        self.statsd = Statsd()
        self.url = ""
        self._used: dict[str, Consumer] = {}

    def up(self) -> None:
        """Starts Airflow. Returns when it is healthy and knows every DAG."""
        for name in ("consumers", "transforms", "expectations", "points"):
            (self.folder / name).mkdir()
        self.set_factor(1)
        self.answer({})
        code = TRANSFORM.replace("FACTOR", str(self.folder / "factor")).replace("ANSWERS", str(self.folder / "answers"))
        (self.folder / "transforms" / "e2e_numbers.py").write_text(code)
        shutil.copytree(project.root() / "dags", self.folder / "dags")
        (self.folder / "dags" / "sleeper.py").write_text(SLEEPER)
        self.points.install(self.folder / "transforms")
        (self.folder / "expectations" / "numbers.json").write_text(SUITE)
        (self.folder / "airflow" / "config").mkdir(parents=True)
        (policy,) = (code for code in snippets("docs/operating.md", "python") if "task_policy" in code)
        (self.folder / "airflow" / "config" / "airflow_local_settings.py").write_text(policy + ALARMS.replace("ALARMED", str(self.alarmed)))
        for name, special in CONSUMERS.items():
            special = special if "airflow:" in special else f"{special}\nairflow: {{retries: 2, retry_delay: 0s}}"
            transform = TRANSFORMS.get(name, "transform")
            text = COMMON.format(name=name, table=table_name(name), batch=BATCH, special=special, transform=transform)
            (self.folder / "consumers" / f"{name}.yaml").write_text(text)
        (self.folder / "consumers" / "bad.yaml").write_text(BAD)
        self.url = self._database()
        self._sinks()
        kafka = {
            "bootstrap.servers": self.topics.servers,
            "sasl.password": KAFKA_PASSWORD,  # unused without SASL, but still a password
        }
        secret = {"spark.hadoop.fs.s3a.secret.key": SPARK_PASSWORD}
        connections = connections_env(self.url, kafka, "local[1]")
        self.airflow = LocalAirflow(
            self.folder / "airflow",
            metadata_url=self.stack.create_database("airflow_e2e"),
            env={
                **connections,
                "AIRFLOW_CONN_TIDEMARK_SPARK": json.dumps({"conn_type": "spark", "host": "local[1]", "extra": {"conf": secret}}),
                "TIDEMARK_CONSUMERS": str(self.folder / "consumers"),
                "TIDEMARK_TRANSFORMS": str(self.folder / "transforms"),
                "TIDEMARK_EXPECTATIONS": str(self.folder / "expectations"),
                **self.points.env,
                **self.statsd.env,
                "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_USERS": ",".join(["admin:admin", *(f"{name}:user" for name in USERS)]),
                # Airflow takes a supervisor or scheduler for dead after 20 s. On a busy machine, a heartbeat may be 10 s late.
                "AIRFLOW__SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT": "20",
                "AIRFLOW__SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT_DETECTION_INTERVAL": "1",
                "AIRFLOW__SCHEDULER__ORPHANED_TASKS_CHECK_INTERVAL": "2",
                "AIRFLOW__SCHEDULER__SCHEDULER_HEALTH_CHECK_THRESHOLD": "20",
                "AIRFLOW__SCHEDULER__SCHEDULER_HEARTBEAT_SEC": "0.5",  # tells the tests when the scheduler's loop has run again
                "AIRFLOW__WORKERS__MIN_HEARTBEAT_INTERVAL": "1",
                # The files do not change, and parsing them every 10 s takes an eighth of a core.
                "AIRFLOW__DAG_PROCESSOR__MIN_FILE_PROCESS_INTERVAL": "30",
                "AIRFLOW__DAG_PROCESSOR__REFRESH_INTERVAL": "3600",
            },
            dags=self.folder / "dags",
            plugins=None,
        )
        self.airflow.up()
        self.client = self.airflow.client()
        others = ("drain_retries", "redrive", "discard", "rewind", "rewind__owned", "watch", "sleeper")
        for dag in (*(f"consume__{name}" for name in (*CONSUMERS, "bad")), *others):
            self.client.wait_for_dag(dag, timeout_s=180)

    def kill_scheduler(self) -> None:
        """Kills its process group, as a crash would, and waits until the group is gone. A driver in a session of its own stays."""
        (leader,) = (process.pid for process in self.airflow.status().processes if process.name == "scheduler")
        group = []
        for process in self.airflow.family("scheduler"):
            with contextlib.suppress(ProcessLookupError):
                if os.getpgid(process.pid) == leader:
                    group.append(process)
        os.killpg(leader, signal.SIGKILL)
        assert wait_gone(group, 60)

    def start_scheduler(self) -> None:
        """Starts it again. Unlike `LocalAirflow.up`, this leaves its predecessor's processes running."""
        self.airflow._launch("scheduler")
        until(lambda: self.airflow.status().healthy, what="Airflow has its scheduler again")

    def sign_in(self, name: str) -> AirflowClient:
        """A client signed in as one of `USERS`, with the password that Airflow generated when it started. The caller closes it."""
        return AirflowClient(self.airflow.url, user=name, password=json.loads((self.airflow.folder / "passwords.json").read_text())[name])

    @property
    def alarmed(self) -> Path:
        """Gets a line for each call of the callback that the documentation shows."""
        return self.folder / "alarmed"

    def set_factor(self, factor: int) -> None:
        """Sets the factor by which the transform `times` multiplies from now on."""
        self._say("factor", factor)

    def answer(self, answers: dict[str, str]) -> None:
        """Sets what the service of the transform `served` answers from now on, by the record's number."""
        self._say("answers", answers)

    def _say(self, name: str, what: Any) -> None:
        fresh = self.folder / f"{name}.new"
        fresh.write_text(json.dumps(what))
        fresh.rename(self.folder / name)

    def down(self) -> None:
        if hasattr(self, "airflow"):
            self.airflow.down()
            assert self.family() == []
        if hasattr(self, "client"):
            self.client.close()
        self.statsd.close()

    def repair(self) -> None:
        """Starts those of the four processes that an earlier test has killed."""
        self.airflow.up()

    def consumer(self, name: str, partitions: int = 1) -> Consumer:
        """The consumer with its topic, which is created on first use. `CONSUMERS` has its special keys."""
        if name not in self._used:
            self.topics.create(partitions, name=name)
            self._used[name] = Consumer(self, name)
        return self._used[name]

    def trigger(self, dag: str, conf: dict[str, Any] | None = None, *, client: AirflowClient | None = None) -> Run:
        return Run(self, dag, (client or self.client).trigger(dag, conf))

    def sql(self, statement: str, *parameters: Any) -> list[Any]:
        with session(self.url) as connection, transaction(connection) as cursor:
            cursor.execute(statement, parameters or None)
            return fetched(cursor)

    def works_at(self, instance: str) -> bool:
        """Whether a worker of the executor is still at this task instance. Its title has the id, cut to the length of the scheduler's
        command line."""
        for process in self.airflow.family("scheduler"):
            with contextlib.suppress(psutil.Error):
                if any(instance[:24] in word for word in process.cmdline()):
                    return True
        return False

    def family(self) -> list[psutil.Process]:
        """Every process that this Airflow has started, in any session."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if process.environ().get(MARK, "").endswith(f":{self.airflow.folder}") and process.pid != os.getpid():
                    found.append(process)
        return found

    def driver(self, attempt_id: int) -> psutil.Process | None:
        """The process that a keeper has forked for this attempt, or that the task itself has started."""
        for process in self.family():
            with contextlib.suppress(psutil.Error):
                if process.name() == f"attempt {attempt_id}" or _own_driver(process.cmdline(), attempt_id):
                    return process
        return None

    def drivers_and_jvms(self) -> list[str]:
        """The running drivers, JVMs and Python workers, except the application that small runs share and its idle daemon."""
        found = []
        for process in self.family():
            with contextlib.suppress(psutil.Error):
                words, name, parent = process.cmdline(), process.name(), process.parent()
                above = parent.name() if parent else ""
                shared = name == "java" and above == "tidemark spark"
                idle = DAEMONS & set(words) and above == "java"
                of_a_run = name.startswith("attempt ") or name == "java" or ({str(project.consume_job())} | DAEMONS) & set(words)
                if of_a_run and not shared and not idle:
                    found.append(f"{name}: {' '.join(words)}"[:200])
        return found

    # Checks at the end of each module

    def check_nothing_runs(self) -> None:
        """Waits until no driver, JVM or Python worker is running."""
        until(lambda: not self.drivers_and_jvms(), within_s=180, what="drivers and JVMs gone")

    def check_exactly_once(self) -> None:
        """Checks that committed records are in the sink once, and that ledger, sink, failed records and positions agree."""
        for consumer in self._used.values():
            if consumer.attempts():
                with session(self.url) as connection, transaction(connection) as cursor:
                    assert check_conservation(cursor, consumer.name, [consumer.table]) == []

    # Postgres

    def _database(self) -> str:
        """Creates a migrated database, and a role whose password can be recognised. Returns the URL."""
        url = self.stack.create_database("e2e")
        migrations.migrate(url)
        with session(url) as connection, transaction(connection) as cursor:
            cursor.execute("CREATE ROLE e2e_loader LOGIN SUPERUSER PASSWORD %s", (PASSWORD,))
        parts = urlsplit(url)
        return urlunsplit(parts._replace(netloc=f"e2e_loader:{quote(PASSWORD, safe='')}@{parts.hostname}:{parts.port}"))

    def _sinks(self) -> None:
        folder = self.folder / "consumers"
        with session(self.url) as connection, transaction(connection) as cursor:
            for name in CONSUMERS:
                spec = find_consumer(name, folder)
                cursor.execute(sink_ddl(spec, load_transform(spec, [self.folder / "transforms"]), _no_spark))


def _own_driver(words: list[str], attempt_id: int) -> bool:
    return str(project.consume_job()) in words and words[words.index("--attempt") + 1] == str(attempt_id)


def table_name(consumer: str) -> str:
    return consumer.replace("-", "_")


def _no_spark(*_: Any) -> Any:
    raise AssertionError("no consumer of these tests is of the Spark form")

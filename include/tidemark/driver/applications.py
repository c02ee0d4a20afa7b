"""Applications on a cluster manager, YARN or Kubernetes: finds them, reads their state and kills them, with the programs of pyspark.

A program starts a JVM, which takes a second or two. So it is asked only when an attempt's row does not answer the question.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path

from tidemark.driver.call import call
from tidemark.errors import BadInput, Unavailable
from tidemark.packages import ExtraMissing

ANSWER_LIMIT_S = 120
YARN_CLIENT = "org.apache.hadoop.yarn.client.cli.ApplicationCLI"
"""The class of ``yarn application``."""
QUEUE_CLIENT = "org.apache.hadoop.yarn.client.cli.QueueCLI"
"""The class of ``yarn queue``."""
FILE_CLIENT = "org.apache.hadoop.fs.FsShell"
"""The class of ``hadoop fs``."""
HADOOP_CONF = ("HADOOP_CONF_DIR", "YARN_CONF_DIR")
_NOISE = re.compile(r"^(\d\d/\d\d/\d\d |\d{4}-\d\d-\d\d|WARNING|SLF4J|Using Spark's|Picked up |\s+at |\s*$)")
"""Lines of a program's output that do not explain its failure."""


class Stage(StrEnum):
    """The state of an application. ``GONE``: the cluster manager does not know it, or no longer."""

    WAITING = "waiting"
    RUNNING = "running"
    ENDED = "ended"
    GONE = "gone"


@dataclass(frozen=True, slots=True)
class Report:
    """What the cluster manager says about an application. ``why`` is its reason, empty if it gives none."""

    stage: Stage
    why: str = ""


@dataclass(frozen=True, slots=True)
class Application:
    """An application as stored in its attempt's row.

    ``name`` is unique: a tag on YARN, the name of the driver's pod on Kubernetes. ``id`` is what the cluster manager calls it, and `None`
    until the submission has reported it. ``staging`` is the folder of the files that YARN's client has uploaded.
    """

    master: str
    name: str
    id: str | None = None
    staging: str | None = None
    url: str | None = None

    @property
    def shown(self) -> str:
        return f"{self.id or self.name}{f' ({self.url})' if self.url else ''}"


class ClusterUnavailable(Unavailable):
    """The cluster manager did not answer; ``cause`` is the message of its client."""

    master: str
    cause: str

    def __str__(self) -> str:
        return f"The cluster manager {self.master} does not answer: {self.cause}"


def find(application: Application) -> str | None:
    """The id of an application that was submitted under this name and has not ended. Raises `ClusterUnavailable`."""
    if application.id is not None:
        return application.id if report(application).stage in (Stage.WAITING, Stage.RUNNING) else None
    listed = _yarn(application, "-list", "-appTags", application.name, "-appStates", "NEW,NEW_SAVING,SUBMITTED,ACCEPTED,RUNNING")
    match = re.search(r"^(application_\d+_\d+)\s", listed, re.MULTILINE)
    return match and match[1]


def report(application: Application) -> Report:
    """An application's state. Raises `ClusterUnavailable`."""
    if application.id is None:
        return Report(Stage.WAITING if find(application) else Stage.GONE)
    if application.master == "yarn":
        try:
            return yarn_report(_yarn(application, "-status", application.id))
        except ClusterUnavailable as error:
            if "doesn't exist" in error.cause:
                return Report(Stage.GONE, error.cause)
            raise
    return pod_report(_run(application, [*_submit(application), "--status", application.id]))


def kill(application: Application) -> None:
    """Kills an application, and waits until the cluster manager has answered. Raises `ClusterUnavailable`.

    Also removes what YARN's client has uploaded. Spark does that at an application's end, but not for one that never started.
    """
    if application.id is None:
        application = replace(application, id=find(application))
    if application.id is None:
        return
    if application.master != "yarn":
        _run(application, [*_submit(application), "--kill", application.id])
        return
    _yarn(application, "-kill", application.id)
    if application.staging:
        folder = f"{application.staging}/{application.id}"
        _run(application, [str(spark_home() / "bin" / "spark-class"), FILE_CLIENT, "-rm", "-r", "-f", "-skipTrash", folder])


def start_to_kill(application: Application) -> None:
    """Starts a process that kills an application and outlives the caller. Safe in a signal handler: waits for nothing."""
    code = "import sys, json; from tidemark.driver.applications import Application, kill; kill(Application(**json.loads(sys.argv[1])))"
    command = [sys.executable, "-c", code, json.dumps(asdict(application))]
    silent = [(os.POSIX_SPAWN_OPEN, stream, os.devnull, os.O_RDWR, 0) for stream in range(3)]
    os.posix_spawn(command[0], command, os.environ, file_actions=silent, setsid=True)


def yarn_report(text: str) -> Report:
    """Reads the output of ``yarn application -status``."""
    fields = dict(re.findall(r"^\s*([A-Za-z-]+) : ?(.*)$", text, re.MULTILINE))
    state = fields.get("State", "")
    _, _, diagnostics = text.partition("Diagnostics : ")
    why = " ".join(diagnostics.partition("Unmanaged Application : ")[0].split())
    if state in ("FINISHED", "FAILED", "KILLED"):
        return Report(Stage.ENDED, f"{fields.get('Final-State', state)}{f': {why}' if why and why != 'N/A' else ''}")
    return Report(Stage.RUNNING if state == "RUNNING" else Stage.WAITING, "" if why == "N/A" else why)


def pod_report(text: str) -> Report:
    """Reads the output of ``spark-submit --status`` on Kubernetes."""
    phase = re.search(r"phase: (\w+)", text)
    if phase is None:
        return Report(Stage.GONE)
    reasons = re.findall(r"(?:termination reason|container state|exit code): ?(\S.*)", text)
    stages = {"Pending": Stage.WAITING, "Running": Stage.RUNNING, "Unknown": Stage.RUNNING}
    return Report(stages.get(phase[1], Stage.ENDED), ", ".join([phase[1], *(reason.strip() for reason in reasons)]))


def queue_problem(queue: str) -> str | None:
    """Why YARN's queue takes no applications; `None` if it takes them. Raises `ClusterUnavailable`."""
    try:
        text = _run(Application("yarn", ""), [str(spark_home() / "bin" / "spark-class"), QUEUE_CLIENT, "-status", queue])
    except ClusterUnavailable as error:
        if "Cannot get queue" in error.cause:
            return f"it has no queue {queue}"
        raise
    state = re.search(r"State : (\w+)", text)
    return None if state is None or state[1] == "RUNNING" else f"its queue {queue} is {state[1]}"


def require_hadoop_conf() -> None:
    """Raises `BadInput` unless the environment, or Spark's own ``spark-env.sh``, names the folder with YARN's settings."""
    variable = next((name for name in HADOOP_CONF if os.environ.get(name)), None)
    if variable is None:
        if (spark_conf_dir() / "spark-env.sh").is_file():
            return
        fix = "Set it to the folder with yarn-site.xml and core-site.xml: /etc/hadoop/conf."
        raise BadInput(what=HADOOP_CONF[0], found="it is not set, and the master is yarn", fix=fix)
    folder = os.environ[variable]
    if not (Path(folder) / "yarn-site.xml").is_file():
        raise BadInput(what=variable, found=f"{folder} has no yarn-site.xml", fix="Name the folder with YARN's client settings.")


def spark_conf_dir() -> Path:
    """The folder of Spark's own configuration."""
    return Path(os.environ.get("SPARK_CONF_DIR") or spark_home() / "conf")


def spark_home() -> Path:
    """The folder of the Spark that submits: ``SPARK_HOME``, or PySpark of the driver's environment. Raises `BadInput`, `ExtraMissing`."""
    if not (home := os.environ.get("SPARK_HOME")):
        return call(_pyspark_folder, with_keeper=False)
    if not (Path(home) / "bin" / "spark-submit").is_file():
        raise BadInput(what="SPARK_HOME", found=f"{home} has no bin/spark-submit", fix="Name Spark's folder, or unset it to use PySpark.")
    return Path(home)


def _pyspark_folder() -> Path:
    pyspark = find_spec("pyspark")
    if pyspark is None or pyspark.origin is None:
        raise ExtraMissing(module="pyspark", extra="driver")
    return Path(pyspark.origin).parent


def client_env() -> dict[str, str]:
    """The environment of the programs that talk to the cluster manager: this process's, without Tidemark's variables, which may be
    secrets."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("TIDEMARK_", "AIRFLOW_CONN_", "PYSPARK_"))}
    return {**kept, "SPARK_HOME": str(spark_home())}


def failure_cause(output: str) -> str:
    """The lines of a program's output that explain its failure."""
    exceptions = re.findall(r"^(?:Exception in thread \S+ |Caused by: )?[\w.$]+(?:Exception|Error): .*$", output, re.MULTILINE)
    lines = [line.strip() for line in output.splitlines() if not _NOISE.match(line)]
    return str(exceptions[-1]) if exceptions else " ".join(lines[-3:]) or "it printed nothing"


def _submit(application: Application) -> list[str]:
    return [str(spark_home() / "bin" / "spark-submit"), "--master", application.master]


def _yarn(application: Application, *words: str) -> str:
    return _run(application, [str(spark_home() / "bin" / "spark-class"), YARN_CLIENT, "application", *words])


def _run(application: Application, command: list[str]) -> str:
    try:
        done = subprocess.run(
            command,
            env=client_env(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=ANSWER_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ClusterUnavailable(master=application.master, cause=f"no answer within {ANSWER_LIMIT_S} s") from None
    if done.returncode:
        raise ClusterUnavailable(master=application.master, cause=failure_cause(done.stdout))
    return done.stdout

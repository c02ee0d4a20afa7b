"""Submits a driver to a cluster (``deploy-mode: cluster``), with everything that it needs there.

On YARN, the driver gets its connections in a file, which only the user's applications can read: it travels through the application's
staging folder, and is never an argument, a variable or a setting. With it travels the project: the consumer's file, transforms and schemas,
and the jars of Spark's Kafka connector. On Kubernetes, connections and project come from the driver's pod: from secrets and from the image.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import subprocess
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

from tidemark import project
from tidemark.connections import DEPLOY_MODE, Connections, on_cluster
from tidemark.driver.applications import Application, client_env, failure_cause, require_hadoop_conf, spark_conf_dir, spark_home
from tidemark.driver.call import call
from tidemark.driver.environment import CALLER_VERSION, interpreter
from tidemark.driver.process import child_env
from tidemark.errors import BadInput, Unavailable
from tidemark.jvm.jars import JAR_SETTINGS, spark_jars
from tidemark.packages import version
from tidemark.spec import ConsumerSpec
from tidemark.text.duration import parse_duration
from tidemark.wires import guarded

PROJECT, VARIABLES = "tidemark-project", "tidemark-variables.json"
"""What the driver finds in its working folder on YARN."""
START_LIMIT = "spark.tidemark.startLimit"
"""The setting that limits the wait for a driver to start, in a queue for example."""
DEFAULT_START_LIMIT = timedelta(minutes=10)
POLL_S = 0.2
ESCAPES = {"\n": "n", "\r": "r", "\t": "t", "\f": "f"}
"""The characters that Java's properties write as a letter after a backslash."""
OVERRIDES = {
    "spark.yarn.maxAppAttempts": "1",  # the next attempt is Airflow's
    "spark.yarn.submit.waitAppCompletion": "false",
    "spark.kubernetes.submission.waitAppCompletion": "false",
}


class SubmissionFailed(Unavailable):
    """spark-submit failed, so no driver will start."""

    master: str
    cause: str

    def __str__(self) -> str:
        return f"The driver could not be submitted to {self.master}: {self.cause}"


class SubmissionStopped(Unavailable):
    """The caller stopped the submission."""

    def __str__(self) -> str:
        return "The submission was stopped."


@dataclass(frozen=True, slots=True)
class ClusterSettings:
    """The settings with which a consumer's drivers are submitted to a cluster."""

    master: str
    conf: Mapping[str, str]
    start_limit: timedelta

    @property
    def on_yarn(self) -> bool:
        return self.master == "yarn"


def cluster_settings(spec: ConsumerSpec, connections: Connections) -> ClusterSettings | None:
    """The consumer's settings for drivers on a cluster; `None` if its drivers run beside their caller.

    The consumer's file overrides the connection, which overrides Spark's own configuration. Raises `BadInput` for settings with which a
    submission would fail.
    """
    own = {**connections.spark_conf, **spec.spark.conf}
    if not on_cluster(connections.spark_master, own):
        return None
    master = own.pop("spark.master", connections.spark_master)
    del own[DEPLOY_MODE]
    if master == "yarn":
        require_hadoop_conf()
    conf = {"spark.pyspark.python": interpreter(), **_spark_defaults(), **own, **OVERRIDES}
    try:
        limit = parse_duration(conf[START_LIMIT]) if START_LIMIT in conf else DEFAULT_START_LIMIT
    except BadInput as error:
        raise replace(error, what=START_LIMIT, found=f"{error.found} is not a duration") from None
    return ClusterSettings(master, {**guarded(master, conf), **conf}, limit)


def new_application(settings: ClusterSettings, consumer: str, attempt_id: int) -> Application:
    """The application of an attempt, before it is submitted. Its name is unique, even among databases."""
    label = re.sub(r"[^a-z0-9]+", "-", consumer.lower()).strip("-")[:30] or "consumer"
    name = f"tidemark-{label}-{attempt_id}-{secrets.token_hex(4)}"
    if settings.on_yarn:
        return Application(settings.master, name)
    return Application(settings.master, name, f"{settings.conf.get('spark.kubernetes.namespace', 'default')}:{name}")


def submit(
    application: Application,
    settings: ClusterSettings,
    connections: Connections,
    arguments: Sequence[str],
    title: str,
    stopped: Callable[[], bool],
) -> Application:
    """Submits the driver with these arguments of `spark_jobs/consume.py`. Returns the application with its id and its address.

    Raises `SubmissionFailed`, and `SubmissionStopped` once ``stopped`` returns True.
    """
    job = project.consume_job() if settings.on_yarn else f"local://{project.consume_job()}"
    with _files(application, settings, connections) as conf, tempfile.TemporaryFile("w+", errors="replace") as output:
        command = [interpreter(), "-m", "tidemark.driver.process", str(spark_home() / "bin" / "spark-submit")]
        command += ["--master", settings.master, "--deploy-mode", "cluster", "--properties-file", str(conf), "--name", title]
        command += [str(job), *arguments, "--application", application.name]
        process = subprocess.Popen(
            command, env=child_env(client_env()), stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
        try:
            _wait(process, settings, stopped)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        output.seek(0)
        text = output.read()
    if process.returncode:
        raise SubmissionFailed(master=settings.master, cause=failure_cause(text))
    if not settings.on_yarn:
        return application
    patterns = {
        "id": r"\b(application_\d+_\d+)\b",
        "url": r"tracking URL: (http\S+)",
        "staging": r"Uploading resource .* -> (\S+)/application_",
    }
    return replace(application, **{name: match[1] for name, pattern in patterns.items() if (match := re.search(pattern, text))})


def _wait(process: subprocess.Popen[bytes], settings: ClusterSettings, stopped: Callable[[], bool]) -> None:
    deadline = time.monotonic() + settings.start_limit.total_seconds()
    while process.poll() is None:
        if stopped():
            raise SubmissionStopped
        if time.monotonic() >= deadline:
            raise SubmissionFailed(master=settings.master, cause=f"spark-submit did not end within {settings.start_limit}")
        time.sleep(POLL_S)


@contextmanager
def _files(application: Application, settings: ClusterSettings, connections: Connections) -> Iterator[Path]:
    """Writes the files of a submission into a folder of this user alone, and removes them after the block. Returns the settings' file."""
    folder = Path(tempfile.mkdtemp(prefix="tidemark-submit-"))
    try:
        conf = dict(settings.conf)
        if settings.on_yarn:
            variables = {**replace(connections.read(), spark_conf={}).env(), "TIDEMARK_HOME": PROJECT, CALLER_VERSION: version()}
            (archive := folder / "project.zip").touch(0o600)
            _zip_project(archive)
            _write(folder / VARIABLES, json.dumps(variables))
            added = {
                "spark.files": f"{folder / VARIABLES}#{VARIABLES}",
                "spark.archives": f"{archive}#{PROJECT}",
                "spark.yarn.tags": application.name,
            }
            conf |= {key: f"{conf[key]},{value}" if conf.get(key) else value for key, value in added.items()}
            if not any(name in conf for name in JAR_SETTINGS):
                conf["spark.jars"] = ",".join(map(str, call(spark_jars, with_keeper=False)))
        else:
            conf["spark.kubernetes.driver.pod.name"] = application.name
            conf[f"spark.kubernetes.driverEnv.{CALLER_VERSION}"] = version()
        _write(folder / "spark.properties", "".join(f"{_escaped(key)} = {_escaped(value)}\n" for key, value in conf.items()))
        yield folder / "spark.properties"
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _zip_project(archive: Path) -> None:
    """Packs what a driver reads of the project, in the folders in which it looks for them."""
    parts = {project.CONSUMERS: project.consumers(), "spark_jobs/transforms": project.transforms(), "include/schemas": project.schemas()}
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED, strict_timestamps=False) as out:
        for name, folder in parts.items():
            for file in project.files_below(folder):
                if "__pycache__" not in file.parts:
                    out.write(file, f"{name}/{file.relative_to(folder)}")


def read_variables() -> None:
    """Sets the variables that came with a driver to its cluster. Without their file, the pod has set them."""
    file = Path(VARIABLES)
    if file.is_file():
        os.environ.update(json.loads(file.read_text()))


def _write(file: Path, text: str) -> None:
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as out:
        out.write(text)


def _escaped(text: str) -> str:
    """A key or a value as Java's properties have it."""
    return re.sub(r"[\\:=#! \n\r\t\f]", lambda match: "\\" + ESCAPES.get(match[0], match[0]), text)


def _unescaped(text: str) -> str:
    characters = {letter: character for character, letter in ESCAPES.items()}
    return re.sub(r"\\(?:\n\s*|(.))", lambda match: characters.get(match[1], match[1]) if match[1] else "", text)


def _spark_defaults() -> dict[str, str]:
    """The settings of Spark's own configuration, which spark-submit ignores if it gets a ``--properties-file``."""
    file = spark_conf_dir() / "spark-defaults.conf"
    if not file.is_file():
        return {}
    lines = re.findall(r"(?:\\.|[^\\\n])+", file.read_text(errors="replace"), re.DOTALL)  # a line that ends with a backslash goes on
    pairs = (re.split(r"\s*[=:\s]\s*", line.strip(), maxsplit=1) for line in lines)
    return {pair[0]: _unescaped(pair[1]) for pair in pairs if len(pair) == 2 and pair[0].startswith("spark.")}

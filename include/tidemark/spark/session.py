"""The Spark session of a driver."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tidemark.connections import Connections
from tidemark.local.jars import spark_jars
from tidemark.local.java import find_java
from tidemark.spec import ConsumerSpec

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

BRINGS_JARS = ("spark.jars", "spark.jars.packages", "spark.driver.extraClassPath")
"""Settings by which a user or a cluster's image brings the Kafka connector itself."""

SETTINGS = {
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.adaptive.enabled": "false",  # the plan that was checked is the plan that runs
    "spark.python.worker.reuse": "true",
    "spark.ui.showConsoleProgress": "false",
    "spark.ui.enabled": "false",
}
LOCAL_SETTINGS = {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}


def start_session(spec: ConsumerSpec, connections: Connections, attempt_id: int, folders: Sequence[Path]) -> SparkSession:
    """Starts Spark with the connector's jars and the users' transforms at hand. The spec's settings win over the connection's.

    Started by spark-submit, the driver takes the master that spark-submit was told.
    """
    user = {**connections.spark_conf, **spec.spark.conf}
    settings = dict(SETTINGS)
    if not any(name in user for name in BRINGS_JARS) and "SPARK_SUBMIT_JARS" not in os.environ:
        settings["spark.jars"] = ",".join(str(jar) for jar in spark_jars())
    submitted = "PYSPARK_GATEWAY_PORT" in os.environ
    spark = _session(f"tidemark {spec.name} attempt {attempt_id}", None if submitted else connections.spark_master, {**settings, **user})
    spark.sparkContext.addPyFile(_zipped([folder for folder in folders if folder.is_dir()]))
    return spark


def small_session() -> SparkSession:
    """A session to ask for schemas: local, without Kafka."""
    return _session("tidemark check", "local[1]", dict(SETTINGS))


def _session(name: str, master: str | None, settings: dict[str, str]) -> SparkSession:
    find_java()
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    if master is not None and master.startswith("local"):
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
        settings = {**LOCAL_SETTINGS, **settings}
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.appName(name)
    if master is not None:
        builder = builder.master(master)
    for key, value in settings.items():
        builder = builder.config(key, value)
    with _said_only_on_failure():
        spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    return spark


@contextlib.contextmanager
def _said_only_on_failure() -> Iterator[None]:
    """What the JVM writes to stderr while it starts (a dozen lines that help nobody) is kept back unless starting fails.

    The JVM inherits the file descriptor, so its later words go the same way: what matters of them comes as exceptions.
    """
    with tempfile.TemporaryFile() as kept:
        sys.stderr.flush()
        stderr = os.dup(2)
        os.dup2(kept.fileno(), 2)
        try:
            yield
        except BaseException:
            kept.seek(0)
            os.write(stderr, kept.read())
            raise
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)


def _zipped(folders: Sequence[Path]) -> str:
    """The folders' modules as one zip file that executors can import from; of two files with one name the first folder's counts."""
    archive = Path(tempfile.mkdtemp(prefix="tidemark-")) / "transforms.zip"
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as out:
        for folder in folders:
            for file in sorted(folder.rglob("*.py")):
                if (name := str(file.relative_to(folder))) not in out.namelist():
                    out.write(file, name)
    return str(archive)

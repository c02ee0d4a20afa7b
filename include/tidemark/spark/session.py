"""The Spark session of a driver."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tidemark import project
from tidemark.connections import Connections
from tidemark.driver.applications import require_hadoop_conf, spark_conf_dir
from tidemark.driver.process import children
from tidemark.errors import Refused, Unavailable
from tidemark.jvm.jars import JAR_SETTINGS
from tidemark.jvm.java import find_java, released
from tidemark.spark.class_archive import Archive
from tidemark.spark.errors import lost_jvm, translated
from tidemark.spark.releases import connector_jars, require_spark_form
from tidemark.spark.shared import borrow_session
from tidemark.spec import ConsumerSpec
from tidemark.spec.user_transform import Form
from tidemark.wires import guarded, is_local, of_spark, on_loopback

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = logging.getLogger(__name__)

PYTHON = "spark.pyspark.python"
"""The setting for the executors' Python if it differs from the driver's, as in a packed environment (``spark.archives``)."""

URL_PASSWORD = r"://[^/@\s]*:[^/\s]*@"  # noqa: S105 - an expression
SETTINGS = {
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.adaptive.enabled": "false",  # so that the checked plan is the plan that runs
    "spark.python.worker.reuse": "true",
    "spark.ui.showConsoleProgress": "false",
    "spark.ui.enabled": "false",
    # each batch's reader has its own name and is never reused: kept for Spark's default of 5 minutes, readers would fill the heap
    "spark.kafka.consumer.cache.capacity": "1",
    "spark.kafka.consumer.cache.timeout": "1s",
    "spark.kafka.consumer.cache.evictorThreadRunInterval": "1s",
    "spark.kafka.consumer.fetchedData.cache.timeout": "1s",
    "spark.kafka.consumer.fetchedData.cache.evictorThreadRunInterval": "1s",
    # Spark's default expression, plus what Kafka's client and the clients of object stores call credentials, and passwords in URLs. Spark
    # looks for it in keys and in values.
    "spark.redaction.regex": r"(?i)secret|passw|token|(access|account|api|private)[._-]?key|keystore[.]key|jaas|credential|[.]sas[.]|"
    + URL_PASSWORD,
}
CLASS_PATH = "spark.driver.extraClassPath"

EXTRA_OPTIONS = "spark.driver.extraJavaOptions"
OPTIONS = "spark.driver.defaultJavaOptions"
"""Spark appends the user's `EXTRA_OPTIONS` to these. The JVM uses the last of a repeated option."""

IGNORE_UNUSABLE = ("-XX:+VerifySharedSpaces", "-Xlog:cds*=off")
"""Ignore an unusable archive, without a message on stdout."""

C1 = "-XX:TieredStopAtLevel=1"
"""Use the fast compiler only. In a small run, the other one takes half of the JVM's CPU time."""

COLLECTOR = "-XX:+UseParallelGC"
LARGE_YOUNG, SMALL_YOUNG = "-XX:NewRatio=1", "-Xmn64m"
"""Nearly all data that passes through becomes garbage at once, in objects of megabytes. So use a large young generation, and no collector
that treats such objects as long-lived. Measured on 2 cores and 1 GB: 8 % more records per second in the Spark form than with the JVM's
defaults. If no records pass through the JVM, a large young generation would only fill up over the hours."""

ZERO_TLAB, ZERO_TLAB_VERSIONS = "-XX:+ZeroTLAB", (17, 21)
"""Clears memory for new objects in large blocks instead of object by object. ``from_json`` allocates 8 KB per record and gains 9 % more
records per second. Only for Java versions known to have the option: a JVM does not start with an unknown one."""

SMALL_RUN = 250_000
"""Maximum number of records of a small run: it shares an application, or its JVM uses C1. C1 saves about 6 s of CPU time and costs 5 µs
more per record in a plain ``from_json``, so it pays off up to a million records; fewer if a transform does more in the JVM."""

DAEMON = "spark.python.daemon.module"
SHARED = "spark.tidemark.shared"
SHARED_SETTINGS = {
    SHARED: "true",
    "spark.python.worker.reuse": "false",  # a worker runs the transform of one consumer only
    "spark.scheduler.mode": "FAIR",  # a run does not wait until all tasks of another one have started
}

JVM_OPTIONS = (EXTRA_OPTIONS, OPTIONS)
LAUNCHER_PREFIXES = ("spark.driver.", "spark.jars", "spark.files", "spark.archives", "spark.submit.", "spark.local.dir", "spark.yarn.",
                     "spark.kerberos.", "spark.kubernetes.", "spark.ui.", "spark.log.", DAEMON)  # fmt: skip
"""Prefixes of the settings that Spark's launcher and its JVM read before a session exists."""
JVM_LIMIT_S = 300.0
"""A JVM starts within seconds, on an overloaded machine within a minute."""

HIDDEN_BYTES = 64 * 1024
"""How much of the JVM's last output is shown if its start fails."""
READ_S = 1.0
"""How long a start that failed waits for the rest of it."""

LOCAL_SETTINGS = {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}


class JvmHangs(Unavailable):
    """Spark's JVM was started but did not report in time."""

    limit_s: float

    def __str__(self) -> str:
        return f"Spark's JVM did not start within {self.limit_s:.0f} s and was killed. Check the load and memory of its host."


def start_session(
    spec: ConsumerSpec, connections: Connections, attempt_id: int, folders: Sequence[Path], form: Form, records: int | None = None
) -> SparkSession:
    """Starts Spark with the connector's jars and the user's transforms. The spec's settings override the connection's.

    ``records``: the records that the run will read, if known. A small run in a driver forked by a keeper gets a session in the shared
    application instead, if its spec allows sharing and has no Spark settings. Under spark-submit the driver uses spark-submit's master.
    """
    if form is Form.SPARK:
        require_spark_form()
    name = name_of(spec, attempt_id)
    modules = _zip_modules(folders)
    submitted = "PYSPARK_GATEWAY_PORT" in os.environ
    small = records is not None and records <= SMALL_RUN
    shareable = small and spec.spark.shared and not spec.spark.conf
    if shareable and _alone(connections.spark_conf.get("spark.master", connections.spark_master)):
        spark = borrow_session(name, connections.spark_master, connections.spark_conf, modules)
        if spark is not None:
            return spark
    user = {**connections.spark_conf, **spec.spark.conf}
    if not submitted:
        find_java()
    if not submitted and user.get("spark.master", connections.spark_master) == "yarn":
        require_hadoop_conf()
    if not submitted and _alone(user.get("spark.master", connections.spark_master)):
        settings = _local_settings(user, records if form is Form.SPARK else 0)
    else:
        settings = dict(SETTINGS)
        if not any(name in user for name in JAR_SETTINGS) and not (submitted and _submitted_with_jars()):
            settings["spark.jars"] = ",".join(str(jar) for jar in connector_jars())
        settings |= user
    spark = _session(name, None if submitted else connections.spark_master, settings)
    spark.sparkContext.addPyFile(modules)
    return spark


def name_of(spec: ConsumerSpec, attempt_id: int) -> str:
    """The name of an attempt's application, and of its jobs' group."""
    return f"tidemark {spec.name} attempt {attempt_id}"


def start_shared(master: str, conf: Mapping[str, str]) -> SparkSession:
    """Starts the application that a keeper lends to small runs of all forms."""
    find_java()
    return _session("tidemark, shared by small runs", master, _local_settings({**SHARED_SETTINGS, **conf}, None))


def is_shared(spark: SparkSession) -> bool:
    return spark.sparkContext.getConf().get(SHARED) == "true"


def _local_settings(user: Mapping[str, str], records: int | None) -> dict[str, str]:
    """The settings of a JVM that is driver and executor. ``records``: expected records through it, if known."""
    java = find_java()
    settings = {**SETTINGS, DAEMON: "tidemark.spark.daemon"}
    options = [C1] if records is not None and records <= SMALL_RUN else []
    if not _names_collector(user):
        options += [COLLECTOR, SMALL_YOUNG if records == 0 else LARGE_YOUNG]
    if records != 0 and released(java) in ZERO_TLAB_VERSIONS:
        options.append(ZERO_TLAB)
    if not any(name in user for name in JAR_SETTINGS):
        settings[CLASS_PATH] = _class_path()
        archive = local_archive(java)
        if (file := archive.find()) is None:
            archive.make_later()
        else:
            options += [f'"-XX:SharedArchiveFile={file}"', *IGNORE_UNUSABLE]
    return {**settings, **user, OPTIONS: " ".join([*options, user.get(OPTIONS, "")])}


def local_archive(java: Path) -> Archive:
    """The archive for the JVM of a driver in local mode."""
    return Archive.of(java, _spark_home(), connector_jars())


@contextlib.contextmanager
def archived_session(file: Path) -> Iterator[SparkSession]:
    """A session like a local driver's. At the end of the block its JVM writes its loaded classes to ``file``."""
    from pyspark import SparkContext

    options = f'"-XX:ArchiveClassesAtExit={file}" -Xlog:cds*=error {C1}'
    try:
        spark = _session("tidemark archive", "local[2]", {**SETTINGS, CLASS_PATH: _class_path(), OPTIONS: options})
        yield spark
        spark.stop()
    except BaseException:
        if (gateway := SparkContext._gateway) is not None:  # noqa: SLF001
            gateway.proc.kill()  # otherwise it would write an incomplete archive
        raise
    end_jvm()


def end_jvm() -> None:
    """Ends this process's JVM, if any, so that the next session starts its own. Stopping a session leaves the JVM running."""
    from pyspark import SparkContext

    if (gateway := SparkContext._gateway) is None:  # noqa: SLF001
        return
    gateway.shutdown()
    gateway.proc.stdin.close()  # ends the JVM
    gateway.proc.wait()
    SparkContext._gateway = SparkContext._jvm = None  # noqa: SLF001


@contextlib.contextmanager
def plain_session(name: str, connections: Connections) -> Iterator[SparkSession]:
    """A session on the connections' cluster with the project's transforms, where tokens may come from, and without Kafka's connector.

    Raises `SparkFailed`, also for a failure in the block.
    """
    find_java()
    spark = None
    with lost_jvm(), translated():
        try:
            spark = _session(name, connections.spark_master, {**SETTINGS, OPTIONS: C1, **connections.spark_conf})
            spark.sparkContext.addPyFile(_zip_modules([project.transforms()]))
            yield spark
        finally:
            if spark is not None:
                spark.stop()


def small_session(folders: Sequence[Path] = ()) -> SparkSession:
    """A local session without Kafka, to find schemas and try records. ``folders``: the user's transforms."""
    find_java()
    spark = _session("tidemark check", "local[1]", {**SETTINGS, OPTIONS: C1})
    if folders:
        spark.sparkContext.addPyFile(_zip_modules(folders))
    return spark


def _session(name: str, master: str | None, settings: Mapping[str, str]) -> SparkSession:
    os.environ["PYSPARK_PYTHON"] = settings.get(PYTHON) or os.environ.get("PYSPARK_PYTHON", sys.executable)
    if master is not None and on_loopback(master):
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
        settings = {**LOCAL_SETTINGS, **settings}
    if master is not None and _alone(settings.get("spark.master", master)):
        settings = {**_private(), **settings}
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.appName(name)
    if master is not None:
        builder = builder.master(master)
    for key, value in settings.items():
        builder = builder.config(key, value)
    with _quiet_unless_failed():
        _start_jvm(master, settings)
        for key, value in _guards(master, settings).items():
            builder = builder.config(key, value)
        spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    return spark


def _private() -> dict[str, str]:
    """The settings for a private folder of temporary files in local mode. Spark's own folders are readable by every user of the host."""
    try:
        folder = project.own_tmp() / "spark"
        folder.mkdir(exist_ok=True)
    except PermissionError:  # another user took the name first, which must not stop this user's runs
        folder = Path(tempfile.mkdtemp(prefix="tidemark-spark-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    options = os.environ.get("SPARK_SUBMIT_OPTS", "")
    if "java.io.tmpdir" not in options:
        os.environ["SPARK_SUBMIT_OPTS"] = f'{options} "-Djava.io.tmpdir={folder}"'.strip()
    return {} if "SPARK_LOCAL_DIRS" in os.environ else {"spark.local.dir": str(folder)}


def _guards(master: str | None, settings: Mapping[str, str]) -> dict[str, str]:
    """The settings that protect Spark's network. Logs what stays unprotected; raises `BadInput` if the user has to decide.

    Called once the JVM is up: it knows the settings of spark-submit and of Spark's own configuration. An application that spark-submit
    has started on a cluster is not changed.
    """
    from pyspark import SparkConf

    conf = {**dict(SparkConf().getAll()), **settings}
    used_master = settings.get("spark.master") or master or conf["spark.master"]
    added = guarded(used_master, conf)
    if master is None and not is_local(used_master):
        added = {}
    for exposure in of_spark(used_master, conf | added):
        log.warning("%s", exposure)
    return added


def _alone(master: str) -> bool:
    """Whether executors run in the driver's JVM and Tidemark sets its class path. False if Spark's own configuration may set it."""
    if not is_local(master):  # a driver on a cluster has no folder of Spark
        return False
    conf = spark_conf_dir()
    return "PYSPARK_SUBMIT_ARGS" not in os.environ and not (conf.is_dir() and any(conf.iterdir()))


def _names_collector(user: Mapping[str, str]) -> bool:
    """Whether a setting or the environment chooses a garbage collector. A JVM with two does not start."""
    options = [user.get(OPTIONS), user.get(EXTRA_OPTIONS), *map(os.environ.get, ("JDK_JAVA_OPTIONS", "JAVA_TOOL_OPTIONS", "_JAVA_OPTIONS"))]
    return any(re.search(r"-XX:\+Use\w+GC\b", words or "") for words in options)


def _class_path() -> str:
    """The connector's jars without those that Spark includes: they come first on the class path and must not replace Spark's."""
    return os.pathsep.join(str(jar) for jar in connector_jars() if not (_spark_home() / "jars" / jar.name).exists())


def _spark_home() -> Path:
    from pyspark.find_spark_home import _find_spark_home

    return Path(_find_spark_home())


def _submitted_with_jars() -> bool:
    """Whether spark-submit's arguments or defaults provide jars, already set in the JVM. Ours would replace them."""
    from pyspark import SparkConf

    conf = SparkConf()
    return any(conf.contains(name) for name in JAR_SETTINGS)


def _start_jvm(master: str | None, settings: Mapping[str, str]) -> None:
    """Starts the JVM with the settings that it needs at its start, except secrets. The rest is set once it is up.

    pyspark puts these settings on the JVM's command line, where every user of the machine can read them.
    """
    from pyspark import SparkConf, SparkContext

    conf = SparkConf()
    if master is not None:
        conf.setMaster(master)
    for key, value in settings.items():
        secret = re.search(SETTINGS["spark.redaction.regex"], key) or re.search(URL_PASSWORD, value)
        if key in JVM_OPTIONS or (key.startswith(LAUNCHER_PREFIXES) and not secret):
            conf.set(key, value)
    with _kill_after(JVM_LIMIT_S):
        SparkContext._ensure_initialized(conf=conf)  # noqa: SLF001 - what SparkContext's constructor would do, and then skips


@contextlib.contextmanager
def _kill_after(limit_s: float) -> Iterator[None]:
    """Kills the child processes started within the block after ``limit_s``, because pyspark waits forever for a JVM that hangs.

    Works only if the kernel lists a process's children (Linux). Raises `JvmHangs`.
    """
    before, timed_out = children(), threading.Event()

    def end() -> None:
        timed_out.set()
        for pid in children() - before:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    timer = threading.Timer(limit_s, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    except Exception as error:
        if timed_out.is_set():
            raise JvmHangs(limit_s=limit_s) from error
        raise
    finally:
        timer.cancel()


@contextlib.contextmanager
def _quiet_unless_failed() -> Iterator[None]:
    """Hides the JVM's stderr while it starts (a dozen useless lines), unless the start fails.

    The JVM inherits the file descriptor, so its later output is hidden too. Spark also writes there what transforms print, so no file
    holds it. Anything important also comes as an exception.
    """
    read, write = os.pipe()
    last = bytearray()
    reader = threading.Thread(target=_read, args=(read, last), name="hidden output", daemon=True)
    reader.start()
    sys.stderr.flush()
    stderr = os.dup(2)
    os.dup2(write, 2)
    os.close(write)
    try:
        yield
    except Refused:
        raise
    except BaseException:
        os.dup2(stderr, 2)
        reader.join(READ_S)  # at once, unless the JVM is still there
        os.write(stderr, bytes(last))
        raise
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)


def _read(pipe: int, last: bytearray) -> None:
    """Reads a pipe until the last process that writes to it has ended. Keeps the last bytes."""
    with open(pipe, "rb", buffering=0) as output:
        while chunk := output.read(HIDDEN_BYTES):
            last += chunk
            del last[:-HIDDEN_BYTES]


def _zip_modules(folders: Sequence[Path]) -> str:
    """Writes the folders' modules into a zip file for executors. Returns its path. Of files with the same name, the first counts; a folder
    may be missing."""
    home = Path(tempfile.mkdtemp(prefix="tidemark-"))
    atexit.register(shutil.rmtree, home, ignore_errors=True)  # executors may fetch it as long as the driver lives
    archive = home / "transforms.zip"
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED, strict_timestamps=False) as out:
        for folder in folders:
            for file in project.files_below(folder, "*.py"):
                if (name := str(file.relative_to(folder))) not in out.namelist():
                    out.write(file, name)
    return str(archive)

"""A Spark standalone cluster on this machine, from the programs in pip's pyspark: one master, and two workers with one core each."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pyspark

from tests.support.waiting import until
from tidemark import project
from tidemark.local import ports, processes

SPARK_HOME = Path(pyspark.__file__).parent
START_LIMIT_S = 300
STOP_LIMIT_S = 15


@dataclass
class SparkCluster:
    """A running cluster. Its processes get what they need from the application: they know neither Tidemark nor the test's folders."""

    folder: Path
    port: int
    web_port: int
    host: str = ports.HOST
    secret: str | None = None
    """If set, master and workers are started in the same way as by docker-compose.yaml."""
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def master(self) -> str:
        return f"spark://{self.host}:{self.port}"

    @property
    def work_folders(self) -> list[Path]:
        """One folder per worker; executors run in subfolders."""
        return [self.folder / "worker-1", self.folder / "worker-2"]

    def worker_of(self, path: str) -> str:
        """The worker whose folder contains ``path``."""
        return next(folder.name for folder in self.work_folders if Path(path).is_relative_to(folder))

    def state(self) -> dict[str, Any]:
        """The state that the master reports: ``workers``, ``activeapps``, ``completedapps``."""
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(f"http://{self.host}:{self.web_port}/json/", timeout=60) as answer:
            return json.load(answer)

    def family(self) -> list[psutil.Process]:
        """Master, workers, executors and their Python workers."""
        found = []
        for process in self.processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                parent = psutil.Process(process.pid)
                found += [parent, *parent.children(recursive=True)]
        return found

    def executors(self) -> list[psutil.Process]:
        """The running executors and their Python workers, without zombies."""
        known = {process.pid for process in self.processes}
        return [process for process in self.family() if process.pid not in known and not processes.gone(process)]

    def start(self, *arguments: str, log: str) -> None:
        script = SPARK_HOME / "bin" / "spark-class" if self.secret is None else project.shipped("docker") / "spark.sh"
        with (self.folder / log).open("wb") as output:
            self.processes.append(
                subprocess.Popen(
                    [script, *arguments],
                    env=_environment(self.host) | ({} if self.secret is None else {"SPARK_AUTH_SECRET": self.secret}),
                    cwd=self.folder,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )

    def stop(self) -> None:
        family = self.family()
        for process in reversed(self.processes):
            process.terminate()
        psutil.wait_procs(family, STOP_LIMIT_S)
        for left in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                left.kill()
        for process in self.processes:
            process.wait(STOP_LIMIT_S)

    def logs(self) -> str:
        return "\n".join(path.read_text(errors="replace") for path in sorted(self.folder.glob("*.log")))


@contextlib.contextmanager
def running(folder: Path, host: str = ports.HOST, secret: str | None = None, *, workers: tuple[str, ...] = ()) -> Iterator[SparkCluster]:
    """A master and two workers, ready for applications. ``workers`` are their hosts, if not the master's. None of their processes is left
    after the block."""
    port = ports.find_free()
    cluster = SparkCluster(folder, port, ports.find_free(exclude={port}), host, secret)
    try:
        web = ("--webui-port", str(cluster.web_port))
        cluster.start("org.apache.spark.deploy.master.Master", "--host", host, "--port", str(port), *web, log="master.log")
        for address, work in zip(workers or (host, host), cluster.work_folders, strict=True):
            words = ("--host", address, "--cores", "1", "--memory", "1g", "--webui-port", "0", "--work-dir", str(work))
            cluster.start("org.apache.spark.deploy.worker.Worker", *words, cluster.master, log=f"{work.name}.log")
        until(lambda: _alive_workers(cluster) == 2, within_s=START_LIMIT_S)
        yield cluster
    finally:
        cluster.stop()


def _alive_workers(cluster: SparkCluster) -> int:
    assert all(process.poll() is None for process in cluster.processes), cluster.logs()
    try:
        return sum(worker["state"] == "ALIVE" for worker in cluster.state()["workers"])
    except (OSError, ValueError):  # it does not answer yet, or not with its state
        return 0


def _environment(host: str) -> dict[str, str]:
    """Keeps only what any process needs from this environment: no Tidemark, no Python path, no Spark settings."""
    kept = {name: os.environ[name] for name in ("HOME", "JAVA_HOME", "LANG", "TMPDIR") if name in os.environ}
    return kept | {
        "PATH": f"{SPARK_HOME / 'bin'}:{os.defpath if 'JAVA_HOME' in os.environ else os.environ['PATH']}",
        "SPARK_HOME": str(SPARK_HOME),
        "SPARK_LOCAL_IP": host,
        "SPARK_DAEMON_MEMORY": "256m",
        "SPARK_DAEMON_JAVA_OPTS": "-XX:+UseSerialGC -XX:TieredStopAtLevel=1 -Dspark.master.rest.enabled=false",
        "SPARK_NO_DAEMONIZE": "1",
        "PYSPARK_PYTHON": str(Path(sys.executable).with_name("no-python-of-the-workers")),
    }

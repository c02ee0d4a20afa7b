"""A YARN cluster on this machine: one resource manager and two node managers, each a process, on loopback and the local file system.

Its servers are those of Hadoop's mini cluster, in the version of pyspark's own Hadoop client.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

import psutil
import pyspark

from tests.support.waiting import until
from tidemark import project
from tidemark.jvm.jars import Recipe, jars_of
from tidemark.jvm.java import LIGHT, find_java
from tidemark.local import ports

RECIPE = Recipe(Path(__file__).with_suffix(".xml"), ("yarn",), "the jars of YARN's servers", "60 MB")
PYSPARK_JARS = Path(pyspark.__file__).parent / "jars"
RESOURCE_MANAGER = "org.apache.hadoop.yarn.server.resourcemanager.ResourceManager"
NODE_MANAGER = "org.apache.hadoop.yarn.server.nodemanager.NodeManager"
START_LIMIT_S = 120
STOP_LIMIT_S = 15
LOST_AFTER_MS = 4000
"""How long a node manager may be silent. YARN's default is 10 minutes."""


@dataclass
class YarnCluster:
    """A running cluster."""

    folder: Path
    web_port: int
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def conf(self) -> Path:
        """The folder for ``HADOOP_CONF_DIR``."""
        return self.folder / "conf"

    def get(self, path: str) -> Any:
        """An answer of the resource manager's REST API."""
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(f"http://{ports.HOST}:{self.web_port}/ws/v1/cluster/{path}", timeout=60) as answer:
            return json.load(answer)

    def applications(self) -> list[dict[str, Any]]:
        """The applications that the resource manager knows, the oldest first."""
        apps = (self.get("apps")["apps"] or {}).get("app", [])
        return sorted(apps, key=lambda app: app["id"])

    def family(self) -> list[psutil.Process]:
        """The servers, and the containers that they have started. Containers have their own sessions and survive their node manager."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if any(str(self.folder) in word for word in process.cmdline()):
                    found += [process, *process.children(recursive=True)]
        return list(dict.fromkeys(found))

    def drivers(self) -> list[psutil.Process]:
        """The JVMs of application masters, which run the drivers."""
        mark = "org.apache.spark.deploy.yarn.ApplicationMaster"
        found = []
        for process in self.family():
            with contextlib.suppress(psutil.Error):
                if process.name() == "java" and mark in process.cmdline():
                    found.append(process)
        return found

    def node_of(self, process: psutil.Process) -> str:
        """The node manager that has started this process of a container."""
        return next(name for name in self.processes if f"{self.folder}/{name}/" in " ".join(process.cmdline()))

    def logs(self, kind: str = "*") -> str:
        """What containers have written: ``stdout``, ``stderr``."""
        return "\n".join(file.read_text(errors="replace") for file in sorted(self.folder.glob(f"*/logs/*/*/{kind}")) if file.is_file())

    def start_node(self, name: str) -> None:
        own = self.folder / name
        settings = {
            "hostname": ports.HOST, "address": f"{ports.HOST}:0", "localizer.address": f"{ports.HOST}:0",
            "webapp.address": f"{ports.HOST}:0", "local-dirs": f"{own}/local", "log-dirs": f"{own}/logs",
        }  # fmt: skip
        options = [word for key, value in settings.items() for word in ("-D", f"yarn.nodemanager.{key}={value}")]
        self._start(name, NODE_MANAGER, *options)

    def _start(self, name: str, program: str, *words: str) -> None:
        jars = [*jars_of(RECIPE, "yarn"), PYSPARK_JARS / "*"]
        classes = os.pathsep.join(map(str, [self.conf, *jars]))
        with (self.folder / f"{name}.log").open("wb") as output:
            self.processes[name] = subprocess.Popen(
                [find_java(), "-Xmx256m", *LIGHT, f"-Djava.io.tmpdir={self.folder}/tmp", "-cp", classes, program, *words],
                env={name: os.environ[name] for name in ("HOME", "JAVA_HOME", "LANG", "PATH") if name in os.environ},
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def stop(self) -> None:
        for process in reversed(self.processes.values()):
            process.terminate()
        for process in self.processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_LIMIT_S)
        for left in self.family():
            with contextlib.suppress(psutil.NoSuchProcess):
                left.kill()
        for process in self.processes.values():
            process.wait(STOP_LIMIT_S)


@contextlib.contextmanager
def running(folder: Path) -> Iterator[YarnCluster]:
    """A resource manager and the node managers ``node-1`` and ``node-2``, ready for applications. None of their processes, and none of
    their containers, is left after the block."""
    taken: set[int] = set()
    for _ in range(5):
        taken.add(ports.find_free(exclude=taken))
    client, scheduler, tracker, admin, web = sorted(taken)
    cluster = YarnCluster(folder, web)
    for name in ("conf/webapps/cluster", "conf/webapps/node", "tmp"):
        (folder / name).mkdir(parents=True)
    addresses = {"": client, "scheduler.": scheduler, "resource-tracker.": tracker, "admin.": admin, "webapp.": web}
    _write(
        cluster.conf / "yarn-site.xml",
        {
            **{f"yarn.resourcemanager.{name}address": f"{ports.HOST}:{port}" for name, port in addresses.items()},
            "yarn.resourcemanager.nm.liveness-monitor.expiry-interval-ms": LOST_AFTER_MS,
            "yarn.nm.liveness-monitor.expiry-interval-ms": LOST_AFTER_MS,
            "yarn.resourcemanager.nodemanagers.heartbeat-interval-ms": 200,
            "yarn.resourcemanager.connect.max-wait.ms": 5000,
            "yarn.scheduler.minimum-allocation-mb": 128,
            "yarn.nodemanager.resource.memory-mb": 3072,
            "yarn.nodemanager.resource.cpu-vcores": 4,
            "yarn.nodemanager.vmem-check-enabled": "false",
            "yarn.nodemanager.pmem-check-enabled": "false",
            "yarn.nodemanager.disk-health-checker.enable": "false",
            "yarn.nodemanager.disk-health-checker.max-disk-utilization-per-disk-percentage": 100,  # counts at the start all the same
        },
    )
    _write(cluster.conf / "core-site.xml", {"fs.defaultFS": "file:///"})
    queues = {"queues": "default,narrow,closed", "default.capacity": 99, "narrow.capacity": 1, "narrow.maximum-capacity": 1,
              "closed.capacity": 0, "closed.state": "STOPPED"}  # fmt: skip
    capacity = {f"yarn.scheduler.capacity.root.{name}": value for name, value in queues.items()}
    _write(cluster.conf / "capacity-scheduler.xml", {**capacity, "yarn.scheduler.capacity.maximum-am-resource-percent": "1.0"})
    try:
        cluster._start("manager", RESOURCE_MANAGER)
        for name in ("node-1", "node-2"):
            cluster.start_node(name)
        until(lambda: _nodes(cluster) == 2, within_s=START_LIMIT_S)
        yield cluster
    finally:
        cluster.stop()


def spark_conf(cluster: YarnCluster) -> dict[str, str]:
    """Settings for small applications with this checkout's Tidemark, which do not upload Spark."""
    env = {
        "PYTHONPATH": str(project.shipped("include")),
        "TIDEMARK_CACHE": os.environ.get("TIDEMARK_CACHE", str(Path.home() / ".cache" / "tidemark")),
        "SPARK_LOCAL_IP": ports.HOST,
    }
    return {
        "spark.authenticate": "true",
        "spark.yarn.jars": f"local:{PYSPARK_JARS}/*",
        "spark.driver.memory": "512m",
        "spark.driver.memoryOverhead": "256m",
        "spark.executor.memory": "512m",
        "spark.executor.memoryOverhead": "256m",
        "spark.executor.instances": "1",
        "spark.scheduler.minRegisteredResourcesRatio": "0",
        "spark.yarn.stagingDir": f"file://{cluster.folder}/staging",
        "spark.yarn.am.memory": "512m",
        **{f"spark.yarn.appMasterEnv.{name}": value for name, value in env.items()},
        **{f"spark.executorEnv.{name}": value for name, value in env.items()},
    }


def _nodes(cluster: YarnCluster) -> int:
    for name, process in cluster.processes.items():
        assert process.poll() is None, (cluster.folder / f"{name}.log").read_text()
    try:
        return sum(node["state"] == "RUNNING" for node in (cluster.get("nodes")["nodes"] or {}).get("node", []))
    except (OSError, ValueError):  # it does not answer yet
        return 0


def _write(file: Path, settings: dict[str, Any]) -> None:
    properties = "".join(f"<property><name>{key}</name><value>{escape(str(value))}</value></property>\n" for key, value in settings.items())
    file.write_text(f"<configuration>\n{properties}</configuration>\n")

"""A schema registry with Confluent's API on loopback: Apicurio Registry with its embedded database (H2) in a file."""

from __future__ import annotations

from http.client import HTTPException
from pathlib import Path
from typing import ClassVar
from urllib.request import ProxyHandler, build_opener

from tidemark.jvm.jars import REGISTRY, registry_jars
from tidemark.jvm.java import LIGHT, find_java
from tidemark.local import ports, processes
from tidemark.local.server import Report, Server

_HEAP = "-Xmx256m"
_API = "/apis/ccompat/v7"
_ANSWER_S = 2.0


class RegistryServer(Server):
    name = "Registry"
    stop_limit_s: ClassVar[float] = 10

    @property
    def signature(self) -> processes.Signature:
        return processes.Signature(program="java", argument=f"-Dtidemark.registry={self.folder}")

    def prepare(self, report: Report) -> None:
        find_java()
        registry_jars(report)

    def url(self) -> str:
        """The URL for clients of Confluent's registry. Raises `NotUp` if the registry does not run."""
        return f"http://{ports.HOST}:{self.port()}{_API}"

    def _answers(self, port: int) -> bool:
        try:
            with build_opener(ProxyHandler({})).open(f"http://{ports.HOST}:{port}{_API}/subjects", timeout=_ANSWER_S) as answer:
                return bool(answer.status == 200)
        except (OSError, HTTPException):
            return False

    def version(self) -> str | None:
        return REGISTRY.revision("apicurio-registry-app")

    def is_transient(self, lines: str) -> bool:
        return "seems to be in use by another process" in lines

    def _initialise(self, fresh: Path) -> str | None:
        fresh.mkdir()
        return None

    def _launch(self, port: int) -> int:
        (program,) = (jar for jar in registry_jars() if jar.name.endswith("-runner.jar"))
        # Properties of the command line win over variables of the environment.
        address = (f"-Dquarkus.http.host={ports.HOST}", f"-Dquarkus.http.port={port}")
        database = f"-Dquarkus.datasource.jdbc.url=jdbc:h2:file:{self.data}/registry"
        own = (self.own_tmp(), f"-Dvertx.cacheDirBase={self.folder / 'tmp'}", self.signature.argument)
        command: list[str | Path] = [find_java(), _HEAP, *LIGHT, *own, *address, database, "-jar", program]
        return processes.spawn(command, log=self.log, folder=self.folder)

"""A standalone Kafka Connect worker on loopback, for the tests and for the benchmarks."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import ProxyHandler, Request, build_opener

from tidemark.jvm.java import find_java
from tidemark.local import ports

START_S = 120
STOP_S = 20
_ANSWER_S = 60
_POLL_S = 0.1
_LOGGER = """appender.out.type=Console
appender.out.name=out
appender.out.layout.type=PatternLayout
appender.out.layout.pattern=%d %p %c{1}: %m%n
rootLogger.level=warn
rootLogger.appenderRef.out.ref=out
"""


class Worker:
    """Starts at once; call `wait` before you create the first connector. The worker prints to ``log``, by default to the caller's
    output."""

    def __init__(
        self,
        folder: Path,
        servers: str,
        *,
        classes: Sequence[str | Path],
        settings: Mapping[str, str],
        java_options: Sequence[str] = (),
        log: Path | None = None,
    ) -> None:
        self._url = f"http://{ports.HOST}:{ports.find_free()}"
        self._log = log
        own = {
            "bootstrap.servers": servers,
            "listeners": self._url,
            "offset.storage.file.filename": f"{folder}/offsets",
            "key.converter": "org.apache.kafka.connect.storage.StringConverter",
            "value.converter": "org.apache.kafka.connect.json.JsonConverter",
        }
        file = folder / "worker.properties"
        file.write_text("".join(f"{key}={value}\n" for key, value in {**own, **settings}.items()))
        logger = folder / "log4j2.properties"
        logger.write_text(_LOGGER)
        command: list[str | Path] = [
            find_java(),
            *java_options,
            f"-Dlog4j2.configurationFile={logger}",
            "-cp",
            os.pathsep.join(map(str, classes)),
            "org.apache.kafka.connect.cli.ConnectStandalone",
            file,
        ]
        with contextlib.ExitStack() as files:
            output = files.enter_context(log.open("ab")) if log else None
            self._process = subprocess.Popen(command, cwd=folder, stdin=subprocess.DEVNULL, stdout=output, stderr=output)

    def wait(self) -> None:
        """Returns when the worker answers. Raises RuntimeError if it ends or takes too long."""
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline and self._process.poll() is None:
            with contextlib.suppress(RuntimeError):  # it answers 404 until it has registered its own pages
                if self.ask("GET", "/connectors") is not None:
                    return
            time.sleep(_POLL_S)
        self.close()
        raise RuntimeError(f"the worker did not start\n{self.log_end()}")

    def configure(self, connector: str, config: Mapping[str, str]) -> None:
        """Creates or updates the connector."""
        self.ask("PUT", f"/connectors/{connector}/config", config)

    def delete(self, connector: str) -> None:
        self.ask("DELETE", f"/connectors/{connector}")

    def check(self, connector: str) -> None:
        """Raises RuntimeError with the innermost cause if the connector or one of its tasks has failed."""
        status = self.ask("GET", f"/connectors/{connector}/status") or {}
        for part in (status.get("connector", {}), *status.get("tasks", ())):
            if trace := part.get("trace"):
                raise RuntimeError(trace.split("Caused by: ")[-1].splitlines()[0])

    def ask(self, method: str, path: str, body: Mapping[str, str] | None = None) -> Any:
        """Returns the answer, or None if the worker cannot be reached yet. Raises RuntimeError with the worker's message if it refuses, and
        if it has ended."""
        data = None if body is None else json.dumps(body).encode()
        request = Request(self._url + path, data=data, method=method, headers={"Content-Type": "application/json"})
        try:
            with build_opener(ProxyHandler({})).open(request, timeout=_ANSWER_S) as answer:
                text = answer.read()
        except HTTPError as error:
            raise RuntimeError(f"{method} {path}: {error.read().decode(errors='replace')}") from error
        except (URLError, ConnectionError, HTTPException) as error:
            if self._process.poll() is not None:
                raise RuntimeError(f"the worker has ended\n{self.log_end()}") from error
            return None
        return json.loads(text) if text else {}

    def log_end(self) -> str:
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-30:]) if self._log else ""

    def close(self) -> None:
        """Stops the worker; its connectors have time to stop cleanly."""
        self._process.terminate()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

"""An api-server alone, on SQLite, for requests that are answered before any task would run."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import httpx
from tests.support.waiting import until

from tidemark import project
from tidemark.local import ports
from tidemark.local.airflow_settings import environment

SERVE = """
import json, os, sys
from pathlib import Path
from airflow.cli.cli_parser import get_parser
from airflow.settings import engine
from sqlalchemy import text

told = json.loads(sys.argv[1])

def airflow(*words):
    arguments = get_parser().parse_args(words)
    arguments.func(arguments)

airflow("db", "migrate")
for command in told["commands"]:
    airflow(*command)
for files in told["files"]:
    for name, written in files.items():
        Path(os.environ["TIDEMARK_CONSUMERS"], name).write_text(written)
    airflow("dags", "reserialize")
    with engine.connect() as connection:
        found = connection.execute(text("SELECT dag_id FROM dag WHERE is_stale")).scalars()
        with open("stale", "a") as stale:
            print(json.dumps(sorted(found)), file=stale)

import uvicorn
from fastapi.dependencies.utils import get_flat_dependant
from airflow.api_fastapi.app import create_app
from tidemark.airflow.web import consumers, preview
from tidemark.airflow.web.app import app
consumers.CONNECT_S = preview.KAFKA_S = preview.LIMIT_S = 60  # a form asks for its preview once, and a busy machine may answer late
Path("routes").write_text(json.dumps([[getattr(one, "path", str(one)), *getattr(one, "methods", ["?"])] for one in app.routes]))
names = {one.path: [each.name for each in get_flat_dependant(one.dependant).query_params] for one in app.routes}
Path("parameters").write_text(json.dumps(names))
uvicorn.run(create_app(apps="core"), host="127.0.0.1", port=told["port"], log_level="warning")
"""


@contextlib.contextmanager
def served(
    home: Path,
    env: Mapping[str, str],
    *,
    path: str = "",
    commands: Sequence[Sequence[str]] = (),
    files: Sequence[Mapping[str, str]] = ({},),
) -> Iterator[str]:
    """The URL of an api-server with the project's DAGs and plugin, below ``path``. First, the ``commands`` of ``airflow`` are executed.
    Then each of ``files`` is written into ``home/consumers``, and the DAGs are parsed. ``home/stale`` gets a line per parse, with the stale
    DAGs, ``home/routes`` has the path and methods of each route of the plugin, and ``home/parameters`` the names in each one's query."""
    port = ports.find_free()
    (home / "consumers").mkdir(exist_ok=True)
    own = {
        "AIRFLOW_HOME": str(home),
        "AIRFLOW__API__BASE_URL": f"http://127.0.0.1:{port}{path}",
        "AIRFLOW__CORE__DAGS_FOLDER": str(project.root() / "dags"),
        "AIRFLOW__CORE__PLUGINS_FOLDER": str(project.root() / "plugins"),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "AIRFLOW__CORE__MIN_SERIALIZED_DAG_UPDATE_INTERVAL": "0",  # the files are parsed several times
        "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": f"sqlite:///{home}/airflow.db",
        "TIDEMARK_CONSUMERS": str(home / "consumers"),
        **env,
    }
    told = {"port": port, "commands": list(commands), "files": list(files)}
    log = home / "log"
    with log.open("wb") as output:
        server = subprocess.Popen(
            [sys.executable, "-c", SERVE, json.dumps(told)],
            env=environment(os.environ, own, process="served"),
            cwd=home,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    url = f"{own['AIRFLOW__API__BASE_URL']}"

    def answers() -> bool:
        assert server.poll() is None, log.read_text()[-4000:]
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"{url}/api/v2/version", trust_env=False).is_success
        return False

    try:
        until(answers, f"the api-server answers, see {log}", within_s=600)
        yield url
    finally:
        server.terminate()
        server.wait(timeout=120)

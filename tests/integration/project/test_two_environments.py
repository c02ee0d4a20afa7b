"""Airflow in an environment made with its own constraints, drivers in another one, which ``TIDEMARK_PYTHON`` names: both as the README
installs them, from the files of a release."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from urllib.parse import quote

import httpx
import psutil
import pytest
from tests.support.documented import snippets, with_words
from tests.support.installed import clean_env
from tests.support.scenario import Scenario
from tests.support.waiting import until, until_scheduler_looped

from tidemark.connections import BOOTSTRAP_SERVERS, DATABASE_URL
from tidemark.local import LocalStack
from tidemark.local.airflow import LocalAirflow
from tidemark.local.airflow_client import AirflowClient
from tidemark.packages import version

pytestmark = pytest.mark.thorough
ROOT = Path(__file__).parents[3]
AIRFLOW = ("3.1.8", "3.2.1", "3.3.1")
STEPS = 6
"""The README's commands from the installed package to scheduled rows."""
SUITE = '{"expectations": [{"type": "expect_column_values_to_not_be_null", "kwargs": {"column": "payload"}}]}'
PARSE = """
import sys
from importlib.util import find_spec
try:
    from airflow.dag_processing.dagbag import DagBag
except ImportError:  # Airflow 3.1
    from airflow.models.dagbag import DagBag
import tidemark.airflow.plugin, tidemark.airflow.web.app
bag = DagBag(sys.argv[1])
assert bag.import_errors == {}, bag.import_errors
print(*sorted(bag.dags))
print(*[name for name in sys.argv[2].split(",") if find_spec(name)])
"""
UP = """
import json, sys
from pathlib import Path
from tidemark.local.airflow import LocalAirflow
folder, metadata, dags, env = sys.argv[1:]
LocalAirflow(Path(folder), metadata_url=metadata, env=json.loads(env), dags=Path(dags), plugins=None).up()
"""
LATER = """
    from pathlib import Path
    from typing import TypedDict

    from tidemark.transform import Record


    class Row(TypedDict):
        payload: bytes | None


    def transform(record: Record) -> Row:
        if record.value == b"later" and not Path("{ready}").exists():
            raise RuntimeError("not ready")
        return {{"payload": record.value}}
"""
"""Fails for one record until a file exists."""


def in_the_readme(start: str, instead: Mapping[str, str]) -> str:
    """The README's block that begins like this, with other words."""
    (code,) = (code for code in snippets("README.md", "sh") if code.startswith(start))
    return with_words(code, instead)


class Client:
    """An environment with a plain Airflow, into which the README's commands install Tidemark, and the README's environment for drivers."""

    def __init__(self, folder: Path, airflow: str) -> None:
        self.airflow = airflow
        self.python, self.driver = folder / "client" / "bin" / "python", folder / "driver" / "bin" / "python"
        subprocess.run(["make", "--quiet", "--old-file", ".venv/.ready", "dist"], cwd=ROOT, check=True)
        files, constraints = ROOT / "build" / "dist", f"constraints-airflow-{airflow}.txt"
        uv = [sys.executable, "-m", "uv"]
        subprocess.run([*uv, "venv", "--quiet", "--python", sys.executable, str(folder / "client")], check=True)
        plain = [*uv, "pip", "install", "--quiet", "--python", str(self.python), "--constraint", str(files / constraints)]
        metadata_in_postgres = "apache-airflow-providers-postgres"
        subprocess.run([*plain, f"apache-airflow=={airflow}", metadata_in_postgres], check=True)
        here = {
            "make dist && cd build/dist": f"cd {files}",
            "x86_64": platform.machine(),
            "/opt/airflow": str(folder / "client"),
            "constraints-airflow-3.3.1.txt": constraints,
            "--python 3.11 ~/driver": f"--python {sys.executable} ~/driver",
            "~/driver": str(folder / "driver"),
        }
        started = time.monotonic()
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        done = subprocess.run(
            ["bash", "-ec", in_the_readme("make dist", here)], env=os.environ | {"PATH": path}, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        self.installed_in_s = time.monotonic() - started

    def run(self, *words: str, check: bool = True, **env: str) -> subprocess.CompletedProcess[str]:
        """Runs a program of the environment."""
        variables = clean_env() | {"TIDEMARK_PYTHON": str(self.driver), "NO_COLOR": "1"} | env
        command = [str(self.python.with_name(words[0])), *words[1:]]
        done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=300)
        assert not check or done.returncode == 0, done.stdout + done.stderr
        return done


@pytest.fixture(scope="module", params=AIRFLOW)
def client(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    client = Client(tmp_path_factory.mktemp("environments"), request.param)
    yield client
    keepers = [process for process in psutil.process_iter(["cmdline"]) if str(client.driver) in (process.info["cmdline"] or [])]
    for keeper in keepers:  # they would wait for another task for ten minutes
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in (*keeper.children(recursive=True), keeper):
                process.kill()


@pytest.fixture
def home(scenario: Scenario, tmp_path: Path) -> dict[str, str]:
    """A project with one consumer, and Airflow's settings and connections for it."""
    (tmp_path / "expectations").mkdir()
    (tmp_path / "expectations" / "payloads.json").write_text(SUITE)
    (tmp_path / "dags").mkdir()
    (tmp_path / "dags" / "all.py").write_text("from tidemark.airflow import all_dags\n\nglobals().update(all_dags())\n")
    variables = scenario.env()
    servers = variables["TIDEMARK_KAFKA_BOOTSTRAP_SERVERS"]
    return variables | {
        "TIDEMARK_EXPECTATIONS": str(tmp_path / "expectations"),
        "AIRFLOW_HOME": str(tmp_path),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": f"sqlite:///{tmp_path}/airflow.db",
        "AIRFLOW_CONN_TIDEMARK_POSTGRES": variables["TIDEMARK_DATABASE_URL"],
        "AIRFLOW_CONN_TIDEMARK_KAFKA": f'{{"conn_type": "kafka", "extra": {{"bootstrap.servers": "{servers}"}}}}',
        "AIRFLOW_CONN_TIDEMARK_SPARK": '{"conn_type": "spark", "host": "local[2]"}',
    }


def test_airflow_with_its_own_constraints_runs_a_consumer(client: Client, scenario: Scenario, home: dict[str, str]) -> None:
    """Airflow's environment has none of a driver's packages. Runs, validations and commands use the driver's environment."""
    topic = scenario.topics.create()
    scenario.write(topics=topic, validation={"suite": "payloads"}).make_sink()
    heavy = "pyspark,pyarrow,pandas,numpy,great_expectations,grpc_tools,datafusion,ptars,authlib"
    dags, installed = client.run("python", "-c", PARSE, home["AIRFLOW_HOME"] + "/dags", heavy, **home).stdout.splitlines()[-2:]
    assert dags.split()[0] == f"consume__{scenario.name}"
    assert installed == ""
    assert "ok" in client.run("tidemark", "consumers", "check", scenario.name, **home).stdout

    scenario.topics.produce(topic, ["a", "b"])
    client.run("airflow", "db", "migrate", **home)
    client.run("airflow", "dags", "test", f"consume__{scenario.name}", **home)
    assert scenario.rows() == [b"a", b"b"]
    assert scenario.sql("SELECT verdict FROM tidemark.validation") == [("passed",)]


def test_people_and_schedules_rewind_and_drain_in_each_airflow(
    client: Client, scenario: Scenario, stack: LocalStack, home: dict[str, str], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """An approved rewind starts a run that reads the rows again. A record whose transform fails waits for its retry, and the next drain
    loads it. The page answers."""
    topic = scenario.topics.create()
    retry = {"delays": ["1s"]}
    scenario.write(LATER.format(ready=tmp_path / "ready"), topics=topic, validation={"suite": "payloads"}, retry=retry).make_sink()
    assert "created" in client.run("tidemark", "retries", "topics", scenario.name, "--create", **home).stdout
    scenario.topics.produce(topic, ["a", "b", "later"])
    metadata = stack.create_database(f"airflow_{scenario.name}")
    folder = tmp_path / "airflow"
    request.addfinalizer(LocalAirflow.at(folder).down)
    client.run("python", "-c", UP, str(folder), metadata, home["AIRFLOW_HOME"] + "/dags", json.dumps(home))
    with LocalAirflow.at(folder).client() as airflow:
        consume = f"consume__{scenario.name}"
        for dag in (consume, "rewind", "drain_retries"):
            airflow.wait_for_dag(dag)
        airflow.unpause(consume)
        assert airflow.wait(consume, airflow.trigger(consume), 180) == "success"
        assert scenario.rows() == [b"a", b"b"]

        form = {"consumers": [scenario.name], "scenario": "to-offset", "value": "1", "reason": "b was wrong"}
        run = airflow.trigger("rewind", form)
        question = f"dags/rewind/dagRuns/{quote(run, safe='')}/taskInstances/apply/-1/hitlDetails"
        until(lambda: _states(airflow, "rewind", run).get("apply") in {"awaiting_input", "deferred", "failed"}, "somebody is asked")
        until_scheduler_looped(airflow)
        assert "b was wrong" in airflow.get(question)["body"]
        airflow.patch(question, {"chosen_options": ["Approve"], "params_input": {}})
        assert airflow.wait("rewind", run, 180) == "success", _states(airflow, "rewind", run)
        ((number, state, decided_by),) = scenario.sql("SELECT rewind_id, state, decided_by FROM tidemark.rewind")
        assert (state, decided_by) == ("APPLIED", "admin")
        assert airflow.wait(consume, f"rewind__{number}", 180) == "success"
        assert scenario.rows() == [b"a", b"b"]

        (tmp_path / "ready").touch()
        airflow.unpause("drain_retries")
        airflow.trigger("drain_retries")
        until(lambda: scenario.rows() == [b"a", b"b", b"later"], "the drain has loaded the record")
        page = httpx.get(f"{LocalAirflow.at(folder).url}/tidemark/api/groups", headers={"Authorization": f"Bearer {airflow.token()}"})
        assert scenario.name in page.text


def test_topic_becomes_a_table_by_the_commands_of_the_readme(
    client: Client,
    scenario: Scenario,
    stack: LocalStack,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In an Airflow that runs, with an empty folder of DAGs. The connections are stored by the commands that `tidemark init` prints. The
    test reports how long it takes."""
    topic = scenario.topics.create(name=scenario.name)
    scenario.topics.produce(topic, ['{"id": 1, "at": "2026-01-02T03:04:05Z"}', '{"id": 2, "at": null}'])
    project, folder = tmp_path / "project", tmp_path / "airflow"
    (project / "dags").mkdir(parents=True)
    metadata = stack.create_database(f"airflow_{topic}")
    request.addfinalizer(LocalAirflow.at(folder).down)
    places = {"TIDEMARK_HOME": str(project), "TIDEMARK_PYTHON": str(client.driver)}
    client.run("python", "-c", UP, str(folder), metadata, str(project / "dags"), json.dumps(places))
    user = {name: value for name, value in scenario.env().items() if name in (DATABASE_URL, BOOTSTRAP_SERVERS)}
    shell = places | {
        "PATH": f"{client.python.parent}:{os.environ['PATH']}",
        "AIRFLOW_HOME": str(project),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "AIRFLOW__CORE__FERNET_KEY": json.loads((folder / "secrets.json").read_text())["fernet_key"],
        "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": metadata,
    }

    def typed(line: str) -> str:
        done = subprocess.run(
            ["bash", "-ec", line], env=os.environ | shell | user, cwd=project, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, (line, done.stdout + done.stderr)
        return done.stdout

    steps = in_the_readme("tidemark init\n", {"orders": topic}).splitlines()
    assert len(steps) == STEPS
    started = time.monotonic()
    for line in steps:
        printed = typed(line)
        if line == "tidemark init":
            typed("\n".join(command for command in printed.splitlines() if command.startswith("airflow connections add")))
    until(lambda: scenario.sql(f"SELECT id, at IS NULL FROM public.{topic} ORDER BY id") == [(1, False), (2, True)], "the rows")
    seconds = time.monotonic() - started
    with capsys.disabled():
        installed = f"into a plain Airflow {client.airflow} installed in {client.installed_in_s:.0f} s"
        sys.stdout.write(f"\n{installed}, from there to the first scheduled rows {STEPS} steps in {seconds:.0f} s\n")
    with LocalAirflow.at(folder).client() as airflow:
        assert {run["run_type"] for run in airflow.runs(f"consume__{topic}")} == {"scheduled"}


def _states(airflow: AirflowClient, dag: str, run: str) -> dict[str, str | None]:
    return {task.task_id: task.state for task in airflow.task_instances(dag, run)}


def test_interpreter_that_cannot_run_drivers_is_refused(client: Client, scenario: Scenario, home: dict[str, str], tmp_path: Path) -> None:
    scenario.write(topics=scenario.topics.create()).make_sink()
    missing = client.run("tidemark", "offsets", scenario.name, check=False, **home | {"TIDEMARK_PYTHON": str(tmp_path)})
    assert (missing.returncode, missing.stderr.split(": ")[0]) == (1, "TIDEMARK_PYTHON")
    assert f"{tmp_path} is not an executable file" in missing.stderr
    alone = client.run("tidemark", "consumers", "check", scenario.name, check=False, **home | {"TIDEMARK_PYTHON": ""})
    assert "Install Tidemark with the extra driver: pip install 'tidemark-kafka[driver]'" in alone.stdout + alone.stderr
    older = home | {"TIDEMARK_CALLER_VERSION": "0.0.1", "TIDEMARK_PYTHON": ""}
    differs = client.run("tidemark", "offsets", scenario.name, check=False, **older)
    assert f"Tidemark is version 0.0.1 where the run was started, and {version()}" in differs.stderr

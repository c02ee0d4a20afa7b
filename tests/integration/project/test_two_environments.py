"""Airflow in an environment made with its own constraints, drivers in another one, which ``TIDEMARK_PYTHON`` names."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.scenario import Scenario

from tidemark.packages import version

pytestmark = pytest.mark.thorough
ROOT = Path(__file__).parents[3]
CONSTRAINTS = ROOT / "tests" / "support" / "constraints"
AIRFLOW = ("3.2.1", "3.3.1")
SUITE = '{"expectations": [{"type": "expect_column_values_to_not_be_null", "kwargs": {"column": "payload"}}]}'
PARSE = """
import sys
from importlib.util import find_spec
from airflow.dag_processing.dagbag import DagBag
import tidemark.airflow.plugin, tidemark.airflow.web.app
bag = DagBag(sys.argv[1])
assert bag.import_errors == {}, bag.import_errors
print(*sorted(bag.dags))
print(*[name for name in sys.argv[2].split(",") if find_spec(name)])
"""


class Client:
    """An environment with Airflow and Tidemark's core, whose commands use the tests' environment for drivers."""

    def __init__(self, folder: Path, airflow: str) -> None:
        self.python = folder / "client" / "bin" / "python"
        uv = [sys.executable, "-m", "uv"]
        subprocess.run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)], cwd=ROOT, check=True)
        (wheel,) = folder.glob("*.whl")
        subprocess.run([*uv, "venv", "--quiet", "--python", sys.executable, str(folder / "client")], check=True)
        constrained = ["--constraint", str(CONSTRAINTS / f"airflow-{airflow}.txt")]
        install = [*uv, "pip", "install", "--quiet", "--python", str(self.python), *constrained]
        subprocess.run([*install, f"{wheel}[airflow]", f"apache-airflow=={airflow}"], check=True)

    def run(self, *words: str, check: bool = True, **env: str) -> subprocess.CompletedProcess[str]:
        """Runs a program of the environment. The driver's environment has the checkout, and so the same version."""
        strange = ("TIDEMARK_", "AIRFLOW", "PYTHON", "VIRTUAL_ENV")
        clean = {name: value for name, value in os.environ.items() if not name.startswith(strange) or name == "TIDEMARK_CACHE"}
        variables = clean | {"TIDEMARK_PYTHON": sys.executable, "NO_COLOR": "1"} | env
        command = [str(self.python.with_name(words[0])), *words[1:]]
        done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=300)
        assert not check or done.returncode == 0, done.stdout + done.stderr
        return done


@pytest.fixture(scope="module", params=AIRFLOW)
def client(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Client:
    return Client(tmp_path_factory.mktemp("environments"), request.param)


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
    heavy = "pyspark,pyarrow,pandas,numpy,great_expectations,grpc_tools,datafusion,ptars,pgpq,authlib"
    dags, installed = client.run("python", "-c", PARSE, home["AIRFLOW_HOME"] + "/dags", heavy, **home).stdout.splitlines()[-2:]
    assert dags.split()[0] == f"consume__{scenario.name}"
    assert installed == ""
    assert "ok" in client.run("tidemark", "consumers", "check", scenario.name, **home).stdout

    scenario.topics.produce(topic, ["a", "b"])
    client.run("airflow", "db", "migrate", **home)
    client.run("airflow", "dags", "test", f"consume__{scenario.name}", **home)
    assert scenario.rows() == [b"a", b"b"]
    assert scenario.sql("SELECT verdict FROM tidemark.validation") == [("passed",)]


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

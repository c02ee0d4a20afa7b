"""Tidemark as users install it: a wheel in an environment without a checkout, and the project that ``tidemark init`` writes."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest
from tests.support.documented import snippets
from tests.support.installed import ROOT, Installed

from tidemark import migrations

PARSE = """
import sys
from airflow.dag_processing.dagbag import DagBag
for folder in sys.argv[1:]:
    bag = DagBag(folder)
    assert bag.import_errors == {}, bag.import_errors
    print(*sorted(bag.dags))
"""


@pytest.fixture(scope="module")
def new_project(installed: Installed, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("user") / "lake"
    installed.run("tidemark", "init", str(folder), cwd=folder.parent)
    return folder


def test_wheel_has_the_library_and_what_a_project_needs(installed: Installed, tmp_path: Path) -> None:
    """It has the migrations, the entry point, a project's files and the marker of a typed package, but no byte code and no tests."""
    names = zipfile.ZipFile(installed.wheel).namelist()
    assert {name.partition("/")[0] for name in names} == {"tidemark", f"tidemark_kafka-{version('tidemark-kafka')}.dist-info"}
    assert {Path(name).stem for name in names if name.startswith("tidemark/_project/sql/")} == set(migrations.known())
    needed = ("py.typed", "native/encoder.c", "_project/spark_jobs/consume.py", "_project/dags/consume.py")
    assert {f"tidemark/{name}" for name in needed} <= set(names)
    assert [name for name in names if "__pycache__" in name or name.endswith(".pyc")] == []
    done = installed.run("python", "-c", "import tidemark; print(tidemark.__file__)", cwd=tmp_path)
    assert Path(done.stdout.strip()).is_relative_to(installed.bin.parent)
    assert installed.run("tidemark", "--version", cwd=tmp_path).stdout == f"tidemark {version('tidemark-kafka')}\n"


LIBRARY = "from tidemark import native; library = native.library(); print(library and library._name)"


def test_wheel_brings_the_compiled_library_for_its_machine(installed: Installed, tmp_path: Path) -> None:
    """No compiler is needed. The library needs glibc 2.17 or newer, and is not used if the sources differ from those it was built from."""
    machine = platform.machine()
    assert installed.wheel.name.endswith(f"-py3-none-manylinux_2_17_{machine}.whl")
    env = {"PATH": "", "TIDEMARK_CACHE": str(tmp_path)}
    python = str(installed.bin / "python")
    library = Path(installed.run(python, "-c", LIBRARY, cwd=tmp_path, **env).stdout.strip())
    assert library.is_relative_to(installed.bin.parent)
    assert list(tmp_path.iterdir()) == []
    source = library.with_name("encoder.c")
    original = source.read_text()
    source.write_text(original + "/* edited */")
    try:
        edited = installed.run(python, "-c", LIBRARY, cwd=tmp_path, **env)
    finally:
        source.write_text(original)
    assert (edited.stdout, "there is no C compiler" in edited.stderr) == ("None\n", True)


@pytest.mark.thorough
def test_wheel_without_a_compiler_fits_every_machine(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"CC": "false"}, capture_output=True, text=True, check=True)
    assert "the wheel has no compiled code: false failed" in done.stdout + done.stderr
    (wheel,) = tmp_path.iterdir()
    assert wheel.name.endswith("-py3-none-any.whl")
    assert [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".so")] == []


def test_init_refuses_a_folder_of_something_else(installed: Installed, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    done = installed.run("tidemark", "init", cwd=tmp_path, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith(". is neither empty nor an Airflow project: it has no folder dags and no airflow.cfg. ")
    assert list(tmp_path.iterdir()) == [tmp_path / "notes.txt"]


@pytest.fixture
def airflow_project(tmp_path: Path) -> dict[str, str]:
    """The environment of an Airflow project in ``tmp_path``, with the variables of a user's shell."""
    (tmp_path / "dags").mkdir()
    (tmp_path / "dags" / "other.py").write_text("mine = 1\n")
    return {
        "AIRFLOW_HOME": str(tmp_path),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": f"sqlite:///{tmp_path}/airflow.db",
        "TIDEMARK_DATABASE_URL": "postgresql://ann:secret@db.example:5433/lake?sslmode=require",
        "TIDEMARK_KAFKA_BOOTSTRAP_SERVERS": "kafka.example:9092",
    }


def test_init_adds_tidemark_to_an_airflow_project(installed: Installed, airflow_project: dict[str, str], tmp_path: Path) -> None:
    """It changes no existing file. Airflow then has the DAGs and, from the printed variables, the connections. A new call adds nothing."""
    printed = installed.run("tidemark", "init", cwd=tmp_path, **airflow_project).stdout
    again = installed.run("tidemark", "init", cwd=tmp_path, **airflow_project)
    assert (again.stderr, again.stdout) == ("Everything is there already.\n", printed)
    assert sorted(path.name for path in (tmp_path / "dags").iterdir()) == ["other.py", "tidemark_dags.py"]
    assert (tmp_path / "dags" / "other.py").read_text() == "mine = 1\n"
    assert "secret" not in printed

    shutil.copy(ROOT / "template" / "include" / "consumers" / "cities.yaml", tmp_path / "include" / "consumers")
    exports = [line for line in printed.splitlines() if line.startswith("export ")]
    read = "from airflow.sdk import BaseHook; print(BaseHook.get_connection('tidemark_postgres').password)"
    shell = [*exports, f"python -c '{PARSE}' {tmp_path}/dags", f'python -c "{read}"']
    printed = installed.run("bash", "-ec", "\n".join(shell), cwd=tmp_path, **airflow_project).stdout
    assert (len(exports), printed.splitlines()[-2:]) == (3, ["consume__cities discard drain_retries maintain redrive rewind", "secret"])


@pytest.mark.thorough
def test_commands_that_init_prints_store_the_connections(installed: Installed, airflow_project: dict[str, str], tmp_path: Path) -> None:
    printed = installed.run("tidemark", "init", cwd=tmp_path, **airflow_project).stdout
    commands = [line for line in printed.splitlines() if line.startswith("airflow ")]
    shell = ['airflow() { python -m airflow "$@"; }', "airflow db migrate", *commands]
    assert installed.run("bash", "-ec", "\n".join(shell), cwd=tmp_path, **airflow_project).stdout.count("Successfully added") == 3


def test_new_project_has_the_files_that_its_readme_and_compose_file_name(new_project: Path) -> None:
    named = {
        *re.findall(r"`([\w./-]+[/\w])`", (new_project / "README.md").read_text().partition("\n## ")[0]),
        *re.findall(r"\./(docker/[\w.-]+):", (new_project / "docker-compose.yaml").read_text()),
        *re.findall(r"^COPY --chown=tidemark (\S+)", (new_project / "Dockerfile").read_text(), re.MULTILINE),
        *re.findall(r"^!(.*)$", (new_project / ".dockerignore").read_text(), re.MULTILINE),
    }
    assert {"include/consumers/", "docker/postgres-init.sh", "requirements.txt", "docker", "Dockerfile"} <= named
    dags = {"discard", "drain_retries", "maintain", "redrive", "rewind", "watch"}
    assert sorted(name for name in named - dags if not (new_project / name).exists()) == []
    assert os.access(new_project / "docker" / "kafka.sh", os.X_OK)


def test_airflow_finds_the_project_in_its_home(installed: Installed, new_project: Path, tmp_path: Path) -> None:
    """Both with the files of a new project and with the one file that the README shows. No Tidemark variable is set, and Airflow runs in
    another folder."""
    snippet = next(code for code in snippets("README.md", "python") if "tidemark.airflow" in code)
    one_file = tmp_path / "dags" / "load.py"
    one_file.parent.mkdir()
    one_file.write_text(snippet)
    airflow = {
        "AIRFLOW_HOME": str(new_project),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": f"sqlite:///{tmp_path}/airflow.db",
        "AIRFLOW__LOGGING__BASE_LOG_FOLDER": str(tmp_path / "logs"),
    }
    done = installed.run("python", "-c", PARSE, str(new_project / "dags"), str(one_file.parent), cwd=tmp_path, **airflow)
    found = [line for line in done.stdout.splitlines() if line.startswith("consume__")]
    assert found == ["consume__cities discard drain_retries maintain redrive rewind"] * 2

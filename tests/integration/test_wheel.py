"""Tidemark as a wheel: without a checkout it brings its migrations and its entry point along."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from tests.scenario import Scenario

from tidemark import project, schema


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that holds the package as a wheel has it."""
    wheels, folder = tmp_path_factory.mktemp("wheels"), tmp_path_factory.mktemp("installed")
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(wheels)], cwd=project.root(), check=True)
    (wheel,) = wheels.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def run(installed: Path, scenario: Scenario, code: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Python that finds the wheel before the checkout, in a folder that has nothing to do with either."""
    variables = {name: value for name, value in scenario.env().items() if name != "TIDEMARK_HOME"}
    return subprocess.run(
        [sys.executable, "-c", f"import tidemark; assert tidemark.__file__.startswith({str(installed)!r}); {code}"],
        env=variables | {"PYTHONPATH": os.pathsep.join([str(installed)])} | env,
        cwd=scenario.folder, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip


MIGRATE = "import sys; from tidemark.cli.main import main; sys.argv = ['tidemark', 'migrate']; main()"


def test_wheel_brings_the_whole_schema(installed: Path, scenario: Scenario) -> None:
    scenario.sql("DROP SCHEMA tidemark CASCADE")
    done = run(installed, scenario, MIGRATE)
    assert done.stderr.splitlines() == [f"applied {name}" for name in schema.known()], done.stderr
    assert scenario.sql("SELECT count(*) FROM tidemark.migration") == [(len(schema.known()),)]


def test_wheel_brings_the_entry_point_and_takes_the_users_files_from_the_current_folder(installed: Path, scenario: Scenario) -> None:
    done = run(installed, scenario, "from tidemark import project; print(project.consume_job()); print(project.root())")
    job, root = done.stdout.splitlines()
    assert Path(job).is_file()
    assert Path(job).is_relative_to(installed)
    assert Path(root) == scenario.folder
    code = f"import runpy, sys; sys.argv = ['consume', '--help']; runpy.run_path({job!r}, run_name='__main__')"
    consumed = run(installed, scenario, code)
    assert "Run a consumer once." in consumed.stdout, consumed.stderr


def test_migrate_without_migrations_is_refused(scenario: Scenario) -> None:
    """It must not say that the database is current."""
    done = scenario.command("migrate", env={"TIDEMARK_HOME": str(scenario.folder)})
    assert done.returncode == 1
    assert done.stderr.startswith(f"migrations: {scenario.folder}/sql has none.")

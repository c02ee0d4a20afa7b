"""The workflows call what is there, and try the Pythons that the package supports."""

from __future__ import annotations

import re
import subprocess
import tomllib
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from tests.matrix.columns import COLUMNS

from tidemark import project

ROOT = project.root()
WORKFLOWS = {path.name: yaml.safe_load(path.read_text(encoding="utf-8")) for path in (ROOT / ".github" / "workflows").glob("*.yaml")}
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")


def jobs() -> Iterator[tuple[str, Any]]:
    for name, workflow in WORKFLOWS.items():
        for job, settings in workflow["jobs"].items():
            yield f"{name}: {job}", settings


COMMANDS = sorted({step["run"] for _, job in jobs() for step in job["steps"] if "run" in step and not step["run"].startswith("gh ")})


@pytest.mark.parametrize("command", COMMANDS)
def test_command_of_a_workflow_exists(command: str) -> None:
    program, *words = command.split()
    if program == "make":
        assert all(re.search(rf"^{word}:", MAKEFILE, re.MULTILINE) for word in words)
    else:
        assert program == ".ci/run"
        parts = re.findall(r"^  (\w+)\) ", (ROOT / program).read_text(encoding="utf-8"), re.MULTILINE)
        assert words[0] in parts


def test_ci_refuses_a_part_that_it_does_not_have_and_a_tag_that_is_not_the_version() -> None:
    for words, reason in ((["nothing"], "usage: .ci/run"), (["dist", "v999.0.0"], "the tag is v999.0.0")):
        done = subprocess.run([ROOT / ".ci" / "run", *words], capture_output=True, text=True, timeout=60)
        assert done.returncode != 0
        assert reason in done.stderr


def test_release_has_the_files_that_make_dist_builds() -> None:
    """The README installs from them; ``tests/integration/project/test_two_environments.py`` does so."""
    (build, release) = (WORKFLOWS["release.yaml"]["jobs"][name]["steps"] for name in ("wheel", "release"))
    folders = [step["with"]["path"] for step in (*build, *release) if "artifact" in step.get("uses", "")]
    (create,) = (step["run"] for step in release if step.get("run", "").startswith("gh release create"))
    assert (folders, create.split()[4]) == (["build/dist"] * 2, "build/dist/*")


def test_pythons_are_the_same_wherever_they_are_named() -> None:
    supported = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["requires-python"]
    found = re.search(r"^PYTHONS := (.+)$", MAKEFILE, re.MULTILINE)
    assert found
    pythons = sorted(found[1].split())
    assert supported == f">={pythons[0]},<3.{int(pythons[-1].split('.')[1]) + 1}"
    assert WORKFLOWS["check.yaml"]["jobs"]["check"]["strategy"]["matrix"]["python"] == pythons
    assert WORKFLOWS["test.yaml"]["jobs"]["test"]["strategy"]["matrix"]["python"] == [pythons[0], pythons[-1]]


def test_each_command_uses_the_python_that_its_job_sets_up() -> None:
    """make takes the newest Python that it finds, and the runners have several."""
    for name, job in jobs():
        setups = [step["with"]["python-version"] for step in job["steps"] if step.get("uses", "").startswith("actions/setup-python")]
        for step in job["steps"]:
            if step.get("run", "").startswith(("make", ".ci/run")):
                pythons = [f"python{version}" for versions in setups for version in str(versions).splitlines()]
                assert step["env"]["PYTHON"] == pythons[-1], (name, step["run"])


def test_nightly_matrix_runs_every_column() -> None:
    columns = " ".join(WORKFLOWS["test.yaml"]["jobs"]["matrix"]["strategy"]["matrix"]["what"]).split()
    assert columns == list(COLUMNS)


def test_each_job_has_a_limit() -> None:
    assert {name for name, job in jobs() if "timeout-minutes" not in job} == set()

"""Tidemark as users install it: a wheel, in a virtual environment without a checkout."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]


def clean_env() -> dict[str, str]:
    """The variables of this process, without those that may point to a checkout or to another Airflow."""
    strange = ("TIDEMARK_", "AIRFLOW", "PYTHON", "VIRTUAL_ENV")
    return {name: value for name, value in os.environ.items() if not name.startswith(strange) or name == "TIDEMARK_CACHE"}


@dataclass(frozen=True)
class Installed:
    """A virtual environment with the wheel, on top of the packages of the tests' environment."""

    wheel: Path
    bin: Path

    def run(self, *command: str, cwd: Path, check: bool = True, **env: str) -> subprocess.CompletedProcess[str]:
        """Runs a command of the environment, as in a shell where no variable points to a checkout."""
        variables = clean_env()
        path = os.pathsep.join([str(self.bin), variables.get("PATH", os.defpath)])
        done = subprocess.run(
            command, env=variables | {"PATH": path, "NO_COLOR": "1"} | env, cwd=cwd, capture_output=True, text=True, timeout=300
        )
        assert not check or done.returncode == 0, done.stdout + done.stderr
        return done


def install(folder: Path) -> Installed:
    """Builds the wheel and creates the environment in this folder."""
    python = folder / "venv" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)], cwd=ROOT, check=True)
    (wheel,) = folder.glob("*.whl")
    uv = [sys.executable, "-m", "uv"]
    subprocess.run([*uv, "venv", "--quiet", "--python", sys.executable, str(folder / "venv")], check=True)
    subprocess.run([*uv, "pip", "install", "--quiet", "--offline", "--no-deps", "--python", str(python), str(wheel)], check=True)
    (packages,) = (folder / "venv").glob("lib/python*/site-packages")
    (packages / "already_installed.pth").write_text(sysconfig.get_path("purelib"))  # its .pth files are not read: no checkout
    return Installed(wheel, python.parent)

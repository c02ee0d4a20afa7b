"""The Python environment of drivers.

By default it is the environment of their caller. ``TIDEMARK_PYTHON`` names the interpreter of another one: Airflow's environment then needs
none of a driver's packages, and Airflow's constraints do not limit them. Both have the same version of Tidemark.

    task in Airflow's environment  --run, call-->  process of TIDEMARK_PYTHON
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from tidemark.errors import BadInput, Refused
from tidemark.packages import DISTRIBUTION, version

PYTHON = "TIDEMARK_PYTHON"
CALLER_VERSION = "TIDEMARK_CALLER_VERSION"
"""In a driver's environment: the version of Tidemark that started it."""


class VersionsDiffer(Refused):
    """Tidemark in the driver's environment is not the version that started the driver."""

    caller: str
    driver: str

    def __str__(self) -> str:
        return (
            f"Tidemark is version {self.caller} where the run was started, and {self.driver} in the environment of {PYTHON} "
            f"({sys.executable}). Install the same version in both."
        )


def interpreter() -> str:
    """The path of the interpreter that runs drivers. Raises `BadInput`."""
    path = os.environ.get(PYTHON)
    if not path:
        return sys.executable
    if not os.access(path, os.X_OK) or Path(path).is_dir():
        raise BadInput(
            what=PYTHON, found=f"{path} is not an executable file", fix="Name the Python of an environment: /opt/driver/bin/python."
        )
    return path


def separate() -> bool:
    """Whether drivers have another environment than this process."""
    path = os.environ.get(PYTHON)
    return bool(path) and Path(str(path)).absolute() != Path(sys.executable).absolute()


def require_same_version() -> None:
    """Raises `VersionsDiffer`, in a process that a caller has started with `driver_env`."""
    caller = os.environ.get(CALLER_VERSION)
    if caller and caller != version():
        raise VersionsDiffer(caller=caller, driver=version())


def driver_env(env: Mapping[str, str]) -> dict[str, str]:
    """``env`` for a process of the driver's environment, which is not separate from itself."""
    return {name: value for name, value in env.items() if name != PYTHON} | {CALLER_VERSION: version(), "PYSPARK_PYTHON": interpreter()}


def require_tidemark() -> None:
    """Raises `BadInput` if the interpreter does not start, or has no Tidemark."""
    done = subprocess.run([interpreter(), "-c", "import tidemark"], env=os.environ, capture_output=True, text=True, check=False)
    if done.returncode:
        cause = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
        fix = f"Install Tidemark in its environment: pip install '{DISTRIBUTION}[driver]=={version()}'."
        raise BadInput(what=PYTHON, found=f"{interpreter()} cannot import Tidemark ({cause})", fix=fix)

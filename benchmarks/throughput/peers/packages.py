"""The packages of the other contestants: jars, by the Ivy that pyspark ships, and Python packages in environments of their own.

If a package is unavailable, one line says so, and its contestants are skipped.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks.harness.site import ROOT

from tidemark.jvm.jars import Recipe

_HERE = Path(__file__).parent
RECIPES = {
    "jdbc": Recipe(_HERE / "jdbc.xml", ("jdbc",), "Postgres' JDBC driver", "1 MB"),
    "connect": Recipe(_HERE / "connect.xml", ("connect",), "the jars of Kafka Connect with Debezium's JDBC sink", "66 MB"),
}
QUIX = "quixstreams[postgresql]==3.28.1"
PGPQ = "pgpq==0.12.0"
_LIMIT_S = 600


class Unobtainable(Exception):
    """A package could not be installed."""


def quix_python(report: Callable[[str], None]) -> Path:
    """The interpreter of an environment with Quix Streams, whose dependencies conflict with ours. Raises `Unobtainable`."""
    return _environment("quix", QUIX, report) / "bin" / "python"


def pgpq_packages(report: Callable[[str], None]) -> Path:
    """The folder with the package pgpq. Raises `Unobtainable`: it has no wheel for ARM."""
    (packages,) = _environment("pgpq", PGPQ, report).glob("lib/python*/site-packages")
    return packages


def _environment(name: str, requirement: str, report: Callable[[str], None]) -> Path:
    environment = ROOT / "build" / name
    ready = environment / ".ready"
    if ready.is_file() and ready.read_text() == requirement:
        return environment
    report(f"installing {requirement} (once)")
    uv = shutil.which("uv", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    if uv is None:
        raise Unobtainable("uv is not installed")
    shutil.rmtree(environment, ignore_errors=True)
    install = [uv, "pip", "install", "--quiet", "--compile-bytecode", "--python", str(environment / "bin" / "python"), requirement]
    for command in ([uv, "venv", "--quiet", "--python", sys.executable, str(environment)], install):
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_LIMIT_S)
        if done.returncode != 0:
            raise Unobtainable((done.stderr.strip().splitlines() or ["no reason given"])[-1].strip())
    ready.write_text(requirement)
    return environment

"""Finds the Java that runs the broker and Ivy: the one in ``JAVA_HOME`` if set, else the first on ``PATH``."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

from tidemark.jvm.errors import JavaUnusable

NEEDED = 17
"""Kafka 4 brokers and Spark 4 both require Java 17."""

LIGHT = ("-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Djava.awt.headless=true")
"""The cheapest compiler and collector, for the local servers: a broker's start takes 2.0 s of CPU time instead of 3.6 s."""

_ANSWER_S = 30


def find_java() -> Path:
    """The ``java`` to run. A ``JAVA_HOME`` without one is an error, because Spark would use it too.

    Raises `JavaUnusable` with the place and its problem.
    """
    home = os.environ.get("JAVA_HOME")
    if home:
        java, where = Path(home) / "bin" / "java", f"JAVA_HOME is {home}"
        if not java.is_file():
            raise JavaUnusable(where=where, found="it has no bin/java", needed=NEEDED)
    else:
        on_path = shutil.which("java")
        if on_path is None:
            raise JavaUnusable(where="JAVA_HOME is not set", found="no java is on PATH", needed=NEEDED)
        java, where = Path(on_path), f"java on PATH is {on_path}"
    try:
        answer = _run_version(java)
        if answer.returncode < 0:  # killed by a signal, which is not Java's fault
            answer = _run_version(java)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise JavaUnusable(where=where, found=f"it does not run ({error})", needed=NEEDED) from error
    version = major(answer.stderr + answer.stdout)
    if answer.returncode != 0 or version is None:
        output = (answer.stderr + answer.stdout).strip().splitlines()
        raise JavaUnusable(where=where, found=f"it does not print its version ({output[0] if output else 'no output'})", needed=NEEDED)
    if version < NEEDED:
        raise JavaUnusable(where=where, found=f"its version is {version}", needed=NEEDED)
    return java


def _run_version(java: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([java, "-version"], capture_output=True, text=True, timeout=_ANSWER_S, check=False)


def released(java: Path) -> int | None:
    """The major version from the Java home's ``release`` file, without starting Java; `None` without the file."""
    file = java.resolve().parents[1] / "release"
    match = re.search(r'^JAVA_VERSION="(\d+)', file.read_text(), re.MULTILINE) if file.is_file() else None
    return int(match[1]) if match else None


def major(text: str) -> int | None:
    """The major version in the output of ``java -version``: 17 for ``"17.0.15"``, 8 for ``"1.8.0_402"``, 25 for ``"25-ea"``."""
    match = re.search(r'version "(?:1\.)?(\d+)', text)
    return int(match[1]) if match else None

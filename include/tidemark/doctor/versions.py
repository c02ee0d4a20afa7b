"""Examines Python, Java and the packages of this environment."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from tidemark.doctor.finding import Finding, failure, ok, warning
from tidemark.driver.environment import PYTHON, separate
from tidemark.jvm.errors import JavaUnusable
from tidemark.jvm.java import find_java, released
from tidemark.packages import DISTRIBUTION

PACKAGES = (
    *(DISTRIBUTION, "pyspark", "confluent-kafka", "psycopg2-binary", "pandas", "numpy", "pyarrow", "sqlalchemy", "protobuf"),
    *("apache-airflow", "great-expectations"),
)
CLIENT = "pyspark-client"
"""A PySpark without Spark, for Spark Connect. Airflow's provider of Spark installs it. Its files are also files of ``pyspark``."""


def installed() -> dict[str, str]:
    """The versions of Python and of the installed packages, by name."""
    versions = {name: distribution.version for name in PACKAGES if (distribution := _distribution(name)) is not None}
    return {"python": platform.python_version(), **versions}


def _distribution(name: str) -> metadata.Distribution | None:
    try:
        return metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return None


def examine_versions() -> Iterator[Finding]:
    yield ok("versions", ", ".join(f"{name} {version}" for name, version in installed().items()))
    if not separate():  # otherwise runs import another environment's PySpark
        yield from examine_pyspark()
    try:
        java = find_java()
    except JavaUnusable as error:
        yield failure("java", str(error), "")
    else:
        yield ok("java", f"{released(java) or 'unknown version'}, {java}")


def _missing_files(distribution: metadata.Distribution) -> list[str]:
    """The modules that were installed and are gone. Since Python 3.12, `metadata.Distribution.files` omits these."""
    names = [line.partition(",")[0] for line in (distribution.read_text("RECORD") or "").splitlines()]
    return [name for name in names if name.endswith(".py") and not Path(str(distribution.locate_file(name))).exists()]


def examine_pyspark() -> Iterator[Finding]:
    """Finds `CLIENT` instead of PySpark, beside it, and a PySpark from which uninstalling it has taken files."""
    pyspark, client = _distribution("pyspark"), _distribution(CLIENT)
    elsewhere = f"or give drivers an environment of their own, and name its interpreter in {PYTHON}"
    if pyspark is None:
        if client is not None:
            fix = f"pip uninstall -y {CLIENT} && pip install '{DISTRIBUTION}[driver]'; {elsewhere}"
            yield failure("pyspark", f"{CLIENT} {client.version} is installed instead of pyspark, and has no Spark", fix)
        return
    again = f"pip install --force-reinstall --no-deps pyspark=={pyspark.version}"
    if client is not None:
        problem = f"{CLIENT} {client.version} is beside pyspark {pyspark.version} and has its files: uninstalling either breaks the other"
        yield warning("pyspark", problem, f"pip uninstall -y {CLIENT} && {again}; {elsewhere}")
    elif missing := _missing_files(pyspark):
        problem = f"pyspark {pyspark.version} lacks {len(missing)} of its files, such as {missing[0]}: {CLIENT} was uninstalled"
        yield failure("pyspark", problem, again)

"""Examines Python, Java and the packages of this environment."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from importlib import metadata

from tidemark.doctor.finding import Finding, failure, ok
from tidemark.jvm.errors import JavaUnusable
from tidemark.jvm.java import find_java, released
from tidemark.packages import DISTRIBUTION

PACKAGES = (DISTRIBUTION, "pyspark", "confluent-kafka", "psycopg2-binary", "pyarrow", "apache-airflow", "great-expectations")


def installed() -> dict[str, str]:
    """The versions of Python and of the installed packages, by name."""
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def examine_versions() -> Iterator[Finding]:
    yield ok("versions", ", ".join(f"{name} {version}" for name, version in installed().items()))
    try:
        java = find_java()
    except JavaUnusable as error:
        yield failure("java", str(error), "")
    else:
        yield ok("java", f"{released(java) or 'unknown version'}, {java}")

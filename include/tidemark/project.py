"""Where a Tidemark project keeps its files: migrations, entry points, specs, transforms, expectations, local state."""

from __future__ import annotations

import os
from pathlib import Path


def root() -> Path:
    """The project folder: ``TIDEMARK_HOME``, or the checkout that this package is installed from (``pip install -e .``)."""
    home = os.environ.get("TIDEMARK_HOME")
    return Path(home).resolve() if home else Path(__file__).resolve().parents[2]


def migrations() -> Path:
    return root() / "sql"


def consume_job() -> Path:
    """The one entry point that the command line, Airflow and spark-submit start."""
    return root() / "spark_jobs" / "consume.py"


def transforms() -> Path:
    return root() / "spark_jobs" / "transforms"


def consumers() -> Path:
    return root() / "include" / "consumers"


def expectations() -> Path:
    return root() / "include" / "expectations"


def state() -> Path:
    """Where the embedded stack keeps its data: ``TIDEMARK_STATE``, or ``.tidemark`` in the project."""
    path = os.environ.get("TIDEMARK_STATE")
    return Path(path).resolve() if path else root() / ".tidemark"

"""Where a Tidemark project keeps its files: migrations, entry points, specs, transforms, expectations, local state.

Everything lies in the project folder unless a variable says otherwise: ``TIDEMARK_CONSUMERS``, ``TIDEMARK_TRANSFORMS``,
``TIDEMARK_EXPECTATIONS`` and ``TIDEMARK_STATE`` name a folder each.
"""

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
    return _folder("TIDEMARK_TRANSFORMS", "spark_jobs/transforms")


def consumers() -> Path:
    return _folder("TIDEMARK_CONSUMERS", "include/consumers")


def expectations() -> Path:
    return _folder("TIDEMARK_EXPECTATIONS", "include/expectations")


def state() -> Path:
    """Where the embedded stack keeps its data: ``.tidemark`` in the project unless ``TIDEMARK_STATE`` names another folder."""
    return _folder("TIDEMARK_STATE", ".tidemark")


def _folder(variable: str, default: str) -> Path:
    path = os.environ.get(variable)
    return Path(path).resolve() if path else root() / default

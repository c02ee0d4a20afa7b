"""Where a Tidemark project keeps its files: migrations, entry points, specs, transforms, expectations, local state.

Everything lies in the project folder unless a variable says otherwise: ``TIDEMARK_CONSUMERS``, ``TIDEMARK_TRANSFORMS``,
``TIDEMARK_EXPECTATIONS`` and ``TIDEMARK_STATE`` name a folder each.
"""

from __future__ import annotations

import os
from pathlib import Path

_CHECKOUT = Path(__file__).resolve().parents[2]
_SHIPPED = Path(__file__).resolve().parent / "_project"
"""Migrations and entry point as a wheel has them; a checkout has its own."""


def root() -> Path:
    """The project folder: ``TIDEMARK_HOME``; else the checkout that this package is installed from, or, for a wheel, the current folder."""
    home = os.environ.get("TIDEMARK_HOME")
    if home:
        return Path(home).resolve()
    return Path.cwd() if _SHIPPED.is_dir() else _CHECKOUT


def migrations() -> Path:
    return _own("sql")


def consume_job() -> Path:
    """The one entry point that the command line, Airflow and spark-submit start."""
    return _own("spark_jobs/consume.py")


def _own(name: str) -> Path:
    """A part of Tidemark itself: the project's, where it has one, or the wheel's."""
    project, shipped = root() / name, _SHIPPED / name
    return shipped if shipped.exists() and not project.exists() else project


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

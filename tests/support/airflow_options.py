"""The configuration reference of the installed Airflow, read without importing Airflow."""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path

import yaml


@functools.cache
def airflow_options() -> dict[str, set[str]]:
    """The options of each section."""
    airflow = importlib.util.find_spec("airflow")
    assert airflow is not None
    assert airflow.origin is not None
    text = (Path(airflow.origin).parent / "config_templates" / "config.yml").read_text(encoding="utf-8")
    return {section: set(found["options"]) for section, found in yaml.load(text, yaml.CSafeLoader).items()}

"""Tidemark's page in Airflow's menu: Browse > Tidemark.

This file is the only entry; the code is `tidemark.airflow.web`. Airflow imports each file here as a top-level module of the file's name, so
a file `tidemark.py` would replace the library `tidemark` for the whole process.
"""

from __future__ import annotations

from tidemark.airflow.plugin import TidemarkPlugin

__all__ = ["TidemarkPlugin"]

"""The page as an Airflow plugin. Every process of Airflow loads plugins, tasks too, so the page itself is imported only by the api-server.

A checkout and a project of ``tidemark init`` have the file ``plugins/tidemark_plugin.py``. An Airflow without that file finds the plugin by
the entry point ``airflow.plugins`` of the installed library. Airflow reads its plugins folder first and reports a second plugin of the same
name as an error, so the entry point gives nothing if the file was read.
"""

from __future__ import annotations

import sys
from typing import Any
from urllib.parse import urlsplit

from airflow.configuration import conf
from airflow.plugins_manager import AirflowPlugin

URL_PREFIX = "/tidemark"
BASE_PATH = urlsplit(conf.get("api", "base_url", fallback="")).path.rstrip("/")
"""The path under which a proxy serves Airflow. Airflow 3.2 does not resolve relative addresses of a plugin's script."""
FILE_MODULE = "tidemark_plugin"
"""The name under which Airflow imports the file in the plugins folder."""


class TidemarkPlugin(AirflowPlugin):
    name = "tidemark"
    react_apps: list[Any] = [  # noqa: RUF012 - as in the base class
        {
            "name": "Tidemark",
            "bundle_url": f"{BASE_PATH}{URL_PREFIX}/app.js",
            "url_route": "tidemark",
            "destination": "nav",
            "category": "browse",
        }
    ]

    @property
    def fastapi_apps(self) -> list[Any]:  # type: ignore[override]  # Airflow reads it from the instance, in the api-server only
        from tidemark.airflow.web.app import app

        return [{"app": app, "url_prefix": URL_PREFIX, "name": "Tidemark"}]


def __getattr__(name: str) -> Any:
    if name == "installed":  # the entry point
        return None if FILE_MODULE in sys.modules else TidemarkPlugin
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

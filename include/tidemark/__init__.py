"""Tidemark: Kafka topics into Postgres with PySpark and Airflow; a consumer group's offsets are stored in the transaction of its rows.

A consumer is a YAML file and a transform. The transform is a function of a Kafka record that returns a row of your table::

    from tidemark import Fail, Record

    def transform(record: Record) -> dict | None:
        city = record.json()
        if city is None:
            return None                  # a tombstone: counted as skipped
        if "name" not in city:
            raise Fail("no name")        # kept with its reason, not tried again
        return {"name": city["name"], "population": city["population"]}

`tidemark.transform` explains this form and the two others (Arrow, Spark). In Airflow, one file creates all DAGs: see `tidemark.airflow`.
On the command line: ``tidemark --help``; ``tidemark init DIR`` creates a new project.

The public interface, stable between minor versions:

- the names below: for transforms, the kinds of errors, and the two interfaces that a class in a consumer's file may implement;
- ``__all__`` of `tidemark.transform` and `tidemark.airflow`;
- the commands, the keys of a consumer's file, the environment variables, and the tables that the documentation shows.

Everything else may change with any version. Each name is imported on first use, so ``import tidemark`` costs nothing and needs neither
Spark nor Airflow.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tidemark.errors import Broken, Fenced, Refused, TidemarkError, Unavailable
    from tidemark.group.assignors import Assignor
    from tidemark.group.listener import RebalanceListener
    from tidemark.transform import Fail, Record, Retry, Skip

    __version__: str

__all__ = [
    "Assignor",
    "Broken",
    "Fail",
    "Fenced",
    "RebalanceListener",
    "Record",
    "Refused",
    "Retry",
    "Skip",
    "TidemarkError",
    "Unavailable",
    "__version__",
]

_HOMES = {
    "Assignor": "group.assignors",
    "Broken": "errors",
    "Fail": "transform",
    "Fenced": "errors",
    "Record": "transform",
    "RebalanceListener": "group.listener",
    "Refused": "errors",
    "Retry": "transform",
    "Skip": "transform",
    "TidemarkError": "errors",
    "Unavailable": "errors",
}


def __getattr__(name: str) -> object:
    if name == "__version__":
        from tidemark.packages import version

        return version()
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

"""The versions that Tidemark was tried with: the results of ``make matrix``, in ``tried.json``."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources

COMPONENTS: Mapping[str, int] = {
    "python": 2,
    "pyspark": 2,
    "postgres": 1,
    "kafka": 2,
    "confluent-kafka": 2,
    "pandas": 2,
    "numpy": 2,
    "pyarrow": 1,
    "sqlalchemy": 2,
    "protobuf": 1,
    "great-expectations": 2,
}
"""The components whose versions are compared, and the number of a version's parts that name a release."""


@dataclass(frozen=True, slots=True)
class Result:
    """The run of one column of the matrix. ``versions``: of each component and package that it had. ``omitted``: the tests that did not
    apply."""

    date: str
    versions: Mapping[str, str]
    passed: int
    failed: int
    skipped: int
    omitted: Sequence[str] = ()


@cache
def results() -> Mapping[str, Result]:
    """The latest result of each column."""
    text = resources.files("tidemark.doctor").joinpath("tried.json").read_text(encoding="utf-8")
    return {column: Result(**fields) for column, fields in json.loads(text).items()}


def releases(component: str) -> list[str]:
    """The releases of a component in columns whose tests all passed, the oldest first."""
    passed = [result.versions for result in results().values() if not result.failed]
    parts = {_release(component, versions[component]) for versions in passed if component in versions}
    return [".".join(map(str, numbers)) for numbers in sorted(parts)]


def untried(versions: Mapping[str, str]) -> list[str]:
    """The components among these whose release is older, or newer, than all that were tried."""
    outside = []
    for component in COMPONENTS.keys() & versions.keys():
        tried, release = releases(component), _release(component, versions[component])
        if tried and not _parts(tried[0]) <= release <= _parts(tried[-1]):
            outside.append(f"{component} {versions[component]} (tried: {span(tried)})")
    return sorted(outside)


def span(tried: Sequence[str]) -> str:
    return tried[0] if len(tried) == 1 else f"{tried[0]} to {tried[-1]}"


def _release(component: str, version: str) -> tuple[int, ...]:
    return _parts(version)[: COMPONENTS[component]]


def _parts(version: str) -> tuple[int, ...]:
    """The leading numbers of a version, such as (18, 1) of ``18.1 (Debian 18.1-1)`` and (4, 3, 0) of ``4.3.0.dev1``."""
    return tuple(int(part) for part in re.split(r"[^0-9.]", version, maxsplit=1)[0].split(".") if part)

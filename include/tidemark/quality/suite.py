"""Reads suite files: JSON as Great Expectations writes it, or a handwritten minimum."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import LazyLoader
from pathlib import Path
from types import ModuleType
from typing import Any

from tidemark import project
from tidemark.errors import Refused
from tidemark.quality.verdict import Severity
from tidemark.spec import ConsumerSpec
from tidemark.text.wording import counted, nearest

UNEXPECTED_ROWS = "unexpected_rows_expectation"
_SUITE_KEYS = {"name", "expectations", "id", "meta", "notes", "suite_parameters", "evaluation_parameters", "data_asset_type"}
_EXPECTATION_KEYS = {"type", "kwargs", "severity", "id", "meta", "notes", "description", "rendered_content", "expectation_context"}


@dataclass(frozen=True, slots=True)
class Expectation:
    """One expectation of a suite. Great Expectations knows its type and accepts its arguments."""

    number: int
    """Its number in the list, from 1."""
    type: str
    kwargs: Mapping[str, Any]
    severity: Severity


@dataclass(frozen=True, slots=True)
class Suite:
    name: str
    path: Path
    expectations: tuple[Expectation, ...]


def suite_files(spec: ConsumerSpec) -> dict[str, Path | None]:
    """Returns a consumer's tables, each with its suite's file, if it has one."""
    files = {name: project.expectations() / f"{suite}.json" for name, suite in spec.suites.items()}
    return {sink.table: files.get(name) for name, sink in spec.sinks.items()}


class BadSuite(Refused):
    """A suite file cannot be used. ``problems`` lists all mistakes, each with its place in the file."""

    path: str
    problems: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        count = counted(len(self.problems), "problem")
        return "\n".join([*(f"{self.path}: {problem}" for problem in self.problems), f"{count}; the suite was not loaded"])


def load_suite(path: Path) -> Suite:
    """Reads the suite in a file. Raises `BadSuite` with all mistakes, each with its place in the list. Imports Great Expectations, which
    takes seconds.

    Required: ``expectations``, each with a ``type``. Defaults: ``kwargs`` none, ``severity`` critical, ``name`` the file's name.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadSuite(path=str(path), problems=[f"cannot be read: {error.strerror or error}"]) from error
    except UnicodeDecodeError as error:
        raise BadSuite(path=str(path), problems=[f"is not UTF-8: byte {error.start}"]) from error
    except json.JSONDecodeError as error:
        problem = f"is not JSON: line {error.lineno}, column {error.colno}: {error.msg}"
        raise BadSuite(path=str(path), problems=[problem]) from error
    if not isinstance(document, dict) or not isinstance(document.get("expectations"), list):
        raise BadSuite(path=str(path), problems=['is not a suite: write {"name": ..., "expectations": [{"type": ..., "kwargs": {...}}]}'])
    problems = [f"unknown key {_nearest(key, _SUITE_KEYS)}" for key in document if key not in _SUITE_KEYS]
    name = document.get("name", path.stem)
    if not isinstance(name, str) or not name:
        problems.append("name is not a non-empty string")
    expectations = []
    for number, entry in enumerate(document["expectations"], start=1):
        place = f"expectation {number}"
        try:
            expectations.append(_expectation(number, entry))
        except _Problem as problem:
            kind = entry.get("type") if isinstance(entry, dict) else None
            problems += [f"{place} ({kind}): {text}" if isinstance(kind, str) else f"{place}: {text}" for text in problem.texts]
    if problems:
        raise BadSuite(path=str(path), problems=problems)
    return Suite(name, path, tuple(expectations))


def great_expectations() -> Any:
    """Imports and returns the module, which takes seconds. Disables its analytics, so it sends nothing."""
    os.environ["GX_ANALYTICS_ENABLED"] = "false"
    if "great_expectations" in sys.modules:
        import great_expectations as gx
    else:
        with warnings.catch_warnings(), _faster_imports():
            warnings.simplefilter("ignore", DeprecationWarning)  # it imports deprecated modules
            import great_expectations as gx
    return gx


RARELY_USED = ("scipy.stats", "altair")
"""Modules that Great Expectations needs only for four types, which compare distributions. They take a third of its import time."""


class _LazyFinder(MetaPathFinder):
    """Finds modules of `RARELY_USED`, and imports each when its first attribute is read."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path, target) if fullname in RARELY_USED else None
        if spec is not None and spec.loader is not None:
            spec.loader = LazyLoader(spec.loader)
        return spec


@contextlib.contextmanager
def _faster_imports() -> Iterator[None]:
    """Saves 40 % of the import time in the block: no `RARELY_USED`, and no garbage collections, which find only modules."""
    finder, collecting = _LazyFinder(), gc.isenabled()
    sys.meta_path.insert(0, finder)
    gc.disable()
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        if collecting:
            gc.enable()


def configuration(expectation: Expectation) -> Any:
    """Returns the expectation for Great Expectations. Its number is in ``meta``, because results come back in another order."""
    great_expectations()
    from great_expectations.expectations.expectation_configuration import ExpectationConfiguration
    from great_expectations.expectations.metadata_types import FailureSeverity

    return ExpectationConfiguration(
        type=expectation.type,
        kwargs=dict(expectation.kwargs),
        severity=FailureSeverity(expectation.severity.value),
        meta={"number": expectation.number},
    )


class _Problem(Exception):
    def __init__(self, *texts: str) -> None:
        self.texts = texts


def _expectation(number: int, entry: object) -> Expectation:
    if not isinstance(entry, dict) or not isinstance(entry.get("type"), str) or not isinstance(entry.get("kwargs", {}), dict):
        raise _Problem('write {"type": "expect_...", "kwargs": {...}, "severity": "critical"}')
    unknown = [f"unknown key {_nearest(key, _EXPECTATION_KEYS)}" for key in entry if key not in _EXPECTATION_KEYS]
    if unknown:
        raise _Problem(*unknown)
    severity = entry.get("severity") or Severity.CRITICAL
    if severity not in list(Severity):
        raise _Problem(f"severity {severity!r} is not one of {', '.join(Severity)}")
    kwargs = {name: value for name, value in entry.get("kwargs", {}).items() if name != "batch_id"}
    if "$PARAMETER" in json.dumps(kwargs):
        raise _Problem("$PARAMETER is not supported; write the value")
    expectation = Expectation(number, entry["type"], kwargs, Severity(severity))
    _check(expectation)
    return expectation


def _check(expectation: Expectation) -> None:
    great_expectations()
    from great_expectations.compatibility.pydantic import ValidationError
    from great_expectations.exceptions.exceptions import GreatExpectationsError
    from great_expectations.expectations.registry import list_registered_expectation_implementations

    types = list_registered_expectation_implementations()
    if expectation.type not in types:
        raise _Problem(f"unknown type {_nearest(expectation.type, set(types))}")
    if expectation.type == UNEXPECTED_ROWS and "{batch}" not in str(expectation.kwargs.get("unexpected_rows_query", "{batch}")):
        raise _Problem("unexpected_rows_query reads rows of other runs; select FROM {batch}, the rows of this run")
    if expectation.type in _COMPARES_OTHER_DATA:
        raise _Problem("it compares with other data, which a validation does not open; write an unexpected_rows_expectation in SQL")
    if not _has_sql(expectation.type):
        raise _Problem("Great Expectations has no SQL for this type; write an unexpected_rows_expectation")
    try:
        configuration(expectation).to_domain_obj()
    except ValidationError as error:
        raise _Problem(
            *(f"{'.'.join(map(str, item['loc']))}: {item['msg']}".removeprefix("__root__: ") for item in error.errors())
        ) from error
    except (GreatExpectationsError, TypeError, ValueError) as error:
        raise _Problem(str(error)) from error


_COMPARES_OTHER_DATA = {"expect_table_row_count_to_equal_other_table", "expect_query_results_to_match_comparison"}
_CHECKS_TYPES = {"expect_column_values_to_be_of_type", "expect_column_values_to_be_in_type_list"}
"""Great Expectations evaluates them from the columns' types."""


def _has_sql(kind: str) -> bool:
    from great_expectations.exceptions.exceptions import MetricProviderError
    from great_expectations.execution_engine.sqlalchemy_execution_engine import SqlAlchemyExecutionEngine
    from great_expectations.expectations.registry import get_expectation_impl, get_metric_provider

    metric = getattr(get_expectation_impl(kind), "map_metric", None)
    if metric is None or kind in _CHECKS_TYPES:
        return True
    engine = SqlAlchemyExecutionEngine.__new__(SqlAlchemyExecutionEngine)  # only its class matters
    for suffix in ("condition", "unexpected_count"):
        with contextlib.suppress(MetricProviderError):
            get_metric_provider(f"{metric}.{suffix}", engine)
            return True
    return False


def _nearest(name: object, names: set[str]) -> str:
    near = nearest(str(name), sorted(names))
    return f'"{name}"' + (f'; did you mean "{near}"?' if near else "")

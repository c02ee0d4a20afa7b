"""Suite files, and the verdict on results. This module imports Great Expectations once."""

from __future__ import annotations

import gc
import json
import pickle
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from tidemark.quality import BadSuite, ExpectationResult, Severity, ValidatedRun, ValidationReport, Verdict, load_suite
from tidemark.quality.suite import great_expectations
from tidemark.quality.verdict import outcome

NOT_NULL = {"type": "expect_column_values_to_not_be_null", "kwargs": {"column": "carrier"}}


def written(folder: Path, document: object) -> Path:
    path = folder / "departures.json"
    path.write_text(document if isinstance(document, str) else json.dumps(document), encoding="utf-8")
    return path


def problems(folder: Path, *expectations: object, **keys: object) -> list[str]:
    path = written(folder, {"expectations": list(expectations), **keys})
    with pytest.raises(BadSuite) as caught:
        load_suite(path)
    assert str(path) in str(caught.value)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    return caught.value.problems


def test_a_suite_written_by_hand_needs_types_and_arguments_only(tmp_path: Path) -> None:
    """By default the name is the file's and the severity is critical. Expectations are numbered from 1."""
    suite = load_suite(written(tmp_path, {"expectations": [NOT_NULL, {**NOT_NULL, "severity": "warning"}]}))
    assert suite.name == "departures"
    assert [(item.number, item.severity) for item in suite.expectations] == [(1, Severity.CRITICAL), (2, Severity.WARNING)]


def test_a_suite_as_great_expectations_writes_it_is_read(tmp_path: Path) -> None:
    """The file has the output of ``suite.to_json_dict()``, with ids, notes and meta."""
    gx = great_expectations()
    assert gc.isenabled()
    assert not [finder for finder in sys.meta_path if type(finder).__module__.startswith("tidemark")], "the import leaves no changes"
    suite = gx.ExpectationSuite("mine", expectations=[gx.expectations.ExpectColumnToExist(column="carrier", severity="info", notes="x")])
    document: dict[str, Any] = json.loads(json.dumps(suite.to_json_dict()))
    read = load_suite(written(tmp_path, document))
    assert read.name == "mine"
    assert [(item.type, item.kwargs, item.severity) for item in read.expectations] == [
        ("expect_column_to_exist", {"column": "carrier"}, Severity.INFO)
    ]


def test_all_problems_of_a_suite_are_told_at_once_with_their_places(tmp_path: Path) -> None:
    """Each problem has the position in the list, the type, the mistake, and the most similar valid word."""
    found = problems(
        tmp_path,
        NOT_NULL,
        {"type": "expect_column_values_to_not_be_nul", "kwargs": {}},
        {"type": "expect_column_values_to_be_between", "kwargs": {"column": "a", "min_value": 3, "maximum": 9}},
        {"type": "expect_column_values_to_not_be_null", "kwargs": {}},
        {**NOT_NULL, "severty": "critical"},
        {**NOT_NULL, "severity": "fatal"},
        "expect_nothing",
        expectation=[],
    )
    assert found[0] == 'unknown key "expectation"; did you mean "expectations"?'
    assert 'expectation 2 (expect_column_values_to_not_be_nul): unknown type "expect_column_values_to_not_be_nul"; did you mean' in found[1]
    assert found[2] == "expectation 3 (expect_column_values_to_be_between): maximum: extra fields not permitted"
    assert found[3] == "expectation 4 (expect_column_values_to_not_be_null): column: field required"
    assert found[4] == 'expectation 5 (expect_column_values_to_not_be_null): unknown key "severty"; did you mean "severity"?'
    assert found[5].endswith("severity 'fatal' is not one of critical, warning, info")
    assert found[6].startswith("expectation 7: write ")


def test_what_could_not_be_validated_after_the_run_is_refused(tmp_path: Path) -> None:
    """A query without ``{batch}`` would read rows that this run did not write. Nobody fills in parameters."""
    query = {"type": "unexpected_rows_expectation", "kwargs": {"unexpected_rows_query": "SELECT 1 FROM analytics.departures"}}
    between = {"type": "expect_column_max_to_be_between", "kwargs": {"column": "a", "max_value": {"$PARAMETER": "limit"}}}
    first, second = problems(tmp_path, query, between)
    assert "select FROM {batch}" in first
    assert "$PARAMETER" in second


@pytest.mark.parametrize(
    ("text", "problem"),
    [("{", "is not JSON: line 1, column 2"), ("[]", "is not a suite"), ('{"expectations": {}}', "is not a suite")],
)
def test_a_file_that_is_no_suite_is_refused(tmp_path: Path, text: str, problem: str) -> None:
    """The error shows where in the file the JSON is broken, or which file is missing."""
    with pytest.raises(BadSuite, match=problem):
        load_suite(written(tmp_path, text))
    with pytest.raises(BadSuite, match=r"nowhere\.json: cannot be read: No such file"):
        load_suite(tmp_path / "nowhere.json")


def test_a_verdict_is_the_worst_failure() -> None:
    """Critical failures block; warnings and infos are only reported."""

    def result(severity: Severity, success: bool) -> ExpectationResult:
        return ExpectationResult(1, "x", severity, success, "x")

    assert outcome(()) is Verdict.PASSED
    assert outcome((result(Severity.CRITICAL, True), result(Severity.INFO, True))) is Verdict.PASSED
    assert outcome((result(Severity.CRITICAL, True), result(Severity.INFO, False))) is Verdict.WARNING
    assert outcome((result(Severity.WARNING, False), result(Severity.CRITICAL, False))) is Verdict.CRITICAL


def test_a_verdict_is_json_without_its_details() -> None:
    """The JSON goes into asset events and XComs, which are not meant for details."""
    verdict = ValidationReport(
        Verdict.PASSED, "departures", results=(ExpectationResult(1, "x", Severity.INFO, True, "x", detail={"big": 1}),)
    )
    assert json.loads(json.dumps(verdict.as_json()))["results"] == [
        {"number": 1, "expectation": "x", "severity": "info", "success": True, "text": "x", "failing_rows": None}
    ]


@pytest.mark.parametrize("parts", [{}, {"dag_id": "d"}, {"run_id": "r"}, {"dag_id": "d", "run_id": "r", "attempt_id": 1}])
def test_a_run_is_a_dag_run_or_an_attempt(parts: dict[str, Any]) -> None:
    """Half of an identifier is refused, and so are both together."""
    with pytest.raises(ValueError, match="give dag_id and run_id, or attempt_id"):
        ValidatedRun(**parts)


@pytest.mark.thorough
def test_great_expectations_is_imported_without_what_few_of_its_types_use(tmp_path: Path) -> None:
    """These modules are imported when they are used."""
    code = """
        import sys
        from tidemark.quality.suite import great_expectations

        great_expectations()
        assert {"scipy.optimize", "altair.vegalite"}.isdisjoint(sys.modules)
        import altair
        from scipy import stats
        assert stats.entropy([0.5, 0.5], base=2) == 1
        assert altair.Chart
        assert {"scipy.optimize", "altair.vegalite"} <= sys.modules.keys()
        print("done")
    """
    program = tmp_path / "program.py"  # with -c, pyspark would mistake the process for one of its doctests, and end it
    program.write_text(textwrap.dedent(code))
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")

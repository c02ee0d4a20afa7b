"""The assignors give the answers that Kafka's gave in Kafka's tests, which are recorded in ``tests/conformance/assignor_cases.json``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.conformance import generators, judge
from tests.conformance.__main__ import main
from tests.conformance.cases import OWN_FILE, Case, load
from tests.support.sampling import ALL

CASES = load(OWN_FILE)
SCALES = {"LargeAssignmentAndGroup": 20, "NonEqualSubscriptionNotTimeout": 1 if ALL else 4}
"""The factors by which large groups are scaled down here; ``python -m tests.conformance`` runs them in full size."""


def name(case: Case) -> str:
    return f"{case.assignor} {case.name}"


@pytest.mark.parametrize("case", [case for case in CASES if case.generator is None], ids=name)
def test_assignor_answers_as_the_reference_does(case):
    """Answers are equal where Kafka's does not depend on the order of Java's hash maps; validity, balance and properties always hold."""
    assert judge.judge(case) == []


@pytest.mark.parametrize("case", [case for case in CASES if case.generator is not None], ids=name)
def test_generated_groups_stay_valid_balanced_sticky_and_in_time(case):
    """The assertions of Kafka's tests with large and random groups hold."""
    assert generators.run(case, scale=next((scale for part, scale in SCALES.items() if part in case.name), 1)) == []


def test_the_file_holds_every_case():
    """465 explicit cases, 427 of them with an expected answer, and 10 generators."""
    assert len(CASES) == 475
    assert sum(case.generator is not None for case in CASES) == 10
    assert {case.assignor for case in CASES} == {"range", "roundrobin", "sticky", "cooperative-sticky"}


WRONG = {
    "wrong partition": {"expected": {"a": ["t-0"], "b": ["t-1"]}, "order_matters": False},
    "wrong round": {"reference_rounds": [{"a": ["t-0"], "b": ["t-1", "t-2"]}]},
    "wrong transfer": {"expected": {"a": ["t-0", "t-2"], "b": ["t-1"]}, "transferring_ownership": {"t-0": "b"}},
    "unknown assignor": {"assignor": "uniform"},
    "unknown generator": {"generator": {"topics": 1}},
}


@pytest.mark.parametrize("facts", WRONG.values(), ids=WRONG)
def test_command_reports_a_case_that_fails(facts, tmp_path: Path, capsys):
    """It prints a line with the assignor and the case for each failure, then the counts. Unknown topics, and topics without subscribers,
    are assigned to no member."""
    base = {
        "assignor": "sticky",
        "name": "made up",
        "partitions_per_topic": {"t": 3, "nobody's": 2},
        "subscriptions": {"a": {"topics": ["t", "unknown"]}, "b": {"topics": ["t"]}},
    }
    right = {**base, "expected": {"a": ["t-0", "t-2"], "b": ["t-1"]}}
    file = tmp_path / "cases.json"
    file.write_text(json.dumps([right]))
    assert main([str(file)]) == 0
    assert capsys.readouterr().out == "1 passed, 0 failed\n"
    file.write_text(json.dumps({"cases": [right, {**base, **facts}]}))
    assert main([str(file)]) == 1
    first, last = capsys.readouterr().out.splitlines()
    assert first.startswith("FAILED ")
    assert "made up: " in first
    assert last == "1 passed, 1 failed"

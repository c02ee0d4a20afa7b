"""What the page shows for a plan that would be refused, and how it shows rows side by side."""

from __future__ import annotations

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor, as_completed
from types import SimpleNamespace
from typing import Any

import psycopg2
import pytest

from tidemark.airflow.web import preview as previews
from tidemark.airflow.web.history import CHARACTERS, side_by_side
from tidemark.airflow.web.preview import refusal
from tidemark.errors import BadInput, BrokerUnavailable, DatabaseUnavailable
from tidemark.records.ranges import TopicPartition
from tidemark.rewind.plan import PlanRefused
from tidemark.rewind.scenarios.targets import SHOWN, Outside, TargetsOutOfRange
from tidemark.rewind.verify import Example
from tidemark.text.problems import SeveralProblems


def outside(target: int, partitions: int = 1) -> TargetsOutOfRange:
    return TargetsOutOfRange(outside=tuple(Outside(TopicPartition("flights", number), target, 10, 90) for number in range(partitions)))


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (PlanRefused(problems=("a", "b")), {"problems": ["a", "b"]}),
        (SeveralProblems(problems=("a", "b")), {"problems": ["a", "b"]}),
        (BadInput(what="value", found="x", fix="Write y."), {"problems": [str(BadInput(what="value", found="x", fix="Write y."))]}),
        (outside(5), {"problems": ["flights/0: target 5 is before the start of the log [10, 90)"], "loss": True}),
        (outside(95), {"problems": ["flights/0: target 95 is after the end of the log [10, 90)"], "loss": False}),
        (DatabaseUnavailable(cause="canceling statement\nmore"), "canceling statement"),
        (BrokerUnavailable(cause="timed out"), "timed out"),
        (psycopg2.ProgrammingError("permission denied for table orders"), "permission denied for table orders."),
    ],
)
def test_preview_tells_a_refusal_from_what_it_cannot_know(error: Exception, said: Any) -> None:
    """A server that does not answer refuses nothing: the plan may succeed."""
    found = refusal(error)
    if isinstance(said, str):
        assert list(found) == ["unknown"]
        assert said in found["unknown"]
    else:
        assert found == said


def test_many_targets_outside_are_counted() -> None:
    problems = refusal(outside(5, SHOWN + 3))["problems"]
    assert (len(problems), problems[-1]) == (SHOWN + 1, "3 more partitions too")


def test_more_previews_than_there_are_places_are_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that wait would take the threads of everybody else's requests."""
    go = threading.Event()
    monkeypatch.setattr(previews, "_compute", lambda *_: {"groups": [1]} if go.wait(60) else {})
    one: Any = SimpleNamespace(spec=SimpleNamespace(name="orders"))
    asked = previews.PreviewRequest("to-earliest", "", "", allow_loss=False)
    with ThreadPoolExecutor(3 * previews.AT_ONCE) as pool:
        futures = [pool.submit(previews.preview, one, {}, asked) for _ in range(3 * previews.AT_ONCE)]
        refused = [future.result(60) for future in itertools.islice(as_completed(futures), previews.AT_ONCE)]
        assert ["Too many previews" in each["unknown"] for each in refused] == [True] * previews.AT_ONCE
        go.set()
        computed = [future.result(60)["groups"] for future in futures]
    assert sorted(computed) == [[]] * previews.AT_ONCE + [[1]] * 2 * previews.AT_ONCE
    assert previews.preview(one, {}, asked)["groups"] == [1]


def test_row_has_its_key_first_and_what_differs_is_marked() -> None:
    """Lineage is omitted unless it is the key, and a large number stays exact."""
    was = {"kafka_offset": 7, "city": "Ulm", "people": 2**60, "tags": ["a"], "note": "x" * (CHARACTERS + 1)}
    now = {"kafka_offset": 9, "city": "Ulm", "people": None, "tags": ["a"], "note": "x" * (CHARACTERS + 2)}
    rows = side_by_side(Example(was, now), ("city",))
    assert [(row["column"], row["differs"]) for row in rows] == [("city", False), ("people", True), ("tags", False), ("note", True)]
    assert [row["was"] for row in rows[:3]] == ["Ulm", str(2**60), '["a"]']
    assert (rows[1]["now"], len(rows[3]["was"])) == (None, CHARACTERS + 2)
    gone = side_by_side(Example(was, None), ("kafka_offset",))
    assert [(row["column"], row["now"], row["differs"]) for row in gone[:2]] == [("kafka_offset", None, False), ("city", None, False)]

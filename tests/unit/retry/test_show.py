"""A redrive as shown to users: in a log, and on Airflow's approval page."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

from tidemark.records.outcome import quoting
from tidemark.retry.filter import Filter
from tidemark.retry.redrive import Destination, Preview, Redrive, RedrivePhase
from tidemark.retry.redrive_text import lines, markdown

AT = datetime(2026, 3, 24, 13, 0, tzinfo=UTC)
EXAMPLE = {"number": 4711, "topic": "flights", "partition": 3, "offset": 12, "error_type": "KeyError", "error_text": "'*dest*'\n<b>"}


def redrive(**facts: object) -> Redrive:
    which = {"consumer": "departures", "group": "departures", "destination": Destination.LADDER, "filter": Filter(error_type="KeyError")}
    limits = {"per_second": None, "max_redrives": 3, "reason": "the codes are fixed"}
    people = {"planned_by": "ann", "planned_at": AT, "approved_by": None, "started_at": None, "ended_at": None, "digest": None}
    known = {"redrive_id": 7, "state": RedrivePhase.PLANNED, "planned": 1200, "redriven": 0, "passed_over": 0}
    return Redrive(**{**which, **limits, **people, **known, **facts})  # type: ignore[arg-type]


def preview(**facts: object) -> Preview:
    errors = [{"records": 1200, "error_type": "KeyError", "example": "x" * 500}]
    return Preview(redrive(**facts), errors, [{"topic": "flights", "records": 1200}], [EXAMPLE], {})


def test_plan_is_shown_with_counts_examples_and_what_is_no_part_of_it() -> None:
    """Each item has one line. Long texts are truncated, and a record's error is put on one line."""
    said = lines(replace(preview(per_second=50), waiting=3, worn_out=2))
    assert said == [
        "Redrive 7 (PLANNED): 1,200 records of departures to the first delay, at most 50 per second",
        "Which: error type KeyError",
        "Reason: the codes are fixed",
        "Planned by ann at 2026-03-24T13:00:00Z",
        "Not included: 3 that already wait for a retry",
        "Not included: 2 that were redriven 3 times",
        f"    1,200  KeyError: {'x' * 199}…",
        "    1,200  of topic flights",
        "4711: flights/3@12 KeyError: '*dest*' <b>",
    ]


def test_plan_quotes_no_values_of_rows() -> None:
    """Airflow logs the plan, so an example's text ends before the DETAIL that a failed record may keep."""
    refused = quoting("duplicate key.", "Key (city)=(secret) already exists.")
    made = replace(preview(), errors=[{"records": 1, "error_type": "E", "example": refused}], examples=[{**EXAMPLE, "error_text": refused}])
    for text in ("\n".join(lines(made)), markdown(made)):
        assert "duplicate key" in text
        assert "secret" not in text


def test_redrive_that_has_begun_is_shown_with_what_became_of_its_records() -> None:
    """A plan's examples are not shown once the redrive has begun."""
    done = preview(state=RedrivePhase.DONE, destination=Destination.NOW, started_at=AT, planned=0, redriven=1150, passed_over=50)
    said = lines(replace(done, passed_over={"was loaded meanwhile": 50}))
    assert said[0] == "Redrive 7 (DONE): 1,200 records of departures for one immediate try"
    assert said[4:6] == ["1,150 redriven, 50 passed over, 0 left", "Passed over, was loaded meanwhile: 50"]
    assert not any(line.startswith("4711") for line in said)


def test_no_mark_of_a_records_error_counts_on_the_approval_page() -> None:
    """Users' texts are shown literally, with any Markdown or HTML in them."""
    page = markdown(preview(reason="a *bug* | of <i>Tuesday</i>"))
    assert r"Reason: a \*bug\* \| of \<i\>Tuesday\</i\>" in page
    assert r"- 4711: flights/3@12 KeyError: '\*dest\*' \<b\>" in page
    assert "| flights | 1,200 |" in page

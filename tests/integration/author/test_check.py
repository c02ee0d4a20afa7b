"""`tidemark consumers check` tells what the latest records show, without refusing the consumer for it."""

from __future__ import annotations

import json

import pytest
from tests.support.orders import NEWER, Orders, order
from tests.support.scenario import Scenario, as_json
from tests.support.shell import tidemark

from tidemark.author import check

FAILS = """
    from tidemark.transform import Record


    def transform(record: Record):
        if record.value == b"later":
            raise ValueError("not yet")
        return {"payload": record.value, "at": record.value.decode()}
"""


@pytest.fixture(autouse=True)
def time_to_try(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine may need more than the few seconds of a check."""
    monkeypatch.setattr(check, "TRIED_S", 60.0)


def notes(scenario: Scenario) -> list[str]:
    """The notes of a check that finds no problem."""
    done = tidemark(scenario, "consumers", "check", scenario.name, "--output", "json")
    (report,) = as_json(done.stdout)
    assert (done.returncode, report["ok"]) == (0, True), done.stdout
    return list(report["notes"])


def test_latest_records_that_would_fail_and_new_fields(scenario: Scenario) -> None:
    """The most frequent reason, and what to do. `drop` silences the note on a field; `try` shows it too. Nothing is written."""
    good, bad = {"id": "7", "kind": "a", "extra": 1}, {"id": "x", "more": 2}
    scenario.feed([json.dumps(each) for each in (good, bad, bad, {"id": []})], None, "id bigint, kind text", format={"value": "json"})
    fields = 'fields without a column are not loaded: "extra", "more". Add columns for them, or name them under `drop`'
    failing = (
        "3 of the latest 4 records would fail, 2 of them because: id does not fit bigint: the value is text that is not a number; "
        "give the column another type, or convert the value in a transform"
    )
    assert notes(scenario) == [failing, fields]
    done = tidemark(scenario, "try", scenario.name)
    assert done.stdout.splitlines()[0] == f"note: {fields}"
    assert scenario.rows("id") == []
    scenario.set(drop=["extra", "more"])
    assert len(notes(scenario)) == 1


def test_latest_records_of_a_function(scenario: Scenario, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without `DETAIL`. The transform gets a few seconds at most."""
    sink = {"table": scenario.table, "error_detail": True}
    values = ["2026-01-02T03:04:05Z", "later", "secret", "2026-01-02T03:04:05+01:00"]
    scenario.feed(values, FAILS, "payload bytea, at timestamptz", sink=sink, retry={"delays": ["1h"]})
    failing, retried, *_ = notes_of_records = [note for note in notes(scenario) if "latest" in note]
    assert failing == (
        "1 of the latest 4 records would fail: at does not fit timestamp with time zone: the value is not a timestamp with zone in "
        "ISO 8601; give the column another type, or convert the value in a transform"
    )
    assert retried == "1 of the latest 4 records would be retried: not yet"
    assert len(notes_of_records) == 2
    monkeypatch.setattr(check, "TRIED_S", -1.0)
    assert "the latest 200 records were not tried, because they take more than -1 s" in notes(scenario)


def test_fields_of_an_older_schema_that_the_newest_lacks(orders: Orders) -> None:
    """Avro drops them on reading, so no record says so."""
    scenario = orders.scenario
    orders.produce(order(1, channel="web"), schema=NEWER)
    orders.produce(order(2))
    scenario.write(None, topics=orders.topic, format={"value": "avro"}).make_sink()
    (note,) = notes(scenario)
    assert note.startswith("fields of schema ")
    assert note.endswith(' that the newest schema lacks are not loaded: "channel"')

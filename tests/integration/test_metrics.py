"""The metrics for Prometheus: counters of committed work, gauges of pending work."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from prometheus_client.samples import Sample
from tests.integration.rewind.lab import Lab, lab_on
from tests.support.kafka_topics import Topics
from tests.support.scenario import Scenario

from tidemark.db import session, transaction
from tidemark.metrics import state
from tidemark.metrics.families import of_state, of_work
from tidemark.metrics.ledger import Ledger, Totals
from tidemark.offsets import store
from tidemark.records.outcome import RecordCounts
from tidemark.rewind.model import ToOffset


@pytest.fixture
def lab(scenario: Scenario, topics: Topics) -> Iterator[Lab]:
    with lab_on(scenario, topics, [100, 100]) as lab:
        yield lab


def read(lab: Lab, ledger: Ledger) -> Totals:
    with session(lab.url) as connection, transaction(connection) as cur:
        ledger.read(cur)
    return ledger.totals[lab.spec.group]


def values(samples: list[Sample]) -> dict[tuple[str, ...], float]:
    return {(one.name, *(value for name, value in one.labels.items() if name != "group")): one.value for one in samples}


def test_counters_count_each_commit_once_from_the_first_scrape_on(lab: Lab) -> None:
    """Earlier commits are not counted, nor are the batches that a rewind cuts or an undo restores."""
    ledger = Ledger()
    lab.read(20, step=10)
    assert read(lab, ledger).commits == 0
    lab.read(40, step=10)
    totals = read(lab, ledger)
    assert (totals.commits, totals.rows, dict(totals.records)) == (
        2, 18, {"loaded": 14, "skipped": 2, "retried": 2, "failed": 2, "unaccounted": 0},
    )  # fmt: skip
    assert 0 < totals.commit_seconds < 60
    assert sum(totals.slower_than.values()) == 2
    done = lab.rewind(ToOffset(35))
    assert read(lab, ledger).commits == 2
    lab.undo(done.rewind_id)
    assert read(lab, ledger).commits == 2
    lab.read(50)
    assert read(lab, ledger).commits == 3


def test_commit_that_took_its_id_before_another_is_counted_when_it_is_visible(lab: Lab) -> None:
    """Ids are assigned in the order of insertion: a slower commit has the lower id, but becomes visible later."""
    ledger = Ledger()
    read(lab, ledger)
    inserted, go_on = threading.Event(), threading.Event()

    def slow() -> None:
        part, target = lab.slice(10), lab.target()
        with session(lab.url) as connection, transaction(connection) as cur:
            store.move_offset(cur, lab.group_id, part)
            store.insert_batch(cur, lab.group_id, target.attempt_id, part, RecordCounts(0, 10, 0, 0, 0, 0))
            inserted.set()
            assert go_on.wait(60)

    thread = threading.Thread(target=slow)
    thread.start()
    assert inserted.wait(60)
    lab.read(10, 1)
    assert read(lab, ledger).commits == 1
    go_on.set()
    thread.join()
    assert read(lab, ledger).commits == 2
    assert read(lab, ledger).commits == 2


def test_attempts_are_counted_by_how_they_ended(lab: Lab) -> None:
    ledger = Ledger()
    read(lab, ledger)
    lab.read(10)
    with lab.watch.cursor() as cur:
        attempt = store.new_attempt(cur, lab.group_id, store.TaskIdentity())
        assert read(lab, ledger).attempts == {"committed": 1}
        store.end_attempt(cur, attempt, {"kind": "fenced", "type": "OffsetFenced", "text": "a newer owner"})
    for _ in range(2):
        assert read(lab, ledger).attempts == {"committed": 1, "fenced": 1}


def test_gauges_show_what_is_pending_and_counters_have_the_names_of_prometheus(lab: Lab) -> None:
    ledger = Ledger()
    read(lab, ledger)
    lab.read(20)
    lab.sql("UPDATE tidemark.failed_record SET state = 'WAITING', due_at = clock_timestamp() - interval '90 s' WHERE record_offset = 1")
    read(lab, ledger)
    lab.rewind(ToOffset(15))
    totals = read(lab, ledger)
    with session(lab.url) as connection, transaction(connection) as cur:
        now = state.read(cur)
    found = values([sample for family in (*of_work({lab.spec.group: totals}), *of_state(now)) for sample in family.samples])
    assert found["tidemark_records_total", "loaded"] == 14
    assert found["tidemark_rows_total",] == 18
    assert found["tidemark_commit_seconds_count",] == found["tidemark_commit_seconds_bucket", "+Inf"] == 1
    assert found["tidemark_failed_records", "WAITING"] == 1
    assert found["tidemark_failed_records", "FAILED"] == 3
    assert 90 <= found["tidemark_retry_overdue_seconds",] < 3600
    assert found["tidemark_rewinds_total",] == 1
    assert ("tidemark_validation_passed",) not in found

"""A task's lineage from the ledger, in OpenLineage's terms, and what remains of it without the database."""

from __future__ import annotations

import threading
import time
from typing import Any
from urllib.parse import urlsplit

import psycopg2
import pytest
from tests.support.black_hole import before
from tests.support.scenario import Scenario
from tests.support.waiting import until

from tidemark.airflow.lineage import facets
from tidemark.airflow.lineage.facets import Consumed
from tidemark.airflow.lineage.openlineage import of_attempts

WITHIN_S = 9.0
"""Airflow's OpenLineage provider aborts after 10 s."""
WAITING = "SELECT pid FROM pg_stat_activity WHERE application_name = 'tidemark lineage' AND wait_event_type = 'Lock'"


def consumed(scenario: Scenario, attempt_id: int, *, url: str | None = None) -> Consumed:
    spec = scenario.spec
    servers = scenario.connections.kafka["bootstrap.servers"]
    return Consumed(spec.group, attempt_id, spec.table_names, spec.topics, servers, url or scenario.database_url)


def three_runs(scenario: Scenario) -> int:
    """Runs three times, with two records each, and returns the first attempt."""
    topic = scenario.topics.create()
    scenario.write(topics=topic).make_sink()
    attempts = []
    for _ in range(3):
        scenario.topics.produce(topic, ["a", "b"])
        scenario.run()
        attempts.append(scenario.attempt_id)
    return attempts[0]


def names(lineage: Any) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    return tuple([(one.namespace, one.name) for one in side] for side in (lineage.inputs, lineage.outputs))  # type: ignore[return-value]


def test_partition_that_an_attempt_lost_and_got_back_has_two_ranges(scenario: Scenario) -> None:
    """The range that another member read in between is not included."""
    attempt_id = three_runs(scenario)
    scenario.sql("UPDATE tidemark.batch SET attempt_id = %s WHERE start_offset = 4", attempt_id)
    lineage = of_attempts([consumed(scenario, attempt_id)])
    (topic,) = lineage.inputs
    assert topic.inputFacets["tidemark_offsets"].ranges == [{"partition": 0, "start": 0, "end": 2}, {"partition": 0, "start": 4, "end": 6}]
    assert topic.inputFacets["inputStatistics"].rowCount == lineage.outputs[0].outputFacets["outputStatistics"].rowCount == 4


def test_deletes_are_counted_among_the_rows_written(scenario: Scenario) -> None:
    """Two rows are written, and one of them is deleted again."""
    topic = scenario.topics.create()
    scenario.write(
        None,
        topics=topic,
        format={"value": "json", "key": "json"},
        sink={"table": scenario.table, "mode": "upsert", "key": ["id"], "deletes": "hard"},
    )
    scenario.make_sink("id bigint NOT NULL UNIQUE")
    for number in (1, 2):
        scenario.topics.produce(topic, [f'{{"id": {number}}}'], key=f'{{"id": {number}}}')
    scenario.topics.produce(topic, [None], key='{"id": 1}')
    scenario.run()
    (sink,) = of_attempts([consumed(scenario, scenario.attempt_id)]).outputs
    assert {name: facet.rowCount for name, facet in sink.outputFacets.items()} == {"outputStatistics": 3, "tidemark_deletes": 1}


@pytest.mark.parametrize("silent", [False, True], ids=["slow", "silent"])
def test_database_that_does_not_answer_costs_the_facets_and_little_time(
    scenario: Scenario, monkeypatch: pytest.MonkeyPatch, silent: bool
) -> None:
    """Datasets keep their names. The provider would drop the whole event, so slow statements and a silent server have shorter limits."""
    if silent:
        monkeypatch.setattr(facets, "STATEMENT_MS", 60_000)
    attempt_id = three_runs(scenario)
    whole = names(of_attempts([consumed(scenario, attempt_id)]))
    with before(scenario.database_url) as hole, psycopg2.connect(scenario.database_url) as holder, holder.cursor() as cur:
        cut = threading.Thread(target=lambda: until(lambda: scenario.sql(WAITING)) and hole.swallow.set())
        cur.execute("LOCK TABLE tidemark.batch IN ACCESS EXCLUSIVE MODE")
        if silent:
            cut.start()
        began = time.monotonic()
        lineage = of_attempts([consumed(scenario, attempt_id, url=hole.url)])
        assert time.monotonic() - began < WITHIN_S
        if silent:
            cut.join()
            assert hole.swallow.is_set()
        holder.rollback()
    assert [one.inputFacets for one in lineage.inputs] == [one.outputFacets for one in lineage.outputs] == [{}]
    assert names(lineage)[0] == whole[0]
    assert names(lineage)[1][0][1] == whole[1][0][1] == f"{urlsplit(scenario.database_url).path[1:]}.{scenario.table}"


def test_database_that_accepts_no_connection_costs_the_facets_and_little_time(scenario: Scenario) -> None:
    scenario.write(topics="orders")
    with before(scenario.database_url) as hole:
        hole.swallow.set()
        began = time.monotonic()
        lineage = of_attempts([consumed(scenario, 1, url=hole.url)])
        assert time.monotonic() - began < WITHIN_S
    assert [(one.name, one.inputFacets) for one in lineage.inputs] == [("orders", {})]

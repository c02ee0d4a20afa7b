"""Validation on a real Postgres: what is judged, what is stored, and which rows readers see."""

from __future__ import annotations

import contextlib
import json
import socket
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg2
import pytest
from tests.support.departures import DDL, GROUP, TABLE
from tests.support.departures import Departures as Scenario
from tests.support.waiting import until

from tidemark.db import session, with_parameter
from tidemark.errors import BadInput, DatabaseUnavailable, LockTimeout
from tidemark.quality import (
    ExpectationError,
    ValidatedRun,
    Verdict,
    Violation,
    ViolationKind,
    validate,
    validated_view_ddl,
)
from tidemark.quality.merged_ranges import merge_ranges, predicate
from tidemark.quality.stored_verdicts import newest

UNEXPECTED = "unexpected_rows_expectation"


def expectation(type_: str, severity: str = "critical", **kwargs: Any) -> dict[str, Any]:
    return {"type": type_, "kwargs": kwargs, "severity": severity}


CARRIER = expectation("expect_column_values_to_not_be_null", column="carrier")
DELAY = expectation("expect_column_values_to_be_between", "warning", column="delay", min_value=-60, max_value=600)


@pytest.fixture
def departures(database_url: str, tmp_path: Path) -> Iterator[Scenario]:
    with contextlib.closing(psycopg2.connect(database_url)) as connection:
        connection.autocommit = True
        scenario = Scenario(database_url, tmp_path, connection)
        scenario.sql(DDL)
        yield scenario


# ---- verdicts


def test_a_run_whose_rows_meet_the_suite_has_passed(departures: Scenario) -> None:
    """The report has ranges, counts and results. It is stored, the batches refer to it, and the validated offset reaches their end."""
    departures.partition(1)
    departures.batch("run", 0, 60, seqs=2)
    departures.batch("run", 60, 100, retried=3, failed=2)
    departures.batch("run", 0, 50, partition=1)
    verdict = departures.validate("run", CARRIER, DELAY, expectation("expect_column_mean_to_be_between", column="delay", max_value=300))
    assert verdict.verdict is Verdict.PASSED
    assert verdict.ranges == {"flights/0": [[0, 100]], "flights/1": [[0, 50]]}
    assert (verdict.counts.loaded, verdict.counts.retried, verdict.counts.failed, verdict.counts.sink_rows) == (145, 3, 2, 205)
    assert [(item.number, item.success) for item in verdict.results] == [(0, True), (1, True), (2, True), (3, True)]
    assert verdict.results[0].text == "conservation: every record of 3 batches is accounted for"
    assert verdict.results[1].text == "expect_column_values_to_not_be_null(column='carrier'): 0 of 205 rows fail"
    assert departures.sql("SELECT dag_id, run_id, suite, verdict, sink_rows FROM tidemark.validation") == [
        ("consume", "run", "departures", "passed", 205)
    ]
    assert departures.sql("SELECT DISTINCT validation_id FROM tidemark.batch") == [(verdict.validation_id,)]
    assert (departures.validated(0), departures.validated(1)) == (100, 50)
    assert departures.violations() == []
    assert json.loads(json.dumps(verdict.as_json()))["verdict"] == "passed"


def test_a_warning_reports_and_holds_nobody_up(departures: Scenario) -> None:
    """The exact failing rows are stored, and the validated offset moves anyway."""
    departures.batch("run", 0, 100)
    departures.sql(f"UPDATE {TABLE} SET delay = 9999 WHERE kafka_offset IN (7, 42)")
    verdict = departures.validate("run", CARRIER, DELAY)
    assert verdict.verdict is Verdict.WARNING
    assert verdict.results[2].failing_rows == 2
    assert departures.stored_rows(2) == [(0, 7, 0), (0, 42, 0)]
    detail = departures.sql("SELECT detail FROM tidemark.validation_result WHERE number = 2")[0][0]
    assert detail["observed"]["unexpected_percent"] == 2.0
    assert {example["kafka_offset"] for example in detail["observed"]["examples"]} == {7, 42}
    assert departures.validated() == 100


def test_every_kind_of_expectation_is_judged_and_its_rows_are_found(departures: Scenario) -> None:
    """Expectations on columns, pairs, several columns, uniqueness, row conditions and SQL name rows; aggregates and tables have none. Types
    that compare distributions import what only they need."""
    half = {"values": ["UA", "XX"], "weights": [0.5, 0.5]}
    departures.batch("run", 0, 100)
    departures.sql(f"UPDATE {TABLE} SET carrier = 'XX', delay = 5000 WHERE kafka_offset IN (10, 20)")
    departures.sql(f"UPDATE {TABLE} SET origin = carrier WHERE kafka_offset = 30")
    same = {"type": "comparison", "column": {"name": "carrier"}, "operator": "==", "parameter": "XX"}
    joined = "SELECT a.* FROM {batch} a JOIN (VALUES ('XX')) bad (carrier) ON a.carrier = bad.carrier;"
    row_level = [
        expectation("expect_column_values_to_be_in_set", column="carrier", value_set=["UA"]),
        expectation("expect_column_values_to_be_unique", column="delay"),
        expectation("expect_compound_columns_to_be_unique", column_list=["carrier", "delay"]),
        expectation("expect_column_pair_values_a_to_be_greater_than_b", column_A="kafka_topic_id", column_B="delay", or_equal=True),
        expectation(UNEXPECTED, unexpected_rows_query="SELECT * FROM {batch} WHERE delay > 600;"),
        expectation(UNEXPECTED, unexpected_rows_query=joined),
        expectation("expect_column_values_to_match_regex", column="carrier", regex="^UA$"),
        expectation("expect_column_values_to_be_between", column="delay", max_value=600, row_condition=same),
        expectation("expect_select_column_values_to_be_unique_within_record", column_list=["carrier", "origin"]),
    ]
    without_rows = [
        expectation("expect_column_max_to_be_between", column="delay", max_value=600),
        expectation("expect_table_row_count_to_equal", value=99),
        expectation("expect_column_to_exist", column="nowhere"),
        expectation("expect_column_kl_divergence_to_be_less_than", column="carrier", threshold=0.1, partition_object=half),
        expectation(UNEXPECTED, unexpected_rows_query="SELECT count(*) FROM {batch} HAVING count(*) > 5"),
    ]
    verdict = departures.validate("run", *row_level, *without_rows)
    assert [item.number for item in verdict.results if item.success] == [0]
    late = [(0, 10, 0), (0, 20, 0)]
    pairs = [(0, n, 0) for n in range(100) if n > departures.topic_id or n in (10, 20)]
    expected = [late, late, late, pairs, late, late, late, late, [(0, 30, 0)]]
    assert [departures.stored_rows(number) for number in range(1, 10)] == expected
    assert [departures.stored_rows(number) for number in range(10, 15)] == [[]] * 5
    assert "observed 5000" in verdict.results[10].text
    notes = departures.sql("SELECT detail ->> 'note' FROM tidemark.validation_result WHERE number = 14")[0][0]
    assert notes.startswith("the query does not select kafka_topic_id")


def test_at_most_ten_thousand_rows_of_an_expectation_are_stored(departures: Scenario) -> None:
    """The count is exact, the number of stored rows is limited, and the result says how many are not stored."""
    departures.batch("run", 0, 12_000)
    departures.sql(f"UPDATE {TABLE} SET carrier = NULL")
    verdict = departures.validate("run", CARRIER, expectation(UNEXPECTED, unexpected_rows_query="SELECT * FROM {batch}"))
    assert [item.failing_rows for item in verdict.results] == [None, 12_000, 12_000]
    assert len(departures.stored_rows(1)) == len(departures.stored_rows(2)) == 10_000
    assert departures.sql("SELECT DISTINCT detail -> 'rows_not_stored' FROM tidemark.validation_result WHERE number > 0") == [(2000,)]


def test_rows_of_other_runs_are_not_judged(departures: Scenario) -> None:
    """Only the ranges of this run's batches are judged: not the rows before, after or between them, or in another partition."""
    departures.partition(1)
    for run, start in (("old", 0), ("mine", 100), ("other", 200), ("mine", 300), ("new", 400)):
        departures.batch(run, start, start + 100)
    departures.batch("old", 0, 400, partition=1)
    departures.sql(f"UPDATE {TABLE} SET carrier = NULL WHERE kafka_partition = 1 OR (kafka_offset / 100) NOT IN (1, 3)")
    verdict = departures.validate("mine", CARRIER, expectation("expect_table_row_count_to_equal", value=200))
    assert verdict.verdict is Verdict.PASSED
    assert verdict.ranges == {"flights/0": [[100, 200], [300, 400]]}


def test_a_run_is_all_its_attempts_or_one(departures: Scenario) -> None:
    """A dag run whose first try failed halfway is judged as a whole; outside Airflow, an attempt alone. A run that committed nothing has
    passed and leaves no trace: the missing validation_id tells the caller."""
    departures.batch("run", 0, 50)
    first = departures.attempts.pop("run")
    departures.batch("run", 50, 80)
    assert departures.validate("run").ranges == {"flights/0": [[0, 80]]}
    alone = validate(departures.url, ValidatedRun(attempt_id=first), group=GROUP, suites={TABLE: None})
    assert alone.ranges == {"flights/0": [[0, 50]]}
    nothing = departures.validate("never", CARRIER)
    assert (nothing.verdict, nothing.ranges, nothing.results, nothing.validation_id) == (Verdict.PASSED, {}, (), None)
    assert departures.sql("SELECT count(*), count(suite) FROM tidemark.validation") == [(2, 0)]


def test_a_group_or_table_that_is_not_there_is_refused(departures: Scenario) -> None:
    """A misspelt name must not pass as a run that wrote nothing."""
    departures.batch("run", 0, 10)
    departures.sql("CREATE TABLE analytics.plain (carrier text)")
    for options, problem in (
        ({"group": "departure"}, r"departure\b"),
        ({"suites": {"analytics.departure": None}}, r"departure\b"),
        ({"suites": {"analytics.plain": None}}, "it lacks kafka_topic_id"),
    ):
        with pytest.raises(BadInput, match=problem):
            departures.validate("run", **options)


# ---- an expectation that cannot be evaluated


@pytest.mark.parametrize(
    ("broken", "cause"),
    [
        (expectation("expect_column_values_to_not_be_null", column="carier"), "carier"),
        (expectation("expect_column_values_to_match_regex", column="delay", regex="x"), "operator does not exist"),
        (expectation(UNEXPECTED, unexpected_rows_query="SELECT * FORM {batch}"), "syntax error"),
        (expectation(UNEXPECTED, "info", unexpected_rows_query="SELECT 1 / (delay - delay) FROM {batch} ORDER BY 1"), "division by zero"),
        (expectation(UNEXPECTED, unexpected_rows_query="SELECT nextval('analytics.number') FROM {batch}"), "read-only transaction"),
    ],
)  # fmt: skip
def test_an_expectation_that_cannot_be_evaluated_is_an_error_and_no_verdict(
    departures: Scenario, broken: dict[str, Any], cause: str
) -> None:
    """The error names the suite file, the number and type of the bad expectation only, and Postgres' message. Nothing is stored."""
    departures.batch("run", 0, 100)
    departures.sql("CREATE SEQUENCE analytics.number")
    with pytest.raises(ExpectationError) as caught:
        departures.validate("run", CARRIER, broken, DELAY)
    assert [(item.number, item.type) for item in caught.value.problems] == [(2, broken["type"])]
    assert cause in caught.value.problems[0].cause
    assert "departures.json: expectation 2" in str(caught.value)
    assert "SELECT sum" not in str(caught.value)
    assert departures.sql("SELECT count(*) FROM tidemark.validation") == [(0,)]
    assert departures.validated() == 0
    assert departures.violations() == []


def test_a_session_that_is_lost_says_nothing_about_the_suite(departures: Scenario) -> None:
    """The same call may succeed later. Nothing is stored."""
    departures.batch("run", 0, 1)
    ends = expectation(UNEXPECTED, unexpected_rows_query="SELECT pg_terminate_backend(pg_backend_pid()) FROM {batch}")
    with pytest.raises(DatabaseUnavailable):
        departures.validate("run", ends)
    assert departures.sql("SELECT count(*) FROM tidemark.validation") == [(0,)]


@pytest.mark.parametrize(
    "expectations",
    [
        [],
        [expectation(UNEXPECTED, unexpected_rows_query="SELECT sink.* FROM {batch} sink JOIN analytics.carriers USING (carrier)")],
    ],
    ids=["conservation", "expectation"],
)
def test_outage_while_rows_are_judged_is_tried_again(departures: Scenario, expectations: list[dict[str, Any]]) -> None:
    """A lock that was not granted in time, as well as a statement timeout or a full disk. Nothing is stored."""
    departures.batch("run", 0, 1)
    departures.sql("CREATE TABLE analytics.carriers (carrier text)")
    departures.url = with_parameter(departures.url, "options", "-c lock_timeout=100")
    departures.sql("BEGIN")
    departures.sql(f"LOCK TABLE {'analytics.carriers' if expectations else TABLE}")
    with pytest.raises(LockTimeout):
        departures.validate("run", *expectations)
    departures.sql("ROLLBACK")
    assert departures.sql("SELECT count(*) FROM tidemark.validation") == [(0,)]


def test_great_expectations_is_silent_and_stays_at_home(
    departures: Scenario, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The only socket is the one to Postgres, there is no progress bar, and no cloud is contacted."""

    def refuse(*_: object) -> None:
        raise AssertionError("a socket was opened")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setenv("GX_CLOUD_ACCESS_TOKEN", "token")
    monkeypatch.setenv("GX_CLOUD_ORGANIZATION_ID", str(uuid.uuid4()))
    departures.batch("run", 0, 10)
    failing = expectation(UNEXPECTED, unexpected_rows_query="SELECT * FROM {batch}")
    late = expectation("expect_column_values_to_be_between", "warning", column="delay", max_value=-1)
    assert departures.validate("run", CARRIER, DELAY, late, failing).verdict == "critical"
    assert capfd.readouterr() == ("", "")


# ---- conservation

BROKEN = {
    "row missing": ("DELETE FROM analytics.departures WHERE kafka_offset = 150", {ViolationKind.LOADED, ViolationKind.SINK_ROWS}),
    "row doubled under another seq": (
        """INSERT INTO analytics.departures SELECT carrier, delay, origin, kafka_topic_id, kafka_partition, kafka_offset, 7
             FROM analytics.departures WHERE kafka_offset = 150""",
        {ViolationKind.SINK_ROWS},
    ),
    "one row missing, another doubled": (
        "UPDATE analytics.departures SET kafka_offset = 151, kafka_seq = 1 WHERE kafka_offset = 150",
        {ViolationKind.LOADED},
    ),
    "retried record missing": ("DELETE FROM tidemark.failed_record WHERE record_offset = 195", {ViolationKind.RETRIED}),
    "failed record under another disposition": (
        "UPDATE tidemark.failed_record SET disposition = 'retry' WHERE record_offset = 199",
        {ViolationKind.RETRIED, ViolationKind.FAILED},
    ),
    "gap before": ("DELETE FROM tidemark.batch WHERE start_offset = 50", {ViolationKind.GAP}),
    "gap behind": ("DELETE FROM tidemark.batch WHERE start_offset = 200", {ViolationKind.GAP}),
    "overlap": ("UPDATE tidemark.batch SET end_offset = 120, unaccounted = 20 WHERE start_offset = 50", {ViolationKind.OVERLAP}),
    "overlap with a lost range": (
        """INSERT INTO tidemark.lost_range (group_id, topic_id, partition, start_offset, end_offset, reason, attempt_id)
           SELECT group_id, topic_id, partition, start_offset, end_offset, 'retention', attempt_id
             FROM tidemark.batch WHERE start_offset = 100""",
        {ViolationKind.OVERLAP},
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_what_the_ledger_does_not_explain_is_critical(departures: Scenario, case: str) -> None:
    """Result 0 of the run fails, names the partition and the offsets, and stops the validated offset, even without a suite."""
    statement, kinds = BROKEN[case]
    for run, start, end in (("first", 0, 50), ("before", 50, 100), ("run", 100, 200), ("behind", 200, 250), ("last", 250, 300)):
        departures.batch(run, start, end, **({"retried": 5, "failed": 2} if run == "run" else {}))
    assert departures.violations() == []
    assert departures.validate("first").verdict is Verdict.PASSED
    departures.sql(statement)
    verdict = departures.validate("run")
    assert verdict.verdict is Verdict.CRITICAL
    assert verdict.results[0].text.startswith("conservation: flights/0 [")
    detail = departures.sql("SELECT detail FROM tidemark.validation_result WHERE NOT success")[0][0]
    assert {item["kind"] for item in detail["first_violations"]} == kinds
    assert departures.validated() == 50
    assert kinds <= {item.kind for item in departures.violations()}


def test_a_ledger_that_does_not_end_at_the_position_is_told(departures: Scenario) -> None:
    """If the position is ahead of the ledger or behind it, the state of the records in between is unknown."""
    departures.batch("run", 0, 100)
    for position in (90, 110):
        departures.move(position)
        (violation,) = departures.violations()
        assert (violation.kind, violation.expected, violation.found) == (ViolationKind.POSITION, 100, position)
        assert departures.validate("run").verdict is Verdict.CRITICAL


def test_lost_ranges_are_part_of_the_ledger_and_bridged_if_their_end_is_known(departures: Scenario) -> None:
    """At the beginning, in the middle and at the end. They contain nothing to judge. One with an unknown end stops the validated offset."""
    departures.lost(0, 10)
    departures.batch("run", 10, 20)
    departures.lost(20, 30)
    departures.batch("run", 30, 40)
    departures.lost(40, 50)
    departures.lost(50, None)
    assert departures.violations() == []
    departures.validate("run")
    assert departures.validated() == 50
    departures.move(60)
    assert [item.kind for item in departures.violations()] == [ViolationKind.POSITION]


@pytest.mark.parametrize("place", [(0, 3), (0, 55), (0, 999), (1, 5), (7, 0)])
def test_sink_rows_that_no_batch_wrote_are_orphans(departures: Scenario, place: tuple[int, int]) -> None:
    """Before, between and after the ranges, in a partition without batches, and in one that the group never had."""
    departures.partition(1, at=5)
    departures.move(10)
    departures.batch("run", 10, 50)
    departures.lost(50, 60)
    departures.batch("run", 60, 100)
    assert departures.violations() == []
    partition, offset = place
    for seq in (0, 1):
        departures.sql(f"INSERT INTO {TABLE} VALUES ('UA', 1, 'JFK', %s, %s, %s, %s)", departures.topic_id, partition, offset, seq)
    assert departures.violations() == [Violation(ViolationKind.ORPHAN_ROWS, "flights", partition, offset, offset + 1, 0, 2)]
    assert "rows that no ledger row accounts for: 2 in the sink" in str(departures.violations()[0])


def test_failed_records_that_no_batch_handed_over_are_orphans(departures: Scenario) -> None:
    """They would be retried although their record was never read."""
    departures.batch("run", 0, 100, failed=1)
    departures.sql("DELETE FROM tidemark.batch")
    departures.move(0)
    departures.sql(f"DELETE FROM {TABLE}")
    assert [item.kind for item in departures.violations()] == [ViolationKind.ORPHAN_FAILED_RECORDS]


def test_groups_that_share_a_sink_do_not_see_each_others_rows(departures: Scenario) -> None:
    """Several groups may load the same sink, each from different topics."""
    weather = Scenario(departures.url, departures.folder, departures.connection, "weather", "weather")
    departures.batch("run", 0, 100)
    weather.batch("rain", 0, 30)
    assert departures.violations() == weather.violations() == []
    departures.sql(f"DELETE FROM {TABLE} WHERE kafka_topic_id = %s AND kafka_offset = 3", weather.topic_id)
    assert departures.violations() == []
    assert {item.kind for item in weather.violations()} == {ViolationKind.LOADED, ViolationKind.SINK_ROWS}


def test_in_an_upsert_sink_later_records_may_take_rows_away(departures: Scenario) -> None:
    """In such a sink, fewer rows than in the ledger are no violation, but more rows are."""
    departures.batch("run", 0, 100)
    departures.sql(f"DELETE FROM {TABLE} WHERE kafka_offset < 30")
    assert departures.validate("run", upsert=True).verdict is Verdict.PASSED
    departures.sql(f"INSERT INTO {TABLE} SELECT 'UA', 1, 'JFK', %s, 0, 50, n FROM generate_series(1, 99) n", departures.topic_id)
    assert departures.validate("run", upsert=True).verdict is Verdict.CRITICAL


# ---- several tables

LINES = "analytics.lines"


def test_one_verdict_covers_the_suites_of_all_tables(departures: Scenario) -> None:
    """Each suite sees only the rows of its table. Results name their table; failing rows are stored under the number of their result. The
    conservation check covers all tables, so a row that is missing in the second one is critical even if the suites pass."""
    departures.batch("run", 0, 10)
    departures.sql(f"CREATE TABLE {LINES} (LIKE {TABLE} INCLUDING ALL)")
    places = "%s, 0, n / 2, n %% 2 FROM generate_series(0, 19) n"
    departures.sql(f"INSERT INTO {LINES} SELECT CASE n WHEN 9 THEN NULL ELSE 'UA' END, 1, 'JFK', {places}", departures.topic_id)
    departures.sql("UPDATE tidemark.batch SET sink_rows = 30")
    suites = {TABLE: departures.suite(CARRIER, DELAY, name="orders"), LINES: departures.suite(CARRIER, DELAY, name="lines")}
    verdict = departures.validate("run", suites=suites)
    assert (verdict.verdict, verdict.suite) == (Verdict.CRITICAL, "orders, lines")
    assert [(item.number, item.success) for item in verdict.results] == [(0, True), (1, True), (2, True), (3, False), (4, True)]
    assert verdict.results[1].text == f"{TABLE}: expect_column_values_to_not_be_null(column='carrier'): 0 of 10 rows fail"
    assert verdict.results[3].text.startswith(f"{LINES}: expect_column_values_to_not_be_null(column='carrier'): 1 of 20 rows fail")
    assert departures.stored_rows(3) == [(0, 4, 1)]
    assert departures.sql("SELECT suite, verdict FROM tidemark.validation") == [("orders, lines", "critical")]
    departures.sql(f"DELETE FROM {LINES} WHERE carrier IS NULL")
    verdict = departures.validate("run", suites=suites)
    assert [item.success for item in verdict.results] == [False, True, True, True, True]
    assert "rows written: 30 in the ledger, 29 in the sink" in verdict.results[0].text
    assert (verdict.verdict, departures.validated()) == (Verdict.CRITICAL, 0)
    departures.sql(f"INSERT INTO {LINES} VALUES ('UA', 1, 'JFK', %s, 0, 4, 1)", departures.topic_id)
    assert departures.validate("run", suites=suites).verdict is Verdict.PASSED
    assert departures.validated() == 10


# ---- how far the validated offset moves


def test_verdicts_that_come_out_of_order_wait_for_the_ones_before(departures: Scenario) -> None:
    """The validated offset of a partition moves past a run only when everything before it in that partition is validated, and then past all
    runs that waited for that."""
    departures.partition(1)
    for number in range(4):
        departures.batch(f"run{number}", number * 10, number * 10 + 10)
    departures.batch("run2", 0, 20, partition=1)
    departures.validate("run1")
    departures.validate("run2")
    assert (departures.validated(0), departures.validated(1)) == (0, 20)
    departures.validate("run0")
    assert departures.validated() == 30
    departures.validate("run3")
    assert departures.validated() == 40


def test_a_critical_run_holds_back_what_comes_after_until_it_is_repaired(departures: Scenario) -> None:
    """The validated offset stops before it. Validating again after the repair replaces the verdict and releases everything after it. The
    old verdict stays on record."""
    for number in range(3):
        departures.batch(f"run{number}", number * 10, number * 10 + 10)
    departures.sql(f"UPDATE {TABLE} SET carrier = NULL WHERE kafka_offset = 15")
    verdicts = [departures.validate(f"run{number}", CARRIER, DELAY) for number in (0, 1, 2)]
    assert [verdict.verdict for verdict in verdicts] == ["passed", "critical", "passed"]
    assert [item.success for item in verdicts[1].results] == [True, False, True]
    assert departures.stored_rows(1) == [(0, 15, 0)]
    assert departures.validated() == 10
    with session(departures.url) as connection:
        (critical,) = newest(connection, [GROUP], of_each=1, most=1, verdict=Verdict.CRITICAL)
    assert critical["validation_id"] == verdicts[1].validation_id, "though a newer one has passed"
    departures.sql(f"UPDATE {TABLE} SET carrier = 'UA' WHERE kafka_offset = 15")
    verdict = departures.validate("run1", CARRIER)
    assert departures.validated() == 30
    assert departures.sql("SELECT validation_id FROM tidemark.batch WHERE start_offset = 10") == [(verdict.validation_id,)]
    assert departures.sql("SELECT verdict, count(*) FROM tidemark.validation GROUP BY 1 ORDER BY 1") == [("critical", 1), ("passed", 3)]


def test_a_newer_critical_verdict_does_not_take_back_what_was_shown(departures: Scenario) -> None:
    """Only a rewind, with a reason and an approver, moves readers back."""
    departures.batch("run", 0, 100)
    departures.validate("run", CARRIER)
    departures.sql(f"UPDATE {TABLE} SET carrier = NULL")
    assert departures.validate("run", CARRIER).verdict is Verdict.CRITICAL
    assert departures.validated() == 100


# ---- readers and speed


def test_the_view_shows_validated_rows_only(departures: Scenario) -> None:
    """Before the first verdict it shows none, then those below the validated offset. The DDL may be run again at any time."""
    departures.partition(1)
    departures.batch("first", 0, 10)
    departures.batch("second", 10, 20)
    departures.batch("second", 0, 5, partition=1)
    for _ in range(2):
        departures.sql(validated_view_ddl(TABLE, [GROUP]))
    shown = "SELECT kafka_partition, count(*), max(kafka_offset) FROM analytics.departures_validated GROUP BY 1 ORDER BY 1"
    assert departures.sql(shown) == []
    departures.validate("second")
    assert departures.sql(shown) == [(1, 5, 4)]
    departures.validate("first")
    assert departures.sql(shown) == [(0, 20, 19), (1, 5, 4)]


def test_the_view_of_a_table_with_an_odd_long_name_works(departures: Scenario) -> None:
    """The name has quotes, capitals, spaces, a percent sign and 63 bytes."""
    name = 'The "odd" table: 100 % ' + "x" * 40
    quoted = name.replace('"', '""')
    departures.sql(f'CREATE TABLE analytics."{quoted}" (LIKE {TABLE} INCLUDING ALL)')
    departures.batch("run", 0, 10)
    departures.sql(f'INSERT INTO analytics."{quoted}" SELECT * FROM {TABLE}')
    departures.sql(validated_view_ddl(f"analytics.{name}", [GROUP, "o'clock \\ %"]))
    assert departures.validate("run", suites={f"analytics.{name}": departures.suite(CARRIER)}).verdict is Verdict.PASSED
    ((view,),) = departures.sql("SELECT quote_ident(viewname) FROM pg_views WHERE schemaname = 'analytics'")
    assert departures.sql(f"SELECT count(*) FROM analytics.{view}") == [(10,)]


def test_the_rows_of_a_run_are_found_through_the_lineage_index(departures: Scenario) -> None:
    """However many rows of other runs the sink has, neither the suite nor the conservation check reads any of them."""
    departures.batch("old", 0, 200_000)
    departures.batch("run", 200_000, 200_500)
    departures.sql(f"ANALYZE {TABLE}")
    condition = predicate(merge_ranges([(departures.topic_id, 0, 200_000, 200_500), (departures.topic_id, 3, 0, 10)]))
    plan = "\n".join(line for (line,) in departures.sql(f"EXPLAIN SELECT * FROM {TABLE} sink WHERE {condition}"))
    assert "departures_kafka_topic_id_kafka_partition_kafka_offset_kafk_key" in plan
    assert "Seq Scan" not in plan
    departures.sql("SELECT pg_stat_force_next_flush()")
    departures.sql("SELECT pg_stat_reset()")
    departures.validate("run", CARRIER, DELAY, expectation("expect_column_values_to_be_unique", column="kafka_offset"))
    scans = "SELECT seq_scan, idx_scan FROM pg_stat_user_tables WHERE relname = 'departures'"
    until(lambda: departures.sql(scans)[0][1] > 0)
    assert departures.sql(scans)[0][0] == 0

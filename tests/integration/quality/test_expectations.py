"""Each type of Great Expectations that has SQL, holding and not: the same answer in a suite, alone, and from Great Expectations."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg2
import pytest
from tests.support.departures import Departures

from tidemark.quality import BadSuite, ValidatedRun, Verdict, load_suite, validate
from tidemark.quality.suite import great_expectations

TABLE = "analytics.samples"
ROWS = 20
DDL = f"""
    CREATE SCHEMA analytics;
    CREATE TABLE {TABLE} (
        n integer, same integer, half double precision, amount numeric(10,2), word text, code text, flag boolean, at timestamptz, day date,
        nothing text,
        kafka_topic_id smallint NOT NULL, kafka_partition integer NOT NULL, kafka_offset bigint NOT NULL, kafka_seq integer NOT NULL,
        UNIQUE (kafka_topic_id, kafka_partition, kafka_offset, kafka_seq))
"""
FILL = f"""
    INSERT INTO {TABLE}
    SELECT n, n, n / 2.0, n * 1.25, CASE n %% 2 WHEN 0 THEN 'even' ELSE 'odd' END, 'C' || lpad(n::text, 3, '0'), n %% 2 = 0,
           '2026-01-01Z'::timestamptz + n * interval '1 hour', '2026-01-01'::date + n, NULL, %s, 0, n - 1, 0
      FROM generate_series(1, {ROWS}) n
"""
COLUMNS = ["n", "same", "half", "amount", "word", "code", "flag", "at", "day", "nothing"]
COLUMNS += ["kafka_topic_id", "kafka_partition", "kafka_offset", "kafka_seq"]
PAIRS = [[n, n] for n in range(1, ROWS + 1)]
TWO = {"quantiles": [0.1, 0.9], "value_ranges": [[2, 3], [18, None]]}
CASES: list[tuple[str, bool, dict[str, Any]]] = [
    ("column_distinct_values_to_be_in_set", True, {"column": "word", "value_set": ["even", "odd", "x"]}),
    ("column_distinct_values_to_be_in_set", False, {"column": "word", "value_set": ["odd"]}),
    ("column_distinct_values_to_contain_set", True, {"column": "word", "value_set": ["odd"]}),
    ("column_distinct_values_to_contain_set", False, {"column": "word", "value_set": ["x"]}),
    ("column_distinct_values_to_equal_set", True, {"column": "word", "value_set": ["even", "odd"]}),
    ("column_distinct_values_to_equal_set", False, {"column": "word", "value_set": ["odd"]}),
    ("column_max_to_be_between", True, {"column": "n", "max_value": 20}),
    ("column_max_to_be_between", False, {"column": "n", "max_value": 20, "strict_max": True}),
    ("column_max_to_be_between", True, {"column": "amount", "max_value": 25}),
    ("column_max_to_be_between", False, {"column": "amount", "max_value": 24.99}),
    ("column_max_to_be_between", True, {"column": "at", "max_value": "2026-01-02T00:00:00Z"}),
    ("column_max_to_be_between", False, {"column": "at", "max_value": "2026-01-01T00:00:00+00:00"}),
    ("column_max_to_be_between", True, {"column": "day", "min_value": "2026-01-02"}),
    ("column_max_to_be_between", False, {"column": "day", "max_value": "2026-01-02"}),
    ("column_mean_to_be_between", True, {"column": "n", "min_value": 10, "max_value": 11}),
    ("column_mean_to_be_between", False, {"column": "half", "max_value": 5}),
    ("column_median_to_be_between", True, {"column": "n", "min_value": 10, "max_value": 11}),
    ("column_median_to_be_between", False, {"column": "n", "min_value": 11}),
    ("column_min_to_be_between", True, {"column": "n", "min_value": 1}),
    ("column_min_to_be_between", False, {"column": "n", "min_value": 1, "strict_min": True}),
    ("column_most_common_value_to_be_in_set", True, {"column": "word", "value_set": ["odd"], "ties_okay": True}),
    ("column_most_common_value_to_be_in_set", False, {"column": "word", "value_set": ["x"]}),
    ("column_pair_values_a_to_be_greater_than_b", True, {"column_A": "n", "column_B": "half"}),
    ("column_pair_values_a_to_be_greater_than_b", False, {"column_A": "half", "column_B": "n"}),
    ("column_pair_values_a_to_be_greater_than_b", True, {"column_A": "n", "column_B": "same", "or_equal": True}),
    ("column_pair_values_a_to_be_greater_than_b", False, {"column_A": "n", "column_B": "same"}),
    ("column_pair_values_to_be_equal", True, {"column_A": "n", "column_B": "same"}),
    ("column_pair_values_to_be_equal", False, {"column_A": "n", "column_B": "half"}),
    ("column_pair_values_to_be_in_set", True, {"column_A": "n", "column_B": "same", "value_pairs_set": PAIRS}),
    ("column_pair_values_to_be_in_set", False, {"column_A": "n", "column_B": "same", "value_pairs_set": [[1, 1]]}),
    ("column_proportion_of_non_null_values_to_be_between", True, {"column": "n", "min_value": 1}),
    ("column_proportion_of_non_null_values_to_be_between", False, {"column": "nothing", "min_value": 0.5}),
    ("column_proportion_of_unique_values_to_be_between", True, {"column": "n", "min_value": 1}),
    ("column_proportion_of_unique_values_to_be_between", False, {"column": "word", "min_value": 0.5}),
    ("column_quantile_values_to_be_between", True, {"column": "n", "quantile_ranges": {"quantiles": [0.5], "value_ranges": [[10, 11]]}}),
    ("column_quantile_values_to_be_between", False, {"column": "n", "quantile_ranges": {"quantiles": [0.9], "value_ranges": [[10, 11]]}}),
    ("column_quantile_values_to_be_between", True, {"column": "n", "quantile_ranges": TWO}),
    ("column_quantile_values_to_be_between", False, {"column": "n", "quantile_ranges": {"quantiles": [0.1], "value_ranges": [[10, 11]]}}),
    ("column_stdev_to_be_between", True, {"column": "n", "min_value": 5, "max_value": 6}),
    ("column_stdev_to_be_between", False, {"column": "n", "max_value": 5}),
    ("column_sum_to_be_between", True, {"column": "n", "min_value": 210, "max_value": 210}),
    ("column_sum_to_be_between", False, {"column": "n", "min_value": 211}),
    ("column_to_exist", True, {"column": "n"}),
    ("column_to_exist", False, {"column": "m"}),
    ("column_to_exist", True, {"column": "same", "column_index": 1}),
    ("column_unique_value_count_to_be_between", True, {"column": "n", "min_value": 20, "max_value": 20}),
    ("column_unique_value_count_to_be_between", False, {"column": "word", "min_value": 3}),
    ("column_value_lengths_to_be_between", True, {"column": "code", "min_value": 4, "max_value": 4}),
    ("column_value_lengths_to_be_between", False, {"column": "word", "max_value": 3}),
    ("column_value_lengths_to_equal", True, {"column": "code", "value": 4}),
    ("column_value_lengths_to_equal", False, {"column": "word", "value": 3}),
    ("column_value_z_scores_to_be_less_than", True, {"column": "n", "threshold": 3, "double_sided": True}),
    ("column_value_z_scores_to_be_less_than", False, {"column": "n", "threshold": 1, "double_sided": True}),
    ("column_values_to_be_between", True, {"column": "n", "min_value": 1, "max_value": 20}),
    ("column_values_to_be_between", False, {"column": "n", "max_value": 19}),
    ("column_values_to_be_between", True, {"column": "n", "max_value": 19, "mostly": 0.9}),
    ("column_values_to_be_between", False, {"column": "at", "max_value": "2026-01-01T10:00:00Z"}),
    ("column_values_to_be_in_set", True, {"column": "word", "value_set": ["even", "odd"]}),
    ("column_values_to_be_in_set", False, {"column": "word", "value_set": ["odd"], "mostly": 0.6}),
    ("column_values_to_be_in_type_list", True, {"column": "n", "type_list": ["INTEGER"]}),
    ("column_values_to_be_in_type_list", False, {"column": "n", "type_list": ["TEXT"]}),
    ("column_values_to_be_null", True, {"column": "nothing"}),
    ("column_values_to_be_null", False, {"column": "n"}),
    ("column_values_to_be_of_type", True, {"column": "n", "type_": "INTEGER"}),
    ("column_values_to_be_of_type", False, {"column": "n", "type_": "TEXT"}),
    ("column_values_to_be_unique", True, {"column": "n"}),
    ("column_values_to_be_unique", False, {"column": "word"}),
    ("column_values_to_match_like_pattern", True, {"column": "code", "like_pattern": "C%"}),
    ("column_values_to_match_like_pattern", False, {"column": "word", "like_pattern": "o%"}),
    ("column_values_to_match_like_pattern_list", True, {"column": "word", "like_pattern_list": ["o%", "e%"]}),
    ("column_values_to_match_like_pattern_list", False, {"column": "word", "like_pattern_list": ["o%", "x%"]}),
    ("column_values_to_match_regex", True, {"column": "code", "regex": r"^C\d{3}$"}),
    ("column_values_to_match_regex", False, {"column": "word", "regex": "^o"}),
    ("column_values_to_match_regex_list", True, {"column": "word", "regex_list": ["^o", "^e"]}),
    ("column_values_to_match_regex_list", False, {"column": "word", "regex_list": ["^o"]}),
    ("column_values_to_not_be_in_set", True, {"column": "word", "value_set": ["x"]}),
    ("column_values_to_not_be_in_set", False, {"column": "word", "value_set": ["odd"]}),
    ("column_values_to_not_be_null", True, {"column": "n"}),
    ("column_values_to_not_be_null", False, {"column": "nothing"}),
    ("column_values_to_not_be_outliers", True, {"column": "n", "method": "iqr", "multiplier": 2.0}),
    ("column_values_to_not_be_outliers", False, {"column": "n", "method": "iqr", "multiplier": 0.1}),
    ("column_values_to_not_match_like_pattern", True, {"column": "code", "like_pattern": "x%"}),
    ("column_values_to_not_match_like_pattern", False, {"column": "word", "like_pattern": "o%"}),
    ("column_values_to_not_match_like_pattern_list", True, {"column": "word", "like_pattern_list": ["x%"]}),
    ("column_values_to_not_match_like_pattern_list", False, {"column": "word", "like_pattern_list": ["o%", "x%"]}),
    ("column_values_to_not_match_regex", True, {"column": "code", "regex": "^x"}),
    ("column_values_to_not_match_regex", False, {"column": "word", "regex": "^o"}),
    ("column_values_to_not_match_regex_list", True, {"column": "word", "regex_list": ["^x"]}),
    ("column_values_to_not_match_regex_list", False, {"column": "word", "regex_list": ["^o"]}),
    ("compound_columns_to_be_unique", True, {"column_list": ["n", "word"]}),
    ("compound_columns_to_be_unique", False, {"column_list": ["word", "flag"]}),
    ("multicolumn_sum_to_equal", True, {"column_list": ["n", "same"], "sum_total": 20, "mostly": 0.05}),
    ("multicolumn_sum_to_equal", False, {"column_list": ["n", "same"], "sum_total": 20}),
    ("multicolumn_values_to_be_equal", True, {"column_list": ["n", "same"]}),
    ("multicolumn_values_to_be_equal", False, {"column_list": ["n", "same", "half"]}),
    ("select_column_values_to_be_unique_within_record", True, {"column_list": ["n", "half"]}),
    ("select_column_values_to_be_unique_within_record", False, {"column_list": ["n", "same"]}),
    ("table_column_count_to_be_between", True, {"min_value": 14, "max_value": 14}),
    ("table_column_count_to_be_between", False, {"max_value": 3}),
    ("table_column_count_to_equal", True, {"value": 14}),
    ("table_column_count_to_equal", False, {"value": 3}),
    ("table_columns_to_match_ordered_list", True, {"column_list": COLUMNS}),
    ("table_columns_to_match_ordered_list", False, {"column_list": COLUMNS[::-1]}),
    ("table_columns_to_match_set", True, {"column_set": COLUMNS[::-1]}),
    ("table_columns_to_match_set", False, {"column_set": ["n"], "exact_match": True}),
    ("table_row_count_to_be_between", True, {"min_value": 20, "max_value": 20}),
    ("table_row_count_to_be_between", False, {"min_value": 21}),
    ("table_row_count_to_equal", True, {"value": 20}),
    ("table_row_count_to_equal", False, {"value": 1}),
    ("unexpected_rows_expectation", True, {"unexpected_rows_query": "SELECT * FROM {batch} WHERE n > 20"}),
    ("unexpected_rows_expectation", False, {"unexpected_rows_query": "SELECT * FROM {batch} WHERE n > 19"}),
]  # fmt: skip
"""Types without ``expect_``, whether they hold of the rows, and their arguments."""
STATISTICS = re.compile("column_(max|mean|median|min|stdev|sum|quantile|unique_value_count|most_common|proportion_of|distinct)_.*")
"""Types that judge a statistic of a column, not single rows."""
REFUSED = {
    "column_values_to_be_dateutil_parseable": {"column": "word"},
    "column_values_to_be_decreasing": {"column": "n"},
    "column_values_to_be_increasing": {"column": "n"},
    "column_values_to_be_json_parseable": {"column": "word"},
    "column_values_to_match_json_schema": {"column": "word", "json_schema": {}},
    "column_values_to_match_strftime_format": {"column": "word", "strftime_format": "%Y"},
    "table_row_count_to_equal_other_table": {"other_table_name": "samples"},
    "query_results_to_match_comparison": {
        "base_query": "SELECT 1", "comparison_data_source_name": "other", "comparison_query": "SELECT 1",
    },
}  # fmt: skip
OTHERS = {"column_kl_divergence_to_be_less_than", "column_type_to_be"}
"""Neither has an answer for a table in Postgres that does not depend on Great Expectations' own inference."""


def name_of(kind: str) -> str:
    return kind if kind.startswith("unexpected") else f"expect_{kind}"


def suite_of(folder: Path, *cases: tuple[str, dict[str, Any]]) -> Path:
    path = folder / "samples.json"
    path.write_text(json.dumps({"name": "samples", "expectations": [{"type": name_of(kind), "kwargs": kwargs} for kind, kwargs in cases]}))
    return path


def committed(samples: Departures, run: str, start: int, end: int, **counts: int) -> None:
    counts = dict.fromkeys(("loaded", "skipped", "retried", "failed", "unaccounted", "sink_rows"), 0) | counts
    attempt = samples.attempt(run)
    samples.insert("batch", partition=0, attempt_id=attempt, start_offset=start, end_offset=end, owner_epoch=1, **counts)
    samples.move(end)


@pytest.fixture
def samples(database_url: str, tmp_path: Path) -> Iterator[Departures]:
    with contextlib.closing(psycopg2.connect(database_url)) as connection:
        connection.autocommit = True
        departures = Departures(database_url, tmp_path, connection)
        departures.sql(DDL)
        departures.sql(FILL, departures.topic_id)
        committed(departures, "run", 0, ROWS, loaded=ROWS, sink_rows=ROWS)
        yield departures


def answers(samples: Departures, suite: Path, run: str = "run") -> list[bool]:
    report = validate(samples.url, ValidatedRun("consume", run), group=samples.group, suites={TABLE: suite})
    return [result.success for result in report.results[1:]]


def test_answers_are_those_of_great_expectations(samples: Departures) -> None:
    expected = [holds for _, holds, _ in CASES]
    assert answers(samples, suite_of(samples.folder, *((kind, kwargs) for kind, _, kwargs in CASES))) == expected
    assert answers(samples, suite_of(samples.folder, *((kind, kwargs) for kind, _, kwargs in CASES[::-1]))) == expected[::-1]
    assert by_great_expectations(samples.url) == expected


@pytest.mark.thorough
def test_answers_alone_are_those_in_a_suite(samples: Departures) -> None:
    for kind, holds, kwargs in CASES:
        assert answers(samples, suite_of(samples.folder, (kind, kwargs))) == [holds], (kind, kwargs)


def by_great_expectations(url: str) -> list[bool]:
    """One at a time, on the whole table, with a connection of its own."""
    gx = great_expectations()
    from great_expectations.expectations.expectation_configuration import ExpectationConfiguration

    own = url.replace("postgresql://", "postgresql+psycopg2://") + "?options=-csearch_path%3Danalytics"
    source = gx.get_context(mode="ephemeral", cloud_mode=False).data_sources.add_postgres(
        "own", connection_string=own, create_temp_table=False
    )
    batch = source.add_table_asset("samples", table_name="samples").add_batch_definition_whole_table("all").get_batch()
    expectations = [ExpectationConfiguration(type=name_of(kind), kwargs=kwargs).to_domain_obj() for kind, _, kwargs in CASES]
    try:
        return [bool(batch.validate(each).success) for each in expectations]
    finally:
        batch.data.execution_engine.engine.dispose()


def test_every_type_has_a_case_or_is_refused(tmp_path: Path) -> None:
    great_expectations()
    from great_expectations.expectations.registry import list_registered_expectation_implementations

    known = {name.removeprefix("expect_") for name in list_registered_expectation_implementations()}
    assert known <= {*(kind for kind, *_ in CASES), *REFUSED, *OTHERS, "count_unexpected_rows"}  # the last is ours
    for kind, kwargs in REFUSED.items():
        with pytest.raises(BadSuite, match="write an unexpected_rows_expectation"):
            load_suite(suite_of(tmp_path, (kind, kwargs)))


def test_run_without_rows_or_values_breaks_no_statistic(samples: Departures) -> None:
    """Its records were skipped, or the column is null in all of its rows. The number of rows is still judged."""
    committed(samples, "empty", ROWS, ROWS + 1, skipped=1)
    statistics = [(kind, kwargs) for kind, holds, kwargs in CASES if not holds and STATISTICS.fullmatch(kind)]
    assert len(statistics) > 10
    assert answers(samples, suite_of(samples.folder, *statistics), "empty") == [True] * len(statistics)
    assert answers(samples, suite_of(samples.folder, ("table_row_count_to_be_between", {"min_value": 1})), "empty") == [False]
    null = [
        ("column_max_to_be_between", {"column": "nothing", "max_value": 1}),
        ("column_distinct_values_to_contain_set", {"column": "nothing", "value_set": ["a"]}),
    ]
    assert answers(samples, suite_of(samples.folder, *null)) == [True, True]


@pytest.mark.parametrize(
    ("bound", "holds"), [("2026-01-01T20:00:00", True), ("2026-01-01 19:59:59.5", False), ("2026-01-01T20:00:00Z", True)]
)
def test_bound_without_a_zone_is_in_utc(samples: Departures, bound: str, *, holds: bool) -> None:
    kinds = ("column_max_to_be_between", "column_values_to_be_between")
    suite = suite_of(samples.folder, *((kind, {"column": "at", "max_value": bound}) for kind in kinds))
    report = validate(samples.url, ValidatedRun("consume", "run"), group=samples.group, suites={TABLE: suite})
    assert report.verdict is (Verdict.PASSED if holds else Verdict.CRITICAL)
    assert [result.success for result in report.results[1:]] == [holds] * 2

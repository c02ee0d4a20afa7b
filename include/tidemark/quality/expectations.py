"""Runs Great Expectations over the rows of a run, in our own session: one snapshot, no network, no progress bars, constant memory.

The rows are a temporary view, `RUN_ROWS`, over the sink's lineage index. Each expectation first counts its failing rows. The rows
themselves are fetched only for failed expectations, at most `MAX_ROWS` each.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import psycopg2

from tidemark.db import READ_ONLY, is_outage, unavailable
from tidemark.errors import Refused
from tidemark.quality.merged_ranges import Partition, Range, covers, predicate
from tidemark.quality.suite import UNEXPECTED_ROWS, Expectation, Suite, configuration, great_expectations
from tidemark.quality.verdict import ExpectationResult
from tidemark.sink.table import LINEAGE, on_tables, quoted, quoted_table
from tidemark.text.wording import counted

if TYPE_CHECKING:
    from tidemark.db import Connection, Cursor

RUN_ROWS = "tidemark_run"
"""Relation with the run's rows. Replaces ``{batch}``, and appears in a suite's messages."""
MAX_ROWS = 10_000
"""Maximum failing rows stored per expectation: enough to see the pattern and repair a few, few enough for one statement."""
EXAMPLES = 5
COMPOUND_UNIQUE = "expect_compound_columns_to_be_unique"
COMPOUND_METRIC = "compound_columns.unique"
NON_NULL = "expect_column_proportion_of_non_null_values_to_be_between"
QUANTILES = "expect_column_quantile_values_to_be_between"
_KEY = tuple(name for name, _ in LINEAGE)

Row = tuple[int, int, int, int]
"""``kafka_topic_id, kafka_partition, kafka_offset, kafka_seq``."""


@dataclass(frozen=True, slots=True)
class Unevaluated:
    """An expectation without a result, and the error of Postgres or Great Expectations."""

    number: int
    type: str
    cause: str


class ExpectationError(Refused):
    """Expectations could not be evaluated, which says nothing about the data. No verdict was stored."""

    suite: str
    problems: list[Unevaluated] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [f"{self.suite}: expectation {item.number} ({item.type}) could not be evaluated: {item.cause}" for item in self.problems]
        return "\n".join(
            [*lines, "This says nothing about the data, and no verdict was stored. Fix the suite or the table, and validate again."]
        )


@dataclass(frozen=True, slots=True)
class Evaluated:
    """An expectation's result and its failing rows (at most `MAX_ROWS`)."""

    result: ExpectationResult
    rows: list[Row]


def expose(cursor: Cursor, table: str, ranges: Mapping[Partition, list[Range]]) -> None:
    """Creates `RUN_ROWS`, the sink's rows in these ranges, until the transaction ends. Makes the rest of the transaction read-only.

    Changes planner settings for this transaction: rows this new are not in the statistics, so the planner would expect almost none and use
    nested loops. JIT compilation costs more than it saves in queries this short.
    """
    cursor.execute(f"CREATE TEMPORARY VIEW {RUN_ROWS} AS SELECT sink.* FROM {quoted_table(table)} sink WHERE {predicate(ranges)}")  # noqa: S608 - numbers and quoted names
    _set_read_only(cursor)


def copy_loaded(cursor: Cursor, tables: Sequence[str]) -> None:
    """Creates `RUN_ROWS` for a drain: the rows of the records in ``tidemark_run_loaded``, as a temporary table. With several tables, it has
    only their lineage.

    These rows are scattered among the rows of other runs, so a condition that lists them all could be megabytes long. Each is looked up in
    the lineage index, however many the planner expects.
    """
    for method in ("hashjoin", "mergejoin"):
        cursor.execute(f"SET LOCAL enable_{method} = off")
    statement = (
        f"CREATE TEMPORARY TABLE {RUN_ROWS} ON COMMIT DROP AS SELECT sink.* FROM tidemark_run_loaded record"  # noqa: S608 - quoted names
        " JOIN {table} sink ON sink.kafka_topic_id = record.topic_id AND sink.kafka_partition = record.partition"
        " AND sink.kafka_offset = record.record_offset"
    )
    cursor.execute(on_tables(statement, tables), {})
    for method in ("hashjoin", "mergejoin"):
        cursor.execute(f"SET LOCAL enable_{method} TO DEFAULT")
    _set_read_only(cursor)


def _set_read_only(cursor: Cursor) -> None:
    cursor.execute("SET LOCAL enable_nestloop = off")
    cursor.execute("SET LOCAL jit = off")
    cursor.execute("SET TRANSACTION READ ONLY")


def evaluate(connection: Connection, suite: Suite, ranges: Mapping[Partition, list[Range]]) -> list[Evaluated]:
    """Returns the results of a suite over `RUN_ROWS`, in the order of the suite.

    The session must be in autocommit mode, with a transaction begun by a statement. Then SQLAlchemy's commits and rollbacks do not end it,
    and all reads use the caller's snapshot. One thread at a time: Great Expectations keeps its project in a global.
    Raises `ExpectationError` if any expectation could not be evaluated, and `DatabaseUnavailable` if an outage was the reason.
    """
    if not suite.expectations:
        return []
    outages: dict[str, psycopg2.Error] = {}
    try:
        return _evaluate(connection, suite, ranges, outages)
    except ExpectationError as error:
        for problem in error.problems:
            if outage := outages.get(problem.cause):
                raise unavailable(outage) from error
        raise


def _evaluate(
    connection: Connection, suite: Suite, ranges: Mapping[Partition, list[Range]], outages: dict[str, psycopg2.Error]
) -> list[Evaluated]:
    """Collects the outages that Great Expectations caught, by the text that it keeps of them."""
    zoned = _zoned_columns(connection)
    expectations = tuple(_in_utc(expectation, zoned) for expectation in suite.expectations)
    batch = _batch(connection, outages)
    results, unevaluated = _count_failures(batch, expectations)
    if unevaluated:
        raise ExpectationError(suite=str(suite.path), problems=unevaluated)
    evaluated = []
    for expectation in expectations:
        result = results[expectation.number]
        failing_rows: list[Row] = []
        observed = dict(result.result)
        note, success = None, bool(result.success)
        if not success and _has_no_values(connection, expectation, observed):
            note, success = "there are no values to judge", True
        elif not success:
            failing_rows, examples, note = _failing_rows(batch, suite, expectation, ranges)
            if examples:
                observed["examples"] = examples
        evaluated.append(Evaluated(_result(expectation, success, observed, len(failing_rows), note), failing_rows))
    return evaluated


def _zoned_columns(connection: Connection) -> set[str]:
    """Returns the timestamptz columns of `RUN_ROWS`."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT attname FROM pg_attribute WHERE attrelid = %s::regclass AND attnum > 0 AND atttypid = 'timestamptz'::regtype",
            (RUN_ROWS,),
        )
        return {name for (name,) in cursor.fetchall()}


_WITHOUT_ZONE = re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d(?::\d\d(?:\.\d+)?)?")


def _in_utc(expectation: Expectation, zoned: set[str]) -> Expectation:
    """Adds UTC to times without a zone that a timestamptz column is compared with: Python cannot compare times with and without a zone."""

    def utc(value: Any) -> Any:
        if isinstance(value, str) and _WITHOUT_ZONE.fullmatch(value):
            return f"{value}+00:00"
        return [utc(item) for item in value] if isinstance(value, list) else value

    if expectation.kwargs.get("column") not in zoned:
        return expectation
    compared = ("min_value", "max_value", "value_set")
    return replace(expectation, kwargs={name: utc(value) if name in compared else value for name, value in expectation.kwargs.items()})


def _has_no_values(connection: Connection, expectation: Expectation, observed: Mapping[str, Any]) -> bool:
    """Whether a statistic of a column fails only for lack of values: the run's records were skipped or failed, or the column is null in all
    of its rows."""
    from great_expectations.expectations.expectation import ColumnAggregateExpectation
    from great_expectations.expectations.registry import get_expectation_impl

    if not issubclass(get_expectation_impl(expectation.type), ColumnAggregateExpectation):
        return False
    if expectation.type.endswith("_to_be_between") and observed.get("observed_value", 0) is None:
        return True
    condition = "" if expectation.type == NON_NULL else f" WHERE {quoted(expectation.kwargs['column'])} IS NOT NULL"
    with connection.cursor() as cursor:
        cursor.execute(f"SELECT NOT EXISTS (SELECT FROM {RUN_ROWS}{condition})")  # noqa: S608 - a quoted name
        row = cursor.fetchone()
    return row is not None and bool(row[0])


def _batch(connection: Connection, outages: dict[str, psycopg2.Error]) -> Any:
    gx = great_expectations()
    from great_expectations.data_context.types.base import ProgressBarsConfig
    from sqlalchemy.pool import StaticPool

    class OurSession(StaticPool):
        """Great Expectations disposes of its engine when it is garbage-collected, which may be while the next suite uses the session."""

        def dispose(self) -> None: ...

    context = gx.get_context(mode="ephemeral", cloud_mode=False)
    context.variables.progress_bars = ProgressBarsConfig(globally=False)
    source = context.data_sources.add_postgres(
        "sink",
        connection_string="postgresql+psycopg2://sink@sink/sink",  # never opened: the creator returns our own session
        create_temp_table=False,
        kwargs={"creator": lambda: connection, "poolclass": OurSession, "use_native_hstore": False},
    )
    batch = source.add_table_asset(RUN_ROWS, table_name=RUN_ROWS).add_batch_definition_whole_table(RUN_ROWS).get_batch()
    _keep_transaction(connection, batch.data.execution_engine.engine, outages)
    return batch


def _keep_transaction(connection: Connection, engine: Any, outages: dict[str, psycopg2.Error]) -> None:
    """Rolls back to a savepoint after each failed statement, so that the transaction can continue. Adds outages to ``outages``.

    Great Expectations tries a failing metric three times and reports the last message. Without the savepoint, that would be "current
    transaction is aborted", and valid expectations would fail with it too.
    """
    from sqlalchemy import event

    with connection.cursor() as cursor:
        cursor.execute("SAVEPOINT all_is_well")

    def roll_back(context: Any) -> None:
        error = context.original_exception
        if isinstance(error, psycopg2.Error) and error.pgcode != READ_ONLY and is_outage(error):  # the suite may not write
            outages[_first_line(str(error))] = error
        if not connection.closed:
            with connection.cursor() as cursor:
                cursor.execute("ROLLBACK TO SAVEPOINT all_is_well")

    event.listen(engine, "handle_error", roll_back)


def _count_failures(batch: Any, expectations: tuple[Expectation, ...]) -> tuple[dict[int, Any], list[Unevaluated]]:
    """Returns Great Expectations' results by number, and the expectations without one. Only counts: fetches no failing values.

    Quantiles are evaluated one at a time: in Great Expectations, two such expectations on one column share a metric, so the second would
    be judged by the quantiles of the first.
    """
    gx = great_expectations()
    types = {expectation.number: expectation.type for expectation in expectations}
    quantiles = [[expectation] for expectation in expectations if expectation.type == QUANTILES]
    results = {}
    unevaluated = []
    for group in ([expectation for expectation in expectations if expectation.type != QUANTILES], *quantiles):
        suite = gx.ExpectationSuite("run", expectations=[_counting(expectation) for expectation in group])
        for result in batch.validate(suite, result_format={"result_format": "BASIC", "partial_unexpected_count": 0}).results:
            number = result.expectation_config.meta["number"]
            cause = _exception(result.exception_info)
            if cause is not None:
                unevaluated.append(Unevaluated(number, types[number], cause))
            results[number] = result
    return results, sorted(unevaluated, key=lambda item: item.number)


def _counting(expectation: Expectation) -> Any:
    """Returns the expectation; for an SQL query, without the metric that fetches all rows of the query to the client."""
    built = configuration(expectation).to_domain_obj()
    if expectation.type != UNEXPECTED_ROWS:
        return built
    return _count_unexpected_rows()(**expectation.kwargs, severity=built.severity, meta=built.meta)


@functools.cache
def _count_unexpected_rows() -> Any:
    from great_expectations.expectations.core.unexpected_rows_expectation import UnexpectedRowsExpectation

    class CountUnexpectedRows(UnexpectedRowsExpectation):
        metric_dependencies = ("unexpected_rows_query.row_count",)

        def _validate(self, metrics: Any, runtime_configuration: Any = None, execution_engine: Any = None) -> Any:
            count = metrics["unexpected_rows_query.row_count"]
            return {"success": count == 0, "result": {"observed_value": count}}

    return CountUnexpectedRows


def _failing_rows(
    batch: Any, suite: Suite, expectation: Expectation, ranges: Mapping[Partition, list[Range]]
) -> tuple[list[Row], list[Any], str | None]:
    """Returns the lineage of the failing rows, example values, and the reason if there is no lineage. Runs a statement of its own."""
    from great_expectations.validator.metric_configuration import MetricConfiguration
    from great_expectations.validator.metrics_calculator import MetricsCalculator

    engine = batch.data.execution_engine
    built = configuration(expectation).to_domain_obj()
    query = _query_for_rows(expectation)
    if query is not None:
        metric = MetricConfiguration("query.table", {}, {"query": query, "fetch_all": True})
    elif getattr(built, "map_metric", None) in {None, COMPOUND_METRIC}:
        return [], [], None
    else:
        result_format = {"result_format": "COMPLETE", "unexpected_index_column_names": list(_KEY), "partial_unexpected_count": MAX_ROWS}
        dependencies = built.get_validation_dependencies(engine, {"result_format": result_format})
        metric = dependencies.get_metric_configuration(f"{built.map_metric}.unexpected_index_list")
        if metric is None:
            return [], [], "Great Expectations does not list failing rows for this type"
    calculator = MetricsCalculator(engine, show_progress_bars=False)
    resolved, aborted = calculator.resolve_validation_graph(calculator.build_metric_dependency_graph([metric]))
    if metric.id not in resolved:
        messages = [_exception(entry["exception_info"]) for entry in aborted.values()]
        cause = next((message for message in messages if message), "Great Expectations gives no reason")
        if expectation.type == UNEXPECTED_ROWS:  # the count worked, so only the columns are missing
            return [], [], f"the query does not select {', '.join(_KEY)}: {cause}"
        raise ExpectationError(suite=str(suite.path), problems=[Unevaluated(expectation.number, expectation.type, cause)])
    unexpected = resolved[metric.id] or []
    keyed = [(tuple(int(row[name]) for name in _KEY), row) for row in unexpected]
    rows: list[Row] = [key for key, _ in keyed if covers(ranges, key[0], key[1], key[2])]  # type: ignore[misc]
    examples = [{name: _plain(value) for name, value in row.items()} for _, row in keyed[:EXAMPLES]]
    return sorted(rows), examples, None


def _query_for_rows(expectation: Expectation) -> str | None:
    """Returns SQL for the lineage of the failing rows, containing ``{batch}``, where Great Expectations has no bounded query.

    These are SQL expectations, and compound uniqueness, for which it only has a cartesian product.
    """
    if expectation.type == UNEXPECTED_ROWS:
        rows = expectation.kwargs["unexpected_rows_query"].rstrip("; \t\r\n\v\f")
    elif expectation.type == COMPOUND_UNIQUE and not expectation.kwargs.get("row_condition"):
        columns = [quoted(name).replace("{", "{{").replace("}", "}}").replace(":", "\\:") for name in expectation.kwargs["column_list"]]
        rows = (
            f"SELECT {', '.join(_KEY)} FROM (SELECT {', '.join(_KEY)}, count(*) OVER (PARTITION BY {', '.join(columns)}) AS alike"  # noqa: S608 - quoted names
            f" FROM {{batch}} WHERE {' AND '.join(f'{name} IS NOT NULL' for name in columns)}) AS counted WHERE alike > 1"
        )
    else:
        return None
    keys = ", ".join(f"{name}::{kind}" for name, kind in LINEAGE).replace(":", "\\:")
    present = " AND ".join(f"{name} IS NOT NULL" for name in _KEY)
    return f"SELECT {keys} FROM (\n{rows}\n) AS unexpected WHERE {present} LIMIT {MAX_ROWS}"  # noqa: S608 - the suite's own SQL, in a read-only transaction


def _result(expectation: Expectation, success: bool, observed: dict[str, Any], stored: int, note: str | None) -> ExpectationResult:
    observed.pop("partial_unexpected_list", None)
    is_query = expectation.type == UNEXPECTED_ROWS
    failing = observed.get("observed_value") if is_query else observed.get("unexpected_count")
    failing = int(failing) if isinstance(failing, int | float) else None
    detail = {"kwargs": expectation.kwargs, "observed": observed, "rows_stored": stored}
    if failing is not None and failing > stored:
        detail["rows_not_stored"] = failing - stored
    if note:
        detail["note"] = note
    if failing is not None:
        of = f"{failing:,} of " if "element_count" in observed else ""
        outcome = of + counted(observed.get("element_count", failing), "row fails", "rows fail")
    elif isinstance(observed.get("observed_value"), int | float):  # anything else may quote rows, and this text is logged
        outcome = f"observed {_plain(observed['observed_value'])}"
    else:
        outcome = "holds" if success else "does not hold"
    arguments = ", ".join(f"{name}={value!r}" for name, value in expectation.kwargs.items() if value is not None)
    text = " ".join(f"{expectation.type}({arguments}): {outcome}".split())
    return ExpectationResult(expectation.number, expectation.type, expectation.severity, success, text, failing, _plain(detail))


def _exception(info: Mapping[str, Any] | None) -> str | None:
    """Returns the exception message in a result's ``exception_info``, which holds one entry, or one per metric; `None` without one."""
    if not info:
        return None
    entries = [info] if "raised_exception" in info else [entry for entry in info.values() if isinstance(entry, Mapping)]
    messages = [_first_line(str(entry.get("exception_message"))) for entry in entries if entry.get("raised_exception")]
    return next(iter(messages), None)


def _first_line(message: str) -> str:
    """Returns Postgres' message, without the statement that Great Expectations adds. Tidemark's session has removed all values from it."""
    lines = message.split("[SQL:")[0].strip().splitlines() or [message]
    return re.sub(r"^\(psycopg2\.errors\.\w+\) ", "", lines[0])


def _plain(value: Any) -> Any:
    """Converts a value for jsonb: no NaN, no NUL, JSON types only."""
    if isinstance(value, Mapping):
        return {_plain(str(name)): _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in value]
    if isinstance(value, bool | int | None):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    return str(value).replace("\0", "\ufffd")

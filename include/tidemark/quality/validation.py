"""Judges the rows of a run and stores the verdict."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tidemark.db import FIX_PATH, outages, rows, scalar, session, statements, transaction
from tidemark.errors import BadInput, DatabaseUnavailable
from tidemark.offsets.store import require_group
from tidemark.quality.conservation import Violation, check_conservation, read_violations
from tidemark.quality.expectations import Evaluated, ExpectationError, copy_loaded, evaluate, expose
from tidemark.quality.merged_ranges import MOST_RANGES, by_name, merge_ranges
from tidemark.quality.suite import Suite, load_suite
from tidemark.quality.verdict import ExpectationResult, Severity, ValidatedRun, ValidationReport, outcome
from tidemark.records.outcome import RecordCounts
from tidemark.sink.table import LINEAGE, read_columns
from tidemark.text.wording import counted

if TYPE_CHECKING:
    from tidemark.db import Connection, Cursor, DatabaseUrl

SQL = statements("tidemark.quality", "store.sql")
CONSERVATION = "conservation"
MAX_VIOLATIONS = 100
"""Maximum violations stored with the result. All are counted."""
logger = logging.getLogger(__name__)


def validate(
    connection_url: DatabaseUrl, run: ValidatedRun, *, group: str, suites: Mapping[str, Path | None], upsert: bool = False
) -> ValidationReport:
    """Judges the rows that a run committed, stores the verdict, and returns it. ``suites``: the consumer's tables (``schema.table``), each
    with its suite file, if it has one.

    These are the rows of the run's batches in the ledger, without batches that a rewind has removed; for a drain, the rows of the records
    that it loaded, wherever they were first read. The verdict covers the conservation check of all tables together (result number 0,
    critical) and the expectations of each table's suite. ``upsert``: a later record may have replaced a row.

    ① Everything is read in one read-only snapshot. ② One transaction stores the verdict with its results and failing rows, assigns it to
    the run's batches, and moves the validated offset of their partitions up to the first batch without a verdict or with a critical one.
    Validating a run again (a retried task, repaired rows) replaces its verdict in the same way. Validation never moves a validated offset
    down: a critical verdict on rows that readers have already seen leaves it where it is; a rewind moves it back.

    A drain moves no validated offset. Its rows lie among rows that were judged long ago, so readers of the view see them at once. The
    verdict on a drain that loaded nothing has no ranges and covers only its ledger.

    A run that committed nothing passes: the verdict has no ranges and no ``validation_id``, and nothing is stored. Nothing is stored either
    if this raises `BadSuite` (the suite file is unusable), `ExpectationError` (an expectation could not be evaluated, which says nothing
    about the data), `BadInput` (the group or table does not exist) or `DatabaseUnavailable`.

    Reads the suite, and imports Great Expectations, only if the run committed something: that takes seconds once per process. Run one
    validation at a time in a process. The only locks it waits for, briefly, are those of ②.
    """
    started = time.monotonic()
    with session(connection_url, application="tidemark validate") as connection:
        try:
            with transaction(connection) as cursor:
                committed = _batches(cursor, require_group(cursor, group), run)
            if not committed:
                return _empty_report(group, run)
            loaded = {table: None if suite is None else load_suite(suite) for table, suite in suites.items()}
            return _validate(connection, run, group, loaded, upsert, started)
        except ExpectationError as error:
            if connection.closed:  # the expectation is not at fault
                raise DatabaseUnavailable(cause=str(error).strip()) from error
            raise


@dataclass(frozen=True, slots=True)
class Unjudged:
    """A run with commits without a verdict. ``running``: its attempt that has not ended and may commit more."""

    run: ValidatedRun
    running: int | None


def unjudged(connection: Connection, group: str, *, critical: bool = False) -> list[Unjudged]:
    """Returns the runs of a group with commits without a verdict, oldest first; with ``critical``, also runs with a critical verdict.

    A critical verdict does not count if a rewind has taken out some of its rows: the remaining rows may be good.

    Raises `BadInput` for a group that never ran.
    """
    with transaction(connection) as cursor:
        cursor.execute(SQL["unjudged_runs"], {"group_id": require_group(cursor, group), "critical": critical})
        return [Unjudged(ValidatedRun(row["dag_id"], row["run_id"], row["attempt_id"]), row["running"]) for row in rows(cursor)]


def validate_with_earlier(
    connection_url: DatabaseUrl, run: ValidatedRun, *, group: str, suites: Mapping[str, Path | None], upsert: bool = False
) -> tuple[ValidationReport, list[ValidationReport]]:
    """`validate`s a DAG run, after all other runs of the group with commits without a verdict, however they ended. Returns its report, and
    theirs, oldest first.

    First ends an attempt of the run that is still running (its task was marked as success), so that it can commit no more. Leaves other
    runs with running attempts to their own validation.
    """
    with session(connection_url, application="tidemark validate") as connection:
        with transaction(connection) as cursor:
            fence = {"group_id": require_group(cursor, group), "dag_id": run.dag_id, "run_id": run.run_id}
            cursor.execute(SQL["fence_run"], fence)
            ended = [attempt_id for (attempt_id,) in cursor.fetchall()]
        waiting = [other for other in unjudged(connection, group) if other.run != run]
    if ended:
        logger.warning("ended attempts that were still running group=%s attempts=%s", group, ended)
    for other in waiting:
        if other.running is not None:
            logger.info("not judged: the run has not ended group=%s run=%s attempt=%s", group, other.run, other.running)
    ended_runs = [other.run for other in waiting if other.running is None]
    earlier = [validate(connection_url, other, group=group, suites=suites, upsert=upsert) for other in ended_runs]
    return validate(connection_url, run, group=group, suites=suites, upsert=upsert), earlier


def _validate(
    connection: Connection, run: ValidatedRun, group: str, suites: Mapping[str, Suite | None], upsert: bool, started: float
) -> ValidationReport:
    # ① one snapshot
    judged: list[Evaluated] = []
    tables = list(suites)
    with _snapshot(connection) as cursor:
        group_id = require_group(cursor, group)
        batches = _batches(cursor, group_id, run)
        if not batches:  # a rewind has just removed them
            return _empty_report(group, run)
        for table in tables:
            _require_sink(cursor, table)
        batch_ids = [int(batch["batch_id"]) for batch in batches]
        violations = check_conservation(cursor, group, tables, batch_ids=batch_ids, upsert=upsert)
        drained = batches[0]["drained"]  # all or none of them: no attempt does both
        slices = loaded_by(cursor, group_id, batch_ids) if drained else batches
        ranges = merge_ranges((part["topic_id"], part["partition"], part["start_offset"], part["end_offset"]) for part in slices)
        if drained and ranges:
            with _rolled_back(cursor):
                copy_loaded(cursor, tables)
                cursor.execute(SQL["loaded_violations"], {"upsert": upsert})
                violations += read_violations(cursor)
        for table, suite in suites.items():
            if suite is not None and ranges:
                with _rolled_back(cursor):
                    if drained:
                        copy_loaded(cursor, [table])
                    else:
                        expose(cursor, table, ranges)
                    evaluated = evaluate(connection, suite, ranges)
                judged += [_renumbered(item, len(judged), table if len(tables) > 1 else None) for item in evaluated]
    counts = counts_of(batches)
    results = (_conservation_result(violations, len(batches), counts), *(item.result for item in judged))
    topics = {part["topic_id"]: part["topic"] for part in slices}
    verdict = ValidationReport(
        verdict=outcome(results),
        group=group,
        suite=", ".join(suite.name for suite in suites.values() if suite is not None) or None,
        ranges=by_name({(topics[topic_id], partition): spans for (topic_id, partition), spans in ranges.items()}),
        counts=counts,
        results=results,
        seconds=time.monotonic() - started,
    )
    # ② one transaction
    with transaction(connection) as cursor:
        verdict = _store(cursor, group_id, run, verdict, judged, batch_ids)
    logger.info(
        "validated group=%s run=%s validation=%s verdict=%s failed=%s rows=%s%s",
        group, run, verdict.validation_id, verdict.verdict, sum(not result.success for result in results), verdict.counts.sink_rows,
        f" deleted={verdict.counts.deleted}" if verdict.counts.deleted else "",
    )  # fmt: skip
    return verdict


def _empty_report(group: str, run: ValidatedRun) -> ValidationReport:
    logger.info("nothing to validate group=%s run=%s", group, run)
    return ValidationReport(outcome(()), group, None)


@contextmanager
def _snapshot(connection: Connection) -> Iterator[Cursor]:
    """One REPEATABLE READ transaction, rolled back at the end. Raises `DatabaseUnavailable`, as `transaction` does.

    A statement begins it while psycopg2 is in autocommit mode. Then the ``commit`` and ``rollback`` that SQLAlchemy calls after every query
    do nothing, and the snapshot survives them.
    """
    connection.autocommit = True
    try:
        with outages(), connection.cursor() as cursor:
            cursor.execute(f"BEGIN ISOLATION LEVEL REPEATABLE READ; {FIX_PATH}")
            try:
                yield cursor
            finally:
                if not connection.closed:
                    cursor.execute("ROLLBACK")
    finally:
        if not connection.closed:
            connection.autocommit = False


@contextmanager
def _rolled_back(cursor: Cursor) -> Iterator[None]:
    """Rolls back the relations and settings of the block at its end, because the next table uses the same names."""
    cursor.execute("SAVEPOINT tidemark_table")
    yield
    cursor.execute("ROLLBACK TO SAVEPOINT tidemark_table")


def _renumbered(item: Evaluated, offset: int, table: str | None) -> Evaluated:
    """Returns the result with its number among all tables, and with the table's name, if there are several."""
    result = replace(item.result, number=item.result.number + offset)
    return replace(item, result=result if table is None else replace(result, text=f"{table}: {result.text}"))


def _batches(cursor: Cursor, group_id: int, run: ValidatedRun) -> list[dict[str, Any]]:
    parameters = {"group_id": group_id, "attempt_id": run.attempt_id, "dag_id": run.dag_id, "run_id": run.run_id}
    cursor.execute(SQL["run_batches"], parameters)
    return rows(cursor)


def loaded_by(cursor: Cursor, group_id: int, batch_ids: Sequence[int]) -> list[dict[str, Any]]:
    """Returns the offset ranges at which the records loaded by these drained batches were first read. Creates ``tidemark_run_loaded``."""
    cursor.execute(SQL["expose_loaded"], {"group_id": group_id, "batch_ids": list(batch_ids)})
    cursor.execute(SQL["loaded_ranges"], {"most": MOST_RANGES})
    return rows(cursor)


def _require_sink(cursor: Cursor, table: str) -> None:
    columns = {column.name for column in read_columns(cursor, table)}
    if not columns:
        raise BadInput(what="sink table", found=f"{table} does not exist", fix="Name the table that the consumer writes, as schema.table.")
    missing = [name for name, _ in LINEAGE if name not in columns]
    if missing:
        raise BadInput(what=f"sink table {table}", found=f"it lacks {', '.join(missing)}", fix="Compare it with: tidemark sink ddl NAME")


def counts_of(batches: Sequence[dict[str, Any]]) -> RecordCounts:
    """Returns the sums over these rows of the ledger."""
    return RecordCounts(**{count.name: sum(int(batch[count.name]) for batch in batches) for count in fields(RecordCounts)})


def _conservation_result(violations: Sequence[Violation], batches: int, counts: RecordCounts) -> ExpectationResult:
    if violations:
        more = f" (and {len(violations) - 1} more)" if len(violations) > 1 else ""
        text = f"{CONSERVATION}: {violations[0]}{more}"
    else:
        text = f"{CONSERVATION}: every record of {counted(batches, 'batch', 'batches')} is accounted for"
    first_violations = [asdict(item) for item in violations[:MAX_VIOLATIONS]]
    detail = {"batches": batches, "deleted": counts.deleted, "violations": len(violations), "first_violations": first_violations}
    return ExpectationResult(0, CONSERVATION, Severity.CRITICAL, not violations, text, None, detail)


def _store(
    cursor: Cursor, group_id: int, run: ValidatedRun, verdict: ValidationReport, judged: Sequence[Evaluated], batch_ids: Sequence[int]
) -> ValidationReport:
    """Stores a verdict, assigns it to the batches and advances the validated offsets. Does not commit.

    Locks the positions last, because consumers wait to move them.
    """
    cursor.execute(
        SQL["add_validation"],
        {
            "group_id": group_id, "dag_id": run.dag_id, "run_id": run.run_id, "suite": verdict.suite, "verdict": verdict.verdict.value,
            "sink_rows": verdict.counts.sink_rows, "seconds": verdict.seconds, "ranges": json.dumps(dict(verdict.ranges)),
        },
    )  # fmt: skip
    validation_id = int(scalar(cursor))
    for result in verdict.results:
        cursor.execute(
            SQL["add_result"],
            {
                "validation_id": validation_id, "number": result.number, "expectation": result.expectation,
                "severity": result.severity.value, "success": result.success,
                "detail": json.dumps({"text": result.text, **result.detail}, allow_nan=False),
            },
        )  # fmt: skip
    for item in judged:
        if item.rows:
            topic_ids, partitions, offsets, seqs = (list(column) for column in zip(*item.rows, strict=True))
            cursor.execute(
                SQL["add_rows"],
                {
                    "validation_id": validation_id, "number": item.result.number,
                    "topic_ids": topic_ids, "partitions": partitions, "offsets": offsets, "seqs": seqs,
                },
            )  # fmt: skip
    key = {"group_id": group_id, "validation_id": validation_id, "batch_ids": list(batch_ids)}
    for name in ("lock_partitions", "mark_batches", "advance_validated"):
        cursor.execute(SQL[name], key)
    return replace(verdict, validation_id=validation_id)

"""Transforms that combine rows of several slices: the tasks stage the batch, and the driver commits it as a whole."""

from __future__ import annotations

import json
from typing import Any

import psycopg2
import pytest
from tests.integration.sink.conftest import AtStep
from tests.support.ledger import never
from tests.support.scenario import Scenario
from tests.support.shell import tidemark
from tests.support.shop import Shop
from tests.support.spark_here import run_here

from tidemark.consume import run
from tidemark.db import session, transaction
from tidemark.driver import launch
from tidemark.erase import erasure
from tidemark.kafka.cluster import Cluster
from tidemark.offsets.store import OffsetFenced, TaskIdentity
from tidemark.quality import ValidatedRun, Verdict, Violation, check_conservation, validate
from tidemark.records.outcome import BadOutput
from tidemark.sink.load import SinkRejected, TooManyRejected
from tidemark.sink.staged import StagedRowsGone
from tidemark.sink.steps import Step

LINEAGE = "'kafka_topic', 'kafka_partition', 'kafka_offset'"
TRANSFORM = """
    from pyspark.sql import DataFrame, Window
    from pyspark.sql import functions as F


    def transform(records: DataFrame) -> DataFrame:
        order = records.select({lineage}, F.from_json(F.col("value").cast("string"), "city string, people bigint").alias("it"))
        order = order.select({lineage}, "it.*")
        return {result}
"""
COUNTS = "order.groupBy('city').agg(F.sum('people').alias('people'))"
LATEST = (
    "order.withColumn('rank', F.row_number().over(Window.partitionBy('city').orderBy(F.desc('people'))))"
    ".withColumn('disposition', F.expr(\"CASE WHEN people < 0 THEN 'fail' WHEN rank > 1 THEN 'skip' ELSE 'load' END\"))"
    ".withColumn('error', F.expr(\"CASE WHEN people < 0 THEN 'ValueError: less than nobody' END\")).drop('rank')"
)
SHUFFLED = "order.repartition(3)"
TABLE = "city text, people bigint"


pytestmark = pytest.mark.usefixtures("session_here")


class Staged:
    """A consumer of the Spark form whose plan shuffles."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.topic = scenario.topics.create(2)

    def write(self, result: str, columns: str = TABLE, **keys: Any) -> Staged:
        source = TRANSFORM.format(lineage=LINEAGE, result=result)
        self.scenario.write(source, topics=self.topic, **keys).make_sink(columns)
        return self

    def produce(self, *rows: tuple[str, int], partition: int = 0) -> None:
        values = [json.dumps({"city": city, "people": people}) for city, people in rows]
        self.scenario.topics.produce(self.topic, values, partition=partition)

    def run(self, **task: Any) -> launch.Progress:
        """One run with Spark in this process. Raises the error that made it fail."""
        return run_here(self.scenario, task=TaskIdentity(**task))

    def rows(self, columns: str = "city, people") -> list[tuple[Any, ...]]:
        return self.scenario.sql(f"SELECT {columns} FROM {self.scenario.table} ORDER BY 1, 2")

    def violations(self) -> list[Violation]:
        """Where ledger and tables disagree. `Scenario.check` does not work here, because it identifies rows by their records."""
        spec = self.scenario.spec
        with session(self.scenario.database_url) as connection, transaction(connection) as cur:
            return check_conservation(cur, spec.group, spec.table_names, upsert=spec.upserts)

    def staging(self) -> list[tuple[Any, ...]]:
        return self.scenario.sql("SELECT relname FROM pg_class WHERE relname LIKE 'staged%'")


@pytest.fixture
def staged(scenario: Scenario) -> Staged:
    return Staged(scenario)


# ---- rows with the lineage of their records


def test_shuffled_rows_keep_the_lineage_of_their_records(staged: Staged) -> None:
    """Loaded, skipped and failed records of each slice add up, as with a direct commit. A second run commits another batch."""
    staged.write(LATEST, batch={"max_records": 6})
    staged.produce(("ulm", 1), ("bonn", 2), ("ulm", 3), ("rom", -1))
    staged.produce(("bonn", 9), ("york", 4), partition=1)
    result = staged.run()
    assert result.state == "COMMITTED"
    assert staged.rows("city, people, kafka_partition, kafka_offset, kafka_seq") == [
        ("bonn", 9, 1, 0, 0), ("ulm", 3, 0, 2, 0), ("york", 4, 1, 1, 0),
    ]  # fmt: skip
    assert staged.scenario.failed() == [(3, "fail", "ValueError", "less than nobody")]
    assert staged.scenario.counts() == {"loaded": 3, "skipped": 2, "failed": 1, "sink_rows": 3}
    assert staged.scenario.positions() == {(staged.topic, 0): 4, (staged.topic, 1): 2}
    staged.produce(("ulm", 7))
    staged.run()
    assert staged.rows()[-2:] == [("ulm", 7), ("york", 4)]
    assert staged.staging() == []
    staged.scenario.check()


@pytest.mark.thorough
def test_two_topics_are_joined_in_one_batch(scenario: Scenario) -> None:
    """Rows carry the lineage of one side; the other side's records are accounted for as filtered."""
    orders, cities = scenario.topics.create(2), scenario.topics.create()
    for partition in range(2):
        scenario.topics.produce(orders, [json.dumps({"city": city, "n": partition}) for city in ("ulm", "bonn")], partition=partition)
    scenario.topics.produce(cities, [json.dumps({"city": city, "country": "DE"}) for city in ("ulm", "bonn")])
    source = """
        from pyspark.sql import DataFrame
        from pyspark.sql import functions as F


        def transform(records: DataFrame) -> DataFrame:
            text = F.col("value").cast("string")
            order = records.where(f"topic = '{ORDERS}'").select("kafka_topic", "kafka_partition", "kafka_offset",
                F.get_json_object(text, "$.city").alias("city"))
            city = records.where(f"topic = '{CITIES}'").select(F.get_json_object(text, "$.city").alias("city"),
                F.get_json_object(text, "$.country").alias("country"))
            return order.join(city.hint("merge"), "city")
    """.replace("{ORDERS}", orders).replace("{CITIES}", cities)
    scenario.write(source, topics=[orders, cities]).make_sink("city text, country text")
    run_here(scenario)
    assert len(scenario.rows("city, country")) == 4
    assert set(scenario.rows("city, country")) == {("ulm", "DE"), ("bonn", "DE")}
    assert scenario.counts() == {"loaded": 4, "unaccounted": 2, "sink_rows": 4}
    scenario.check(filtered=2)


def test_tables_of_a_spark_transform_are_loaded_together(scenario: Scenario) -> None:
    """A record that one table refuses is loaded into none. `test_tables.py` has the rules, which are the same for each form."""
    shop = Shop(scenario, "spark")
    shop.produce({"id": 1, "lines": [3, 4]}, {"id": 2, "lines": [7, -1]}, {"id": 3, "word": "skip"}, {"id": 1, "line": 0, "word": "delete"})
    shop.run()
    assert shop.loaded() == {1: [4]}
    assert scenario.failed("record_offset, error_type") == [(1, "CheckViolation")]
    assert shop.violations() == []


def test_bad_rows_of_a_staged_batch_are_left_out(staged: Staged) -> None:
    """Rows that cannot be staged, or that the sink's constraints refuse, are found by bisection and become failed records."""
    staged.write(SHUFFLED, "city varchar(5) UNIQUE, people bigint CHECK (people > 0)")
    staged.produce(("ulm", 1), ("a\0b", 2), ("bonn", -3), ("london", 4), *((f"c{number}", 5) for number in range(40)))
    staged.produce(("york", 6), ("rom", 0), partition=1)
    staged.run()
    assert [row[0] for row in staged.rows() if not row[0].startswith("c")] == ["ulm", "york"]
    assert [row[0] for row in staged.rows()].count("c7") == 1
    assert staged.scenario.failed("partition, record_offset, error_type") == [
        (0, 1, "CharacterNotInRepertoire"), (0, 2, "CheckViolation"), (0, 3, "StringDataRightTruncation"), (1, 1, "CheckViolation"),
    ]  # fmt: skip
    assert staged.scenario.counts() == {"loaded": 42, "failed": 4, "sink_rows": 42}
    assert staged.staging() == []
    staged.scenario.check()


@pytest.mark.thorough
def test_staged_batch_that_is_bad_throughout_stops(staged: Staged) -> None:
    """The limit in the spec stops it. Nothing is stored and no staging table remains."""
    staged.write(SHUFFLED, "city text, people bigint CHECK (people > 100)", batch={"max_failed_records": 5})
    staged.produce(*((f"c{number}", 5) for number in range(40)))
    with pytest.raises(TooManyRejected, match="more than 5 records"):
        staged.run()
    assert staged.rows() == staged.scenario.failed() == staged.staging() == []
    assert staged.scenario.positions() == {(staged.topic, 0): 0, (staged.topic, 1): 0}


def test_rows_that_no_record_of_the_batch_explains_are_refused(staged: Staged) -> None:
    """`test_accounting.py` has more cases. In the second one, each row comes from one record, but the transform does not say from which."""
    staged.write(SHUFFLED)
    staged.produce(("ulm", 1))
    for result, problem in (
        ("order.withColumn('disposition', F.lit('load')).union(order.withColumn('disposition', F.lit('skip')))", "different dispositions"),
        ("order.select('city', 'people')", "return kafka_topic, kafka_partition, kafka_offset as they were given"),
    ):
        staged.scenario.transform(TRANSFORM.format(lineage=LINEAGE, result=result))
        with pytest.raises(BadOutput, match=problem):
            staged.run()
        assert staged.rows() == staged.staging() == []


def test_upsert_of_a_staged_batch(staged: Staged) -> None:
    """The last record of a key wins. If a key is in two partitions of one batch, no record is the last."""
    sink = {"table": staged.scenario.table, "mode": "upsert", "key": ["city"]}
    staged.write(SHUFFLED, "city text PRIMARY KEY, people bigint", sink=sink)
    staged.produce(("ulm", 1), ("ulm", 2), ("bonn", 3))
    staged.produce(("york", 4), partition=1)
    staged.run()
    assert staged.rows() == [("bonn", 3), ("ulm", 2), ("york", 4)]
    staged.produce(("ulm", 5))
    staged.produce(("ulm", 6), partition=1)
    with pytest.raises(SinkRejected, match=r"one key came from several partitions \(\S+/0 offset 3 and \S+/1 offset 1\)"):
        staged.run()
    assert staged.rows() == [("bonn", 3), ("ulm", 2), ("york", 4)]


# ---- rows that no single record explains


def erase(staged: Staged, where: str) -> erasure.Erasure:
    spec, person = staged.scenario.spec, erasure.Person(where=where)
    with session(staged.scenario.database_url, application="tidemark erase") as connection:
        cluster = Cluster(staged.scenario.connections.kafka)
        made = erasure.plan(connection, cluster, spec, person, never, reason="asked for by ulm", by="ann").erasure
        return erasure.apply(connection, lambda _: spec, made.erasure_id, person, never, by="ann")


def replay(staged: Staged) -> None:
    """Reads everything again from the start, with all records of a slice in one batch."""
    done = tidemark(staged.scenario, "rewind", "plan", staged.scenario.name, "--to-earliest", "--reason", "read it all again")
    assert done.returncode == 0, done.stderr
    number = str(staged.scenario.sql("SELECT max(rewind_id) FROM tidemark.rewind")[0][0])
    assert tidemark(staged.scenario, "rewind", "apply", number).returncode == 0
    staged.run()


@pytest.mark.thorough
def test_erased_records_are_skipped_in_a_staged_batch(staged: Staged) -> None:
    """This includes records that now fail. A replay produces the rows of aggregates again, and the plan says so."""
    staged.write(LATEST)
    staged.produce(("ulm", 1), ("bonn", 2), ("ulm", 3), ("rom", -1))
    staged.produce(("york", 4), partition=1)
    staged.run()
    assert erase(staged, "city IN ('ulm', 'york')").suppressed == 2
    staged.scenario.transform(TRANSFORM.format(lineage=LINEAGE, result=LATEST.replace("people < 0", "people < 0 OR city = 'york'")))
    replay(staged)
    assert staged.rows() == [("bonn", 2)]
    assert staged.scenario.failed("record_offset") == [(3,)]
    assert staged.violations() == []
    staged.scenario.transform(TRANSFORM.format(lineage=LINEAGE, result=COUNTS))
    replay(staged)
    assert ("ulm", 4) in staged.rows()
    done = erase(staged, "city = 'ulm'")
    assert (done.suppressed, done.not_suppressed) == (0, 1)
    replay(staged)
    assert ("ulm", 4) in staged.rows()
    assert staged.violations() == []


@pytest.mark.thorough
def test_erased_keys_are_dropped_from_a_staged_upsert(staged: Staged) -> None:
    """Older records of the key are dropped too; a later one is loaded."""
    staged.write(SHUFFLED, "city text PRIMARY KEY, people bigint", sink={"table": staged.scenario.table, "mode": "upsert", "key": ["city"]})
    staged.produce(("ulm", 1), ("bonn", 2))
    staged.run()
    staged.produce(("ulm", 3))
    staged.run()
    assert erase(staged, "people = 3").suppressed == 1
    replay(staged)
    assert staged.rows() == [("bonn", 2)]
    staged.produce(("ulm", 5))
    staged.run()
    assert staged.rows() == [("bonn", 2), ("ulm", 5)]
    assert staged.violations() == []


def test_aggregates_have_their_batch_as_lineage(staged: Staged) -> None:
    """Each batch adds rows, whose lineage is the start of its first slice. The ledger says which slices belong together. Validation takes
    ranges and counts from the ledger."""
    staged.write(COUNTS)
    staged.produce(("ulm", 1), ("bonn", 2), ("ulm", 3))
    staged.produce(("bonn", 9), partition=1)
    staged.run(dag_id="d", run_id="r", task_id="t", map_index=-1, try_number=1)
    spec = staged.scenario.spec
    verdict = validate(staged.scenario.database_url, ValidatedRun("d", "r"), group=spec.group, suites=dict.fromkeys(spec.table_names))
    assert (verdict.verdict, verdict.counts.sink_rows) == (Verdict.PASSED, 2)
    staged.produce(("ulm", 5), partition=1)
    staged.run()
    lineage = "city, people, kafka_partition, kafka_offset"
    assert staged.rows(lineage) == [("bonn", 11, 0, 0), ("ulm", 4, 0, 0), ("ulm", 5, 1, 1)]
    whole = "whole_batch_id = min(batch_id) OVER (PARTITION BY whole_batch_id)"
    ledger = f"SELECT partition, start_offset, end_offset, {whole}, sink_rows, unaccounted"
    assert staged.scenario.sql(f"{ledger} FROM tidemark.batch ORDER BY batch_id") == [
        (0, 0, 3, True, 2, 3), (1, 0, 1, True, 0, 1), (1, 1, 2, True, 1, 1),
    ]  # fmt: skip
    assert len(staged.scenario.sql("SELECT DISTINCT whole_batch_id FROM tidemark.batch")) == 2
    assert staged.violations() == []


@pytest.mark.thorough
def test_aggregates_can_be_upserted(staged: Staged) -> None:
    """The row of a key from a later batch replaces the earlier one, whatever partitions they come from."""
    sink = {"table": staged.scenario.table, "mode": "upsert", "key": ["city"]}
    staged.write(COUNTS, "city text PRIMARY KEY, people bigint", sink=sink)
    staged.produce(("ulm", 1), ("bonn", 2))
    staged.run()
    staged.produce(("ulm", 4), ("ulm", 5), partition=1)
    staged.run()
    assert staged.rows() == [("bonn", 2), ("ulm", 9)]
    assert staged.violations() == []


@pytest.mark.thorough
def test_a_refused_aggregate_refuses_its_batch(staged: Staged) -> None:
    """There is no single record that could be rejected instead."""
    staged.write(COUNTS, "city text, people bigint CHECK (people > 0)")
    staged.produce(("ulm", 1), ("bonn", -2))
    with pytest.raises(SinkRejected, match="CheckViolation"):
        staged.run()
    assert staged.rows() == staged.staging() == []


# ---- faults


def test_a_lost_answer_to_commit_is_found_out_from_the_ledger(staged: Staged, monkeypatch: pytest.MonkeyPatch) -> None:
    """The commit had succeeded, so nothing is done twice."""
    from tidemark.sink import commit

    staged.write(SHUFFLED)
    staged.produce(("ulm", 1), ("bonn", 2))
    really = commit.connect
    monkeypatch.setattr(commit, "connect", lambda *args, **kwargs: LosesAnswer(really(*args, **kwargs)))
    staged.run()
    assert staged.rows() == [("bonn", 2), ("ulm", 1)]
    staged.scenario.check()


class LosesAnswer:
    """A session whose COMMIT succeeds, but whose answer is lost."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)

    def commit(self) -> None:
        self._connection.commit()
        raise psycopg2.OperationalError("the connection was lost")


def test_a_newer_owner_of_one_partition_fences_the_whole_batch(staged: Staged, at_step: AtStep) -> None:
    """One failed compare-and-set rolls everything back."""
    staged.write(SHUFFLED)
    staged.produce(("ulm", 1))
    staged.produce(("york", 3), partition=1)
    newer = "owner_epoch = owner_epoch + 1, generation = generation + 1, owner = 'newer'"
    at_step(Step.BEGIN, lambda: staged.scenario.sql(f"UPDATE tidemark.partition_offset SET {newer} WHERE partition = 1") and None)
    with pytest.raises(OffsetFenced):
        staged.run()
    assert staged.rows() == staged.staging() == []
    assert staged.scenario.positions() == {(staged.topic, 0): 0, (staged.topic, 1): 0}


def test_rows_that_a_crash_of_postgres_took_from_the_staging_table_are_missed(staged: Staged, at_step: AtStep) -> None:
    """An unlogged table is empty after a crash. Offsets must not move past lost rows."""
    staged.write(SHUFFLED)
    staged.produce(("ulm", 1), ("bonn", 2))
    at_step(Step.BEGIN, lambda: staged.scenario.sql(f"TRUNCATE tidemark_staging.{staged.staging()[0][0]}") and None)
    with pytest.raises(StagedRowsGone, match="Of 2 rows that the tasks staged"):
        staged.run()
    assert staged.rows() == []
    staged.run()
    assert staged.rows() == [("bonn", 2), ("ulm", 1)]


def test_rows_of_a_try_that_nobody_heard_of_are_not_promoted(staged: Staged, at_step: AtStep) -> None:
    """A task whose worker died after staging is retried, so its rows are staged twice."""
    staged.write(SHUFFLED)
    staged.produce(("ulm", 1), ("bonn", 2))

    def stage_again() -> None:
        ((table,),) = staged.staging()
        staged.scenario.sql(f"CREATE TABLE lake.once AS SELECT * FROM tidemark_staging.{table}; UPDATE lake.once SET try_id = 1")
        staged.scenario.sql(f"INSERT INTO tidemark_staging.{table} SELECT * FROM lake.once")

    at_step(Step.BEGIN, stage_again)
    staged.run()
    assert staged.rows() == [("bonn", 2), ("ulm", 1)]
    staged.scenario.check()


@pytest.mark.thorough
def test_what_a_killed_driver_left_behind_is_dropped_by_the_next_batch(staged: Staged) -> None:
    """Only tables of attempts that have ended are dropped: a running attempt may still be staging. A stopped driver may hold its table, and
    the run does not wait for it."""
    staged.write(SHUFFLED)
    ended, running, held = (run.open_attempt(staged.scenario.database_url, staged.scenario.spec.group, TaskIdentity()) for _ in range(3))
    tables = [f"tidemark_staging.staged_{attempt}_1_0123abcd" for attempt in (ended, running, held)]
    for table in tables:
        staged.scenario.sql(f"CREATE UNLOGGED TABLE {table} (n int)")
    end = "UPDATE tidemark.attempt SET state = 'FAILED', error = '{}', ended_at = now() WHERE attempt_id <> %s"
    staged.scenario.sql(end, running)
    staged.produce(("ulm", 1))
    with session(staged.scenario.database_url) as connection, transaction(connection) as cur:
        cur.execute(f"INSERT INTO {tables[2]} VALUES (1)")
        staged.run()
    assert staged.rows() == [("ulm", 1)]
    assert {f"tidemark_staging.{name}" for (name,) in staged.staging()} == {*tables[1:]}

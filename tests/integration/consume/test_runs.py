"""Whole runs on real topics with real commits: everything except Spark, see tests/integration/spark/test_form.py."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from psycopg2.extensions import parse_dsn
from tests.support.records import numbers
from tests.support.scenario import Scenario
from tests.support.shell import tidemark
from tests.support.transforms import FORMS
from tests.support.waiting import until

from tidemark.connections import Connections
from tidemark.consume import claims
from tidemark.consume.renamed import LoadedByAnother
from tidemark.db import session, transaction
from tidemark.errors import BrokerUnavailable, DatabaseUnavailable
from tidemark.kafka import cluster
from tidemark.offsets import store
from tidemark.offsets.reset import OffsetOutOfRange
from tidemark.offsets.store import ClaimRefused, OffsetFenced, TaskIdentity
from tidemark.records.ranges import Slice
from tidemark.retry.messages import NAMES

TASK = TaskIdentity("consume__x", "scheduled__1", "consume", -1, 1)

# ---- successive runs


@FORMS
def test_first_run_loads_all_the_second_nothing_the_third_what_was_produced_in_between(scenario: Scenario, transform: str) -> None:
    """A run reads what is in the topics when it starts, and continues where the last one stopped."""
    topic = scenario.topics.create(2)
    scenario.topics.produce(topic, numbers(0, 70))
    scenario.topics.produce(topic, numbers(70, 100), partition=1)
    scenario.write(transform, topics=topic).make_sink()
    first = scenario.run()
    assert (first.state, first.records, first.total) == ("COMMITTED", 100, 100)
    assert [(part.partition, part.start, part.end, part.loaded) for part in first.partitions] == [(0, 0, 70, 70), (1, 0, 30, 30)]
    second = scenario.run()
    assert (second.state, second.planned, second.partitions) == ("COMMITTED", True, ())
    assert scenario.engine is None, "a run with nothing to read starts no engine"
    scenario.topics.produce(topic, numbers(100, 105), partition=1)
    third = scenario.run()
    assert [(part.partition, part.start, part.end) for part in third.partitions] == [(1, 30, 35)]
    assert scenario.rows() == [*numbers(0, 70), *numbers(70, 105)]
    scenario.check()


@FORMS
def test_run_larger_than_a_batch_commits_batch_after_batch(scenario: Scenario, transform: str) -> None:
    """No batch has more than ``batch.max_records`` offsets; together, the batches are the run."""
    topic = scenario.topics.create(3)
    for partition, count in enumerate((50, 7, 20)):
        scenario.topics.produce(topic, numbers(0, count), partition=partition)
    scenario.write(transform, topics=topic, batch={"max_records": 30}).make_sink()
    done = scenario.run()
    assert done.records == 77
    assert scenario.engine is not None
    assert all(sum(part.span for part in batch) <= 30 for batch in scenario.engine.batches)
    assert len(scenario.rows()) == 77
    scenario.check()


def test_records_produced_during_a_run_wait_for_the_next(scenario: Scenario) -> None:
    """A run ends at the end offsets that it saw when it started."""
    topic = scenario.feed(numbers(0, 10))
    done = scenario.run(before=lambda part: scenario.topics.produce(topic, numbers(10, 15)))
    assert done.records == 10
    assert scenario.run().records == 5
    assert scenario.rows() == numbers(0, 15)
    scenario.check()


def test_consumer_of_several_topics_keeps_them_apart(scenario: Scenario) -> None:
    """Each topic has a separate id in the lineage, so equal partitions and offsets do not clash."""
    one, two = scenario.topics.create(), scenario.topics.create(2)
    scenario.topics.produce(one, [b"a", b"b"])
    scenario.topics.produce(two, [b"c"])
    scenario.topics.produce(two, [b"d"], partition=1)
    scenario.write(topics=[two, one]).make_sink()
    scenario.run()
    assert sorted(scenario.rows("payload, kafka_partition, kafka_offset")) == [(b"a", 0, 0), (b"b", 0, 1), (b"c", 0, 0), (b"d", 1, 0)]
    assert len(set(scenario.rows("kafka_topic_id"))) == 2
    scenario.check()


def test_topic_pattern_reads_what_matches_whole_also_topics_that_come_later(scenario: Scenario) -> None:
    """A pattern is a regular expression that must match the whole name. Without a topic, a run has nothing to read. A topic that appears
    later is read from its first record."""
    prefix = scenario.topics.create()
    scenario.topics.produce(prefix, [b"not mine"])
    scenario.write(topic_pattern=rf"{prefix}\..+").make_sink()
    assert scenario.run().partitions == ()
    for name, expected in (("eu", [b"eu"]), ("us", [b"eu", b"us"])):
        topic = scenario.topics.create(name=f"{prefix}.{name}")
        scenario.topics.produce(topic, [name])
        scenario.run()
        assert scenario.rows() == expected
    scenario.check()


LOST = "SELECT topic.name, start_offset, end_offset, reason FROM tidemark.lost_range JOIN tidemark.topic USING (topic_id)"


def two_matching(scenario: Scenario) -> tuple[str, str]:
    """Two topics that a pattern matches. A run has read a record of each, and five more wait in the first one, as a sample knows."""
    prefix = scenario.topics.create()
    eu, us = (scenario.topics.create(name=f"{prefix}.{name}") for name in ("eu", "us"))
    scenario.write(topic_pattern=rf"{prefix}\..+").make_sink()
    for topic in (eu, us):
        scenario.topics.produce(topic, ["a"])
    scenario.run()
    scenario.topics.produce(eu, list("bcdef"))
    assert tidemark(scenario, "lag", scenario.name).returncode == 0
    return eu, us


def test_topic_of_a_pattern_that_is_gone_is_a_lost_range_and_the_others_are_read(scenario: Scenario) -> None:
    """Once a sample has missed it, and the next run finds neither. Until then its unread records stay in the lag."""
    eu, us = two_matching(scenario)
    scenario.topics.delete(eu)
    for records in (5, 5):
        (shown,) = json.loads(tidemark(scenario, "lag", scenario.name, "--output", "json").stdout)
        assert shown["lag"]["known_records"] == records
    scenario.topics.produce(us, ["b"])
    scenario.run()
    scenario.run()
    assert scenario.sql(LOST) == [(eu, 1, 6, "topic deleted")]
    assert sorted(scenario.rows()) == [b"a", b"a", b"b"]
    (shown,) = json.loads(tidemark(scenario, "lag", scenario.name, "--output", "json").stdout)
    assert (shown["lag"]["records"], shown["lag"]["partitions"], shown["lost_records"]) == (0, 1, 5)
    scenario.topics.create(name=eu)
    scenario.set(offset_reset="earliest")
    scenario.run()
    assert scenario.sql(LOST) == [(eu, 1, 6, "topic deleted")], "the topic that is there now is another one"


def test_cluster_in_which_none_of_the_topics_is_found_moves_nothing(scenario: Scenario) -> None:
    """It may be another one, or not whole yet."""
    eu, us = two_matching(scenario)
    for topic in (eu, us):
        scenario.topics.delete(topic)
    for _ in range(2):
        tidemark(scenario, "lag", scenario.name)
        scenario.run()
    assert scenario.sql(LOST) == []
    assert scenario.positions() == {(eu, 0): 1, (us, 0): 1}


def test_topic_of_a_pattern_that_is_deleted_while_it_is_read_does_not_end_the_run(
    scenario: Scenario, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next run stores what was not read of it."""
    eu, us = two_matching(scenario)
    scenario.topics.produce(us, ["b"])
    deleted = threading.Lock()

    def delete(part: Slice) -> None:
        if part.partition.topic == eu and deleted.acquire(blocking=False):
            scenario.topics.delete(eu)

    monkeypatch.setattr("tidemark.kafka.reader.SILENCE_S", 3)
    scenario.run(before=delete)
    assert sorted(scenario.rows()) == [b"a", b"a", b"b"]
    assert scenario.sql(LOST) == []
    scenario.run()
    assert scenario.sql(LOST) == [(eu, 1, 6, "topic deleted")]


def test_topic_pattern_leaves_out_retry_and_failed_topics_of_any_consumer(scenario: Scenario, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two consumers that read each other's would fail the same record again and again. By name, it is a retry topic of a consumer of the
    project; by the headers of its records, of any other. Other topics may have such names."""
    prefix = scenario.topics.create()
    names = (".retry.eu", ".failed", ".retry.5m", "-x.failed", "-y.retry.1m")
    made = {"": prefix} | {name: scenario.topics.create(name=f"{prefix}{name}") for name in names}
    for name in made.values():
        scenario.topics.produce(name, [name])
    scenario.topics.produce(made["-x.failed"], [b"again"], headers=[("own", b"1"), *((name, b"") for name in NAMES)])
    scenario.write(topic_pattern=rf"{prefix}.*").make_sink()
    other = {
        "group": f"{prefix}-y",
        "topics": ["other"],
        "format": {"value": "json"},
        "sink": {"table": "a.b"},
        "retry": {"delays": ["1m"]},
    }
    (scenario.folder / "consumers" / "other.yaml").write_text(json.dumps(other))
    monkeypatch.setenv("TIDEMARK_CONSUMERS", str(scenario.folder / "consumers"))
    scenario.run()
    read = {made[name].encode() for name in ("", ".retry.eu", ".failed", ".retry.5m")}
    assert {*scenario.rows()} == read
    shown = tidemark(scenario, "consumers", "check", scenario.name)
    assert f"not read, because they are retry or failed topics: {made['-x.failed']}, {made['-y.retry.1m']}" in " ".join(
        (shown.stdout + shown.stderr).split()
    )


def test_partitioned_sink_takes_each_kafka_partition_into_its_own_table(scenario: Scenario) -> None:
    """``sink ddl --partitions`` creates one table per Kafka partition, and one for partitions added later."""
    topic = scenario.topics.create(3)
    for partition in range(3):
        scenario.topics.produce(topic, numbers(0, 3), partition=partition)
    scenario.write(topics=topic)
    scenario.sql(tidemark(scenario, "sink", "ddl", scenario.name, "--partitions", "2").stdout)
    scenario.run()
    assert [scenario.sql(f"SELECT count(*) FROM {scenario.table}_{part}") for part in ("p0", "p1", "rest")] == [[(3,)]] * 3
    scenario.check()


# ---- concurrent and interrupted runs


GATED = """
    import threading
    from tidemark.transform import Record

    entered, gate = threading.Event(), threading.Event()

    def transform(record: Record) -> dict:
        entered.set()
        assert gate.wait(60)
        return {"payload": record.value}
"""


def test_newer_run_ends_the_session_of_an_older_one_that_hangs_inside_its_commit(
    scenario: Scenario, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A claim waits a while for the commit in flight and then ends its session, so no run can block a group indefinitely."""
    monkeypatch.setattr(claims, "GRACE_MS", 300)
    scenario.feed(numbers(0, 10), GATED, ddl="payload bytea")
    with ThreadPoolExecutor(2) as pool:
        older = pool.submit(scenario.run)
        module = scenario.loaded_module()
        assert module.entered.wait(60)
        older_attempt = scenario.attempt_id
        newer = pool.submit(scenario.run)
        until(
            lambda: scenario.attempt_id != older_attempt and scenario.sql("SELECT 1 FROM tidemark.partition_offset WHERE owner_epoch = 2")
        )
        module.gate.set()
        with pytest.raises((DatabaseUnavailable, OffsetFenced)):
            older.result(180)
        assert newer.result(180).records == 10
    assert scenario.rows() == numbers(0, 10)
    scenario.check()


def test_runs_that_start_together_never_load_a_record_twice(scenario: Scenario) -> None:
    """Some runs are fenced, or their claims are refused, but each record is loaded once."""
    scenario.feed(numbers(0, 40), partitions=3, batch={"max_records": 30})
    with ThreadPoolExecutor(4) as pool:
        runs = [pool.submit(scenario.run) for _ in range(4)]
        errors = [error for each in runs if (error := each.exception(120)) is not None]
    assert all(isinstance(error, OffsetFenced | ClaimRefused | DatabaseUnavailable) for error in errors), errors
    scenario.run()
    assert len(scenario.rows()) == 120
    scenario.check()


def test_runs_of_new_consumers_that_start_together_share_a_topic(scenario: Scenario) -> None:
    """Each group and each topic has one row, whichever run writes it first."""
    names = [f"group-{number}" for number in range(20)]
    topic = scenario.topics.create()

    def start(name: str) -> tuple[int, int]:
        with session(scenario.database_url) as connection, transaction(connection) as cur:
            return store.ensure_group(cur, name), store.ensure_topic(cur, topic, "uuid of the topic")

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(start, [name for name in names for _ in range(8)]))
    assert len(set(found)) == 20
    assert scenario.sql("SELECT count(*) FROM tidemark.consumer_group UNION ALL SELECT count(*) FROM tidemark.topic") == [(20,), (1,)]


def test_runs_use_up_no_topic_ids(scenario: Scenario) -> None:
    """A topic's id is a smallint in each row of the sink, so only a topic that was never seen may take a new one."""
    topic = scenario.topics.create()
    scenario.write(topics=topic).make_sink()
    scenario.sql("ALTER TABLE tidemark.topic ALTER COLUMN topic_id RESTART WITH 32766")
    for start in range(4):
        scenario.topics.produce(topic, numbers(start, start + 1))
        scenario.run()
    assert scenario.rows("payload, kafka_topic_id") == [(value, 32766) for value in numbers(0, 4)]
    scenario.check()


def test_second_try_of_a_task_whose_first_try_committed_everything_has_nothing_to_do(
    scenario: Scenario, caplog: pytest.LogCaptureFixture
) -> None:
    """Airflow may retry a task whose success it did not see. The first try's plan limits the run: later records belong to the next run."""
    caplog.set_level("INFO", "tidemark")
    topic = scenario.feed(numbers(0, 10))
    scenario.run(task=TASK)
    scenario.topics.produce(topic, numbers(10, 12))
    again = scenario.run(task=TASK)
    assert (again.state, again.records, scenario.engine) == ("COMMITTED", 0, None)
    assert f"an earlier attempt has committed the whole run group={scenario.spec.group}" in caplog.text
    assert scenario.rows() == numbers(0, 10)
    assert scenario.run(task=TaskIdentity("consume__x", "scheduled__2", "consume", -1, 1)).records == 2
    scenario.check()


def test_second_try_of_a_task_that_had_nothing_to_read_reads_what_came_since(scenario: Scenario) -> None:
    """An empty plan does not count as a committed run: there is nothing that the second try could repeat."""
    topic = scenario.topics.create()
    scenario.write(topics=topic).make_sink()
    scenario.run(task=TASK)
    scenario.topics.produce(topic, numbers(0, 3))
    assert scenario.run(task=TASK).records == 3
    scenario.check()


# ---- unavailable servers


def test_broker_that_is_away_fails_the_attempt_as_unavailable(scenario: Scenario, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is claimed and no position moves; Airflow may retry."""
    monkeypatch.setattr(cluster, "REQUEST_TIMEOUT_S", 2)
    scenario.write(topics=scenario.topics.create()).make_sink()
    scenario.connections = Connections(scenario.database_url, {"bootstrap.servers": "127.0.0.1:9"})
    with pytest.raises(BrokerUnavailable, match=r"127\.0\.0\.1:9"):
        scenario.run()
    assert scenario.attempt()["error"]["kind"] == "unavailable"
    assert scenario.positions() == {}


def test_database_session_that_is_lost_in_the_middle_fails_the_attempt_as_unavailable(scenario: Scenario) -> None:
    """The driver's own session is gone. What was committed stays, and the attempt's row is written over a new one."""
    scenario.feed(numbers(0, 10))

    def lose(part: Slice) -> None:
        driver = "application_name LIKE 'tidemark driver%' AND datname = current_database()"
        scenario.sql(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE {driver}")

    with pytest.raises(DatabaseUnavailable):
        scenario.run(before=lose)
    assert scenario.attempt()["error"]["kind"] == "unavailable"
    assert scenario.rows() == numbers(0, 10)
    assert scenario.run().state == "COMMITTED"
    scenario.check()


def test_run_warns_once_of_servers_across_a_network_that_are_not_verified(scenario: Scenario, caplog: pytest.LogCaptureFixture) -> None:
    """It warns once, however many batches it has. The first server of each list answers; the second address has no server."""
    scenario.feed(numbers(0, 6), batch={"max_records": 2})
    ours = scenario.connections.kafka["bootstrap.servers"]
    at = parse_dsn(scenario.database_url)
    url = f"postgresql://{at['user']}:{at.get('password', '')}@{at['host']}:{at['port']},192.0.2.255:1/{at['dbname']}"
    scenario.connections = Connections(url, {"bootstrap.servers": f"{ours},192.0.2.255:1"}, "local[2]")
    scenario.run()
    assert scenario.engine is not None
    assert len(scenario.engine.batches) == 3
    told = [text.partition(":")[0] for text in caplog.messages if "192.0.2.255" in text and " is " in text.partition(":")[0]]
    assert told == [
        "Kafka at 192.0.2.255 is reached in plain text",
        "Postgres at 192.0.2.255 is not verified, and may be reached in plain text",
    ]


def test_many_partitions_are_claimed_in_one_transaction(scenario: Scenario) -> None:
    topic = scenario.topics.create(5)
    scenario.write(topics=topic).make_sink()
    scenario.run()
    assert scenario.sql("SELECT count(DISTINCT xmin::text), count(*) FROM tidemark.partition_offset") == [(1, 5)]


def test_partitions_beside_one_that_is_out_of_range_are_claimed_one_by_one(scenario: Scenario) -> None:
    """The partitions before it stay claimed, the others are not claimed."""
    topic = scenario.feed(numbers(0, 4), partitions=3)
    scenario.run()
    scenario.sql("UPDATE tidemark.partition_offset SET next_offset = 1 WHERE partition = 1")
    scenario.topics.trim(topic, {1: 3})
    with pytest.raises(OffsetOutOfRange):
        scenario.run()
    epochs = scenario.sql("SELECT owner_epoch FROM tidemark.partition_offset ORDER BY partition")
    assert epochs == [(2,), (1,), (1,)]


def test_renamed_file_is_refused_before_it_reads_again_what_its_table_has(scenario: Scenario) -> None:
    """`consumers check` says the same. With the former group, or from the end of the topic, it goes on."""
    topic = scenario.feed(numbers(0, 5))
    scenario.run()
    former = scenario.spec.group
    scenario.set(group=f"{former}-renamed")
    text = f"The group {former}-renamed has no position in {topic}, but {scenario.table} already has rows of its records"
    text += f", loaded by the group {former}."
    shown = tidemark(scenario, "consumers", "check", scenario.name)
    assert (shown.returncode, text in " ".join(shown.stdout.split())) == (1, True)
    with pytest.raises(LoadedByAnother) as refused:
        scenario.run()
    assert str(refused.value).startswith(text)
    assert f"write group: {former}." in str(refused.value)
    assert scenario.failed() == []
    scenario.set(offset_reset="latest")
    assert tidemark(scenario, "consumers", "check", scenario.name).returncode == 0
    scenario.run()
    scenario.topics.produce(topic, numbers(5, 6))
    scenario.run()
    assert scenario.rows() == [*numbers(0, 6)]


def test_group_that_is_new_in_an_upsert_sink_reads_all_again(scenario: Scenario) -> None:
    """There, reading again changes nothing."""
    topic = scenario.topics.create()
    scenario.topics.produce(topic, ['{"id": 1}', '{"id": 2}'], key=b"k")
    scenario.write(None, topics=topic, format={"value": "json"}, sink={"table": scenario.table, "mode": "upsert", "key": ["id"]})
    scenario.make_sink("id bigint PRIMARY KEY")
    for group in (scenario.name, f"{scenario.name}-other"):
        scenario.set(group=group)
        scenario.run()
        assert scenario.rows("id") == [1, 2]
    assert scenario.failed() == []

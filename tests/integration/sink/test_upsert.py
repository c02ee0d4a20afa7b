"""Upsert sinks: the last record of a key wins, within one Kafka partition."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.sampling import examples
from tests.support.scenario import Scenario

from tidemark.db import session, transaction
from tidemark.errors import BadInput
from tidemark.quality import check_conservation
from tidemark.records.ranges import Slice
from tidemark.sink.fit import SinkMismatch

TRANSFORM = """
    from collections.abc import Iterator
    from typing import TypedDict

    from tidemark.transform import Record


    class Row(TypedDict):
        city: str
        people: int


    def transform(record: Record) -> Iterator[Row]:
        for pair in record.value.decode().split():
            city, people = pair.split("=")
            yield {"city": city, "people": int(people)}
"""
"""``ulm=1 bonn=2`` is a record with two rows."""


class Stopped(Exception):
    """Raised to end a run between two batches."""


@pytest.fixture
def cities(scenario: Scenario) -> Scenario:
    """A consumer whose sink has one row per city. Its topic has two partitions."""
    topic = scenario.topics.create(2)
    sink = {"table": scenario.table, "mode": "upsert", "key": ["city"]}
    return scenario.write(TRANSFORM, topics=topic, sink=sink).make_sink()


def produce(cities: Scenario, values: Sequence[str], partition: int = 0) -> None:
    cities.topics.produce(cities.keys["topics"][0], values, partition=partition)


def found(cities: Scenario) -> dict[str, int]:
    return dict(cities.sql(f"SELECT city, people FROM {cities.table}"))


def read_again(cities: Scenario) -> None:
    """Moves the positions back, and makes the transform return ten times as many people."""
    cities.sql("DELETE FROM tidemark.batch; UPDATE tidemark.partition_offset SET next_offset = 0, validated_offset = 0")
    cities.transform(TRANSFORM.replace("int(people)", "int(people) * 10"))


def conserved(cities: Scenario) -> bool:
    with session(cities.database_url) as connection, transaction(connection) as cur:
        return check_conservation(cur, cities.spec.group, [cities.table], upsert=True) == []


def test_last_record_of_a_key_wins_within_a_batch_and_between_batches(cities: Scenario) -> None:
    """So does the last row of a record with several, and the last record across runs. The row's lineage is that of the winning record."""
    produce(cities, ["ulm=1", "bonn=2", "ulm=3 ulm=4", "rom=5"])
    produce(cities, ["york=6"], partition=1)
    cities.run()
    assert found(cities) == {"ulm": 4, "bonn": 2, "rom": 5, "york": 6}
    produce(cities, ["bonn=7", "ulm=8"])
    cities.run()
    assert found(cities) == {"ulm": 8, "bonn": 7, "rom": 5, "york": 6}
    lineage = f"SELECT city, kafka_partition, kafka_offset, kafka_seq FROM {cities.table} ORDER BY 1"
    assert cities.sql(lineage) == [("bonn", 0, 4, 0), ("rom", 0, 3, 0), ("ulm", 0, 5, 0), ("york", 1, 0, 0)]
    assert cities.counts() == {"loaded": 7, "sink_rows": 8}
    assert conserved(cities)


def test_key_that_comes_from_another_partition_is_a_failed_record(cities: Scenario) -> None:
    """Records of different partitions have no order. The failed record says where the key was loaded from; the other records are loaded. If
    both partitions are in one batch, the key is loaded from the partition that commits first."""
    produce(cities, ["ulm=1", "bonn=2"])
    cities.run()
    produce(cities, ["york=3", "ulm=9", "rom=4"], partition=1)
    cities.run()
    assert found(cities) == {"ulm": 1, "bonn": 2, "york": 3, "rom": 4}
    ((offset, disposition, error_type, text),) = cities.failed()
    assert (offset, disposition, error_type) == (1, "fail", "KeyOfOtherPartition")
    assert f"key was loaded from {cities.keys['topics'][0]}/0" in text
    assert "ulm" not in text
    produce(cities, ["oslo=1"])
    produce(cities, ["oslo=9"], partition=1)
    cities.run()
    assert found(cities)["oslo"] in (1, 9)
    assert [row[2] for row in cities.failed()] == ["KeyOfOtherPartition"] * 2
    assert cities.counts() == {"loaded": 5, "failed": 2, "sink_rows": 5}
    assert conserved(cities)


def test_topic_that_was_re_created_goes_on_with_its_keys(cities: Scenario) -> None:
    """A re-created topic is a new topic in the ledger, but each key keeps its partition."""
    (topic,) = cities.keys["topics"]
    produce(cities, ["ulm=1", "bonn=2"])
    cities.run()
    cities.topics.recreate(topic, 2)
    cities.set(offset_reset="earliest")
    produce(cities, ["ulm=5"])
    produce(cities, ["bonn=6"], partition=1)
    cities.run()
    assert found(cities) == {"ulm": 5, "bonn": 2}
    assert [row[2] for row in cities.failed()] == ["KeyOfOtherPartition"]


def test_older_record_never_replaces_a_newer_row(cities: Scenario) -> None:
    """Older records are read after newer ones, as when a skipped range is read later. They count as loaded, as do records whose row was
    replaced later."""
    produce(cities, ["ulm=1", "bonn=2 rom=3", "york=-4", "ulm=5 ulm=6", "bonn=7"])
    cities.run()
    cities.sql(f"DELETE FROM {cities.table} WHERE city IN ('rom', 'york'); ALTER TABLE {cities.table} ADD CHECK (people > 0)")
    read_again(cities)
    cities.set(batch={"max_records": 3})

    def older_only(part: Slice) -> None:
        if part.start >= 3 and part.partition.partition == 0:
            raise Stopped

    with pytest.raises(Stopped):
        cities.run(before=older_only)
    assert found(cities) == {"ulm": 6, "bonn": 7, "rom": 30}
    assert [row[:3] for row in cities.failed()] == [(2, "fail", "CheckViolation")]
    assert cities.counts() == {"loaded": 2, "failed": 1, "sink_rows": 3}
    cities.run()
    assert found(cities) == {"ulm": 60, "bonn": 70, "rom": 30}
    assert conserved(cities)


def test_record_of_a_former_life_of_the_topic_is_older_than_all_of_the_new_one(cities: Scenario) -> None:
    """Offsets do not matter here: topic ids are assigned in the order in which the incarnations were seen."""
    produce(cities, ["rom=0", "rom=1", "ulm=1"])
    cities.run()
    cities.sql(f"UPDATE {cities.table} SET kafka_offset = 0, kafka_topic_id = 2 WHERE city = 'ulm'")
    cities.sql("INSERT INTO tidemark.topic (name, kafka_uuid) SELECT name, 'the next one' FROM tidemark.topic")
    read_again(cities)
    cities.run()
    assert found(cities) == {"rom": 10, "ulm": 1}
    assert cities.failed() == []


def test_rows_that_postgres_refuses_are_left_out_of_an_upsert(cities: Scenario) -> None:
    """The last *valid* record of a key wins."""
    cities.sql(f"ALTER TABLE {cities.table} ADD CHECK (people > 0)")
    produce(cities, ["ulm=1", "bonn=2", "ulm=-3", "bonn=4 rom=-1", "york=5", "a\0=6"])
    cities.run()
    assert found(cities) == {"ulm": 1, "bonn": 2, "york": 5}
    assert [(row[0], row[2]) for row in cities.failed()] == [(2, "CheckViolation"), (3, "CheckViolation"), (5, "CharacterNotInRepertoire")]
    assert conserved(cities)


def test_columns_that_the_transform_does_not_return_keep_their_values(cities: Scenario) -> None:
    """An upsert replaces only the columns that the transform returns."""
    cities.sql(f"ALTER TABLE {cities.table} ADD note text DEFAULT 'new'")
    produce(cities, ["ulm=1"])
    cities.run()
    cities.sql(f"UPDATE {cities.table} SET note = 'mine'")
    produce(cities, ["ulm=2", "bonn=3"])
    cities.run()
    assert cities.sql(f"SELECT city, people, note FROM {cities.table} ORDER BY 1") == [("bonn", 3, "new"), ("ulm", 2, "mine")]


@settings(max_examples=examples(15), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(runs=st.lists(st.lists(st.tuples(st.sampled_from("abcde"), st.integers(0, 99)), min_size=1, max_size=30), min_size=1, max_size=3))
def test_sink_is_what_a_dict_would_be(cities: Scenario, runs: list[list[tuple[str, int]]]) -> None:
    """Keys come in any order, and records are divided into runs and batches in any way."""
    cities.set(batch={"max_records": 7})
    expected = found(cities)
    for records in runs:
        produce(cities, [f"{city}={people}" for city, people in records])
        cities.run()
        expected |= dict(records)
        assert found(cities) == expected
    assert conserved(cities)


# ---- the table


def test_table_must_find_a_row_by_its_key(cities: Scenario) -> None:
    """Without the unique index, or with a nullable key, a key could have several rows. The error has the DDL that fixes the table. The
    transform must return the key."""
    cities.sql(f"ALTER TABLE {cities.table} DROP CONSTRAINT {cities.name}_pkey, ALTER city DROP NOT NULL")
    produce(cities, ["ulm=1"])
    with pytest.raises(SinkMismatch) as refused:
        cities.run()
    assert refused.value.problems == ["the key column city is nullable", "the table has no unique index on the key city"]
    cities.sql(refused.value.ddl)
    cities.run()
    assert found(cities) == {"ulm": 1}
    produce(cities, ["ulm=2"])
    cities.set(sink={"table": cities.table, "mode": "upsert", "key": ["city", "country"]})
    with pytest.raises(SinkMismatch, match="the output lacks the key column country"):
        cities.run()


def test_key_and_partitions_of_the_table_exclude_each_other(cities: Scenario) -> None:
    """In a partitioned table, a unique index applies within one partition only."""
    with pytest.raises(BadInput, match=r"unique in the whole table\. Omit --partitions"):
        cities.make_sink(partitions=2)

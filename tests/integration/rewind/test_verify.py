"""What a replay has changed, found by comparing archive and sink. Uses a real Postgres and Kafka."""

from __future__ import annotations

import pytest
from tests.integration.rewind.lab import Lab, Transform, lab_on, one_city
from tests.support.kafka_topics import Topics
from tests.support.scenario import Scenario

from tidemark.db import transaction
from tidemark.offsets.samples import replays
from tidemark.records.ranges import TopicPartition
from tidemark.rewind.plan_model import ShiftBy, ToOffset
from tidemark.rewind.verify import NotVerifiable, Verified


def counts(found: Verified) -> tuple[int, int, int, int]:
    return found.equal, found.changed, found.gone, found.new


def replayed(lab: Lab) -> int:
    """The number of rows in the rewound range."""
    return len([row for row in lab.rows() if 20 <= row[1] < 60])


def fixed(offset: int) -> list[str]:
    """Renames the cities of offsets ending in 7, drops 25, and makes two rows of 35; otherwise as before."""
    if offset == 25:
        return []
    if offset == 35:
        return ["city 35", "city 35 b"]
    return [f"town {offset}"] if offset % 10 == 7 else one_city(offset)


def test_says_what_is_equal_changed_gone_and_new(lab: Lab) -> None:
    lab.read(60)
    rows = len([row for row in lab.rows() if row[1] >= 20])
    done = lab.rewind(ToOffset(20), f"{lab.topic}:0")
    lab.read(60, transform=fixed)
    found = lab.verified(done.rewind_id)
    assert found.by == ("kafka_topic_id", "kafka_partition", "kafka_offset", "kafka_seq")
    assert (found.replayed, found.left) == (40, 0)
    assert counts(found) == (rows - 5, 4, 1, 1)
    changed = {(example.was or {})["city"]: (example.now or {})["city"] for example in found.examples["changed"]}
    assert changed == {f"city {offset}": f"town {offset}" for offset in (27, 37, 47, 57)}
    assert [(example.was and example.was["city"], example.now) for example in found.examples["gone"]] == [("city 25", None)]
    assert [(example.was, example.now and example.now["city"]) for example in found.examples["new"]] == [(None, "city 35 b")]
    assert set(found.examples) == {"changed", "gone", "new"}


def test_counts_only_what_has_been_replayed(lab: Lab) -> None:
    """Rows that are not replayed yet do not count as gone."""
    lab.read(60)
    done = lab.rewind(ToOffset(20), f"{lab.topic}:0")
    assert counts(lab.verified(done.rewind_id)) == (0, 0, 0, 0)
    lab.read(40)
    with lab.session() as connection, transaction(connection) as cur:
        (replay,) = replays(cur, lab.spec.group)
    assert (replay.partition, replay.rewind_id, replay.until) == (TopicPartition(lab.topic, 0), done.rewind_id, 60)
    found = lab.verified(done.rewind_id)
    assert (found.replayed, found.left) == (20, 20)
    assert counts(found) == (replayed(lab), 0, 0, 0)
    lab.read(100)
    with lab.session() as connection, transaction(connection) as cur:
        assert replays(cur, lab.spec.group) == []
    found = lab.verified(done.rewind_id)
    assert (found.replayed, found.left) == (40, 0)
    assert counts(found) == (replayed(lab), 0, 0, 0)


def test_rows_of_an_upsert_sink_are_the_same_by_their_key(scenario: Scenario, topics: Topics) -> None:
    """Their lineage may differ, because a later record may have written them since."""
    five: Transform = lambda offset: [f"city {offset % 5}"]  # noqa: E731
    with lab_on(scenario, topics, (60,), key=["city"]) as lab:
        lab.read(40, transform=five)
        done = lab.rewind(ToOffset(30))
        lab.read(60, transform=lambda offset: [f"city {offset % 5 + (offset % 5 == 3)}"])  # city 3 becomes city 4
        found = lab.verified(done.rewind_id)
        assert found.by == ("city",)
        assert (found.gone, found.new) == (1, 0)
        assert [example.was and example.was["city"] for example in found.examples["gone"]] == ["city 3"]
        assert found.equal + found.changed == 4


def test_refuses_what_there_is_nothing_to_compare_with(lab: Lab) -> None:
    lab.read(60)
    with pytest.raises(NotVerifiable, match="it is planned"):
        lab.verified(lab.plan(ShiftBy(-5), f"{lab.topic}:0").rewind_id)
    done = lab.rewind(ToOffset(20), f"{lab.topic}:0")
    back = lab.undo(done.rewind_id)
    with pytest.raises(NotVerifiable, match="it is undone"):
        lab.verified(done.rewind_id)
    with pytest.raises(NotVerifiable, match="an undo puts rows back"):
        lab.verified(back.rewind_id)

"""Where reading starts, and what happens when the log no longer has the position: retention, recreated topics, added partitions.

For each position with each ``offset_reset``, see tests/unit/offsets/test_reset.py."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.support.records import numbers
from tests.support.scenario import PLAIN, Scenario
from tests.support.waiting import until

from tidemark.doctor.finding import Level
from tidemark.doctor.topic_checks import examine_topics
from tidemark.kafka import cluster
from tidemark.kafka.cluster import Cluster
from tidemark.kafka.reader import RangeGone
from tidemark.offsets.reset import NoPosition, OffsetOutOfRange, TopicRecreated

# ---- where to start, and positions that the log does not have


@pytest.mark.parametrize(("reset", "loaded"), [(None, 3), ("latest", 0)])
def test_first_position_is_what_offset_reset_says(scenario: Scenario, reset: str | None, loaded: int) -> None:
    """The default is earliest. Records that ``latest`` skips at the first run never belonged to the group, so they are not a lost range."""
    topic = scenario.feed(numbers(0, 3), offset_reset=reset)
    scenario.run()
    assert len(scenario.rows()) == loaded
    scenario.topics.produce(topic, numbers(3, 5))
    scenario.run()
    assert scenario.rows()[-2:] == numbers(3, 5)
    assert len(scenario.rows()) == loaded + 2
    assert scenario.lost() == []
    scenario.check()


def test_offset_reset_none_refuses_to_choose_a_first_position(scenario: Scenario) -> None:
    """No position is stored, and the error says what to write instead."""
    topic = scenario.feed(numbers(0, 3), offset_reset="none")
    with pytest.raises(NoPosition, match="offset_reset: earliest"):
        scenario.run()
    assert scenario.positions() == {}
    scenario.set(offset_reset="earliest")
    scenario.run()
    scenario.set(offset_reset="none")
    scenario.topics.produce(topic, numbers(3, 5))
    scenario.run()
    assert scenario.rows() == numbers(0, 5)
    scenario.check()


def test_retention_ahead_of_the_position_is_refused(scenario: Scenario) -> None:
    """If records are gone before they were read, the whole run is refused; the position is not clamped."""
    topic = trimmed_below_the_position(scenario)
    with pytest.raises(OffsetOutOfRange) as refused:
        scenario.run()
    assert (refused.value.position, refused.value.start, refused.value.end) == (10, 15, 20)
    assert "records 10 to 14 are gone" in scenario.attempt()["error"]["text"]
    assert scenario.positions()[topic, 0] == 10
    assert scenario.lost() == []


@pytest.mark.parametrize(
    ("reset", "end", "reason"), [("earliest", 15, "retention"), ("latest", 20, "reset to latest")], ids=["earliest", "latest"]
)
def test_retention_ahead_of_the_position_is_a_lost_range_where_the_user_allowed_it(
    scenario: Scenario, reset: str, end: int, reason: str
) -> None:
    """``earliest`` continues with the remaining records, ``latest`` after the last one. ``lost_range`` stores all that is skipped, and the
    run's result reports it."""
    topic = trimmed_below_the_position(scenario)
    scenario.set(offset_reset=reset)
    done = scenario.run()
    assert [(lost.start, lost.end, lost.reason) for lost in done.lost] == [(10, end, reason)]
    assert scenario.lost() == [(0, 10, end, reason)]
    scenario.topics.produce(topic, numbers(20, 22))
    scenario.run()
    assert scenario.rows(where="kafka_partition = 0") == numbers(0, 10) + numbers(end, 22)
    scenario.check()


def test_retention_that_passes_a_range_while_it_is_read_keeps_what_was_committed(scenario: Scenario) -> None:
    """Earlier batches stay, the affected one is refused, and the next run stores the removed records as lost."""
    topic = scenario.feed(numbers(0, 10), offset_reset="earliest", batch={"max_records": 4})
    with pytest.raises(RangeGone, match=rf"{topic}/0: offsets from 4 to 8 are no longer all in the log") as refused:
        scenario.run(before=lambda part: scenario.topics.trim(topic, {0: 7}) if part.start == 4 else None)
    assert scenario.attempt() == {"state": "FAILED", "error": {"kind": "refused", "type": "RangeGone", "text": str(refused.value)}}
    assert scenario.rows() == numbers(0, 4)
    assert scenario.positions() == {(topic, 0): 4}
    scenario.check()
    scenario.run()
    assert scenario.rows() == numbers(0, 4) + numbers(7, 10)
    assert scenario.lost() == [(0, 4, 7, "retention")]
    scenario.check()


# ---- topics that change


def test_recreated_topic_is_refused(scenario: Scenario) -> None:
    """A topic is identified by its UUID, not by its name: the same offsets are different records. A later run is refused as well."""
    topic = scenario.feed(numbers(0, 5))
    scenario.run()
    scenario.topics.recreate(topic)
    scenario.topics.produce(topic, numbers(100, 105))
    for reset in (None, "none"):
        scenario.set(offset_reset=reset)
        with pytest.raises(TopicRecreated) as refused:
            scenario.run()
        assert refused.value.positions == {0: 5}
        assert scenario.rows() == numbers(0, 5)
        assert scenario.lost() == []


@pytest.mark.parametrize("reset", ["earliest", "latest"])
def test_recreated_topic_is_read_from_its_start_where_the_user_allowed_it(scenario: Scenario, reset: str) -> None:
    """The new topic has a separate id in the lineage; the rest of the old one is a lost range with an unknown end. So is the rest of the
    next incarnation."""
    topic = scenario.topics.create(2)
    scenario.topics.produce(topic, numbers(0, 5))
    scenario.write(topics=topic).make_sink()
    scenario.run()
    scenario.set(offset_reset=reset)
    loaded = numbers(0, 5)
    for first, records in ((100, 9), (200, 2)):
        before = list(scenario.positions().values())
        scenario.topics.recreate(topic, 2)
        scenario.topics.produce(topic, numbers(first, first + records))
        found = [(lost.partition, lost.start, lost.end, lost.reason) for lost in scenario.run().lost]
        assert found == [(partition, start, None, "topic re-created") for partition, start in enumerate(before)]
        loaded += numbers(first, first + records)
        assert scenario.rows() == loaded
    assert scenario.run().partitions == ()
    assert len(scenario.lost()) == 4
    scenario.check()


AT_LAST = """
    import threading
    from tidemark.transform import Record

    entered, gate = threading.Event(), threading.Event()

    def transform(record: Record) -> dict:
        if record.offset == 4:
            entered.set()
            assert gate.wait(60)
        return {"payload": record.value}
"""
"""Waits at the last record of the first batch."""


def test_topic_that_is_recreated_while_a_run_goes_on_is_refused_by_its_next_batch(scenario: Scenario) -> None:
    """The same offsets would be different records under the old topic's name. What was read before stays, and the rest of the old topic is
    a lost range, up to the end that the last sample knows."""
    topic = scenario.feed(numbers(0, 10), AT_LAST, ddl="payload bytea", batch={"max_records": 5})
    with ThreadPoolExecutor(1) as pool:
        run = pool.submit(scenario.run)
        module = scenario.loaded_module()
        assert module.entered.wait(60)
        scenario.topics.recreate(topic)
        scenario.topics.produce(topic, numbers(100, 120))
        module.gate.set()
        with pytest.raises(TopicRecreated) as refused:
            run.result(180)
    assert refused.value.positions == {0: 5}
    assert scenario.rows() == numbers(0, 5)
    scenario.set(offset_reset="earliest")
    scenario.transform(PLAIN)
    scenario.run()
    assert scenario.rows() == numbers(0, 5) + numbers(100, 120)
    assert scenario.lost() == [(0, 5, 10, "topic re-created")]
    scenario.check()


def test_added_partition_is_read_from_its_first_record(scenario: Scenario) -> None:
    """Even under ``latest``: records produced before the partition was noticed are not skipped. Only ``none`` chooses no position."""
    topic = scenario.feed(numbers(0, 2))
    scenario.run()
    scenario.topics.grow(topic, 3)
    until(lambda: scenario.records(topic, 2) == {})
    scenario.topics.produce(topic, numbers(10, 12), partition=2)
    scenario.set(offset_reset="none")
    with pytest.raises(NoPosition, match=rf"{topic}/1"):
        scenario.run()
    assert scenario.positions() == {(topic, 0): 2}
    scenario.set(offset_reset="latest")
    scenario.run()
    assert scenario.rows(where="kafka_partition = 2") == numbers(10, 12)
    assert set(scenario.positions()) == {(topic, 0), (topic, 1), (topic, 2)}
    scenario.check()


# ---- helpers


def trimmed_below_the_position(scenario: Scenario) -> str:
    """A topic whose first partition had 10 records when it was read. That partition has since grown to 20 and lost the first 15."""
    topic = scenario.topics.create(2)
    scenario.topics.produce(topic, numbers(0, 10))
    scenario.topics.produce(topic, numbers(0, 2), partition=1)
    scenario.write(topics=topic).make_sink()
    scenario.run()
    scenario.topics.produce(topic, numbers(10, 20))
    scenario.topics.trim(topic, {0: 15})
    return topic


# ---- clusters without topic ids


def test_topic_without_an_id_is_read_and_keeps_its_position_when_it_gets_one(
    scenario: Scenario, kafka_servers: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Brokers before 2.8 send the same id for every topic. It is not stored: the log and doctor say that the topic has none. With the
    id that an upgrade of the brokers brings, the topic is the same."""
    topic = scenario.feed(numbers(0, 3))
    brokers = Cluster({"bootstrap.servers": kafka_servers})
    (described,) = brokers.topics([topic])
    with monkeypatch.context() as old:
        old.setattr(cluster, "ZERO_ID", described.kafka_uuid)
        scenario.run()
        assert f"topics have no id in this cluster, deleting and creating them again is not noticed topics={topic}" in caplog.text
        found = [one for one in examine_topics(brokers, scenario.spec, None) if one.level is not Level.OK]
        assert [(one.subject, one.level) for one in found] == [(f"{scenario.name}: topic {topic}", Level.WARNING)]
        assert "gives it no id" in found[0].found
    assert scenario.sql("SELECT kafka_uuid FROM tidemark.topic") == [(f"no id: {topic}",)]
    scenario.topics.produce(topic, numbers(3, 5))
    scenario.run()
    assert scenario.rows() == numbers(0, 5)
    assert scenario.sql("SELECT kafka_uuid FROM tidemark.topic") == [(described.kafka_uuid,)]
    scenario.check()

"""Every offset in a broker's answer is checked to be one.

No real broker can be made to answer -1001 (librdkafka: "unknown", while a leader moves), so the client's answers are scripted here.
"""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException

from tidemark.errors import BrokerUnavailable
from tidemark.kafka import cluster as module
from tidemark.kafka.cluster import Cluster
from tidemark.records.ranges import Log, TopicPartition

PLACE = TopicPartition("flights", 3)


class Answers:
    """An admin client that answers ``list_offsets`` with one offset or error after the other; the last one is repeated. Without any, its
    answer never comes."""

    def __init__(self, *answers: int | KafkaException, leader_epoch: int = 7) -> None:
        self.answers, self.leader_epoch = list(answers), leader_epoch

    def list_offsets(self, asked: Any, **_: Any) -> dict[Any, Future[Any]]:
        answer = self.answers.pop(0) if len(self.answers) > 1 else next(iter(self.answers), None)
        futures = {place: Future[Any]() for place in asked}
        for future in futures.values():
            if isinstance(answer, KafkaException):
                future.set_exception(answer)
            elif answer is not None:
                future.set_result(SimpleNamespace(offset=answer, leader_epoch=self.leader_epoch))
        return futures


STALE = KafkaException(KafkaError(KafkaError.FENCED_LEADER_EPOCH))
"""The answer of a client that keeps the leaders that it knew before an election, as librdkafka's does for up to 5 minutes."""


def cluster_that_answers(*answers: int | KafkaException, **more: int) -> Cluster:
    cluster = Cluster({"bootstrap.servers": "nowhere:9092"}, timeout_s=0.1)
    cluster._client = Answers(*answers, **more)  # type: ignore[assignment]
    return cluster


@pytest.fixture
def next_client_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "connected", lambda *_: Answers(5))
    monkeypatch.setattr(module, "require_contact", lambda *_: None)


@pytest.mark.parametrize("answer", [-1001, -1, -2])
def test_an_answer_that_is_no_offset_is_asked_again(answer: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The leader may be unknown for a moment, which is not an outage. Such an answer never reaches a position, a lag or a plan."""
    assert cluster_that_answers(answer, answer, 5).stable_ends([PLACE]) == {PLACE: 5}
    assert cluster_that_answers(answer, 5).log_starts([PLACE]) == {PLACE: 5}
    monkeypatch.setattr(module, "LEADER_WAIT_S", 0.1)
    for look in (Cluster.stable_ends, Cluster.log_starts, Cluster.logs):
        with pytest.raises(BrokerUnavailable, match=rf"no offset for flights/3 \({answer}\)"):
            look(cluster_that_answers(answer), [PLACE])


@pytest.mark.usefixtures("next_client_answers")
def test_another_client_asks_if_the_first_one_knows_a_former_leader() -> None:
    """Asking with the same client again would take minutes."""
    assert cluster_that_answers(STALE).stable_ends([PLACE]) == {PLACE: 5}


@pytest.mark.usefixtures("next_client_answers")
def test_client_that_never_answers_is_an_outage_and_the_next_request_has_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run would wait for such a client without an end and without a word."""
    monkeypatch.setattr(module, "LATE_S", 0.1)
    cluster = cluster_that_answers()
    with pytest.raises(BrokerUnavailable, match="the client gave no answer"):
        cluster.stable_ends([PLACE])
    assert cluster.stable_ends([PLACE]) == {PLACE: 5}


def test_no_record_of_a_time_is_an_answer_and_an_unknown_offset_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kafka's -1 means that no record is that late. If -1001 were taken for it, a rewind would go to the end."""
    assert cluster_that_answers(-1).offsets_for_time([PLACE], 1) == {}
    assert cluster_that_answers(-1001, 8).offsets_for_time([PLACE], 1) == {PLACE: 8}
    monkeypatch.setattr(module, "LEADER_WAIT_S", 0.2)
    with pytest.raises(BrokerUnavailable):
        cluster_that_answers(-1001).offsets_for_time([PLACE], 1)


def test_a_log_has_its_leaders_epoch_if_the_broker_says_one() -> None:
    """Old brokers report none."""
    assert cluster_that_answers(5).logs([PLACE]) == {PLACE: Log(PLACE, 5, 5, 7)}
    assert cluster_that_answers(5, leader_epoch=-1).logs([PLACE]) == {PLACE: Log(PLACE, 5, 5, None)}

"""The relay: every handed-off record is registered at exactly one message, whatever dies, hangs or is refused on the way."""

from __future__ import annotations

import gc
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from psycopg2.extensions import cursor as PostgresCursor
from tests.integration.retry.outbox import FIT, TIME, Headers, Outbox
from tests.support.deaths import LosingAnswers, deaths, end_session, hooked
from tests.support.kafka_topics import Topics
from tests.support.waiting import until

from tidemark.errors import BrokerUnavailable, DatabaseUnavailable
from tidemark.kafka.producer import ANSWER_S
from tidemark.retry import relay as relay_module
from tidemark.retry.messages import NAMES
from tidemark.retry.relay import Relayed
from tidemark.rewind.apply import GRACE_MS

FORGED: Headers = [(name, b"\xff\x80") for name in NAMES] + [("tidemark.retry_number", b"2147483648")]
PAYLOADS: dict[str, tuple[bytes | None, bytes | None, Headers]] = {
    "plain": (b"key", b"value", [("trace", b"abc")]),
    "no key": (None, b"value", []),
    "empty key": (b"", b"value", []),
    "tombstone": (b"key", None, []),
    "empty value": (b"key", b"", []),
    "nothing at all": (None, None, []),
    "no text": (b"\x00\xff\xfe", b"\x80\x00", [("bytes", b"\xff\x00")]),
    "headers twice, empty and null": (
        b"key",
        b"value",
        [("a", b"1"), ("a", b"2"), ("b", b""), ("c", None), ("", b"no name"), ("ü 🛫", b"x")],
    ),
    "forged": (b"key", b"value", FORGED),
    "from another's failed topic": (b"key", b"value", [*FORGED, *FORGED, ("own", b"1")]),
}


def test_key_value_and_headers_arrive_byte_for_byte_with_ours_behind_them(outbox: Outbox) -> None:
    """Scenarios 10, 11, 13, 17: for records of any shape, even with forged headers of ours, in a retry topic and in the failed topic."""
    outbox.make_topics()
    numbers = {
        outbox.add(value, key=key, headers=headers, failed=failed): failed
        for key, value, headers in PAYLOADS.values()
        for failed in (False, True)
    }
    done = outbox.relay()
    assert done == Relayed({outbox.tiers[0]: len(PAYLOADS), outbox.tiers[-1]: len(PAYLOADS)})
    outbox.check_published()
    assert {number: topic == outbox.tiers[-1] for number, (topic, _, _) in outbox.hops().items()} == numbers
    assert outbox.relay() == Relayed()


def test_record_goes_to_no_topic_that_is_not_of_its_group(outbox: Outbox, topics: Topics) -> None:
    """An operator's own SQL can name any topic. The group's records are published meanwhile."""
    outbox.make_topics()
    others = [topics.create(), f"{outbox.group}.retry.soon", f"{outbox.group}x.failed"]
    for number, other in zip([outbox.add(b"forged") for _ in others], others, strict=True):
        outbox.sql("UPDATE tidemark.failed_record SET retry_topic = %(name)s WHERE failed_record_id = %(id)s", name=other, id=number)
    outbox.add(b"good")
    done = outbox.relay()
    assert (dict(done.published), set(done.blocked)) == ({outbox.tiers[0]: 1}, set(others))
    assert set(done.blocked.values()) == {"it is not a topic of this group"}
    assert outbox.messages(others[0]) == {}


def test_our_headers_tell_people_the_truth(outbox: Outbox) -> None:
    """Scenarios 9 and 17: retry number and due time as in Postgres; origin, error and the record's id."""
    outbox.make_topics()
    number = outbox.add(b"x", partition=2, error=("KeyError", "né Zürich"), number=3)
    outbox.relay()
    record, ((_, message),) = outbox.record(number), outbox.messages(outbox.tiers[1]).items()
    said = {name: (value or b"").decode() for name, value in message.headers}
    assert list(said) == list(NAMES)
    assert said["tidemark.retry_timestamp"] == record["due_at"].isoformat(timespec="milliseconds").replace("+00:00", "Z")
    del said["tidemark.retry_timestamp"]
    assert said == {
        "tidemark.group": outbox.group,
        "tidemark.record": str(number),
        "tidemark.retry_number": "3",
        "tidemark.topic": outbox.topic,
        "tidemark.partition": "2",
        "tidemark.offset": "0",
        "tidemark.timestamp": TIME.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        "tidemark.error_type": "KeyError",
        "tidemark.error_text": "né Zürich",
    }


@pytest.mark.sampled
@pytest.mark.parametrize("partitions", [1, 2, 3, 5])
def test_records_keep_their_partition_modulo_what_the_topic_has(outbox: Outbox, partitions: int) -> None:
    """Scenarios 20 and 41: the same number of partitions, fewer, more, one. In each partition, records keep the order of their hand-off
    (scenario 25)."""
    outbox.make_topics(partitions)
    numbers = [outbox.add(f"{number}".encode(), partition=number % 3) for number in range(12)]
    outbox.relay()
    hops = outbox.hops()
    assert [hops[number][1] for number in numbers] == [number % 3 % partitions for number in range(12)]
    for partition in range(partitions):
        offsets = [hops[number][2] for number in numbers if hops[number][1] == partition]
        assert offsets == sorted(offsets)
    outbox.check_published()


def test_a_record_that_the_broker_does_not_take_stops_no_other(outbox: Outbox) -> None:
    """Scenarios 11 and 26: records that are too large, in the middle of a batch that the broker rejects as a whole. They keep their state,
    store the reason, and are not published until somebody changes them."""
    outbox.make_topics(largest=10_000)
    numbers = [outbox.add(f"{number}".encode() * 10) for number in range(50)]
    large = [outbox.add(random_bytes(11_000)), outbox.add(random_bytes(20_000), failed=True)]
    numbers += [outbox.add(f"{number}".encode() * 10) for number in range(50)]
    done = outbox.relay()
    assert (done.records, done.refused, done.blocked) == (100, 2, {})
    assert sorted(outbox.hops()) == numbers
    outbox.check_published()
    assert [(outbox.record(each)["state"], outbox.record(each)["publish_error"].split(":")[0]) for each in large] == [
        ("WAITING", "MSG_SIZE_TOO_LARGE"),
        ("FAILED", "MSG_SIZE_TOO_LARGE"),
    ]
    assert outbox.relay() == Relayed()
    outbox.sql("UPDATE tidemark.failed_record SET value = 'small', publish_error = NULL WHERE publish_error IS NOT NULL")
    assert outbox.relay().records == 2


def test_what_its_origin_took_compressed_gets_through(outbox: Outbox) -> None:
    """A topic's limit applies to the compressed batch: a record of 2 MB that compresses well is not too large."""
    outbox.make_topics(largest=10_000)
    outbox.add(b"x" * 2_000_000)
    assert outbox.relay().records == 1
    outbox.check_published()


def test_a_topic_that_is_not_there_holds_up_its_own_records_and_no_others(outbox: Outbox) -> None:
    """Scenarios 26 and 41: nothing is dropped. Once the topic exists, its records are published."""
    missing = outbox.tiers[1]
    outbox.consumer.set(retry={**outbox.consumer.keys["retry"], "topics": {"create": False}})
    outbox.make_topics(without=[missing])
    held = [outbox.add(b"held", number=3) for _ in range(3)]
    gone = [outbox.add(b"goes") for _ in range(3)]
    done = outbox.relay(portion=2)
    assert (done.records, done.refused, done.blocked) == (3, 0, {missing: "it does not exist"})
    assert sorted(outbox.hops()) == gone
    outbox.make_topic(missing)
    assert outbox.relay() == Relayed({missing: 3})
    assert sorted(outbox.hops()) == held + gone
    outbox.check_published()


def test_an_empty_outbox_asks_nobody(outbox: Outbox) -> None:
    """If a group has nothing to publish, or has never run, its relay needs no broker."""
    with outbox.session() as connection:
        nowhere = {"bootstrap.servers": "127.0.0.1:1"}
        assert relay_module.relay(connection, nowhere, outbox.spec) == Relayed()
        assert relay_module.relay(connection, nowhere, outbox.spec.model_copy(update={"group": "never seen"})) == Relayed()


def test_another_groups_records_are_not_touched(outbox: Outbox) -> None:
    outbox.make_topics()
    outbox.add()
    with outbox.session() as connection:
        assert relay_module.relay(connection, outbox.kafka, outbox.spec.model_copy(update={"group": "other"})) == Relayed()
    assert outbox.waiting() == 1


def test_a_limit_bounds_a_call_and_what_is_settled_is_left_alone(outbox: Outbox) -> None:
    """Records that were loaded or discarded before they were published are not published."""
    outbox.make_topics()
    numbers = [outbox.add() for _ in range(10)]
    outbox.sql("UPDATE tidemark.failed_record SET state = 'DISCARDED', due_at = NULL WHERE failed_record_id = %(id)s", id=numbers[0])
    outbox.sql("UPDATE tidemark.failed_record SET state = 'LOADED', due_at = NULL WHERE failed_record_id = %(id)s", id=numbers[1])
    assert outbox.relay(limit=5, portion=2).records == 5
    assert sorted(outbox.hops()) == numbers[2:7]
    assert outbox.relay().records == 3
    assert sorted(outbox.hops()) == numbers[2:]


def test_a_portion_is_bounded_by_bytes_too(outbox: Outbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """So a portion of the largest records fits into memory. A portion has at least one record."""
    monkeypatch.setattr(relay_module, "PORTION_BYTES", 2_500)
    outbox.make_topics()
    for size in (1_000, 1_000, 1_000, 1_000, 9_000, 9_000, 1_000):
        outbox.add(random_bytes(size))
    published: list[int] = []

    def note(_cursor: PostgresCursor, _number: int, query: str) -> None:
        if "WITH taken" in query:
            published.append(len(outbox.hops()))

    with outbox.session(hooked(note)) as connection:
        assert outbox.relay(connection).records == 7
    assert published == [0, 3, 5, 6, 7]


def test_several_relays_share_the_work(outbox: Outbox) -> None:
    """Scenario 25: each record is published once, by one of the relays, and at least two of them get work."""
    outbox.make_topics(3)
    outbox.add_many(3_000)
    with ThreadPoolExecutor(3) as pool:
        done = list(pool.map(lambda _: outbox.relay(portion=50, publishers=None), range(3)))
    assert sum(one.records for one in done) == 3_000
    assert sum(one.records > 0 for one in done) >= 2
    assert outbox.waiting() == 0
    assert len(outbox.messages(outbox.tiers[0])) == 3_000
    outbox.check_published()


def test_a_relay_that_hangs_loses_its_records_to_others(outbox: Outbox) -> None:
    """Scenarios 21 and 25: it hangs after it has published. Other relays skip its records while they are locked, and publish them once its
    session is terminated, before a rewind gives up waiting for the locks. It can then no longer register anything."""
    assert ANSWER_S * 1000 < relay_module.IDLE_MS < GRACE_MS
    outbox.make_topics()
    numbers = [outbox.add(f"{number}".encode()) for number in range(6)]
    stands, go_on = threading.Event(), threading.Event()

    def stand_still(_cursor: PostgresCursor, _number: int, query: str) -> None:
        if "SET retry_topic_id = stored" in query:
            stands.set()
            go_on.wait(300)

    def hang() -> None:
        with outbox.session(hooked(stand_still)) as connection, pytest.raises(DatabaseUnavailable):
            outbox.relay(connection, portion=4, publishers=None)

    with ThreadPoolExecutor(1) as pool:
        hanging = pool.submit(hang)
        assert stands.wait(60)
        assert outbox.relay().records == 2
        assert sorted(outbox.hops()) == numbers[4:]
        until(lambda: outbox.relay().records == 4)
        before = outbox.hops()
        go_on.set()
        hanging.result()
    assert outbox.hops() == before
    assert sorted(before) == numbers
    assert len(outbox.messages(outbox.tiers[0])) == 10
    outbox.check_published()


def test_a_relay_that_dies_anywhere_loses_nothing_and_registers_nothing_twice(outbox: Outbox) -> None:
    """Scenario 21: its session ends after the n-th statement, for each n. Committed registrations stay, and messages that were published
    but not registered are published again."""
    outbox.make_topics(2, largest=10_000)
    numbers, large, last = list[int](), list[int](), 0

    def relay(cursor: type[PostgresCursor]) -> None:
        numbers.extend(outbox.add(f"{number}".encode(), partition=number % 3) for number in range(5))
        large.append(outbox.add(random_bytes(11_000)))
        with outbox.session(cursor) as connection:
            outbox.relay(connection, portion=2)

    for last in deaths(relay, outbox.watch):
        kept = outbox.hops()
        outbox.relay(portion=2)
        assert sorted(outbox.hops()) == numbers, f"after statement {last}"
        assert kept.items() <= outbox.hops().items()
    assert all(outbox.record(number)["publish_error"] for number in large)
    outbox.check_published()
    assert last >= 12


def test_portion_is_registered_in_pieces_but_as_a_whole(outbox: Outbox) -> None:
    """Pieces are registered while others are being published. If the session ends between two of them, none is registered."""
    outbox.make_topics(3)
    outbox.add_many(3_000)
    pieces: list[int] = []

    def end_at_the_second(cursor: PostgresCursor, number: int, query: str) -> None:
        if "SET retry_topic_id = stored" in query:
            pieces.append(number)
            if len(pieces) == 2:
                end_session(cursor, outbox.watch)

    with outbox.session(hooked(end_at_the_second)) as connection, pytest.raises(DatabaseUnavailable):
        outbox.relay(connection)
    assert gc.isenabled()
    assert len(pieces) >= 2
    assert outbox.hops() == {}
    assert outbox.relay().records == 3_000
    outbox.check_published()


def test_no_broker_at_all_is_told_before_anything_is_locked(outbox: Outbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scenario 27: nothing is changed either."""
    monkeypatch.setattr("tidemark.kafka.cluster.REQUEST_TIMEOUT_S", 1)
    outbox.add()
    taken: list[str] = []
    with (
        outbox.session(hooked(lambda _cursor, _number, query: taken.append(query))) as connection,
        pytest.raises(BrokerUnavailable),
    ):
        relay_module.relay(connection, {"bootstrap.servers": "127.0.0.1:1"}, outbox.spec)
    assert not any("FOR UPDATE" in query for query in taken)
    assert outbox.waiting() == 1


def test_messages_that_the_log_has_no_more_are_published_again(outbox: Outbox) -> None:
    """Scenarios 15 and 41: retention removed some messages, and another topic was deleted and created again. Permanently failed records
    keep their registration, because no drain waits for them."""
    first, second, last = outbox.tiers[0], outbox.tiers[1], outbox.tiers[-1]
    outbox.make_topics()
    trimmed = [outbox.add(f"{number}".encode()) for number in range(4)]
    recreated = [outbox.add(f"{number}".encode(), number=3) for number in range(3)]
    failed = outbox.add(failed=True)
    outbox.relay()
    before = outbox.hops()
    outbox.topics.trim(first, {0: 2})
    outbox.topics.recreate(second, **FIT)
    outbox.topics.trim(last, {0: 1})
    done = outbox.relay()
    assert done == Relayed({first: 2, second: 3}, again=5)
    after = outbox.hops()
    assert [after[number][2] for number in trimmed] == [4, 5, 2, 3]
    assert [after[number][2] for number in recreated] == [0, 1, 2]
    assert after[failed] == before[failed]
    outbox.sql("DELETE FROM tidemark.failed_record WHERE state = 'FAILED'")
    outbox.check_published()
    assert outbox.relay() == Relayed()


def test_a_session_lost_in_commit_registers_everything_or_nothing(outbox: Outbox) -> None:
    """Scenario 21: ⑤ happened, and its answer was lost. The next relay finds nothing to do, and nothing is published twice."""
    outbox.make_topics()
    numbers = [outbox.add() for _ in range(3)]
    with outbox.session() as connection:
        losing: Any = LosingAnswers(connection, when=lambda: bool(outbox.hops()))
        with pytest.raises(DatabaseUnavailable):
            outbox.relay(losing)
    assert sorted(outbox.hops()) == numbers
    assert outbox.relay() == Relayed()
    assert len(outbox.messages(outbox.tiers[0])) == 3
    outbox.check_published()


def random_bytes(size: int) -> bytes:
    """Bytes that do not compress."""
    return random.Random(size).randbytes(size)

"""How records that are not loaded are handed off in the transaction of their batch (I1), and when the batch is aborted instead."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from datetime import timedelta

import psycopg2
import pytest
from tests.integration.retry.lab import DELAYS, Lab, minutes
from tests.support import ledger
from tests.support.statements import COMMIT, counted

from tidemark.db import connect
from tidemark.kafka.reader import Reader
from tidemark.retry import Ladder
from tidemark.retry.breaker import Breaker, BreakerTripped
from tidemark.sink import commit as commit_module
from tidemark.sink.commit import commit_slice
from tidemark.worker import batches


def test_record_that_is_to_be_retried_waits_for_the_first_delay_by_the_databases_clock(lab: Lab) -> None:
    """I6: the due time is set by the database's clock. A record that fails permanently has none. The ledger counts both outcomes."""
    lab.say({"a": "retry", "b": "fail"})
    lab.produce("x", "a", "b")
    ((before,),) = lab.sql("SELECT clock_timestamp()")
    lab.run()
    ((after,),) = lab.sql("SELECT clock_timestamp()")
    ((due_at,), (none,)) = lab.failed("due_at")
    assert before + minutes(5) <= due_at <= after + minutes(5)
    assert none is None
    assert lab.failed("state, retry_number, retry_topic, retry_offset, disposition") == [
        ("WAITING", 1, f"{lab.group}.retry.5m", None, "retry"),
        ("FAILED", 0, f"{lab.group}.failed", None, "fail"),
    ]
    assert lab.consumer.counts() == {"loaded": 1, "retried": 1, "failed": 1, "sink_rows": 1}
    lab.check()


def test_without_a_ladder_a_record_that_was_not_loaded_has_failed_and_stays_in_its_table(lab: Lab) -> None:
    """Scenarios 8, 41: there is no failed topic. Nothing is dropped, and nothing is published."""
    lab.consumer.set(retry=None)
    lab.read("a", "b", answers={"a": "retry", "b": "fail"})
    assert lab.failed("state, retry_number, due_at, retry_topic") == [("FAILED", 0, None, None)] * 2
    assert lab.relay() == 0
    lab.check()


@pytest.mark.parametrize(("room", "readings"), [(batches.BUFFER_BYTES, 1), (1, 2)], ids=["kept", "too much to keep"])
def test_failed_records_are_handed_off_byte_for_byte_whether_they_were_kept_or_read_again(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, room: int, readings: int
) -> None:
    """Scenarios 11, 13: failed records are kept while there is room for them. Otherwise the slice is read a second time."""
    seen = []
    monkeypatch.setattr(batches, "BUFFER_BYTES", room)
    read = Reader.read
    monkeypatch.setattr(Reader, "read", lambda self, *of, **how: seen.append(of) or read(self, *of, **how))
    headers = [("trace", b"\xff\x00"), ("trace", None), ("", b"")]
    lab.say({"a": "retry", "b": "fail", "": "retry"})
    for value, key in (("x", b"k"), ("a", b"\x00key"), ("y", None), ("b", None), ("", b"")):
        lab.produce(value, key=key, headers=headers, timestamp=1_700_000_000_123)
    lab.run()
    stored = json.dumps([["trace", "/wA="], ["trace", None], ["", ""]])
    assert [
        (offset, None if key is None else bytes(key), bytes(value), json.dumps(said), at.timestamp())
        for offset, key, value, said, at in lab.failed("record_offset, key, value, headers, record_timestamp")
    ] == [
        (1, b"\x00key", b"a", stored, 1_700_000_000.123),
        (3, None, b"b", stored, 1_700_000_000.123),
        (4, b"", b"", stored, 1_700_000_000.123),
    ]
    assert len(seen) == readings
    lab.check()


@pytest.mark.parametrize("count", [10, 1000])
def test_hand_off_to_a_ladder_costs_one_statement_more_however_many_records_there_are(
    database_url: str, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """Besides the COPY of the failed records, only one query of the database's clock. Neither is sent if nothing fails."""
    sent: list[str] = []
    ladder = Ladder("g", (timedelta(minutes=5),))
    with contextlib.closing(psycopg2.connect(database_url)) as watch:
        group = ledger.Group(database_url, watch)
        group.sql(ledger.DDL)
        monkeypatch.setattr(commit_module, "connect", lambda *args, **named: counted(connect(*args, **named), sent))
        for kinds, more in ((ledger.of_all_kinds, 2), (ledger.all_loaded, 0)):
            sent.clear()
            part = group.slice(end=group.position()[0] + count)
            target = dataclasses.replace(group.target(), ladder=ladder, breaker=Breaker(0.9, 1))
            commit_slice(target, part, kinds(part), ledger.payloads)
            assert len(sent) == COMMIT + more, "\n\n".join(sent)
        group.check_conserved()
        states = dict(group.sql("SELECT disposition, min(state) || max(state) FROM tidemark.failed_record GROUP BY 1"))
        assert states == {"retry": "WAITINGWAITING", "fail": "FAILEDFAILED"}


# ---- the breaker


def test_breaker_stops_the_run_and_no_offset_moves(lab: Lab) -> None:
    """If most records fail, the cause is not in the records. Nothing of the slice is stored, and the next run reads it again. Earlier
    commits stay. The message names the limit and the most common error."""
    lab.consumer.set(retry={"delays": list(DELAYS), "breaker": {"ratio": 0.5, "minimum": 10}}, batch={"max_records": 20})
    lab.produce(*(["ok"] * 20 + ["down"] * 11 + ["ok"] * 9))
    lab.say({"down": "retry"})
    with pytest.raises(
        BreakerTripped, match=r"11 of 20 records failed \(55\.0%\), retry\.breaker\.ratio is 0\.5\. Most common error: Retry: the service"
    ):
        lab.run()
    assert lab.consumer.positions()[lab.topic, 0] == 20
    assert lab.failed() == []
    assert lab.consumer.attempt()["error"]["kind"] == "refused"
    with pytest.raises(BreakerTripped):  # a restart does not change the count, because it is not kept in memory
        lab.run()
    lab.consumer.set(retry={"delays": list(DELAYS), "breaker": {"ratio": 0.6, "minimum": 10}})
    lab.run()
    assert (len(lab.loaded()), lab.states()) == (29, {"WAITING": 11})
    lab.check()


def test_breaker_does_not_keep_a_drain_from_sending_records_up(lab: Lab) -> None:
    """Records in a retry topic have failed before. Even if all of them fail again, they must continue up the ladder."""
    lab.read(*(["down"] * 20), answers={"down": "retry"})
    lab.consumer.set(retry={"delays": list(DELAYS), "breaker": {"ratio": 0, "minimum": 1}}, batch={"max_failed_records": 0})
    lab.climb(minutes(5))
    assert {row[0] for row in lab.failed("retry_number")} == {2}
    lab.check()

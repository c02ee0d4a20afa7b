"""Records whose timestamps Python's `datetime` cannot represent, and unexpected errors of a relay after a run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime

import pytest
from tests.integration.retry.lab import Lab, lab_on, minutes
from tests.integration.retry.outbox import Outbox
from tests.support.kafka_topics import Topics
from tests.support.raw_records import RawRecord, produce_raw
from tests.support.scenario import Scenario
from tests.support.shell import tidemark

from tidemark.db import session
from tidemark.retry import pending as agenda
from tidemark.retry.pending import relay_at_end

ANY_TIME = {"message_timestamp_after_max_ms": str(2**63 - 1)}
"""Lets a topic accept timestamps more than an hour in the future."""
TIMES = {
    -210_866_803_200_000: "-4713-11-24T00:00:00.000Z",
    -62_167_219_200_001: "-0001-12-31T23:59:59.999Z",
    -62_135_596_800_001: "0000-12-31T23:59:59.999Z",
    -62_135_596_800_000: "0001-01-01T00:00:00.000Z",
    253_402_300_799_999: "9999-12-31T23:59:59.999Z",
    253_402_300_800_000: "+10000-01-01T00:00:00.000Z",
    9_223_372_036_854_775: "+294247-01-10T04:00:54.775Z",
}
"""Milliseconds since 1970, and the same in ISO 8601. The first and the last are the limits of what Tidemark stores."""
ARROW = """
    import pathlib

    import pyarrow as pa

    ANSWERS = pathlib.Path(__file__).with_name("answers.json")


    def transform(batch: pa.RecordBatch) -> pa.RecordBatch:
        lineage = {name: batch[name] for name in ("kafka_topic", "kafka_partition", "kafka_offset")}
        said = pa.array(["retry" if "retry" in ANSWERS.read_text() else None] * batch.num_rows, pa.string())
        rows = {"payload": batch["value"], "at": batch["timestamp"], "disposition": said}
        return pa.RecordBatch.from_pydict({**rows, **lineage})
"""


@pytest.fixture
def far(scenario: Scenario, topics: Topics) -> Iterator[Lab]:
    """A consumer whose records, one for each of `TIMES`, failed when they were first read."""
    topic = topics.create(1, **ANY_TIME)
    with lab_on(scenario, topics, topic=topic, transform=ARROW, ddl="payload bytea, at timestamptz") as lab:
        produce_raw(topics.servers, topic, [RawRecord(b"x", millis) for millis in TIMES])
        lab.say({"*": "retry"})
        lab.run()
        yield lab


def test_any_timestamp_that_kafka_takes_is_told_by_the_relay_and_loaded_by_the_drain(far: Lab) -> None:
    """The header is in ISO 8601, with a sign for years outside 0 to 9999, as in Java's `Instant`. The transform gets the same time as in
    the first run."""
    far.relay()
    messages = far.consumer.records(f"{far.group}.retry.5m")
    assert [dict(message.headers)["tidemark.timestamp"].decode() for message in messages.values()] == list(TIMES.values())
    far.say({})
    far.age(minutes(5))
    far.drain()
    query = f"SELECT (extract(epoch FROM at) * 1000)::bigint FROM {far.table} ORDER BY kafka_offset"
    assert [millis for (millis,) in far.sql(query)] == list(TIMES)
    assert far.states() == {"LOADED": len(TIMES)}


def test_list_show_and_export_tell_times_that_python_cannot_hold(far: Lab) -> None:
    """They are printed as Postgres writes them, and all others as usual."""
    far.sql("UPDATE tidemark.failed_record SET record_timestamp = 'infinity' WHERE record_offset = 0")

    def command(*words: str) -> str:
        done = tidemark(far.consumer, "retries", *words)
        assert done.returncode == 0, done.stderr
        return done.stdout

    listed = {one["offset"]: one["timestamp"] for one in json.loads(command("list", far.spec.name, "--output", "json"))}
    exported = [json.loads(line) for line in command("export", far.spec.name).splitlines()]
    assert {one["offset"]: one["timestamp"] for one in exported} == listed
    assert [listed[0], listed[2], listed[5]] == ["infinity", "0001-12-31 23:59:59.999+00 BC", "10000-01-01 00:00:00+00"]
    assert datetime.fromisoformat(listed[4]) == datetime(9999, 12, 31, 23, 59, 59, 999_000, UTC)
    numbers = {one["offset"]: one["number"] for one in exported}
    assert "0@5, 10000-01-01 00:00:00+00\n" in command("show", far.spec.name, str(numbers[5]))
    assert "0@3, 0001-01-01 00:00:00 UTC\n" in command("show", far.spec.name, str(numbers[3]))


def test_what_a_relay_raises_after_a_run_never_fails_the_run(outbox: Outbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run has committed, so the error is reported, not raised."""

    def broken(*_: object) -> None:
        raise ValueError("year 10000 is out of range")

    monkeypatch.setattr(agenda, "relay", broken)
    (said,) = relay_at_end(outbox.consumer.connections, outbox.spec)
    assert said == "Failed records are not published yet: ValueError: year 10000 is out of range"


def test_session_reads_infinite_and_distant_times(database_url: str) -> None:
    """In every session of Tidemark, such times are returned as text."""
    with session(database_url) as connection, connection.cursor() as cur:
        cur.execute("SET TimeZone = '-5'")
        texts = ["infinity", "-infinity", "4713-01-01 00:00:00-05 BC", "10000-01-01 00:00:00-05", "9999-12-31 23:59:59-05"]
        cur.execute("SELECT unnest(%s::timestamptz[])", (texts,))
        assert [moment for (moment,) in cur.fetchall()] == texts
        cur.execute("SELECT '2026-01-01 00:00:00Z'::timestamptz, NULL::timestamptz")
        assert cur.fetchone() == (datetime(2026, 1, 1, tzinfo=UTC), None)

"""The audit: it balances whatever happens to records, and names every discrepancy, whichever table or topic is wrong."""

from __future__ import annotations

import json

import pytest
from tests.integration.retry.lab import Lab, minutes
from tests.support.shell import tidemark

from tidemark.db import session
from tidemark.quality.audit import Account, Audit, audit
from tidemark.records.ranges import TopicPartition


@pytest.fixture
def mixed(lab: Lab) -> Lab:
    """A record of each kind: loaded at once and later, skipped at once and later, waiting in two tiers, failed, discarded."""
    lab.read(
        "a",
        "later",
        "no",
        "not now",
        "second",
        "bad",
        "away",
        answers={"later": "retry", "no": "skip", "not now": "retry", "first": "retry", "second": "retry", "bad": "fail", "away": "retry"},
    )
    lab.make_due(minutes(5))
    lab.say({"not now": "skip", "second": "retry", "first": "retry", "away": "retry"})
    lab.drain()
    lab.climb(minutes(5))
    lab.produce("first")
    lab.run()
    lab.relay()
    lab.sql("UPDATE tidemark.failed_record SET state = 'DISCARDED', due_at = NULL WHERE record_offset = 6")
    return lab


def audited(lab: Lab) -> Audit:
    with session(lab.url) as connection:
        return audit(connection, lab.cluster, lab.spec)


LIES = (
    ("DELETE FROM tidemark.failed_record WHERE record_offset = 4", "8 records were read, 7 accounted for"),
    ("DELETE FROM tidemark.failed_record WHERE record_offset = 5", "records not loaded at once: 6 in the ledger, 5 stored"),
    ("DELETE FROM SINK WHERE kafka_offset = 1", "records loaded: 2 in the ledger, 1 in the sink"),
    ("UPDATE tidemark.failed_record SET sink_rows = 2 WHERE record_offset = 1", "rows written: 3 in the ledger, 2 in the sink"),
    ("UPDATE tidemark.failed_record SET state = 'SKIPPED', sink_rows = 0 WHERE record_offset = 1", "1 in the ledger, 2 in the sink"),
    ("INSERT INTO SINK SELECT payload, kafka_topic_id, kafka_partition, 5, 0 FROM SINK LIMIT 1", "2 in the ledger, 3 in the sink"),
    ("DELETE FROM tidemark.batch WHERE drained AND start_offset = 4", "the ledger ends at 4, the position is 6"),
)


def test_sums_are_right_and_what_does_not_add_up_is_named(mixed: Lab) -> None:
    """Read = loaded + skipped + waiting in each tier + failed + discarded + unaccounted, per partition. Each lie of a table is named."""
    waiting = {f"{mixed.group}.retry.5m": 1, f"{mixed.group}.retry.30m": 1}
    account = Account(TopicPartition(mixed.topic, 0), 8, 1, 1, 2, waiting, 1, 1, 0)
    assert audited(mixed) == Audit(mixed.group, (account,), (), ())
    assert account.explained == account.read
    for told, said in LIES:
        lie = told.replace("SINK", mixed.table)
        table = next(word for word in lie.split() if "." in word)
        mixed.sql(f"CREATE TABLE saved AS TABLE {table}")
        mixed.sql(lie)
        differences = audited(mixed).differences
        assert any(said in difference for difference in differences), differences
        mixed.sql(f"DELETE FROM {table}; INSERT INTO {table} OVERRIDING SYSTEM VALUE TABLE saved; DROP TABLE saved")
    assert audited(mixed).differences == ()


def test_messages_that_are_not_where_they_are_said_to_be_are_told_as_astray(mixed: Lab) -> None:
    """Nothing is lost: the next drain puts these records back into the outbox, and the account always balances."""
    tier = f"{mixed.group}.retry.30m"
    mixed.topics.trim(tier, {0: mixed.ends(tier)})
    found = audited(mixed)
    assert (found.balanced, len(found.astray)) == (True, 1)
    assert f"{tier}/0: records wait at offsets 0 to 0, but the log is [2, 2)." in found.astray
    mixed.topics.delete(tier)
    assert audited(mixed).astray == (f"{tier}/0: 1 record waits for this topic, which is gone.",)
    mixed.say({})
    for _ in range(2):
        mixed.age(minutes(60))
        mixed.drain()
        mixed.relay()
    mixed.drain()
    assert audited(mixed).astray == ()
    assert mixed.states() == {"LOADED": 3, "SKIPPED": 1, "FAILED": 1, "DISCARDED": 1}
    mixed.check()


def test_command_prints_the_accounts_and_fails_where_they_do_not_balance(mixed: Lab) -> None:
    done = tidemark(mixed.consumer, "audit", mixed.consumer.name)
    assert done.returncode == 0, done.stderr
    assert "every record read is accounted for exactly once" in done.stdout
    assert f"1 wait in {mixed.group}.retry.30m" in done.stdout
    mixed.sql("DELETE FROM tidemark.failed_record WHERE record_offset = 4")
    done = tidemark(mixed.consumer, "audit", mixed.consumer.name, "--output", "json")
    assert done.returncode == 1
    told = json.loads(done.stdout)
    assert (told["balanced"], told["accounts"][0]["read"], told["accounts"][0]["loaded_later"]) == (False, 8, 1)

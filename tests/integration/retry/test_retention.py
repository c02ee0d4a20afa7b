"""Payloads of settled records are kept for a limited time; the records themselves and their outcomes permanently."""

from __future__ import annotations

import json
from datetime import timedelta

from tests.integration.retry.lab import Lab, minutes
from tests.support.buffers import counted
from tests.support.shell import tidemark

from tidemark.db import session, transaction
from tidemark.retry import admin
from tidemark.retry.admin import Payload
from tidemark.retry.filter import Filter, RecordState
from tidemark.retry.payload_retention import empty_settled

WHY = {"reason": "the city does not exist", "by": "ann@host"}
HOUR, DAY = timedelta(hours=1), timedelta(days=1)


def test_records_that_were_settled_long_ago_are_emptied_and_go_on_to_count(lab: Lab) -> None:
    """The payloads of loaded, skipped and discarded records are removed in portions, including their versions before an edit. Waiting and
    failed records keep theirs. An emptied record is shown as such and is not redriven."""
    lab.say({"a": "retry", "b": "retry", "c": "fail", "d": "fail", "e": "fail", "f": "retry"})
    lab.topics.produce(lab.topic, list("abcdef"), key="k", headers=[("trace", b"1")])
    lab.run()
    lab.make_due(minutes(5))
    lab.say({"b": "skip", "f": "retry"})
    lab.drain()
    numbers = dict(lab.failed("convert_from(value, 'UTF8'), failed_record_id"))
    with session(lab.url) as connection:
        admin.edit(connection, lab.group, [(numbers["d"], lambda was: Payload(was.key, b"D", was.headers))], **WHY)
        admin.discard(connection, lab.group, Filter(numbers=(numbers["c"], numbers["d"])), **WHY)
        assert empty_settled(connection, DAY) == 0
        lab.age(timedelta(hours=25))
        assert empty_settled(connection, DAY, portion=3) == 4
        assert empty_settled(connection, DAY, portion=3) == 0
        payload = "state, key, value, headers, emptied_at IS NOT NULL"
        kept, gone = (b"k", [["trace", "MQ=="]]), (None, None, [], True)
        assert lab.failed(payload) == [
            ("LOADED", *gone),
            ("SKIPPED", *gone),
            ("DISCARDED", *gone),
            ("DISCARDED", *gone),
            ("FAILED", kept[0], b"e", kept[1], False),
            ("WAITING", kept[0], b"f", kept[1], False),
        ]
        assert lab.sql("SELECT key, value, headers FROM tidemark.failed_record_edit") == [(None, None, [])]
    planned = lab.plan_redrive(Filter(states=(RecordState.DISCARDED, RecordState.FAILED)))
    done = lab.apply_redrive(planned.redrive.redrive_id)
    assert (done.redrive.redriven, done.passed_over) == (1, {"its payload was emptied": 2})
    shown = tidemark(lab.consumer, "retries", "show", lab.spec.name, str(numbers["d"])).stdout
    assert "payload emptied on 20" in " ".join(shown.split())
    assert "value" not in shown
    assert lab.states() == {"LOADED": 1, "SKIPPED": 1, "DISCARDED": 2, "WAITING": 2}
    lab.check()


def test_records_that_are_kept_longer_are_not_read(lab: Lab) -> None:
    """The settled records of 30 days may number in the millions, and `tidemark maintain` runs daily."""
    lab.read("a", answers={"a": "fail"})
    lab.sql("""
        INSERT INTO tidemark.failed_record (group_id, topic_id, partition, record_offset, headers, disposition, error_type, error_text,
                                            attempt_id, state, changed_at, value)
        SELECT group_id, topic_id, 100, number, '[]', 'retry', 'Timeout', 'no answer', attempt_id, 'LOADED',
               clock_timestamp() - number * interval '1 hour', '\\x00'
          FROM (SELECT * FROM tidemark.failed_record LIMIT 1) record, generate_series(1, 20000) number
    """)
    lab.sql("VACUUM ANALYZE tidemark.failed_record")
    with session(lab.url) as connection, counted(connection) as spent:
        assert empty_settled(connection, 19_990.5 * HOUR) == 10
    assert sum(each.buffers for each in spent) < 500


def test_the_command_empties_them_with_what_rewinds_have_left(lab: Lab) -> None:
    """`tidemark maintain` keeps payloads for 30 days or ``--keep``, but not for less than the minimum in the settings. It stores who ran
    it, when, and what it removed."""
    lab.read("a", answers={"a": "retry"})
    lab.make_due(minutes(5))
    lab.say({})
    lab.drain()
    lab.age(timedelta(days=29))
    assert tidemark(lab.consumer, "maintain").stdout == "nothing to do\n"
    lab.age(timedelta(days=2))
    assert tidemark(lab.consumer, "maintain").stdout == "removed the payloads of 1 settled failed record\n"
    refused = tidemark(lab.consumer, "maintain", "--keep", "0s")
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "keep: 0s is less than 7d" in refused.stderr
    assert "TIDEMARK_KEEP_AT_LEAST" in refused.stderr
    lower = {"TIDEMARK_KEEP_AT_LEAST": "0s"}
    assert json.loads(tidemark(lab.consumer, "maintain", "--keep", "0s", "--output", "json", env=lower).stdout)["emptied"] == 0
    with session(lab.url) as connection, transaction(connection) as cur:
        cur.execute(
            "SELECT extract(day FROM keep)::int, archives, rows, payloads, done_by LIKE '%@%', ended_at >= begun_at"
            " FROM tidemark.maintenance ORDER BY maintenance_id"
        )
        assert cur.fetchall() == [(30, 0, 0, 0, True, True), (30, 0, 0, 1, True, True), (0, 0, 0, 0, True, True)]
    lab.check()

"""Redrives: the plan fixes a set of records, and each portion sent stays sent, whatever happens in between."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from psycopg2.extensions import cursor as PostgresCursor
from tests.integration.retry.outbox import Outbox
from tests.support.by_hand import WHY, ByHand
from tests.support.deaths import deaths
from tests.support.shell import tidemark
from tests.support.waiting import until

from tidemark.db import REWIND_LOCK
from tidemark.errors import BadInput
from tidemark.retry import admin, redrive
from tidemark.retry.filter import Filter, RecordState
from tidemark.retry.redrive import Destination, NoLadder, PlanAltered, RedriveInProgress, RedrivePhase
from tidemark.retry.topics import TopicsUnfit

REASON = ("--reason", "the service is back again")


plan, apply = ByHand.plan_redrive, ByHand.apply_redrive


def states(outbox: Outbox) -> list[str]:
    return [state for (state,) in outbox.sql("SELECT state FROM tidemark.failed_record ORDER BY failed_record_id")]


def image(outbox: Outbox) -> list[Any]:
    """Returns every failed record, without its timestamps and payload."""
    return outbox.sql(
        "SELECT failed_record_id, state, retry_number, retry_topic, retry_offset, error_type, redrives, jsonb_array_length(story)"
        " FROM tidemark.failed_record ORDER BY 1"
    )


def test_a_plan_is_a_dry_run_with_counts_and_examples(outbox: Outbox) -> None:
    """Scenario 39: a plan changes no record. Records that already wait for a retry, or were redriven too often, are counted but not part of
    it. Looking at the plan later shows the same."""
    for number in range(3):
        outbox.add(error=("TimeoutError", f"down {number}"), failed=True)
    outbox.add(error=("KeyError", "no such city"), failed=True, partition=1)
    outbox.add(error=("KeyError", "waits"))
    worn = outbox.add(error=("KeyError", "again"), failed=True)
    outbox.sql("UPDATE tidemark.failed_record SET redrives = 3 WHERE failed_record_id = %(id)s", id=worn)
    before = image(outbox)
    made = plan(outbox)
    assert image(outbox) == before
    assert outbox.waiting() == 6
    assert (made.redrive.state, made.redrive.planned, made.waiting, made.worn_out) == (RedrivePhase.PLANNED, 4, 1, 1)
    with outbox.session() as connection:
        assert redrive.preview(connection, made.redrive.redrive_id) == made
    done = apply(outbox, made.redrive.redrive_id)
    assert (done.redrive.redriven, done.waiting, done.worn_out) == (4, 0, 0)
    assert [(one["error_type"], one["records"]) for one in made.errors] == [("TimeoutError", 3), ("KeyError", 1)]
    assert [(one["number"], one["error_text"]) for one in made.examples][:2] == [(1, "down 0"), (2, "down 1")]
    assert [(one["topic"], one["records"]) for one in made.topics] == [(outbox.topic, 4)]


def test_redriven_records_begin_their_ladder_anew(outbox: Outbox) -> None:
    """Retry number, due time, topic and budget are as after the hand-off. Earlier tries are in the story, and the records are published
    again."""
    outbox.make_topics()
    number = outbox.add(b"x", error=("TimeoutError", "down"), failed=True, number=4)
    outbox.relay()
    outbox.sql("UPDATE tidemark.failed_record SET ladder_at = ladder_at - interval '2 days', changed_at = changed_at - interval '1 day'")
    old = outbox.record(number)
    planned = plan(outbox)
    apply(outbox, planned.redrive.redrive_id)
    row = outbox.record(number)
    assert (row["state"], row["retry_number"], row["retry_topic"], row["retry_offset"]) == ("WAITING", 1, outbox.tiers[0], None)
    assert row["due_at"] - row["ladder_at"] == pytest.approx(timedelta(minutes=5), abs=timedelta(seconds=1))
    assert row["ladder_at"] > old["ladder_at"] + timedelta(days=1)
    assert (row["redrives"], row["action_id"]) == (1, 1)
    assert (row["error_type"], row["error_text"]) == ("Redriven", "by bob: the service is back again")
    (tried,) = row["story"]
    assert (tried["number"], tried["type"], tried["text"]) == (3, "TimeoutError", "down")
    assert datetime.fromisoformat(tried["at"]) == old["changed_at"]
    assert outbox.relay().published == {outbox.tiers[0]: 1}
    outbox.check_published()


def test_a_try_at_once_goes_by_a_topic_in_which_nothing_waits(outbox: Outbox) -> None:
    """It is due at once and is the record's last retry. Refused if the topic is missing and must not be created."""
    outbox.make_topics(without=[outbox.tiers[2]])
    waiting, number = outbox.add(), outbox.add(failed=True)
    retry = outbox.consumer.keys["retry"]
    outbox.consumer.set(retry={**retry, "topics": {"create": False}})
    redrive_id = plan(outbox, destination=Destination.NOW).redrive.redrive_id
    with pytest.raises(TopicsUnfit, match="it does not exist"):
        apply(outbox, redrive_id)
    assert outbox.record(number)["state"] == "FAILED"
    outbox.consumer.set(retry=retry)
    apply(outbox, redrive_id)
    row = outbox.record(number)
    assert (row["retry_number"], row["retry_topic"], row["due_at"] <= datetime.now(UTC)) == (3, outbox.tiers[2], True)
    outbox.relay()
    outbox.adopt_topics()
    assert outbox.hops()[number][0] == outbox.tiers[2]
    assert outbox.hops()[waiting][0] == outbox.tiers[0]


def test_a_consumer_without_delays_is_redriven_at_once(outbox: Outbox) -> None:
    number = outbox.add(failed=True)
    outbox.consumer.set(retry=None)
    with pytest.raises(NoLadder, match="--to now"):
        plan(outbox, destination=Destination.LADDER)
    planned = plan(outbox).redrive.redrive_id
    outbox.make_topic(outbox.tiers[0])
    assert outbox.tiers[0] == f"{outbox.group}.retry.now"
    apply(outbox, planned)
    assert (outbox.record(number)["retry_number"], outbox.record(number)["retry_topic"]) == (0, outbox.tiers[0])


def test_the_set_is_fixed_when_it_is_planned(outbox: Outbox) -> None:
    """Scenario 39: records that fail later are not part of it, even if they match the filter. A limit takes the first records."""
    for _ in range(5):
        outbox.add(failed=True)
    planned = plan(outbox, limit=3).redrive
    outbox.add(failed=True)
    done = apply(outbox, planned.redrive_id)
    assert (done.redrive.records, done.redrive.redriven) == (3, 3)
    assert states(outbox) == ["WAITING"] * 3 + ["FAILED"] * 3


def test_plan_that_was_written_to_is_refused_by_its_digest(outbox: Outbox) -> None:
    """The events contain the digest of settings and records. It stays the same while the redrive is applied."""
    for _ in range(3):
        outbox.add(failed=True)
    outbox.make_topics()
    made = plan(outbox, limit=2).redrive
    for change, back in (
        ("INSERT INTO tidemark.redrive_record VALUES (%(id)s, 3)", "DELETE FROM tidemark.redrive_record WHERE failed_record_id = 3"),
        ("UPDATE tidemark.redrive SET destination = 'now'", "UPDATE tidemark.redrive SET destination = 'ladder'"),
    ):
        outbox.sql(change, id=made.redrive_id)
        before = image(outbox)
        with pytest.raises(PlanAltered, match="do not match its digest"):
            apply(outbox, made.redrive_id)
        assert (image(outbox), states(outbox)) == (before, ["FAILED"] * 3)
        outbox.sql(back, id=made.redrive_id)
    assert apply(outbox, made.redrive_id, portion=1).redrive.redriven == 2
    told = outbox.sql("SELECT kind, digest FROM tidemark.audit_event WHERE kind LIKE 'REDRIVE%%' ORDER BY event_id", id=0)
    assert told == [(f"REDRIVE {kind}", made.digest) for kind in ("PLANNED", "STARTED", "DONE")]
    other = plan(outbox).redrive
    assert len({None, made.digest, other.digest}) == 3


def test_what_changed_since_the_plan_is_passed_over_with_the_reason(outbox: Outbox) -> None:
    """Scenarios 39 and 40: records that were loaded, skipped, discarded, redriven or withdrawn by a rewind are not touched. Applying the
    same redrive a second time does nothing."""
    numbers = [outbox.add(failed=True) for _ in range(6)]
    planned = plan(outbox).redrive
    change = "UPDATE tidemark.failed_record SET state = %(state)s WHERE failed_record_id = %(id)s"
    for number, state in zip(numbers, ("LOADED", "SKIPPED", "DISCARDED"), strict=False):
        outbox.sql(change, state=state, id=number)
    outbox.sql("DELETE FROM tidemark.failed_record WHERE failed_record_id = %(id)s", id=numbers[3])
    apply(outbox, plan(outbox, Filter(numbers=(numbers[4],))).redrive.redrive_id)
    before = image(outbox)[:-1]
    done = apply(outbox, planned.redrive_id)
    assert (done.redrive.state, done.redrive.redriven, done.redrive.passed_over) == (RedrivePhase.DONE, 1, 5)
    assert done.passed_over == {
        "was loaded meanwhile": 1,
        "was skipped meanwhile": 1,
        "was discarded meanwhile": 1,
        "withdrawn by a rewind": 1,
        "waits for a retry": 1,
    }
    assert image(outbox)[:-1] == before
    after = image(outbox)
    assert apply(outbox, planned.redrive_id).redrive == done.redrive
    assert image(outbox) == after


def test_a_record_that_is_discarded_in_this_moment_is_waited_for_and_stays_discarded(outbox: Outbox) -> None:
    """If another transaction settles the record between the redrive's read and its update, that transaction's change counts."""
    number = outbox.add(failed=True)
    planned = plan(outbox).redrive.redrive_id
    with outbox.session() as operator, ThreadPoolExecutor(1) as pool:
        with operator.cursor() as cur:
            cur.execute("UPDATE tidemark.failed_record SET state = 'DISCARDED' WHERE failed_record_id = %s", (number,))
        redriving = pool.submit(apply, outbox, planned)
        until(lambda: outbox.sql("SELECT 1 FROM pg_locks WHERE NOT granted"))
        operator.commit()
        assert redriving.result(180).passed_over == {"was changed meanwhile": 1}
    assert (outbox.record(number)["state"], outbox.record(number)["redrives"]) == ("DISCARDED", 0)


def test_a_record_is_not_redriven_without_end(outbox: Outbox) -> None:
    """Scenario 39: redrives are counted. At the limit, a record is not included in plans, and earlier plans pass over it."""
    number = outbox.add(failed=True)
    fail = "UPDATE tidemark.failed_record SET state = 'FAILED', due_at = NULL"
    for _ in range(2):
        apply(outbox, plan(outbox, max_redrives=2).redrive.redrive_id)
        outbox.sql(fail)
    with pytest.raises(BadInput, match="1 was redriven 2 times"):
        plan(outbox, max_redrives=2)
    early, late = plan(outbox, max_redrives=3).redrive, plan(outbox, max_redrives=3).redrive
    apply(outbox, early.redrive_id)
    outbox.sql(fail)
    assert apply(outbox, late.redrive_id).passed_over == {"was redriven 3 times": 1}
    assert outbox.record(number)["redrives"] == 3


def test_discarded_records_are_redriven_only_if_that_is_said(outbox: Outbox) -> None:
    number = outbox.add(failed=True)
    with outbox.session() as connection:
        admin.discard(connection, outbox.group, Filter(numbers=(number,)), **WHY)
    with pytest.raises(BadInput, match="no record to redrive"):
        plan(outbox)
    with pytest.raises(BadInput, match="LOADED cannot be redriven"):
        plan(outbox, Filter(states=(RecordState.LOADED,)))
    apply(outbox, plan(outbox, Filter(states=(RecordState.DISCARDED,))).redrive.redrive_id)
    assert states(outbox) == ["WAITING"]


def test_what_the_broker_did_not_take_is_published_again(outbox: Outbox) -> None:
    """Scenarios 26 and 39: although it waits for a retry already."""
    number = outbox.add()
    outbox.sql("UPDATE tidemark.failed_record SET publish_error = 'MSG_SIZE_TOO_LARGE'")
    apply(outbox, plan(outbox).redrive.redrive_id)
    assert (outbox.record(number)["publish_error"], outbox.waiting()) == (None, 1)


def test_a_rate_is_kept_on_the_whole(outbox: Outbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scenario 39: no portion exceeds one second's records, and the redrive waits between portions. Measured by the waits that it
    requests, on a clock that stands still otherwise."""
    outbox.add_many(100, failed=True)
    planned = plan(outbox, per_second=40).redrive
    waits: list[float] = []
    sizes: list[int] = []
    monkeypatch.setattr(redrive, "time", SimpleNamespace(monotonic=lambda: sum(waits), sleep=waits.append))
    apply(outbox, planned.redrive_id, on_progress=lambda now: sizes.append(now.redriven))
    assert sizes == [40, 80, 100]
    assert waits == [1, 1]


def test_a_redrive_is_stopped_and_goes_on(outbox: Outbox) -> None:
    """Scenario 39: it stops after its current portion, and the next application does the rest. Each is stored as a separate action."""
    outbox.add_many(50, failed=True)
    planned = plan(outbox).redrive.redrive_id

    def stop(now: redrive.RedriveProgress) -> None:
        if now.redriven == 20:
            with outbox.session() as connection:
                redrive.stop(connection, planned, reason="the service is down again", by="eve")

    stopped = apply(outbox, planned, portion=10, on_progress=stop).redrive
    assert (stopped.state, stopped.redriven, stopped.planned) == (RedrivePhase.STOPPED, 20, 30)
    done = apply(outbox, planned, portion=10).redrive
    assert (done.state, done.redriven, done.planned) == (RedrivePhase.DONE, 50, 0)
    kept = outbox.sql("SELECT kind, reason, done_by, records FROM tidemark.retry_action ORDER BY action_id")
    assert kept == [
        ("REDRIVE", WHY["reason"], "bob", 20),
        ("STOP", "the service is down again", "eve", 30),
        ("REDRIVE", WHY["reason"], "bob", 30),
    ]
    assert outbox.sql("SELECT DISTINCT redrives FROM tidemark.failed_record") == [(1,)]


def test_one_redrive_of_a_consumer_at_a_time(outbox: Outbox) -> None:
    """Scenario 39: a second redrive is refused while the first is running, and can be applied when that is done."""
    outbox.add_many(20, failed=True)
    first = plan(outbox, Filter(to_offset=10)).redrive.redrive_id
    second = plan(outbox, Filter(from_offset=10)).redrive.redrive_id
    refused = []

    def meanwhile(_: redrive.RedriveProgress) -> None:
        with pytest.raises(RedriveInProgress):
            apply(outbox, second)
        refused.append(second)

    apply(outbox, first, on_progress=meanwhile)
    assert refused
    assert apply(outbox, second).redrive.redriven == 10


def test_a_plan_that_dies_anywhere_is_stored_whole_or_not_at_all(outbox: Outbox) -> None:
    """Scenario 21."""
    outbox.add_many(5, failed=True)
    last = 0

    for last in deaths(lambda cursor: plan(outbox, cursor=cursor), outbox.watch):
        assert outbox.sql("SELECT 1 FROM tidemark.redrive UNION ALL SELECT 1 FROM tidemark.redrive_record") == [], last
    assert last >= 2


def test_an_application_that_dies_anywhere_leaves_whole_portions_and_goes_on(outbox: Outbox) -> None:
    """Scenarios 21 and 39: dies after the n-th statement, for each n. Each record is either unchanged or redriven once. The next
    application does the rest, without any unlocking."""
    died, last, planned = 0, 0, 0

    def act(cursor: type[PostgresCursor]) -> None:
        nonlocal planned
        outbox.sql("DELETE FROM tidemark.failed_record")
        outbox.add_many(7, failed=True)
        planned = plan(outbox).redrive.redrive_id
        apply(outbox, planned, cursor=cursor, portion=3)

    for died, last in enumerate(deaths(act, outbox.watch), 1):
        counts = outbox.sql("SELECT state, redrives, count(*) FROM tidemark.failed_record GROUP BY 1, 2")
        assert all((state, redrives) in (("FAILED", 0), ("WAITING", 1)) for state, redrives, _ in counts)
        assert sum(number for state, _, number in counts if state == "WAITING") in (0, 3, 6, 7), f"death {died}, after statement {last}"
        done = apply(outbox, planned, portion=3).redrive
        assert (done.state, done.redriven) == (RedrivePhase.DONE, 7)
        assert outbox.sql("SELECT DISTINCT state, redrives FROM tidemark.failed_record") == [("WAITING", 1)]
    assert last >= 17
    ((noted, sent),) = outbox.sql(
        "SELECT (SELECT sum(records) FROM tidemark.retry_action), (SELECT count(*) FROM tidemark.redrive_record WHERE state = 'REDRIVEN')"
    )
    assert noted == sent == 7 * (died + 1)


def test_a_rewind_is_waited_for_and_waits(outbox: Outbox) -> None:
    """An application of a redrive takes the rewind lock shared, so it waits for a running rewind."""
    outbox.add(failed=True)
    planned = plan(outbox).redrive.redrive_id
    locked = threading.Event()

    def watch(_: redrive.RedriveProgress) -> None:
        locked.set()

    with outbox.session() as rewind, ThreadPoolExecutor(1) as pool:
        with rewind.cursor() as cur:
            cur.execute("SELECT pg_advisory_xact_lock(%s, %s)", (REWIND_LOCK, outbox.group_id))
        redriving = pool.submit(lambda: apply(outbox, planned, on_progress=watch))
        waits = "SELECT 1 FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
        until(lambda: outbox.sql(waits))
        assert not locked.is_set()
        assert states(outbox) == ["FAILED"]
        rewind.rollback()
        assert redriving.result(180).redrive.redriven == 1


def test_a_redrive_works_when_the_origin_topic_is_gone(outbox: Outbox) -> None:
    """Scenario 39: Postgres has the record."""
    outbox.make_topics()
    number = outbox.add(b"x", failed=True)
    planned = plan(outbox).redrive.redrive_id
    outbox.topics.delete(outbox.topic)
    apply(outbox, planned)
    assert outbox.relay().records == 1
    assert outbox.hops()[number][0] == outbox.tiers[0]
    outbox.check_published()


def test_plan_apply_and_list_in_words(outbox: Outbox) -> None:
    """The commands as operators type them; their output fits 80 columns. Refusals exit with status 1, wrong usage with 2."""
    for number in range(3):
        outbox.add(error=("TimeoutError", f"the service did not answer {number} " + "x" * 100), failed=True)

    def command(*words: str) -> Any:
        return tidemark(outbox.consumer, "redrive", *words)

    done = command("plan", outbox.name, "--error", "TimeoutError", "--per-second", "100", *REASON)
    assert (done.returncode, done.stderr) == (0, "nothing has changed yet; to apply it: tidemark redrive apply 1\n")
    assert f"Redrive 1 (PLANNED): 3 records of {outbox.name} to the first delay, at most 100 per second" in done.stdout
    assert "Which: error type TimeoutError" in done.stdout
    applied = command("apply", "1")
    assert applied.returncode == 0, applied.stderr
    assert "3 redriven, 0 passed over, 0 left" in applied.stdout
    told = json.loads(command("apply", "1", "--output", "json").stdout)
    assert (told["state"], told["redriven"], told["filter"]) == ("DONE", 3, {"error_type": "TimeoutError"})
    listed = outbox.in_terminal("redrive", "list", outbox.name)
    assert max(map(len, listed)) <= 80
    assert listed[-1].split()[:2] == ["1", "DONE"]
    assert "there is no redrive 7" in command("show", "7").stderr
    assert command("apply", "7").returncode == 1
    assert command("plan", outbox.name, *REASON).returncode == 1
    assert command("plan", outbox.name, "--to", "moon", *REASON).returncode == 2
    assert command("plan", outbox.name).returncode == 2

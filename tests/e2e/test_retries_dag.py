"""The DAGs ``drain_retries``, ``redrive`` and ``discard`` in a real Airflow: failed records climb their ladder and are loaded, redriven or
discarded."""

from __future__ import annotations

import time
from typing import Any

import pytest
from tests.e2e.lab import Consumer, Lab, Run
from tests.support.waiting import until

from tidemark.db import session
from tidemark.kafka.cluster import Cluster
from tidemark.local.airflow_client import AirflowRefused
from tidemark.quality.audit import audit
from tidemark.retry.topics import ensure_topics
from tidemark.spec import ConsumerSpec, find_consumer

DRAINS, REDRIVE, DISCARD = "drain_retries", "redrive", "discard"
RECORDS = 10
TASKS = ("relay", "due", "drain", "validate", "publish", "done")


class Ladder:
    """A consumer with a ladder and a validation. Its transform calls a service, whose answers `Lab.answer` sets."""

    def __init__(self, lab: Lab, name: str) -> None:
        self.lab, self.name = lab, name
        self.spec: ConsumerSpec = find_consumer(name, lab.folder / "consumers")
        self.consumer: Consumer = lab.consumer(name)
        self.cluster = Cluster({"bootstrap.servers": lab.topics.servers})
        found = ensure_topics(self.cluster, self.spec, create=True)
        lab.topics.adopt(one.topic.name for one in found)

    def failed(self) -> dict[int, tuple[str, str | None, bool]]:
        """By offset, the state and topic of each record that was not loaded at once, and whether it has been published to that topic."""
        query = (
            "SELECT record_offset, failed_record.state, retry_topic, retry_offset IS NOT NULL FROM tidemark.failed_record"
            " JOIN tidemark.consumer_group USING (group_id) WHERE name = %s"
        )
        return {offset: (state, topic, published) for offset, state, topic, published in self.lab.sql(query, self.name)}

    def attempts(self) -> set[tuple[str, str]]:
        """The DAG and task of every attempt."""
        query = "SELECT DISTINCT dag_id, task_id FROM tidemark.attempt JOIN tidemark.consumer_group USING (group_id) WHERE name = %s"
        return {tuple(row) for row in self.lab.sql(query, self.name)}

    def announced(self) -> list[tuple[str, dict[str, Any]]]:
        """The DAG and ranges of every event of the sink, oldest first."""
        return [(event.source_dag_id, event.extra["ranges"]) for event in self.lab.client.asset_events(self.consumer.table)]

    def check(self) -> None:
        with session(self.lab.url) as connection:
            found = audit(connection, self.cluster, self.spec)
        assert found.differences == ()

    def redrive(self, **conf: Any) -> Run:
        return self.lab.trigger(REDRIVE, {"consumer": self.name, "reason": "the service is back again", **conf})


def make_due(lab: Lab, *ladders: Ladder, in_s: float = 0) -> None:
    """Makes all waiting records due in ``in_s`` seconds, as if their delay had passed."""
    lab.sql(
        "UPDATE tidemark.failed_record SET due_at = clock_timestamp() + make_interval(secs => %s) FROM tidemark.consumer_group grp"
        " WHERE failed_record.group_id = grp.group_id AND failed_record.state = 'WAITING' AND grp.name = ANY (%s)",
        in_s,
        [ladder.name for ladder in ladders],
    )


def marks(ago_s: float = 0) -> int:
    """The number of times the five-minute schedule has been due up to then."""
    return int((time.time() - ago_s) // 300)


def last_attempt(lab: Lab) -> int:
    ((number,),) = lab.sql("SELECT coalesce(max(attempt_id), 0) FROM tidemark.attempt")
    return int(number)


def drained_in(lab: Lab, ladder: Ladder, *, after: int) -> Run:
    """Waits for the consumer's next drain after that attempt, and returns the run to which it belongs."""
    query = (
        "SELECT run_id FROM tidemark.attempt JOIN tidemark.consumer_group USING (group_id)"
        " WHERE name = %s AND task_id = 'drain' AND attempt_id > %s ORDER BY attempt_id LIMIT 1"
    )
    ((run_id,),) = until(lambda: lab.sql(query, ladder.name, after), f"a drain of {ladder.name}")
    return Run(lab, DRAINS, run_id)


@pytest.fixture(scope="module")
def ladders(lab: Lab) -> dict[str, Ladder]:
    """The consumers by name."""
    return {name: Ladder(lab, name) for name in ("ladder", "sound", "rotten")}


def test_records_climb_the_ladder_and_land_or_fail_and_are_redriven(lab: Lab, ladders: dict[str, Ladder]) -> None:
    """A run publishes the records that it has handed off. When one is due, a run of the drains starts by itself, long before the schedule.
    It loads a record with the lineage of its first read, validates and announces it, or sends it to the next delay. The redrive of a record
    that failed permanently is planned and approved by a person, and the record is loaded at once. If nothing is due, no driver starts."""
    ladder = ladders["ladder"]
    consumer = ladder.consumer
    lab.answer({"3": "retry", "5": "retry", "7": "fail"})
    consumer.produce(*range(RECORDS))
    assert consumer.trigger().wait() == "success"
    assert consumer.rows() == [0, 1, 2, 4, 6, 8, 9], lab.sql("SELECT DISTINCT error_type, error_text FROM tidemark.failed_record")
    waits, landed, given_up = ("WAITING", "ladder.retry.1h", True), ("LOADED", None, False), ("FAILED", "ladder.failed", True)
    assert ladder.failed() == {3: waits, 5: waits, 7: given_up}

    lab.answer({"5": "retry"})
    began, last = marks(ago_s=120), last_attempt(lab)  # the schedule's last run may still be on its way
    make_due(lab, ladder, in_s=2)
    woken = drained_in(lab, ladder, after=last)  # another test may just have woken it, and then it is quiet for a minute
    assert woken.run_id.startswith("asset_triggered__") or marks() > began, "neither woken, nor was it the schedule's time"
    assert woken.wait() == "success"
    assert woken.tasks() == dict.fromkeys(TASKS, "success")
    assert lab.sql(f"SELECT kafka_offset FROM {consumer.table} WHERE number = 3") == [(3,)]
    assert ladder.failed() == {3: landed, 5: ("WAITING", "ladder.retry.2h", True), 7: given_up}
    assert ladder.attempts() == {(consumer.dag, "consume"), (DRAINS, "drain")}
    assert ladder.announced() == [(consumer.dag, {"ladder/0": [[0, RECORDS]]}), (DRAINS, {"ladder/0": [[3, 4]]})]
    ladder.check()

    lab.answer({})
    make_due(lab, ladder)
    dry, run = ladder.redrive(then="nothing", error="Fail"), ladder.redrive(then="ask", to="now")
    assert dry.wait() == "success"
    assert dry.tasks() == {"plan": "success", "apply": "skipped", "drain": "skipped"}
    assert "1 record of ladder to the first delay" in dry.log("plan")
    assert "Fail: 7 is broken" in run.question()["body"]
    run.answer("Approve")
    assert run.wait() == "success"
    assert run.tasks() == {"plan": "success", "apply": "success", "drain": "success"}
    assert run.xcom("apply") == {"redriven": 1, "passed_over": 0}
    assert Run(lab, DRAINS, f"redrive__{run.xcom('plan')}").wait() == "success"
    assert ladder.failed() == {3: landed, 5: landed, 7: landed}
    assert consumer.rows() == list(range(RECORDS))
    query = (
        "SELECT redrive.state, destination, planned_by, approved_by FROM tidemark.redrive JOIN tidemark.consumer_group USING (group_id)"
        " WHERE name = %s ORDER BY redrive.state"
    )
    assert lab.sql(query, ladder.name) == [
        ("DONE", "now", "admin", "admin"),
        ("PLANNED", "ladder", "admin", None),
    ]
    nothing_due = lab.trigger(DRAINS)
    assert nothing_due.wait() == "success"
    assert nothing_due.tasks() == dict.fromkeys(TASKS, "skipped") | dict.fromkeys(("relay", "due", "done"), "success")
    ladder.check()


def test_drained_rows_that_are_critical_are_not_announced_and_hold_up_nobody_else(lab: Lab, ladders: dict[str, Ladder]) -> None:
    """One run drains two consumers. The verdict on the rows of one is critical: its sink gets no event, the rows stay, and the run fails.
    The rows of the other are announced nevertheless."""
    sound, rotten = ladders["sound"], ladders["rotten"]
    lab.answer({"17": "retry", "17000000": "retry"})
    at = sound.consumer.produced
    for each, number in ((sound, 17), (rotten, 17_000_000)):
        each.consumer.produce(number)
        each.consumer.read_here()
        assert each.consumer.rows() == []
    lab.answer({})
    last = last_attempt(lab)
    make_due(lab, sound, rotten)
    triggered = lab.trigger(DRAINS)
    run = drained_in(lab, sound, after=last)
    assert run.wait() == "failed"
    triggered.wait()  # another run may have drained these records; this one must not drain the next test's
    found = lab.client.task_instances(DRAINS, run.run_id)
    names = {task.map_index: task.rendered_map_index for task in found if task.task_id == "drain"}
    tasks = {(task.task_id, names.get(task.map_index)): task.state for task in found}
    assert {key: state for key, state in tasks.items() if state != "success"} == {
        ("validate", "rotten"): "failed",
        ("publish", "rotten"): "upstream_failed",
        ("done", None): "upstream_failed",
    }
    assert {task for task, consumer in tasks if consumer == "sound"} == {"drain", "validate", "publish"}
    assert (sound.consumer.rows(), rotten.consumer.rows()) == ([17], [17_000_000])
    ((dag, ranges),) = sound.announced()
    assert (dag, ranges["sound/0"][-1][1], rotten.announced()) == (DRAINS, at + 1, [])  # with what was read here before, without a verdict
    for each in (sound, rotten):
        each.check()


def test_records_are_discarded_by_a_person_after_another_has_seen_them(lab: Lab, ladders: dict[str, Ladder]) -> None:
    """The discard is stored under the user's name, with the approver in the reason. A dry run changes nothing, and an empty filter is
    refused."""
    sound = ladders["sound"]
    lab.answer({"424242": "fail", "434343": "fail"})
    sound.consumer.produce(424242, 434343)
    sound.consumer.read_here()

    def ask(**conf: Any) -> Run:
        return lab.trigger(DISCARD, {"consumer": sound.name, "error": "Fail", "reason": "flights that never were", **conf})

    dry, run, everything = ask(then="nothing"), ask(), ask(then="apply", error=None)
    assert dry.wait() == "success"
    assert dry.tasks() == {"plan": "success", "apply": "skipped"}
    assert everything.wait() == "failed", "it would be every record of the group"
    assert run.question()["subject"] == "Discard 2 records of sound?"
    run.answer("Approve")
    assert run.wait() == "success"
    assert run.xcom("apply") == {"discarded": 2}
    assert "Discard 2 records of sound" in run.log("plan")
    query = "SELECT kind, done_by, reason, records FROM tidemark.retry_action JOIN tidemark.consumer_group USING (group_id) WHERE name = %s"
    assert lab.sql(query, sound.name) == [("DISCARD", "admin", "flights that never were (approved by admin)", 2)]
    sound.check()


def test_everything_that_is_wrong_with_the_form_of_a_redrive_is_told_at_once(lab: Lab, ladders: dict[str, Ladder]) -> None:
    """REST clients can send anything. Whatever JSON schema can reject is refused before a run exists. All other mistakes make the run fail
    at once, and nothing is stored."""
    ladder, before = ladders["ladder"], lab.sql("SELECT count(*) FROM tidemark.redrive")
    run = ladder.redrive(consumer="lader", since="2026-10-25", key_hex="0", numbers="1, two", eror="KeyError", from_offset=5, to_offset=5)
    assert run.wait() == "failed"
    log = run.log("plan")
    for words in (
        'unknown key "eror". Write error.',
        'there is no consumer "lader"',
        "is a date without a time",
        '"0" is not hex',
        '"two" is not a record number',
        "nothing lies between 5 and 5",
        "6 problems; nothing was planned",
    ):
        assert words in log
    assert run.tries("plan") == ["failed"]
    assert lab.sql("SELECT count(*) FROM tidemark.redrive") == before
    for wrong in ({"to": "later"}, {"states": ["LOADED"]}, {"limit": 0}, {"then": "perhaps"}, {"reason": "short"}, {"consumer": ""}):
        with pytest.raises(AirflowRefused):
            ladder.redrive(**wrong)

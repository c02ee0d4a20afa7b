"""The DAGs ``drain_retries`` and ``redrive`` in a real Airflow: records that failed climb their ladder, land, or are sent round again."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any
from urllib.parse import quote

import pytest
from tests.e2e.lab import AIRFLOW, BATCH, COMMON, Consumer, Lab, eventually

from tidemark.consume.check import sink_ddl
from tidemark.db import session
from tidemark.kafka.cluster import Cluster
from tidemark.local.airflow_client import AirflowRefused
from tidemark.retry.audit import audit
from tidemark.retry.topics import ensure_topics
from tidemark.spec import ConsumerSpec, find_consumer
from tidemark.spec.transform import load_transform

NAME = "ladder"
DRAINS, REDRIVE = "drain_retries", "redrive"
RECORDS = 10

TRANSFORM = '''
"""Records are numbers; a service, which is a file, says what becomes of each."""
import json
import pathlib
from typing import TypedDict

from tidemark.transform import Fail, Record, Retry

ANSWERS = pathlib.Path("{answers}")


class Row(TypedDict):
    number: int


def transform(record: Record) -> Row:
    word = (record.value or b"").decode()
    answer = json.loads(ANSWERS.read_text()).get(word)
    if answer == "retry":
        raise Retry(f"the service is down for {{word}}")
    if answer == "fail":
        raise Fail(f"{{word}} is broken")
    return {{"number": int(word)}}
'''


class Ladder:
    """A consumer whose ladder is of seconds: ``[1s, 2s]``."""

    def __init__(self, lab: Lab) -> None:
        self.lab, self.folder, self.answers = lab, lab.folder, lab.folder / "answers.json"
        (self.folder / "transforms" / "e2e_service.py").write_text(TRANSFORM.format(answers=self.answers))
        self.say({})
        special = f"retry: {{delays: [1s, 2s]}}\n{AIRFLOW}"
        text = COMMON.format(name=NAME, table=NAME, batch=BATCH, special=special, transform="transform")
        (self.folder / "consumers" / f"{NAME}.yaml").write_text(text.replace("e2e_numbers", "e2e_service"))
        lab.sql(sink_ddl(self.spec, load_transform(self.spec, [self.folder / "transforms"]), lambda _: None))
        self.consumer: Consumer = lab.consumer(NAME)
        self.cluster = Cluster({"bootstrap.servers": lab.topics.servers})
        found = ensure_topics(self.cluster, self.spec, create=True)
        lab.topics.adopt(one.topic.name for one in found)
        for dag in (DRAINS, REDRIVE, self.consumer.dag):
            lab.client.wait_for_dag(dag)

    @property
    def spec(self) -> ConsumerSpec:
        return find_consumer(NAME, self.folder / "consumers")

    def say(self, answers: dict[str, str]) -> None:
        """What the service answers from now on, by the record's number."""
        self.answers.write_text(json.dumps(answers))

    def failed(self) -> dict[int, tuple[str, str | None, bool]]:
        """State and topic of each record that was not loaded at once, and whether it is published there, by its offset."""
        query = (
            "SELECT record_offset, failed_record.state, hop_topic, hop_offset IS NOT NULL FROM tidemark.failed_record"
            " JOIN tidemark.consumer_group USING (group_id) WHERE name = %s"
        )
        return {offset: (state, topic, published) for offset, state, topic, published in self.lab.sql(query, NAME)}

    def wait_until_due(self) -> None:
        query = (
            "SELECT count(*) FROM tidemark.failed_record JOIN tidemark.consumer_group grp USING (group_id)"
            " WHERE name = %s AND failed_record.state = 'WAITING' AND due_at > clock_timestamp()"
        )
        eventually(lambda: self.lab.sql(query, NAME) == [(0,)], within_s=10, what="all that waits is due")

    def drain(self) -> dict[str, str | None]:
        """A run of the drains that begins when everything is due, and its tasks' states."""
        self.wait_until_due()
        run_id = self.lab.client.trigger(DRAINS)
        assert self.lab.client.wait(DRAINS, run_id, 120) == "success"
        return states(self.lab, DRAINS, run_id)

    def attempts(self) -> set[tuple[str, str]]:
        """DAG and task of every attempt."""
        query = "SELECT DISTINCT dag_id, task_id FROM tidemark.attempt JOIN tidemark.consumer_group USING (group_id) WHERE name = %s"
        return {tuple(row) for row in self.lab.sql(query, NAME)}

    def check(self) -> None:
        with session(self.lab.url) as connection:
            found = audit(connection, self.cluster, self.spec)
        assert found.differences == ()

    def redrive(self, **conf: Any) -> str:
        return self.lab.client.trigger(REDRIVE, {"consumer": NAME, "reason": "the service is back again", **conf})


def states(lab: Lab, dag: str, run_id: str) -> dict[str, str | None]:
    return {task.task_id: task.state for task in lab.client.task_instances(dag, run_id)}


@pytest.fixture(scope="module")
def ladder_session(lab_session: Lab) -> Ladder:
    lab_session.repair()
    return Ladder(lab_session)


@pytest.fixture
def ladder(lab: Lab, ladder_session: Ladder) -> Ladder:
    """Of a whole Airflow, with nothing running when the test is over."""
    return ladder_session


def test_records_climb_the_ladder_and_land_or_fail_and_are_redriven(lab: Lab, ladder: Ladder) -> None:
    """A run publishes what it has handed off. A drain loads it with the lineage of its first reading, or sends it to the next delay; what
    failed for good is planned, looked at by a person, sent round, and loaded at once. Where nothing is due, no driver is started."""
    consumer = ladder.consumer
    ladder.say({"3": "retry", "5": "retry", "7": "fail"})
    consumer.produce(*range(RECORDS))
    assert consumer.trigger().wait() == "success"
    assert consumer.rows() == [0, 1, 2, 4, 6, 8, 9], lab.sql("SELECT DISTINCT error_type, error_text FROM tidemark.failed_record")
    waits, landed, given_up = ("WAITING", f"{NAME}.retry.1s", True), ("LOADED", None, False), ("FAILED", f"{NAME}.failed", True)
    assert ladder.failed() == {3: waits, 5: waits, 7: given_up}

    ladder.say({"5": "retry"})
    assert ladder.drain()["done"] == "success"
    assert lab.sql(f"SELECT kafka_offset FROM {consumer.table} WHERE number = 3") == [(3,)]
    assert ladder.failed() == {3: landed, 5: ("WAITING", f"{NAME}.retry.2s", True), 7: given_up}
    assert ladder.attempts() == {(consumer.dag, "consume"), (DRAINS, "drain")}
    ladder.check()

    ladder.say({})
    dry, run_id = ladder.redrive(then="nothing", error="Fail"), ladder.redrive(then="ask", to="now")
    assert lab.client.wait(REDRIVE, dry, 30) == "success"
    assert states(lab, REDRIVE, dry) == {"plan": "success", "approve": "skipped", "apply": "skipped", "drain": "skipped"}
    assert f"1 record of {NAME} to the first delay" in lab.client.log(REDRIVE, dry, "plan")
    assert "Fail: 7 is broken" in answer(lab, run_id, "Approve")["body"]
    assert "Not part of it: 1 that wait for a retry already" in lab.client.log(REDRIVE, run_id, "plan")
    assert lab.client.wait(REDRIVE, run_id, 30) == "success"
    assert states(lab, REDRIVE, run_id) == {"plan": "success", "approve": "success", "apply": "success", "drain": "success"}
    assert lab.client.xcom(REDRIVE, run_id, "apply") == {"redriven": 1, "passed_over": 0}
    number = lab.client.xcom(REDRIVE, run_id, "plan")
    assert lab.client.wait(DRAINS, f"redrive__{number}", 120) == "success"
    assert ladder.failed() == {3: landed, 5: landed, 7: landed}
    assert consumer.rows() == list(range(RECORDS))
    assert lab.sql("SELECT state, destination, planned_by FROM tidemark.redrive ORDER BY state") == [
        ("DONE", "now", "admin"),
        ("PLANNED", "ladder", "admin"),
    ]
    assert ladder.drain() == {"relay": "success", "due": "success", "drain": "skipped", "done": "success"}
    ladder.check()


def test_everything_that_is_wrong_with_the_form_of_a_redrive_is_told_at_once(lab: Lab, ladder: Ladder) -> None:
    """Over REST anything can be sent. What JSON schema can refuse is refused before a run exists, the rest fails at once, and stores
    nothing."""
    before = lab.sql("SELECT count(*) FROM tidemark.redrive")
    run_id = ladder.redrive(
        consumer="lader", since="2026-10-25", key_hex="0", numbers="1, two", eror="KeyError", from_offset=5, to_offset=5
    )
    assert lab.client.wait(REDRIVE, run_id, 30) == "failed"
    log = lab.client.log(REDRIVE, run_id, "plan")
    for words in (
        'unknown key "eror". Write error.',
        'there is no consumer "lader"',
        "is a date without a time",
        '"0" is no hex',
        '"two" is no record\'s number',
        "nothing lies between 5 and 5",
        "6 problems; nothing was planned",
    ):
        assert words in log
    assert [task.try_number for task in lab.client.tries(REDRIVE, run_id, "plan")] == [1]
    assert lab.sql("SELECT count(*) FROM tidemark.redrive") == before
    for wrong in ({"to": "later"}, {"states": ["LOADED"]}, {"limit": 0}, {"then": "perhaps"}, {"reason": "short"}, {"consumer": ""}):
        with pytest.raises(AirflowRefused):
            ladder.redrive(**wrong)


def test_form_of_a_redrive_can_be_filled_without_documentation(lab: Lab, ladder: Ladder) -> None:
    """Every field has a title and a section, every choice its words, and the check knows exactly these fields."""
    from tidemark.airflow.redrive import FIELDS

    def schemas_now() -> dict[str, Any]:
        return {name: field["schema"] for name, field in lab.client.get(f"dags/{REDRIVE}/details")["params"].items()}

    eventually(lambda: NAME in schemas_now()["consumer"]["examples"], what="the form knows the consumer, whose file is new")
    schemas = schemas_now()
    assert tuple(schemas) == FIELDS
    assert all({"title", "section"} <= set(schema) for schema in schemas.values())
    for name in ("to", "then"):
        assert set(schemas[name]["enum"]) == set(schemas[name]["values_display"])


def answer(lab: Lab, run_id: str, option: str) -> dict[str, Any]:
    """Answers the question of a run once the scheduler knows that it waits (it loses answers that are quicker); what was asked."""
    path = f"dags/{REDRIVE}/dagRuns/{quote(run_id, safe='')}/taskInstances/approve/-1/hitlDetails"
    eventually(lambda: states(lab, REDRIVE, run_id).get("approve") == "awaiting_input", within_s=30, what="somebody is asked")
    question: dict[str, Any] = lab.client.get(path)
    asked = datetime.fromisoformat(question["created_at"]).timestamp()
    eventually(lambda: _scheduler_at(lab) > asked + 1, within_s=30, what="the scheduler has gone round")
    lab.client.patch(path, {"chosen_options": [option], "params_input": {}})
    return question


def _scheduler_at(lab: Lab) -> float:
    return datetime.fromisoformat(lab.client.health()["scheduler"]["latest_scheduler_heartbeat"] or "").timestamp()

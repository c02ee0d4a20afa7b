"""The DAG ``rewind`` in a real Airflow: what a person asks for is planned, answered by a person, and done or not done."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from urllib.parse import quote

import pytest
from tests.e2e.lab import AIRFLOW, BATCH, COMMON, Consumer, Lab, eventually

from tidemark.consume.check import sink_ddl
from tidemark.local.airflow_client import AirflowRefused
from tidemark.spec import find_consumer
from tidemark.spec.transform import load_transform

RECORDS = 100
DAG = "rewind"
APPROVALS = {"asked": "", "unasked": "rewind: {approval: none}", "strict": "rewind: {own: false}"}
"""Consumers of these tests, and what their files say of approvals."""


@dataclass
class RewindRun:
    """A run of the DAG."""

    lab: Lab
    run_id: str

    @property
    def path(self) -> str:
        return f"dags/{DAG}/dagRuns/{quote(self.run_id, safe='')}/taskInstances"

    def states(self) -> dict[str, str | None]:
        return {task.task_id: task.state for task in self.lab.client.task_instances(DAG, self.run_id)}

    def log(self, task: str, try_number: int = 1) -> str:
        return self.lab.client.log(DAG, self.run_id, task, try_number)

    def wait(self) -> str:
        return self.lab.client.wait(DAG, self.run_id, 60)

    def question(self) -> dict[str, Any]:
        """What the person is asked, once the scheduler knows that the task waits: it loses answers that are quicker than its own loop."""
        eventually(lambda: self.states().get("approve") == "awaiting_input", what="somebody is asked")
        asked = datetime.fromisoformat(self.lab.client.get(f"{self.path}/approve/-1/hitlDetails")["created_at"])
        eventually(lambda: self._scheduler_at() > asked.timestamp() + 1, what="the scheduler has gone round")
        found: dict[str, Any] = self.lab.client.get(f"{self.path}/approve/-1/hitlDetails")
        return found

    def answer(self, option: str) -> None:
        self.lab.client.patch(f"{self.path}/approve/-1/hitlDetails", {"chosen_options": [option], "params_input": {}})

    def stored(self) -> tuple[Any, ...]:
        """State, who planned, decided and applied it, and its number."""
        columns = "state, planned_by, decided_by, applied_by, rewind_id"
        (row,) = self.lab.sql(f"SELECT {columns} FROM tidemark.rewind WHERE dag_id = %s AND run_id = %s", DAG, self.run_id)
        return tuple(row)

    def _scheduler_at(self) -> float:
        return datetime.fromisoformat(self.lab.client.health()["scheduler"]["latest_scheduler_heartbeat"] or "").timestamp()


@pytest.fixture(scope="module")
def consumers(lab_session: Lab) -> dict[str, Consumer]:
    """Each has read all of its topic."""
    lab_session.repair()
    folder = lab_session.folder
    for name, special in APPROVALS.items():
        text = COMMON.format(name=name, table=name, batch=BATCH, special=f"{special}\n{AIRFLOW}")
        (folder / "consumers" / f"{name}.yaml").write_text(text)
        spec = find_consumer(name, folder / "consumers")
        lab_session.sql(sink_ddl(spec, load_transform(spec, [folder / "transforms"]), lambda _: None))
    lab_session.client.wait_for_dag(DAG)
    found = {}
    for name in APPROVALS:
        lab_session.client.wait_for_dag(f"consume__{name}")
        found[name] = lab_session.consumer(name)
        found[name].produce(*range(RECORDS))
    runs = [consumer.trigger() for consumer in found.values()]
    assert [run.wait() for run in runs] == ["success"] * len(runs)
    return found


@pytest.fixture
def rewind(lab: Lab, consumers: dict[str, Consumer]) -> Callable[..., RewindRun]:
    """Starts a run as a REST client does, by default for a plan to offset 40."""

    def start(*names: str, **conf: Any) -> RewindRun:
        asked = {"consumers": list(names), "scenario": "to-offset", "value": "40", "reason": "a test of the form", **conf}
        return RewindRun(lab, lab.client.trigger(DAG, asked))

    return start


def test_approved_plan_is_applied_and_what_it_rewound_is_read_again(lab, consumers, rewind):
    """The person sees the plan as a table; who planned, approved and applied is stored; the consumer's run makes the same rows again."""
    consumer, rows = consumers["asked"], consumers["asked"].rows()
    run = rewind("asked", reason="a *bug* of <b>Tuesday</b>")
    question = run.question()
    assert run.stored()[:4] == ("PLANNED", "admin", None, None)
    number = run.stored()[4]
    assert question["subject"] == f"Rewind {number} of asked?"
    assert f"| asked | 0 | {RECORDS} | 40 | 60 | 0 | 60 | 0 |" in question["body"].splitlines()
    assert r"Reason: a \*bug\* of \<b\>Tuesday\</b\>" in question["body"]
    assert lab.client.xcom(DAG, run.run_id, "plan") == number
    assert "At least 60 offsets read again, 0 skipped; 60 rows and 0 failed records taken out" in run.log("plan")
    assert consumer.position() == RECORDS

    run.answer("Approve")
    assert run.wait() == "success"
    assert run.stored() == ("APPLIED", "admin", "admin", "admin", number)
    assert f"Rewind {number} (APPLIED)" in run.log("apply")
    assert lab.client.wait(consumer.dag, f"rewind__{number}", 60) == "success"
    assert lab.sql("SELECT old_offset, new_offset, sink_rows FROM tidemark.rewind_partition WHERE rewind_id = %s", number) == [
        (RECORDS, 40, 60)
    ]
    assert (consumer.rows(), consumer.position()) == (rows, RECORDS)
    assert lab.client.xcom(DAG, run.run_id, "verify") == {"asked": {"equal": 60, "changed": 0, "gone": 0, "new": 0}}
    assert "60 offsets read again" in run.log("verify")


def test_rejected_plan_changes_nothing_and_is_kept_as_rejected(consumers, rewind):
    """By whom is stored; what comes behind it is skipped, and the run is no failure."""
    run = rewind("asked")
    run.question()
    run.answer("Reject")
    assert run.wait() == "success"
    assert run.states() == {"plan": "success", "approve": "success", "apply": "skipped", "consume": "skipped", "verify": "skipped"}
    assert run.stored()[:4] == ("REJECTED", "admin", "admin", None)
    assert (consumers["asked"].position(), len(consumers["asked"].rows())) == (RECORDS, RECORDS)


def test_plan_that_nobody_answers_is_rejected_when_it_expires(consumers, rewind):
    run = rewind("asked", expires_in="2s")
    assert run.wait() == "success"
    assert run.stored()[:4] == ("REJECTED", "admin", "nobody (no answer in time)", None)
    assert consumers["asked"].position() == RECORDS


def test_plan_that_another_rewind_has_overtaken_is_refused_and_kept_as_rejected(consumers, rewind):
    """It was approved all the same: the run fails at once, and says what has changed and what to do."""
    first, second = rewind("asked"), rewind("asked", scenario="to-current", value=None, consume=False)
    for run in (second, first):
        run.question()
        run.answer("Approve")
        run.wait()
    assert (second.stored()[0], first.stored()[:4]) == ("APPLIED", ("REJECTED", "admin", "nobody (the plan was stale)", None))
    assert "was rewound since" in first.log("apply")
    assert "Plan again" in first.log("apply")
    assert first.states() == {
        "plan": "success",
        "approve": "success",
        "apply": "failed",
        "consume": "upstream_failed",
        "verify": "upstream_failed",
    }
    assert consumers["asked"].position() == RECORDS


def test_nobody_approves_their_own_if_the_file_says_so(consumers, rewind):
    """The run fails and says why; the plan is rejected, so that nobody applies it later."""
    run = rewind("strict")
    run.question()
    run.answer("Approve")
    assert run.wait() == "failed"
    assert "was approved by admin, who had asked for it" in run.log("apply")
    assert run.stored()[:4] == ("REJECTED", "admin", "admin (may not approve their own)", None)
    assert consumers["strict"].position() == RECORDS


def test_apply_that_is_tried_again_after_it_had_committed_says_so_and_succeeds(lab, consumers, rewind):
    """Where no file asks for an approval, nobody is asked. Nothing is moved a second time."""
    consumer = consumers["unasked"]
    run = rewind("unasked", consume=False)
    assert run.wait() == "success"
    assert run.states() == {"plan": "success", "approve": "success", "apply": "success", "consume": "skipped", "verify": "skipped"}
    assert run.stored()[:4] == ("APPLIED", "admin", None, "admin")
    assert (consumer.position(), consumer.rows()) == (40, list(range(40)))
    lab.client.clear(DAG, run.run_id, ["apply"])
    assert run.wait() == "success"
    assert "was applied before" in run.log("apply", 2)
    assert consumer.position() == 40
    assert consumer.trigger().wait() == "success"
    assert consumer.rows() == list(range(RECORDS))


def test_everything_that_is_wrong_with_the_form_is_told_at_once(lab, rewind):
    """Over REST anything can be sent: unknown keys, times that are none. It fails at once, is not tried again, and stores nothing."""
    before = lab.sql("SELECT count(*) FROM tidemark.rewind")
    run = rewind("asked", "askd", scenario="to-datetime", value="2026-10-25 02:30", zone="Europe/Berlin", scop="all", scope="a b!")
    assert run.wait() == "failed"
    log = run.log("plan")
    for words in (
        'unknown key "scop". Write scope.',
        'there is no consumer "askd"',
        "comes twice in Europe/Berlin",
        '"b!" does not name topics or partitions',
        "4 problems; nothing was planned",
    ):
        assert words in log
    assert run.states() == {
        "plan": "failed",
        "approve": "upstream_failed",
        "apply": "upstream_failed",
        "consume": "upstream_failed",
        "verify": "upstream_failed",
    }
    assert [task.try_number for task in lab.client.tries(DAG, run.run_id, "plan")] == [1]
    assert lab.sql("SELECT count(*) FROM tidemark.rewind") == before


def test_form_can_be_filled_without_documentation(lab, consumers):
    """Every field has a title, a description and a section, and every scenario its words; what JSON schema can refuse is refused before a
    run exists."""
    form = lab.client.get(f"dags/{DAG}/details")["params"]
    assert list(form) == ["consumers", "scope", "scenario", "value", "zone", "offsets", "reason", "allow_loss", "expires_in", "consume"]
    schemas = {name: field["schema"] for name, field in form.items()}
    assert all({"title", "description_md", "section"} <= set(schema) or form[name]["description"] for name, schema in schemas.items())
    assert set(schemas["scenario"]["enum"]) == set(schemas["scenario"]["values_display"])
    assert set(schemas["consumers"]["examples"]) == set(schemas["consumers"]["values_display"])
    good = {"consumers": ["asked"], "scenario": "to-latest", "reason": "a test of the form"}
    for wrong in ({"reason": "short"}, {"scenario": "to-moon"}, {"consumers": []}, {"allow_loss": "yes"}):
        with pytest.raises(AirflowRefused):
            lab.client.trigger(DAG, good | wrong)
    body = {"dag_id": DAG, "from_date": "2026-01-01T00:00:00Z", "to_date": "2026-01-02T00:00:00Z", "dag_run_conf": good}
    with pytest.raises(AirflowRefused, match="does not allow"):
        lab.client.post("backfills", body)
    assert len(json.dumps(form)) < 20_000

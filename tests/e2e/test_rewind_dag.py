"""The DAG ``rewind`` in a real Airflow: a rewind is requested, planned, approved or rejected by a person, and applied or not."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from tests.e2e.lab import Consumer, Lab
from tests.e2e.rewinds import ASKS, DAG, RewindRun
from tests.support.documented import snippets

from tidemark.local.airflow_client import AirflowClient, AirflowRefused

RECORDS = 100
APPROVALS = ("asked", "unasked", "strict", "owned")
"""Consumers of these tests. Each file has different settings for approvals or access."""


@pytest.fixture(scope="module")
def consumers(lab_session: Lab) -> dict[str, Consumer]:
    """The consumers by name; each has read its whole topic."""
    lab_session.repair()
    lab_session.client.wait_for_dag(DAG, timeout_s=180)
    found = {}
    for name in APPROVALS:
        found[name] = lab_session.consumer(name)
        found[name].produce(*range(RECORDS))
        found[name].read_here()
        lab_session.client.unpause(found[name].dag)
    return found


@pytest.fixture
def rewind(lab: Lab, consumers: dict[str, Consumer]) -> Callable[..., RewindRun]:
    """Starts a run as a REST client does, by default for a rewind to offset 40."""

    def start(*names: str, client: AirflowClient | None = None, **conf: Any) -> RewindRun:
        asked = {"consumers": list(names), "scenario": "to-offset", "value": "40", "reason": "a test of the form", **conf}
        return RewindRun(lab, (client or lab.client).trigger(DAG, asked))

    return start


def test_approved_plan_is_applied_and_what_it_rewound_is_read_again(lab, consumers, rewind):
    """The person sees the plan as a table, and the names of those who planned, approved and applied it are stored. The consumer's run
    creates the same rows again. An event of the sink lists the changed ranges."""
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
    assert lab.client.wait(consumer.dag, f"rewind__{number}", 180) == "success"
    assert lab.sql("SELECT old_offset, new_offset, sink_rows FROM tidemark.rewind_partition WHERE rewind_id = %s", number) == [
        (RECORDS, 40, 60)
    ]
    assert (consumer.rows(), consumer.position()) == (rows, RECORDS)
    assert lab.client.xcom(DAG, run.run_id, "verify") == {"asked": {"equal": 60, "changed": 0, "gone": 0, "new": 0}}
    assert "60 offsets read again" in run.log("verify")
    (event,) = [event for event in lab.client.asset_events(consumer.table) if event.source_dag_id == DAG]
    (documented,) = (json.loads(code) for code in snippets("docs/rewind.md", "json") if "undo_of" in code)
    assert event.extra == documented | {"group": "asked", "ranges": {"asked/0": [[40, RECORDS]]}, "rewind": number}


def test_rejected_plan_changes_nothing_and_is_kept_as_rejected(consumers, rewind):
    """The name of the person who rejected it is stored. The downstream tasks are skipped, and the run succeeds."""
    run = rewind("asked")
    run.question()
    run.answer("Reject")
    assert run.wait() == "success"
    states = {"plan": "success", "apply": "skipped", "consume": "skipped", "verify": "skipped"}
    assert states.items() <= run.states().items()
    assert run.stored()[:4] == ("REJECTED", "admin", "admin", None)
    assert (consumers["asked"].position(), len(consumers["asked"].rows())) == (RECORDS, RECORDS)


def test_plan_that_nobody_answers_is_rejected_when_it_expires(consumers, rewind):
    run = rewind("asked", expires_in="2s")
    assert run.wait() == "success"
    assert run.stored()[:4] == ("REJECTED", "admin", "nobody (no answer in time)", None)
    assert consumers["asked"].position() == RECORDS


def test_plan_that_another_rewind_has_overtaken_is_refused_and_kept_as_rejected(consumers, rewind):
    """Although it was approved, the run fails at once, and says what has changed and what to do."""
    first, second = rewind("asked"), rewind("asked", scenario="to-current", value=None, consume=False)
    for run in (second, first):
        run.question()
        run.answer("Approve")
        run.wait()
    assert (second.stored()[0], first.stored()[:4]) == ("APPLIED", ("REJECTED", "admin", "nobody (the plan was stale)", None))
    assert "has been rewound since" in first.log("apply")
    assert "Plan again" in first.log("apply")
    states = {"plan": "success", "apply": "failed", "consume": "upstream_failed", "verify": "upstream_failed"}
    assert states.items() <= first.states().items()
    assert consumers["asked"].position() == RECORDS


def test_nobody_approves_their_own_if_the_file_says_so(consumers, rewind):
    """The run fails and says why. The plan is rejected, so that it cannot be applied later."""
    run = rewind("strict")
    run.question()
    run.answer("Approve")
    assert run.wait() == "failed"
    assert "was approved by admin, who also requested it" in run.log("apply")
    assert run.stored()[:4] == ("REJECTED", "admin", "admin (may not approve their own)", None)
    assert consumers["strict"].position() == RECORDS


def test_approval_that_was_forged_moves_nothing_and_who_really_answers_is_stored(lab, consumers, rewind):
    """A user who may trigger runs may also write XComs and mark tasks. Only one answer counts: the one that Airflow has recorded, for the
    plan that it has shown, in the run that made the plan. A cleared task asks again."""
    consumer, ann, bob = consumers["strict"], lab.sign_in("ann"), lab.sign_in("bob")
    other = rewind("strict", value="10")
    other.question()
    run = rewind("strict", client=ann, consume=False)
    question = run.question()
    number, shown = run.stored()[4], question["body"]
    run.forge(ann, "plan", other.stored()[4])
    run.forge(ann, ASKS, {"approved": True, "by": "bob", "name": "bob"})
    run.mark_success(ann, ASKS)
    run.wait()
    assert consumer.position() == RECORDS
    assert run.stored() == ("PLANNED", "ann", None, None, number)
    assert other.stored()[:4] == ("PLANNED", "admin", None, None)

    lab.client.clear(DAG, run.run_id, [ASKS])
    question = run.question()
    assert (question["body"], question["response_received"]) == (shown, False)
    assert "someone else must approve it" in question["body"]
    run.answer("Approve", client=bob)
    assert run.wait() == "success"
    assert run.stored() == ("APPLIED", "ann", "bob", "ann", number)
    assert lab.sql("SELECT new_offset FROM tidemark.rewind_partition WHERE rewind_id = %s", number) == [(40,)]
    other.answer("Reject")
    other.wait()
    consumer.read_here()
    assert consumer.position() == RECORDS


def test_apply_that_is_tried_again_after_it_had_committed_says_so_and_succeeds(lab, consumers, rewind):
    """If no file requires an approval, the run does not ask for one. The retry moves nothing a second time. The backfill of the next rewind
    reads the records that the rewind skips."""
    consumer = consumers["unasked"]
    run = rewind("unasked", consume=False)
    assert run.wait() == "success"
    states = {"plan": "success", "apply": "success", "consume": "skipped", "verify": "skipped"}
    assert states.items() <= run.states().items()
    assert run.stored()[:4] == ("APPLIED", "admin", None, "admin")
    assert (consumer.position(), consumer.rows()) == (40, list(range(40)))
    lab.client.clear(DAG, run.run_id, ["apply"])
    assert run.wait() == "success"
    assert "was already applied at" in run.log("apply", 2)
    assert consumer.position() == 40

    forward = rewind("unasked", scenario="to-latest", value=None, backfill=True, consume=False)
    assert forward.wait() == "success"
    assert forward.states()["backfill"] == "success"
    assert (consumer.position(), consumer.rows()) == (RECORDS, list(range(RECORDS)))


def test_everything_that_is_wrong_with_the_form_is_told_at_once(lab, rewind):
    """REST clients can send anything, such as unknown keys or ambiguous times. The run fails at once without a retry and stores nothing."""
    before = lab.sql("SELECT count(*) FROM tidemark.rewind")
    run = rewind("asked", "askd", scenario="to-datetime", value="2026-10-25 02:30", zone="Europe/Berlin", scop="all", scope="a b!")
    assert run.wait() == "failed"
    log = run.log("plan")
    for words in (
        'unknown key "scop". Write scope.',
        'there is no consumer "askd"',
        "occurs twice in Europe/Berlin",
        '"b!" does not name topics or partitions',
        "4 problems; nothing was planned",
    ):
        assert words in log
    assert {run.states()[task] for task in ("apply", "consume", "verify")} == {"upstream_failed"}
    assert [task.try_number for task in lab.client.tries(DAG, run.run_id, "plan")] == [1]
    assert lab.sql("SELECT count(*) FROM tidemark.rewind") == before


def test_form_can_be_filled_without_documentation(lab, consumers):
    """Every field has a title, a description and a section, and every scenario has a label. Whatever JSON schema can reject is refused
    before a run exists."""
    form = lab.client.get(f"dags/{DAG}/details")["params"]
    assert {"consumers", "scope", "scenario", "value", "zone", "offsets", "reason", "allow_loss", "expires_in", "consume"} <= set(form)
    schemas = {name: field["schema"] for name, field in form.items()}
    assert all({"title", "description_md", "section"} <= set(schema) or form[name]["description"] for name, schema in schemas.items())
    assert set(schemas["scenario"]["enum"]) == set(schemas["scenario"]["values_display"])
    assert set(schemas["consumers"]["examples"]) == set(schemas["consumers"]["values_display"])
    good = {"consumers": ["asked"], "scenario": "to-latest", "reason": "a test of the form"}
    long, strange = {"reason": "x" * 2001}, {"zone": "Europe, Berlin"}
    for wrong in ({"reason": "short"}, long, strange, {"scenario": "to-moon"}, {"consumers": []}, {"allow_loss": "yes"}):
        with pytest.raises(AirflowRefused):
            lab.client.trigger(DAG, good | wrong)
    body = {"dag_id": DAG, "from_date": "2026-01-01T00:00:00Z", "to_date": "2026-01-02T00:00:00Z", "dag_run_conf": good}
    with pytest.raises(AirflowRefused, match="does not allow"):
        lab.client.post("backfills", body)
    assert len(json.dumps(form)) < 20_000


def test_dag_of_one_consumer_rewinds_it_and_no_other(lab, consumers):
    """A user who may start ``rewind__owned`` has access to that consumer only. A conf that names any consumer is refused."""
    own, asked = f"{DAG}__owned", {"scenario": "to-offset", "value": "40", "reason": "a test of its own DAG", "consume": False}
    for named in (["unasked"], ["owned", "unasked"], ["owned"]):
        run = lab.client.trigger(own, {**asked, "consumers": named})
        assert lab.client.wait(own, run, 180) == "failed"
        assert "consumers cannot be set: this DAG is for owned only" in lab.client.log(own, run, "plan")
    assert {name: consumers[name].position() for name in ("owned", "unasked")} == {"owned": RECORDS, "unasked": RECORDS}
    run = lab.client.trigger(own, asked)
    assert lab.client.wait(own, run, 180) == "success"
    assert {name: consumers[name].position() for name in ("owned", "unasked")} == {"owned": 40, "unasked": RECORDS}

"""The DAG ``rewind`` in a real Airflow: a rewind is requested, planned, approved or rejected by a person, and applied or not."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.e2e.lab import Consumer, Lab
from tests.e2e.rewinds import DAG, RewindRun
from tests.support.documented import snippets

from tidemark.db import session
from tidemark.local.airflow_client import AirflowClient, AirflowRefused
from tidemark.rewind import beside

RECORDS = 100
APPROVALS = ("asked", "unasked", "strict", "owned")
"""Consumers of these tests. Each file has different settings for approvals or access."""


@pytest.fixture(scope="module")
def consumers(lab: Lab) -> dict[str, Consumer]:
    """The consumers by name; each has read its whole topic."""
    found = {name: lab.consumer(name) for name in APPROVALS}
    for consumer in found.values():
        consumer.produce(*range(RECORDS))
        consumer.read_here()
        lab.client.unpause(consumer.dag)
    return found


@pytest.fixture
def rewind(lab: Lab, consumers: dict[str, Consumer]) -> Callable[..., RewindRun]:
    """Starts a run as a REST client does, by default for a rewind to offset 40."""

    def start(*names: str, client: AirflowClient | None = None, **conf: Any) -> RewindRun:
        asked = {"consumers": list(names), "scenario": "to-offset", "value": "40", "reason": "a test of the form", **conf}
        return RewindRun(lab, DAG, lab.trigger(DAG, asked, client=client).run_id)

    return start


@pytest.fixture
def signed_in(lab: Lab) -> Iterator[tuple[AirflowClient, ...]]:
    """Clients of `USERS`."""
    with lab.sign_in("ann") as ann, lab.sign_in("bob") as bob:
        yield ann, bob


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
    assert run.xcom("plan") == number
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
    assert run.xcom("verify") == {"asked": {"equal": 60, "changed": 0, "gone": 0, "new": 0}}
    assert "60 offsets read again" in run.log("verify")
    (event,) = [event for event in lab.client.asset_events(consumer.table) if event.source_run_id == run.run_id]
    (documented,) = (json.loads(code) for code in snippets("docs/rewind.md", "json") if "undo_of" in code)
    assert event.extra == documented | {"group": "asked", "ranges": {"asked/0": [[40, RECORDS]]}, "rewind": number}


def test_rewind_beside_asks_before_its_swap_and_is_discarded_if_rejected(consumers, rewind):
    """The replay is read, validated and compared without approval, because it changes nothing that anybody sees. The question shows what
    the swap would change. Positions stay, so no run of the consumer follows."""
    consumer, rows = consumers["asked"], consumers["asked"].rows()
    rejected = rewind("asked", beside=True)
    question = rejected.question("approve")
    assert question["subject"] == f"Swap the replay of rewind {rejected.stored()[4]} of asked?"
    assert f"| {consumer.table.replace('_', chr(92) + '_')} | 60 | 0 | 0 | 0 |" in question["body"].splitlines()
    assert rejected.stored()[:4] == ("BESIDE", "admin", None, None)
    rejected.answer("Reject", "approve")
    assert rejected.wait() == "success"
    assert rejected.stored()[0] == "DISCARDED"
    assert (consumer.rows(), consumer.position()) == (rows, RECORDS)

    approved = rewind("asked", beside=True)
    approved.question("approve")
    approved.answer("Approve", "approve")
    assert approved.wait() == "success"
    assert approved.stored()[:4] == ("APPLIED", "admin", "admin", "admin")
    assert approved.xcom("replay") == {"asked": {"equal": 60, "changed": 0, "gone": 0, "new": 0}}
    skipped = {"consume": "skipped", "backfill": "skipped", "verify": "skipped"}
    assert skipped.items() <= approved.tasks().items()
    assert (consumer.rows(), consumer.position()) == (rows, RECORDS)


def test_rewind_beside_without_approval_is_swapped_when_it_is_valid(consumers, rewind):
    consumer, rows = consumers["unasked"], consumers["unasked"].rows()
    run = rewind("unasked", beside=True)
    assert run.wait() == "success"
    assert run.stored()[:4] == ("APPLIED", "admin", None, "admin")
    assert (consumer.rows(), consumer.position()) == (rows, RECORDS)


@pytest.mark.thorough
def test_rewind_beside_with_a_critical_verdict_is_not_swapped_however_often_its_tasks_are_cleared(lab, rewind):
    """Also if a user marks the failed task as success: the swap judges again what is critical."""
    consumer = lab.consumer("unsound")
    consumer.produce(*range(RECORDS), 2_000_000)
    consumer.read_here()
    lab.client.unpause(consumer.dag)
    rows = consumer.rows()
    run = rewind("unsound", beside=True)
    assert run.wait() == "failed"
    number = run.stored()[4]
    assert f"Otherwise discard the replay: tidemark rewind discard {number}, or swap it all the same" in run.log("replay")
    lab.client.clear(DAG, run.run_id, ["replay"])
    assert run.wait() == "failed"
    assert run.tasks()["replay"] == "failed"
    run.mark("success", "replay")
    lab.client.clear(DAG, run.run_id, ["approve"])
    assert run.wait() == "failed"
    assert (run.tasks()["approve"], run.tasks()["swap"]) == ("success", "failed")
    assert (run.stored()[0], consumer.rows()) == ("BESIDE", rows)
    with session(lab.url) as connection:
        beside.discard(connection, number, by="admin")


def test_plan_that_is_rejected_or_that_nobody_answers_changes_nothing_and_is_kept_as_rejected(consumers, rewind):
    """The name of the person who rejected it is stored. The downstream tasks are skipped, and the run succeeds."""
    run, unanswered = rewind("asked"), rewind("asked", expires_in="2s")
    run.question()
    run.answer("Reject")
    for each in (run, unanswered):
        assert each.wait() == "success"
        assert {"plan": "success", "apply": "skipped", "consume": "skipped", "verify": "skipped"}.items() <= each.tasks().items()
    assert run.stored()[:4] == ("REJECTED", "admin", "admin", None)
    assert unanswered.stored()[:4] == ("REJECTED", "admin", "nobody (no answer in time)", None)
    assert (consumers["asked"].position(), len(consumers["asked"].rows())) == (RECORDS, RECORDS)


@pytest.mark.thorough
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
    assert states.items() <= first.tasks().items()
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


def test_approval_that_was_forged_moves_nothing_and_who_really_answers_is_stored(lab, consumers, rewind, signed_in):
    """A user who may trigger runs may also write XComs and mark tasks. Only one answer counts: the one that Airflow has recorded, for the
    plan that it has shown, in the run that made the plan. A cleared task asks again."""
    consumer, (ann, bob) = consumers["strict"], signed_in
    other = rewind("strict", value="10")
    other.question()
    run = rewind("strict", client=ann, consume=False)
    question = run.question()
    number, shown = run.stored()[4], question["body"]
    run.forge(ann, "plan", other.stored()[4])
    run.forge(ann, "apply", {"approved": True, "by": "bob", "name": "bob"})
    ann.mark("success", DAG, run.run_id, "apply")
    run.wait()
    assert consumer.position() == RECORDS
    assert run.stored() == ("PLANNED", "ann", None, None, number)
    assert other.stored()[:4] == ("PLANNED", "admin", None, None)

    lab.client.clear(DAG, run.run_id, ["apply"])
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


@pytest.mark.thorough  # tests/integration/rewind/test_deaths.py does it again
def test_apply_that_is_tried_again_after_it_had_committed_says_so_and_succeeds(lab, consumers, rewind):
    """If no file requires an approval, the run does not ask for one. The retry moves nothing a second time. The backfill of the next rewind
    reads the records that the rewind skips."""
    consumer = consumers["unasked"]
    run = rewind("unasked", consume=False)
    assert run.wait() == "success"
    states = {"plan": "success", "apply": "success", "consume": "skipped", "verify": "skipped"}
    assert states.items() <= run.tasks().items()
    assert run.stored()[:4] == ("APPLIED", "admin", None, "admin")
    assert (consumer.position(), consumer.rows()) == (40, list(range(40)))
    lab.client.clear(DAG, run.run_id, ["apply"])
    assert run.wait() == "success"
    assert "was already applied at" in run.log("apply", 2)
    assert consumer.position() == 40

    forward = rewind("unasked", scenario="to-latest", value=None, backfill=True, consume=False)
    assert forward.wait() == "success"
    assert forward.tasks()["backfill"] == "success"
    assert (consumer.position(), consumer.rows()) == (RECORDS, list(range(RECORDS)))


def test_everything_that_is_wrong_with_the_form_is_told_at_once(lab, rewind):
    """REST clients can send anything, such as unknown keys or ambiguous times. The run fails at once without a retry and stores nothing.
    Whatever JSON schema can reject is refused before a run exists."""
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
    assert {run.tasks()[task] for task in ("apply", "consume", "verify")} == {"upstream_failed"}
    assert run.tries("plan") == ["failed"]
    long, strange = {"reason": "x" * 2001}, {"zone": "Europe, Berlin"}
    for wrong in ({"reason": "short"}, long, strange, {"scenario": "to-moon"}, {"consumers": []}, {"allow_loss": "yes"}):
        with pytest.raises(AirflowRefused):
            rewind("asked", **wrong)
    body = {"dag_id": DAG, "from_date": "2026-01-01T00:00:00Z", "to_date": "2026-01-02T00:00:00Z", "dag_run_conf": {}}
    with pytest.raises(AirflowRefused, match="does not allow"):
        lab.client.post("backfills", body)
    assert lab.sql("SELECT count(*) FROM tidemark.rewind") == before


def test_forms_can_be_filled_without_documentation(lab):
    """Every field has a title and a section, and every choice has a label."""
    for dag in ("rewind", "redrive", "discard"):
        schemas = {name: field["schema"] for name, field in lab.client.get(f"dags/{dag}/details")["params"].items()}
        assert [name for name, schema in schemas.items() if not {"title", "section"} <= set(schema)] == []
        for name, schema in schemas.items():
            choices = {choice for choice in schema.get("enum") or schema.get("examples") or () if choice is not None}
            assert set(schema.get("values_display", choices)) == choices, (dag, name)


def test_dag_of_one_consumer_rewinds_it_and_no_other(lab, consumers):
    """A user who may start ``rewind__owned`` has access to that consumer only. A conf that names a consumer is refused."""
    asked = {"scenario": "to-offset", "value": "40", "reason": "a test of its own DAG", "consume": False}
    wrong = lab.trigger(f"{DAG}__owned", {**asked, "consumers": ["unasked"]})
    assert wrong.wait() == "failed"
    assert "consumers cannot be set: this DAG is for owned only" in wrong.log("plan")
    assert {name: consumers[name].position() for name in ("owned", "unasked")} == {"owned": RECORDS, "unasked": RECORDS}
    assert lab.trigger(f"{DAG}__owned", asked).wait() == "success"
    assert {name: consumers[name].position() for name in ("owned", "unasked")} == {"owned": 40, "unasked": RECORDS}

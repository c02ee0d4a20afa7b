"""``validation: {on_failure: rewind}``: a run with a critical verdict is taken back once; records that fail again stay and block."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from tests.integration.rewind.lab import Lab, one_city, role_on
from tests.support.kafka_topics import Topics

from tidemark.db import connect
from tidemark.offsets.store import TaskIdentity
from tidemark.profiles import Profile
from tidemark.quality import ValidatedRun, ValidationReport, Verdict, validate
from tidemark.rewind.apply import RewindNotAllowed
from tidemark.rewind.plan_model import Plan, RewindState, ToBatch
from tidemark.rewind.reaction import TakenBack, take_back, taken_back
from tidemark.rewind.scenarios.targets import TargetsOutOfRange
from tidemark.rewind.store import history
from tidemark.spec.model import Approval

DAG = "consume__cities"


def wrong(offset: int) -> Sequence[str]:
    return ["wrong"]


class Judge:
    """Runs of the consumer's DAG, each validated by a suite that rejects wrong cities."""

    def __init__(self, lab: Lab, folder: Path) -> None:
        self.lab = lab
        self.suite = folder / "cities.json"
        kwargs = {"column": "city", "value_set": ["wrong"]}
        expectation = {"type": "expect_column_values_to_not_be_in_set", "kwargs": kwargs, "severity": "critical"}
        self.suite.write_text(json.dumps({"name": "cities", "expectations": [expectation]}))
        self.runs = 0

    def run(self, end: int, *partitions: int, good: bool = False) -> ValidatedRun:
        """Reads up to ``end``, and writes wrong cities unless ``good``."""
        self.runs += 1
        for partition in partitions or (0,):
            self.lab.read(end, partition, one_city if good else wrong, step=10, task=TaskIdentity(DAG, f"run {self.runs}"))
        return ValidatedRun(DAG, f"run {self.runs}")

    def verdict(self, run: ValidatedRun) -> ValidationReport:
        return validate(self.lab.url, run, group=self.lab.spec.group, suites={self.lab.table: self.suite})

    def react(self, run: ValidatedRun) -> TakenBack:
        verdict = self.verdict(run)
        assert verdict.verdict is Verdict.CRITICAL
        with self.lab.session() as connection:
            return take_back(connection, self.lab.cluster, self.lab.spec, run, verdict)

    def taken_back(self, run: ValidatedRun) -> int | None:
        with self.lab.session() as connection:
            return taken_back(connection, self.lab.spec.group, run)

    def rewinds(self) -> list[Plan]:
        with self.lab.session() as connection:
            return history(connection)


@pytest.fixture
def judge(lab: Lab, tmp_path: Path) -> Judge:
    return Judge(lab, tmp_path)


def test_run_over_a_compacted_topic_is_left_as_it_is(lab: Lab, judge: Judge, topics: Topics) -> None:
    """Nobody has decided that rows may go that do not come back."""
    run = judge.run(20)
    topics.alter(lab.topic, cleanup_policy="compact")
    reaction = judge.react(run)
    assert reaction.rewound is None
    assert reaction.reason.startswith(f"{lab.topic}: compacted, so Kafka may no longer have all of its records.")


def test_run_that_fails_is_taken_back_to_before_it_and_the_next_one_reads_it_again(lab: Lab, judge: Judge) -> None:
    """Exactly its ranges are taken back, with their failed records, and the reason names the validation. No approval is needed, even if the
    file requires one for planned rewinds. The rewind can be undone like any other."""
    assert lab.spec.rewind.approval is Approval.REQUIRED
    first = judge.run(20, 0, 1, good=True)
    assert judge.verdict(first).verdict is Verdict.PASSED
    before = lab.image()
    second = judge.run(50, 0, 1)
    lab.read(30, 2)  # by hand, not by a run of the DAG
    written = lab.image()
    done = judge.react(second)
    assert done.rewound is not None
    assert lab.positions() == [20, 20, 30]
    assert [row for row in lab.image().sink if row[3] < 2] == before.sink
    assert [row for row in lab.ledger() if row[0] < 2] == [(part, start, start + 10) for part in (0, 1) for start in (0, 10)]
    plan = done.rewound
    by = f"validation {judge.lab.sql('SELECT max(validation_id) FROM tidemark.validation')[0][0]}"
    assert (plan.state, plan.planned_by, plan.applied_by, plan.decided_by) == (RewindState.APPLIED, by, by, None)
    assert (plan.scenario, plan.dag_id, plan.run_id) == (ToBatch(dag_id=DAG, run_id="run 2"), DAG, "run 2")
    assert plan.reason.startswith(f"{by} of {lab.spec.name} was critical: expect_column_values_to_not_be_in_set(column='city'")
    assert [(part.old, part.new) for _, part in plan] == [(50, 20), (50, 20)]
    assert f"{lab.topic}/0 from 20 to 50, {lab.topic}/1 from 20 to 50" in str(done)
    lab.check()

    third = judge.run(50, 0, 1, good=True)
    assert judge.verdict(third).verdict is Verdict.PASSED
    assert lab.sql("SELECT validated_offset FROM tidemark.partition_offset ORDER BY partition") == [(50,), (50,), (0,)]
    assert lab.undo(plan.rewind_id).state is RewindState.APPLIED
    assert lab.image().sink == written.sink
    lab.check()


def test_what_fails_again_stays_and_blocks_and_what_comes_behind_it_gets_its_own_try(lab: Lab, judge: Judge) -> None:
    """No range is taken back twice, so the group makes progress even if all records stay wrong."""
    ends, taken = [20, 40, 60, 80], []
    for end in ends:
        reaction = judge.react(judge.run(end))
        taken.append(reaction.rewound is not None)
        lab.check()
    assert taken == [True, False, True, False]
    assert lab.position() == 80
    ranges = [[(part.new, part.old) for _, part in plan] for plan in reversed(judge.rewinds())]
    assert ranges == [[(0, 20)], [(40, 60)]]
    last = max(plan.rewind_id for plan in judge.rewinds())
    assert f"they were read again once and failed again: {lab.topic}/0 [40, 60) by rewind {last}" in str(reaction)


def test_rewind_by_hand_does_not_use_up_the_one_of_the_validation(lab: Lab, judge: Judge) -> None:
    first = judge.run(20)
    judge.verdict(first)
    lab.rewind(ToBatch(dag_id=DAG, run_id=str(first.run_id)), by="validation department")
    second = judge.react(judge.run(20))
    assert second.rewound is not None
    assert lab.position() == 0


def test_try_after_the_one_that_took_the_run_back_learns_of_it(lab: Lab, judge: Judge) -> None:
    """The ledger has nothing left of the run, which alone would pass. A rewind that was undone does not count. It is not done again: the
    person who undid it wants to keep the rows."""
    run = judge.run(20)
    assert judge.taken_back(run) is None
    done = judge.react(run)
    assert done.rewound is not None
    assert judge.verdict(run).validation_id is None
    assert judge.taken_back(run) == done.rewound.rewind_id
    assert judge.taken_back(ValidatedRun(DAG, "another run")) is None
    lab.undo(done.rewound.rewind_id)
    assert judge.taken_back(run) is None
    again = judge.react(run)
    assert again.rewound is None
    assert f"0) by rewind {done.rewound.rewind_id}" in str(again)
    assert lab.position() == 20


def test_what_the_next_run_has_read_meanwhile_is_taken_back_too_unless_it_was_judged(lab: Lab, judge: Judge) -> None:
    """With continuous runs, the next run reads while the previous one is validated. Validating an old run again takes back nothing that
    readers have been notified of since."""
    old = judge.run(20)
    judge.verdict(old)
    assert judge.verdict(judge.run(40, good=True)).verdict is Verdict.PASSED
    kept = judge.react(old)
    assert kept.rewound is None
    assert f"readers have already seen the rows from {lab.topic}/0 0 on" in str(kept)
    assert (lab.position(), judge.rewinds()) == (40, [])

    new = judge.run(60)
    judge.run(80, good=True)
    done = judge.react(new)
    assert done.rewound is not None
    assert [(part.old, part.new) for _, part in done.rewound] == [(80, 40)]


def test_run_that_had_passed_and_fails_a_new_suite_stays(lab: Lab, judge: Judge) -> None:
    run = judge.run(20, good=True)
    assert judge.verdict(run).verdict is Verdict.PASSED
    judge.suite.write_text(judge.suite.read_text().replace('"wrong"', '"city 4"'))
    assert judge.react(run).rewound is None
    assert lab.position() == 20


def test_records_that_are_not_accounted_for_are_left_as_they_are(lab: Lab, judge: Judge) -> None:
    """A rewind would remove the evidence."""
    run = judge.run(20)
    lab.sql(f"DELETE FROM {lab.table} WHERE kafka_offset = 13")
    reaction = judge.react(run)
    assert reaction.rewound is None
    assert "not accounted for" in str(reaction)
    assert (lab.position(), judge.rewinds()) == (20, [])


def test_run_whose_records_kafka_no_longer_has_is_not_taken_back(lab: Lab, judge: Judge) -> None:
    """Only a person can allow loss."""
    run = judge.run(20)
    lab.consumer.topics.trim(lab.topic, {0: 5})
    with pytest.raises(TargetsOutOfRange):
        judge.react(run)
    assert lab.position() == 20


def test_plan_that_could_not_be_applied_waits_for_nobody(lab: Lab, judge: Judge) -> None:
    """A role without DELETE on the sink planned it. The plan is stored as rejected, and a later validation does not count it as a
    rewind."""
    run = judge.run(20)
    verdict = judge.verdict(run)
    with role_on(lab, Profile.REWINDER, "docs/rewind.md") as url:
        lab.sql(f"REVOKE DELETE ON {lab.table} FROM {urlsplit(url).username}")
        with contextlib.closing(connect(url, application="tidemark rewind")) as connection, pytest.raises(RewindNotAllowed):
            take_back(connection, lab.cluster, lab.spec, run, verdict)
    assert [plan.state for plan in judge.rewinds()] == [RewindState.REJECTED]
    assert lab.position() == 20
    assert judge.react(run).rewound is not None

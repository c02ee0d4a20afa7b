"""Order by key: while a record waits, later records of its key are held, in order and up to a limit; other keys continue.

Scenarios 31 to 34. A record's value is its key and a number, such as ``a1``, and determines the service's answer.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule
from tests.integration.retry.lab import DELAYS, SERVICE, Lab, lab_on, minutes
from tests.integration.retry.machine import LADDERS, OPEN, STEPS, RetryMachine
from tests.support.by_hand import WHY
from tests.support.kafka_topics import Topics
from tests.support.ledger import in_thread
from tests.support.machines import run_machine
from tests.support.scenario import Scenario

from tidemark.db import session, transaction
from tidemark.errors import BadInput
from tidemark.records.ranges import Slice
from tidemark.retry import store
from tidemark.retry.admin import NotEditable, Payload, edit, list_records
from tidemark.retry.filter import Filter, RecordState
from tidemark.retry.order import HeldTooMany
from tidemark.retry.pending import busy
from tidemark.retry.redrive import Destination
from tidemark.rewind.plan_model import ToOffset
from tidemark.sink import commit as commit_module
from tidemark.sink.steps import Step
from tidemark.spec.retry_topics import now_topic

BY_KEY = {"delays": list(DELAYS), "order": "key"}

ARROW_SERVICE = """
    import json
    import pathlib

    import pyarrow as pa

    HERE = pathlib.Path("@HERE@")


    def transform(batch: pa.RecordBatch) -> pa.RecordBatch:
        said = json.loads((HERE / "answers.json").read_text())
        with (HERE / "calls").open("a") as calls:
            for partition, offset in zip(batch["partition"].to_pylist(), batch["offset"].to_pylist()):
                calls.write(f"{partition} {offset}\\n")
        words = [value.decode() for value in batch["value"].to_pylist()]
        answers = pa.array([said.get(word, said.get("*", "load")) for word in words], pa.string())
        errors = pa.array([f"Retry: the service is down for {word}" for word in words], pa.string())
        lineage = ["kafka_topic", "kafka_partition", "kafka_offset"]
        columns = [*(batch[name] for name in lineage), batch["value"], answers, errors]
        return pa.RecordBatch.from_arrays(columns, names=[*lineage, "payload", "disposition", "error"])
"""
"""Like `SERVICE`, in the Arrow form."""


def with_options(**options: Any) -> pytest.MarkDecorator:
    """Runs a test on a lab with these options. Its records are in order by key."""
    return pytest.mark.parametrize("lab", [options], indirect=True, ids=[""])


def both_forms(**options: Any) -> pytest.MarkDecorator:
    """Runs a test in both forms, on a lab with these options."""
    return pytest.mark.parametrize("lab", [options, {"transform": ARROW_SERVICE, **options}], indirect=True, ids=["function", "arrow"])


@pytest.fixture
def lab(request: pytest.FixtureRequest, scenario: Scenario, topics: Topics) -> Iterator[Lab]:
    options = dict(getattr(request, "param", {}))
    with lab_on(scenario, topics, retry=BY_KEY | options.pop("retry", {}), **options) as lab:
        yield lab


def send(lab: Lab, values: str) -> None:
    """Produces a record per word. The first letter is the key; ``-`` means no key."""
    for value in values.split():
        lab.produce(value, key=None if value[0] == "-" else value[0])


def read(lab: Lab, values: str, answers: dict[str, str]) -> None:
    """Sends records and runs the consumer. The service gives these answers from now on."""
    lab.say(answers)
    send(lab, values)
    lab.run()


def states(lab: Lab) -> dict[str, str]:
    """Returns the state of each failed record by value."""
    return {value.decode(): state for value, state in lab.failed("value, state")}


def drain(lab: Lab, after: float = 0) -> list[str]:
    """Publishes handed-off and released records, lets ``after`` minutes pass, and drains. Returns the values tried, in order."""
    lab.make_due(minutes(after))
    lab.calls()
    lab.drain()
    lab.check()
    values = {(partition, offset): value.decode() for partition, offset, value in lab.failed("partition, record_offset, value")}
    return [values[place] for place in lab.calls()]


# ---- which records are held, and until when


@pytest.mark.sampled
@both_forms()
def test_later_records_of_a_key_that_waits_are_held_and_loaded_in_order_after_it(lab: Lab) -> None:
    """Scenario 31: in the same slice, in later ones, and while held records are being released. Other keys, and records without a key,
    continue."""
    read(lab, "a1 b1 a2 -1 -2 a3", {"a1": "retry", "-1": "retry"})
    assert lab.loaded() == ["b1", "-2"]
    assert lab.failed("value, state, retry_number, retry_topic, error_type") == [
        (b"a1", "WAITING", 1, f"{lab.group}.retry.5m", "Retry"),
        (b"a2", "HELD", 0, None, "HeldBack"),
        (b"-1", "WAITING", 1, f"{lab.group}.retry.5m", "Retry"),
        (b"a3", "HELD", 0, None, "HeldBack"),
    ]
    assert lab.failed("error_text")[1] == ("behind offset 0, which has the same key and is to be retried",)
    lab.check()
    send(lab, "a4 b2")
    lab.run()
    assert (lab.loaded(), states(lab)["a4"]) == (["b1", "-2", "b2"], "HELD")
    lab.say({})
    assert drain(lab, 5) == ["a1", "-1"]
    send(lab, "a5")
    lab.run()  # a2 to a4 are not tried yet, because no relay has released them
    lab.relay()
    send(lab, "a6")
    lab.run()  # now they are released and wait
    lab.check()
    assert drain(lab) == ["a2", "a3", "a4", "a5"]
    assert drain(lab) == ["a6"]
    send(lab, "a7")
    lab.run()
    assert lab.loaded() == ["a1", "b1", "a2", "-1", "-2", "a3", "a4", "b2", "a5", "a6", "a7"]
    assert set(states(lab).values()) == {"LOADED"}
    lab.check()


@pytest.mark.sampled
@both_forms(retry={"delays": ["5m"], "budget": "6m"})
def test_record_that_fails_for_good_holds_its_key_no_longer(lab: Lab, request: pytest.FixtureRequest) -> None:
    """Scenario 31: at the end of the ladder, or at once if it can never succeed. Held records start at the beginning of their ladder."""
    read(lab, "a1 b1 a2 b2 a3", {"a1": "retry", "b1": "fail", "a2": "retry"})
    assert (lab.loaded(), states(lab)) == (["b2"], {"a1": "WAITING", "b1": "FAILED", "a2": "HELD", "a3": "HELD"})
    lab.age(minutes(60))
    assert drain(lab, 5) == ["a1"]
    assert states(lab)["a1"] == "FAILED"
    assert drain(lab) == (["a2", "a3"] if request.node.callspec.id == "arrow" else ["a2"])
    assert lab.failed("value, state, retry_number, retry_topic, jsonb_array_length(story)")[2:] == [
        (b"a2", "WAITING", 1, f"{lab.group}.retry.5m", 0),
        (b"a3", "HELD", 0, None, 0),
    ]
    assert drain(lab, 5) == ["a2"]
    assert drain(lab) == ["a3"]
    assert (lab.loaded(), states(lab)) == (["b2", "a3"], {"a1": "FAILED", "b1": "FAILED", "a2": "FAILED", "a3": "LOADED"})


@pytest.mark.sampled
@both_forms()
def test_drain_that_has_several_records_of_a_key_stops_it_at_the_first_that_fails_again(lab: Lab) -> None:
    """Records behind it keep their progress, and a permanent failure blocks nothing. The ledger counts held records as retried."""
    read(lab, "a1 a2 a3 a4 b1", {"*": "retry"})
    lab.say({"a2": "fail", "a3": "retry", "b1": "retry"})
    drain(lab, 5)
    drain(lab)
    assert states(lab) == {"a1": "LOADED", "a2": "FAILED", "a3": "WAITING", "a4": "HELD", "b1": "WAITING"}
    assert lab.failed("retry_number, jsonb_array_length(story)") == [(1, 0), (0, 0), (1, 0), (0, 0), (2, 1)]
    assert lab.drains()[-1] == ("retry.now", 0, 3, 0, 0, 2, 1, 0)
    lab.say({})
    assert drain(lab, 5) == ["b1", "a3"]
    assert drain(lab) == ["a4"]
    assert lab.loaded() == ["a1", "a3", "a4", "b1"]


def test_record_that_is_not_in_its_log_holds_what_is_behind_it(lab: Lab) -> None:
    """It keeps waiting and is published again. The next record of its key is due and in the log, but not tried before it."""
    read(lab, "a1 a2 a3", {"a1": "retry"})
    lab.say({})
    drain(lab, 5)
    lab.relay()
    topic = now_topic(lab.group)
    lab.topics.produce(topic, [b"x"])
    lab.topics.trim(topic, {0: 1})
    lab.calls()
    lab.drain()
    assert (lab.calls(), states(lab)) == ([], {"a1": "LOADED", "a2": "WAITING", "a3": "HELD"})
    lab.check()
    assert drain(lab) == ["a2"]
    assert drain(lab) == ["a3"]


@with_options(ddl="payload bytea CHECK (payload <> 'a1')")
def test_rows_that_postgres_refuses_block_nothing_and_leave_the_order_of_the_others(lab: Lab) -> None:
    """A bad row is found after the transform has answered for the whole slice. The second pass holds the same records."""
    read(lab, "a1 b1 a2 b2", {"b1": "retry"})
    assert (lab.loaded(), states(lab)) == (["a2"], {"a1": "FAILED", "b1": "WAITING", "b2": "HELD"})
    lab.check()


# ---- limits


@with_options(retry={"max_held": 2})
def test_slice_that_would_hold_too_many_records_is_read_up_to_the_limit(lab: Lab) -> None:
    """Scenario 32: in smaller slices, up to the first record beyond the limit. The message gives the numbers. Once the earlier records are
    drained, the rest is read."""
    read(lab, "a1 a2 b1", {"a1": "retry", "b1": "retry"})
    send(lab, "c1 a3 b2")
    with pytest.raises(HeldTooMany) as raised:
        lab.run()
    assert not raised.value.retriable
    assert str(raised.value).startswith(
        f'{lab.topic}/0 [5, 6): 1 record would be held, because earlier records of 1 key wait for a retry: "b". '
        "With the 2 already held in this partition, that is more than retry.max_held (2). Nothing of this slice was stored"
    )
    assert (lab.loaded(), states(lab)) == (["c1"], {"a1": "WAITING", "a2": "HELD", "a3": "HELD", "b1": "WAITING"})
    lab.check()
    lab.say({})
    drain(lab, 5)
    lab.run()
    drain(lab)
    assert sorted(lab.loaded()) == ["a1", "a2", "a3", "b1", "b2", "c1"]


@with_options(retry={"max_held": 2})
def test_first_slice_whose_own_failure_would_hold_too_many_is_stored_in_part(lab: Lab) -> None:
    """Otherwise nothing would ever be stored, and there would be nothing to drain."""
    lab.say({"a1": "retry"})
    send(lab, "a1 a2 a3 a4 a5")
    with pytest.raises(HeldTooMany):
        lab.run()
    assert states(lab) == {"a1": "WAITING", "a2": "HELD", "a3": "HELD"}
    lab.say({})
    drain(lab, 5)
    drain(lab)
    lab.run()
    assert sorted(lab.loaded()) == ["a1", "a2", "a3", "a4", "a5"]


@with_options(retry={"breaker": {"ratio": 0.5, "minimum": 1}})
def test_held_records_are_no_failures_to_the_breaker(lab: Lab) -> None:
    """One of the two records that were tried has failed, and four are held."""
    read(lab, "a1 a2 a3 a4 a5 b1", {"a1": "retry"})
    assert lab.states() == {"WAITING": 1, "HELD": 4}


# ---- operators


def test_operator_sees_and_discards_held_records_and_can_neither_edit_nor_redrive_them(lab: Lab) -> None:
    """Scenario 33: the head and a record in the middle are discarded. The records behind them continue in order."""
    read(lab, "a1 a2 a3 a4", {"a1": "retry"})
    with session(lab.url) as connection:
        held = list_records(connection, lab.group, Filter(states=(RecordState.HELD,)), limit=10)
        assert [record.offset for record in held] == [1, 2, 3]
        with pytest.raises(NotEditable, match="it is held until an earlier record of its key is settled"):
            edit(connection, lab.group, [(held[0].number, lambda was: Payload(was.key, b"x", ()))], **WHY)
        with pytest.raises(BadInput, match="no record to redrive: states HELD; 3 already wait for a retry"):
            lab.plan_redrive(Filter(states=(RecordState.HELD,)))
    assert lab.discard(Filter(numbers=(held[1].number,))) == 1
    assert lab.discard(Filter(from_offset=0, to_offset=1)) == 1
    lab.check()
    lab.say({})
    assert drain(lab) == ["a2", "a4"]
    assert states(lab) == {"a1": "DISCARDED", "a2": "LOADED", "a3": "DISCARDED", "a4": "LOADED"}


def test_rewind_withdraws_held_records_and_its_undo_puts_them_back(lab: Lab) -> None:
    """A waiting record before the rewind's target keeps holding its key during the replay."""
    read(lab, "a1 a2 b1 a3 b2 b3", {"a1": "retry", "b2": "retry"})
    columns = "record_offset, state, due_at, retry_number, error_type, story, ladder_at"
    before, rows = lab.failed(columns), lab.rows()
    done = lab.rewind(ToOffset(1))
    assert states(lab) == {"a1": "WAITING"}
    lab.check()
    lab.say({})
    lab.run()
    assert (lab.loaded(), states(lab)) == (["b1", "b2", "b3"], {"a1": "WAITING", "a2": "HELD", "a3": "HELD"})
    lab.check()
    lab.undo(done.rewind_id)
    assert (lab.failed(columns), lab.rows()) == (before, rows)
    lab.check()
    assert drain(lab, 5) == ["a1", "b2"]
    assert drain(lab) == ["a2", "a3", "b3"]


# ---- races


def test_record_held_while_a_drain_settles_what_it_is_behind_is_not_forgotten(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scenario 31, check then insert: the run saw that the key is blocked, and stores the record as held when nothing waits any more."""
    there, go = threading.Event(), threading.Event()

    def wait(step: Step, part: Slice) -> None:
        if step is Step.COPY_ROWS and not part.drained:
            there.set()
            assert go.wait(60)

    read(lab, "a1", {"a1": "retry"})
    lab.say({})
    send(lab, "a2 a3")
    with monkeypatch.context() as patched:
        patched.setattr(commit_module, "reached", wait)
        with in_thread(lab.run) as run:
            assert there.wait(60)
            assert drain(lab, 5) == ["a1"]
            lab.relay()
            go.set()
            run.result(180)
    assert states(lab) == {"a1": "LOADED", "a2": "HELD", "a3": "HELD"}
    with session(lab.url) as connection:
        assert lab.group in busy(connection)
    assert drain(lab) == ["a2", "a3"]
    assert lab.loaded() == ["a1", "a2", "a3"]


@pytest.mark.sampled
@both_forms(ddl="payload bytea CHECK (payload <> 'bad')")
def test_key_that_is_blocked_while_bad_rows_are_looked_for_is_held(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """The slice is transformed before its transaction. If a key has been blocked since, it is transformed again."""
    read(lab, "a1", {"a1": "fail"})
    send(lab, "a2 bad c1")
    blocked = []

    def block(step: Step, _part: Slice) -> None:
        if step is Step.BEGIN:
            blocked.append(step)
            if len(blocked) == 2:  # the first transaction did not look for bad rows
                lab.sql("UPDATE tidemark.failed_record SET state = 'WAITING', due_at = clock_timestamp() WHERE value = 'a1'")

    lab.calls()
    with monkeypatch.context() as patched:
        patched.setattr(commit_module, "reached", block)
        lab.run()
    assert len(blocked) == 3
    assert states(lab) == {"a1": "WAITING", "a2": "HELD", "bad": "FAILED"}
    assert lab.loaded() == ["c1"]
    lab.check()


def test_drain_of_one_tier_does_not_overtake_one_of_another_that_is_committing(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the first drain has committed, its records count as waiting, and the other drain holds the records behind them."""
    read(lab, "a1 a2", {"a1": "retry"})
    lab.make_due(minutes(5))
    lab.sql(
        "UPDATE tidemark.failed_record SET state = 'WAITING', due_at = clock_timestamp(), retry_topic = %(topic)s WHERE value = 'a2'",
        topic=now_topic(lab.group),
    )
    lab.relay()
    lab.say({})
    ready = threading.Barrier(2, timeout=300)

    def slowly(step: Step, part: Any) -> None:
        if step is Step.COPY_ROWS:
            ready.wait()  # both have their locks and know the order of their records

    lab.calls()
    with monkeypatch.context() as patched:
        patched.setattr(commit_module, "reached", slowly)
        lab.drain()
    assert (lab.calls(), states(lab)) == ([(0, 0)], {"a1": "LOADED", "a2": "HELD"})
    lab.check()
    assert drain(lab) == ["a2"]


# ---- in any order

KEYS = ("k", "l", "k", "l", None)
SERVICES = {"function": SERVICE, "arrow": ARROW_SERVICE}
ANSWERS = st.lists(st.sampled_from(("load", "retry", "load", "skip", "retry", "fail")), min_size=5, max_size=5)
"""Assigned to the records in turn, so that they get different answers, and other ones at the next try."""
COMING = st.lists(st.sampled_from(KEYS), min_size=3, max_size=6)
ROUNDS = 3
"""Rounds of relay and drain after which no record may be left waiting."""


class Ordered(RetryMachine):
    """Whatever happens, no record is tried, loaded, skipped or given up while an earlier record of its key waits.

    This is checked step by step: when a failed or discarded record is redriven, records that have overtaken it stay settled, and it holds
    the others.
    """

    make: Callable[[str], Lab]

    @initialize(
        service=st.sampled_from(sorted(SERVICES)), keys=st.lists(st.sampled_from(KEYS[:2]), min_size=6, max_size=8), answers=ANSWERS
    )
    def begin(self, service: str, keys: list[str | None], answers: list[str]) -> None:
        self.start(self.make(SERVICES[service]))
        self.keys: list[str | None] = []
        self.read(keys, ["retry", *answers[1:]], LADDERS[0], None)

    def teardown(self) -> None:
        """Once the service stays up, all records are settled, and those that arrive meanwhile wait for their turn."""
        if not hasattr(self, "lab"):
            return
        with contextlib.closing(self.lab):
            self.read(["k", "l"], ["load"], LADDERS[0], None)
            for answers, backwards in ((["load"], False), (["retry", "load"], False), (["load"], True)):
                self.drained(answers, 60, 1, backwards, 1, None)
            for _ in range(ROUNDS):
                if not self.open():
                    break
                self.lab.relay()
                self.lab.age(minutes(60))
                with self._in_order():
                    self.lab.drain()
            assert not self.open()
            self.lab.check()

    @rule(keys=COMING, answers=ANSWERS, delays=st.sampled_from(LADDERS), step=STEPS)
    def read(self, keys: list[str | None], answers: list[str], delays: list[str], step: Step | None) -> None:
        self.lab.consumer.set(retry={"delays": delays, "order": "key"})
        for key in keys:
            self.lab.produce(str(len(self.keys)), key=key)
            self.keys.append(key)
        self._answer(answers)
        with self._in_order(), self.dying(step):
            self.lab.run()

    @rule(
        answers=ANSWERS,
        by=st.sampled_from((30, 5, 0)),
        of=st.sampled_from((1, 1, 2)),
        backwards=st.booleans(),
        published=st.sampled_from((1, 1, 2)),
        step=STEPS,
    )
    def drained(self, answers: list[str], by: int, of: int, backwards: bool, published: int, step: Step | None) -> None:
        """Publishes every ``published``-th record, ages every ``of``-th one by ``by`` minutes, and drains. ``backwards``: publishes in
        reverse order, as several relays may."""
        with session(self.lab.url) as connection, transaction(connection) as cur:
            store.release(cur, self.lab.group_id, now_topic(self.lab.group))
        outbox = self.rows("failed_record_id, retry_topic, key, value", "state IN ('WAITING', 'FAILED') AND retry_offset IS NULL")
        self._publish(outbox[:: -published if backwards else published])
        self.lab.sql(
            "UPDATE tidemark.failed_record SET due_at = due_at - %(by)s WHERE group_id = %(group_id)s AND record_offset %% %(of)s = 0",
            by=minutes(by),
            of=of,
            group_id=self.lab.group_id,
        )
        self._answer(answers)
        due = {tuple(row) for row in self.rows("partition, record_offset", "state = 'WAITING' AND due_at <= clock_timestamp()")}
        with self._in_order(due), self.dying(step):
            self.lab.drain()

    @rule(answers=ANSWERS, step=STEPS)
    def all_drained(self, answers: list[str], step: Step | None) -> None:
        """Publishes all released records, in order, and lets 30 minutes pass for all records."""
        self.drained(answers, 30, 1, False, 1, step)

    # ---- operators

    @precondition(lambda self: bool(self._given_up()))
    @rule(data=st.data(), to=st.sampled_from(Destination))
    def operator_redrives(self, data: Any, to: Destination) -> None:
        (number,) = data.draw(st.sampled_from(self._given_up()))
        self.lab.redrive(Filter(numbers=(number,), states=(RecordState.FAILED, RecordState.DISCARDED)), to)

    @contextlib.contextmanager
    def _in_order(self, due: set[Any] | None = None) -> Iterator[None]:
        """Checks one run or drain for each key: it asks about records in the order of their offsets, each once, and settles none while an
        earlier one stays unsettled. ``due``: the only records that it may ask about."""
        before = self._open()
        self.lab.calls()
        yield
        asked, after = self.lab.calls(), self._open()
        settled = before - after
        assert due is None or set(asked) <= due, "a record was tried that was not due"
        for key in ("k", "l"):
            mine = [offset for _, offset in asked if self.keys[offset] == key]
            assert mine == sorted(set(mine)), f"{key}: tried twice, or before an earlier one: {mine}"
            first = min((offset for offset in after if self.keys[offset] == key), default=len(self.keys))
            passed = sorted(offset for offset in settled if self.keys[offset] == key and offset > first)
            assert not passed, f"{key}: {passed} are settled, and {first} is not"

    def _open(self) -> set[int]:
        """The offsets of unsettled records: waiting, held, or not read yet."""
        unsettled = self.rows("record_offset", f"state IN {OPEN}")
        return {offset for (offset,) in unsettled} | set(range(self.position(), len(self.keys)))

    def _answer(self, answers: list[str]) -> None:
        self.lab.say({str(offset): answers[offset % len(answers)] for offset in range(len(self.keys))})

    def _publish(self, outbox: list[tuple[Any, ...]]) -> None:
        """Publishes these records in this order, and registers where they are."""
        for topic in {topic for _, topic, _, _ in outbox}:
            self.lab.make_topic(topic)
        places: dict[int, tuple[str, int, int]] = {}

        def note(number: int, _error: Any, message: Any) -> None:
            places[number] = (message.topic(), message.partition(), message.offset())

        for number, topic, key, value in outbox:
            self.lab.topics.produce(topic, [bytes(value)], key=key and bytes(key), on_delivery=functools.partial(note, number))
        for number, place in places.items():
            self.lab.register(number, *place)

    def _given_up(self) -> list[tuple[Any, ...]]:
        return self.rows("failed_record_id", "state IN ('FAILED', 'DISCARDED') AND redrives < 3")


def test_no_record_overtakes_one_of_its_key_in_any_order_of_failures_drains_deaths_and_rewinds(
    database_url: str, topics: Topics, project_dir: Path
) -> None:
    """Scenarios 21, 25, 31. Each example has a separate topic, group and sink."""

    def make(service: str) -> Lab:
        return Lab(Scenario(project_dir, database_url, topics), topics, transform=service, retry={"delays": LADDERS[0], "order": "key"})

    run_machine(Ordered, database_url, number=8, steps=7, make=staticmethod(make))

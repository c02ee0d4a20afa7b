"""A rehearsal: a rewind beside that reads with another transform than the consumer's, to be compared and discarded."""

from __future__ import annotations

import contextlib
import textwrap
from collections.abc import Iterator

import psycopg2.errors
import pytest
from tests.integration.rewind.hands import Hands
from tests.support.by_hand import REASON
from tests.support.records import numbers
from tests.support.scenario import ARROW
from tests.support.scenario import Scenario as Consumer

from tidemark.errors import BadInput
from tidemark.rewind import beside, plan_text
from tidemark.rewind.apply import RehearsalNotSwapped, StalePlan
from tidemark.rewind.plan import PlanRefused, PlanRequest, plan
from tidemark.rewind.plan_model import RewindState, ToEarliest, ToLatest, ToOffset
from tidemark.rewind.verify import verify
from tidemark.sink.fit import SinkMismatch
from tidemark.spec.scope import Scope


@pytest.fixture
def hands(scenario: Consumer) -> Iterator[Hands]:
    with contextlib.closing(Hands(scenario, sink={"table": scenario.table, "evolve": "add"})) as hands:
        scenario.run()
        yield hands


def write(hands: Hands, source: str) -> str:
    """Writes the module of a rehearsal's transform. Returns the transform's name."""
    module = f"{hands.consumer.name}_new"
    (hands.consumer.folders[0] / f"{module}.py").write_text(textwrap.dedent(source).lstrip())
    return f"{module}:transform"


def test_rehearsal_shows_what_another_transform_does_and_leaves_nothing_behind(hands: Hands) -> None:
    """The other transform may have another form. The group reads on with its own."""
    consumer = hands.consumer
    old, failed = consumer.rows(), hands.failed()
    name = write(hands, ARROW.replace('"value"]', '"value_text"]').replace("batch.select", "with_text(batch).select") + WITH_TEXT)
    planned = hands.plan(ToOffset(10), beside=True, transform=name)
    assert f"Rehearses the transform {name}; the rows stay as they are." in str(plan_text.markdown(planned)).replace("\\", "")
    assert plan_text.as_json(planned)["transform"] == name
    rewind_id = hands.apply(planned.rewind_id).plan.rewind_id
    consumer.run(of_rewind=rewind_id)
    consumer.topics.produce(hands.topic, numbers(30, 33))
    consumer.run()
    assert consumer.rows() == [*old, "30a"]

    with hands.session() as connection:
        (compared,) = verify(connection, rewind_id, {consumer.name: {hands.table: ()}})
        assert (compared.equal, compared.changed, compared.gone, compared.new, compared.left) == (0, 16, 0, 4, 3)
        assert sorted(each.now["payload"] for each in compared.examples["new"] if each.now) == ["11", "12", "21", "22"]
        with pytest.raises(RehearsalNotSwapped, match=rf"only rehearses {name}.*tidemark rewind discard {rewind_id}"):
            hands.swap(rewind_id)
        with pytest.raises(psycopg2.errors.CheckViolation):
            hands.sql("UPDATE tidemark.rewind SET state = 'APPLIED', applied_by = 'x', applied_at = now(), applied_no = 1")
        assert beside.discard(connection, rewind_id, by="ann").state is RewindState.DISCARDED
    assert (consumer.rows(), hands.failed()[: len(failed)]) == ([*old, "30a"], failed)
    assert hands.sql("SELECT relname FROM pg_class WHERE relnamespace = 'tidemark_archive'::regnamespace") == []
    hands.check()
    again = hands.rewind(ToOffset(10), beside=True).rewind_id
    consumer.run(of_rewind=again)
    hands.swap(again)
    assert consumer.rows() == [*old, "30a"]


WITH_TEXT = """

    def with_text(batch: pa.RecordBatch) -> pa.RecordBatch:
        values = [value.as_py().decode().removeprefix("record ") for value in batch["value"]]
        return batch.append_column("value_text", pa.array(values))
"""


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (("payload: str", "payload: str\n        note: str"), SinkMismatch, "note"),
        (("def transform", "def transfrom"), BadInput, r'has no function "transform"\. Write \w+_new:transfrom\. Nothing was read'),
        (("class Row", "raise KeyError\n\n    class Row"), BadInput, r"raised KeyError.*Fix .*_new\.py:6: raise KeyError"),
    ],
)
def test_transform_that_does_not_fit_is_refused_before_anything_is_read(
    hands: Hands, change: tuple[str, str], error: type[Exception], message: str
) -> None:
    """A rehearsal adds no column to the table, whatever its `evolve` says."""
    name = write(hands, hands.source("b").replace(*change))
    rewind_id = hands.rewind(ToOffset(10), beside=True, transform=name).rewind_id
    with pytest.raises(error, match=message):
        hands.consumer.run(of_rewind=rewind_id)
    with hands.watch.cursor() as cur:
        assert beside.find(cur, hands.group, rewind_id).left == 20
    assert "note" not in [name for (name,) in hands.sql("SELECT attname FROM pg_attribute WHERE attrelid = to_regclass(%s)", hands.table)]


def test_rehearsal_is_only_planned_beside_and_for_one_consumer(hands: Hands, scenario: Consumer) -> None:
    name = write(hands, hands.source("b"))
    for target in (ToEarliest(), ToLatest()):
        with pytest.raises(PlanRefused, match="Add --beside"):
            hands.plan(target, transform=name)
    other = Consumer(scenario.folder, scenario.database_url, scenario.topics)
    with contextlib.closing(Hands(other)) as others, hands.session() as connection:
        other.run()
        request = PlanRequest([hands.spec, others.spec], Scope.parse(()), ToEarliest(), REASON, "ann", beside=True, transform=name)
        with pytest.raises(PlanRefused, match="replaces the transform of one consumer"):
            plan(connection, lambda _: hands.cluster, request)
    assert hands.sql("SELECT count(*) FROM tidemark.rewind") == [(0,)]


def test_transform_is_part_of_what_was_planned(hands: Hands) -> None:
    planned = hands.plan(ToOffset(10), beside=True, transform=write(hands, hands.source("b")))
    hands.sql("UPDATE tidemark.rewind SET transform = NULL")
    with pytest.raises(StalePlan, match="was altered"):
        hands.apply(planned.rewind_id)

"""Rewinds of consumers that load several tables: all tables are rewound together, and restored together by an undo."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.by_hand import ByHand
from tests.support.sampling import examples
from tests.support.scenario import Scenario
from tests.support.shop import Order, Shop

from tidemark.rewind.apply import StalePlan
from tidemark.rewind.plan import PlanRefused
from tidemark.rewind.plan_model import Plan, ToOffset, Undo
from tidemark.rewind.plan_model import Scenario as Rewind
from tidemark.rewind.verify import verify


class Till(Shop):
    """A shop whose consumer is rewound."""

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(scenario, "function")
        self.by_hand = ByHand(scenario)
        self.plan = self.by_hand.plan

    def apply(self, made: Plan) -> Plan:
        return self.by_hand.apply(made.rewind_id).plan

    def rewind(self, scenario: Rewind) -> Plan:
        done = self.apply(self.plan(scenario))
        assert self.violations() == []
        return done

    def image(self) -> dict[str, list[Any]]:
        """All rows with their lineage, the ledger and the positions."""
        tables = (self.orders, self.lines, "tidemark.batch")
        rows = {table: self.scenario.sql(f"SELECT * FROM {table} ORDER BY 1, 2, 3, 4") for table in tables}
        return rows | {"positions": list(self.scenario.positions().items())}


@pytest.fixture
def till(scenario: Scenario) -> Till:
    return Till(scenario)


def test_a_rewind_takes_rows_out_of_all_tables_and_an_undo_puts_them_back(till: Till) -> None:
    """Lines are deleted before their orders and put back after them, as the foreign key requires."""
    till.produce({"id": 1, "lines": [3]}, {"id": 2, "lines": [4, 5]}, {"id": 3})
    till.run()
    before = till.image()
    planned = till.plan(ToOffset(1))
    assert [(group.tables, [part.sink_rows for part in group.partitions]) for group in planned.groups] == [((till.orders, till.lines), [4])]
    done = till.apply(planned)
    assert till.loaded() == {1: [3]}
    assert [part.sink_rows for _, part in done] == [4]
    till.rewind(Undo(done.rewind_id))
    assert till.image() == before
    again = till.rewind(ToOffset(1))
    till.run()
    assert till.loaded() == {1: [3], 2: [4, 5], 3: []}
    till.rewind(Undo(till.rewind(Undo(again.rewind_id)).rewind_id))
    assert till.loaded() == {1: [3], 2: [4, 5], 3: []}


def test_rows_that_refer_to_rows_that_go_stand_in_the_way(till: Till) -> None:
    """Lines that stay refer to an order that was loaded after them. The deferred foreign key allows that until the commit."""
    till.scenario.sql(
        f"ALTER TABLE {till.lines} DROP CONSTRAINT {till.lines.split('.')[1]}_order_id_fkey;"
        f"ALTER TABLE {till.lines} ADD FOREIGN KEY (order_id) REFERENCES {till.orders} (id) DEFERRABLE INITIALLY DEFERRED"
    )
    till.produce({"id": 1, "orphan": True, "lines": [3]}, {"id": 1})
    till.run()
    with pytest.raises(PlanRefused, match=rf"1 row of {till.lines} .* refers to rows that would be taken out of {till.orders}"):
        till.plan(ToOffset(1))
    till.rewind(ToOffset(0))
    assert till.loaded() == {}


def test_a_cascade_between_the_tables_takes_nothing_else(till: Till) -> None:
    """All rows that the cascade would delete are taken out first."""
    till.scenario.sql(
        f"ALTER TABLE {till.lines} DROP CONSTRAINT {till.lines.split('.')[1]}_order_id_fkey;"
        f"ALTER TABLE {till.lines} ADD FOREIGN KEY (order_id) REFERENCES {till.orders} (id) ON DELETE CASCADE"
    )
    till.produce({"id": 1, "lines": [3]}, {"id": 2, "lines": [4]})
    till.run()
    before = till.image()
    done = till.rewind(ToOffset(1))
    assert till.loaded() == {1: [3]}
    till.rewind(Undo(done.rewind_id))
    assert till.image() == before


def test_a_replay_is_compared_table_by_table(till: Till) -> None:
    """As if each table had a separate consumer."""
    till.produce({"id": 1, "lines": [3]}, {"id": 2, "lines": [4]})
    till.run()
    done = till.rewind(ToOffset(0))
    till.scenario.transform(till.source.replace('"quantity": quantity', '"quantity": quantity + 1'))
    till.run()
    with till.by_hand.session() as connection:
        orders, lines = verify(connection, done.rewind_id, {till.scenario.name: till.scenario.spec.keys})
    assert (orders.table, orders.equal, orders.changed) == (till.orders, 2, 0)
    assert (lines.table, lines.equal, lines.changed) == (till.lines, 0, 2)


def test_a_plan_is_stale_when_a_table_was_added(till: Till) -> None:
    """The plan covers only the tables that the consumer had when it was made."""
    till.produce({"id": 1, "lines": [3]})
    till.run()
    made = till.plan(ToOffset(0))
    till.scenario.sql(f"CREATE TABLE {till.orders}_more (LIKE {till.orders} INCLUDING ALL)")
    till.scenario.set(sinks={**till.scenario.keys["sinks"], "more": {"table": f"{till.orders}_more"}})
    with pytest.raises(StalePlan, match=r"The spec of .* was changed: sink was"):
        till.apply(made)


def test_an_undo_needs_the_tables_that_the_rewind_had(till: Till) -> None:
    """Otherwise its rows could not be put back."""
    till.produce({"id": 1, "lines": [3]})
    till.run()
    done = till.rewind(ToOffset(0))
    till.scenario.set(sinks={"orders": till.scenario.keys["sinks"]["orders"]})
    with pytest.raises(PlanRefused, match=rf"took rows out of {till.lines}, but the consumer's table is now {till.orders}"):
        till.plan(Undo(done.rewind_id))


@dataclass
class Model:
    """The expected contents of the tables after reading records in order."""

    orders: dict[int, list[int]] = field(default_factory=dict)

    def read(self, records: list[Order]) -> dict[int, list[int]]:
        lines: dict[tuple[int, int], int] = {}
        orders: set[int] = set()
        for record in records:
            number, own = record["id"], list(record.get("lines", []))
            orphan = record.get("orphan", False)
            if record.get("word") == "delete":
                lines.pop((number, record["line"]), None)
            elif min(own, default=1) > 0 and (number in orders if orphan and own else orphan or number not in orders):
                if not orphan:
                    orders.add(number)
                lines |= {(number, at): quantity for at, quantity in enumerate(own)}
        return {number: [quantity for (of, _), quantity in sorted(lines.items()) if of == number] for number in sorted(orders)}


RECORDS = st.lists(
    st.one_of(
        st.fixed_dictionaries({"id": st.integers(1, 4), "lines": st.lists(st.integers(1, 3), max_size=3)}),
        st.fixed_dictionaries({"id": st.integers(10, 12), "lines": st.just([1, -1])}),
        st.fixed_dictionaries({"id": st.integers(1, 4), "lines": st.lists(st.sampled_from([5, 6]), max_size=3), "orphan": st.just(True)}),
        st.fixed_dictionaries({"id": st.integers(1, 4), "line": st.integers(0, 2), "word": st.just("delete")}),
    ),
    min_size=1,
    max_size=6,
)
STEPS = st.lists(st.one_of(RECORDS, st.floats(0, 1), st.just("undo")), min_size=2, max_size=9)


@settings(max_examples=examples(10), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(STEPS)
def test_whatever_is_read_rewound_and_undone(scenario: Scenario, steps: list[Any]) -> None:
    """The ledger and the tables agree at each step, an undo restores all rows, and in the end the tables match the records.

    Lines that come without their order belong to an order of an earlier step or to none. If their order came later, it would depend on the
    slices whether they load: within a slice, all orders are written before all lines.
    """
    scenario.name = f"c{uuid.uuid4().hex[:10]}"
    scenario.table = f"lake.{scenario.name}"
    till = Till(scenario)
    till.run()
    records: list[Order] = []
    images: list[tuple[int, Any]] = []
    for step in steps:
        if isinstance(step, list):
            known = {record["id"] for record in records if "word" not in record and not record.get("orphan")}
            step = [record | {"id": record["id"] + 20} if record.get("orphan") and record["id"] not in known else record for record in step]
            records += step
            till.produce(*step)
            till.run()
        elif step == "undo":
            if not images:
                continue
            rewind_id, before = images.pop()
            till.rewind(Undo(rewind_id))
            assert (till.loaded(), till.scenario.positions()) == before
        elif records:
            before = (till.loaded(), till.scenario.positions())
            position = till.scenario.positions()[till.topic, 0]
            target = int(step * position)
            if target == position:
                continue
            images.append((till.rewind(ToOffset(target)).rewind_id, before))
        assert till.violations() == []
    till.run()
    assert till.loaded() == Model().read(records)
    assert till.violations() == []

"""Reads, rewinds and undos in any order, checked against a model: rows, offsets and ledger match it after every step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.integration.rewind.lab import Lab, of_all_kinds
from tests.support.erasing import erase
from tests.support.kafka_topics import Topics
from tests.support.machines import run_machine
from tests.support.scenario import Scenario as Consumer

from tidemark.records.outcome import TransformOutput
from tidemark.records.ranges import Slice, TopicPartition
from tidemark.rewind.plan import PlanRefused
from tidemark.rewind.plan_model import FromFile, Scenario, ShiftBy, ToCurrent, ToEarliest, ToLatest, ToOffset, ToValidated, Undo
from tidemark.rewind.scenarios.targets import TargetsOutOfRange

PARTITIONS = 2
LOG_END = 60
CHOSEN = st.sets(st.integers(0, PARTITIONS - 1), min_size=1)

Row = tuple[int, str]
"""Offset and city."""


def rows_of(partition: int, offset: int, variant: int, *, upsert: bool) -> list[Row]:
    """The rows that one of three transforms makes of a record. `of_all_kinds` in the lab does the same for whole batches."""
    digit = offset % 10
    if digit < 3:
        return []
    return [(offset, city) for city in cities(partition, variant, upsert=upsert)(offset)] * (3 if digit == 4 else 1)


def cities(partition: int, variant: int, *, upsert: bool) -> Callable[[int], list[str]]:
    """The transform of a variant. Variant 1 drops a third of the records, variant 2 makes two rows of each. In an upsert sink, keys
    repeat within a partition, and each variant gives a record a different key, so a replay overwrites rows that the first reading did
    not touch."""

    def transform(offset: int) -> list[str]:
        if variant == 1 and offset % 3 == 0:
            return []
        if not upsert:
            return [f"city {variant} {offset}"] * (2 if variant == 2 else 1)
        names = [f"key {partition} {(offset * (variant + 1)) % 11}", f"key {partition} {offset % 5}"]
        return names[: 2 if variant == 2 else 1]

    return transform


@dataclass
class Place:
    """A partition: its position, its validated offset, its rows in lineage order, and the offsets of its failed records."""

    position: int = 0
    validated: int = 0
    rows: list[Row] = field(default_factory=list)
    failed: list[int] = field(default_factory=list)
    erased: dict[str | int, int] = field(default_factory=dict)
    """By offset, or by key of an upsert sink: the offset below which erased records are not loaded."""

    def add(self, offset: int, made: list[Row], *, upsert: bool) -> None:
        made = [row for row in made if offset >= self.erased.get(row[1] if upsert else offset, 0)]
        if not upsert:
            self.rows += made
        for row in made if upsert else ():
            self.rows = [one for one in self.rows if one[1] != row[1]] + [row]
        if offset % 10 in (1, 2):
            self.failed.append(offset)

    def take(self, start: int) -> tuple[list[Row], list[int]]:
        """Takes out the rows and failed records from ``start`` on; returns all that there were before."""
        before = list(self.rows), list(self.failed)
        self.rows = [row for row in self.rows if row[0] < start]
        self.failed = [offset for offset in self.failed if offset < start]
        return before


@dataclass
class Done:
    """An applied rewind. ``before`` has each partition's old position, validated offset, start of the change, rows and failed records."""

    rewind_id: int
    number: int
    before: dict[int, tuple[int, int, int, tuple[list[Row], list[int]]]]
    undo_of: Done | None = None
    undone: bool = False

    @property
    def chain(self) -> tuple[Done, int]:
        """The rewind at the root of a chain of undos, and the number of undos on it."""
        one, undos = self, 0
        while one.undo_of is not None:
            one, undos = one.undo_of, undos + 1
        return one, undos


class Rewinds(RuleBasedStateMachine):
    """One group with two partitions. Every rewind can be undone unless a later one builds on it."""

    make: Any = None
    upsert = False

    @initialize(ends=st.lists(st.integers(20, 45), min_size=PARTITIONS, max_size=PARTITIONS), step=st.integers(7, 45))
    def start(self, ends: list[int], step: int) -> None:
        self.stack = contextlib.ExitStack()
        self.lab: Lab = self.stack.enter_context(contextlib.closing(type(self).make()))
        self.places = [Place() for _ in range(PARTITIONS)]
        self.done: list[Done] = []
        for partition, end in enumerate(ends):
            self.read(partition, end, 0, step)

    def teardown(self) -> None:
        if hasattr(self, "stack"):
            self.stack.close()

    # ---- actions

    @rule(partition=st.integers(0, PARTITIONS - 1), records=st.integers(1, 25), variant=st.integers(0, 2), step=st.integers(3, 30))
    def read(self, partition: int, records: int, variant: int, step: int) -> None:
        place = self.places[partition]
        end = min(LOG_END, place.position + records)
        self.lab.read(end, partition, cities(partition, variant, upsert=self.upsert), step=step)
        for offset in range(place.position, end):
            place.add(offset, rows_of(partition, offset, variant, upsert=self.upsert), upsert=self.upsert)
        place.position = max(place.position, end)

    @rule(partition=st.integers(0, PARTITIONS - 1), share=st.floats(0, 1))
    def validate(self, partition: int, share: float) -> None:
        place = self.places[partition]
        place.validated = place.validated + int((place.position - place.validated) * share)
        self.lab.validate_to(place.validated, partition)

    @rule(
        partitions=CHOSEN,
        scenario=st.one_of(
            st.builds(ToOffset, st.integers(0, LOG_END)),
            st.builds(ShiftBy, st.integers(-40, 20)),
            st.sampled_from([ToEarliest(), ToLatest(), ToCurrent(), ToValidated()]),
        ),
    )
    def rewind(self, partitions: set[int], scenario: Scenario) -> None:
        targets = {number: self.target(scenario, number) for number in sorted(partitions)}
        if isinstance(scenario, ToValidated) and any(
            self.places[number].validated == 0 < self.places[number].position for number in targets
        ):
            with pytest.raises(PlanRefused, match="is validated"):
                self.lab.plan(scenario, *self.scope(partitions))
            return
        if any(not 0 <= target <= LOG_END for target in targets.values()):
            with pytest.raises(TargetsOutOfRange):
                self.lab.plan(scenario, *self.scope(partitions))
            return
        self.rewound(scenario, targets)

    @rule(partitions=CHOSEN, shares=st.lists(st.floats(0, 0.99), min_size=PARTITIONS, max_size=PARTITIONS))
    def rewind_back(self, partitions: set[int], shares: list[float]) -> None:
        """Moves each partition to a different offset, as a file may."""
        targets = {number: int(self.places[number].position * shares[number]) for number in sorted(partitions)}
        self.rewound(FromFile({TopicPartition(self.lab.topic, number): target for number, target in targets.items()}), targets)

    @precondition(lambda self: self.done)
    @rule(data=st.data())
    def undo(self, data: Any) -> None:
        """Undoes one of the last rewinds; the undo is refused if a later one builds on it."""
        one: Done = data.draw(st.sampled_from(self.done[-4:]))
        if one.undone or self.stands_on(one):
            with pytest.raises(PlanRefused):
                self.lab.plan(Undo(one.rewind_id))
        else:
            self.undone(one)

    @rule(partitions=CHOSEN, shares=st.lists(st.floats(0, 0.99), min_size=PARTITIONS, max_size=PARTITIONS), variant=st.integers(0, 2))
    def take_back_a_mistake(self, partitions: set[int], shares: list[float], variant: int) -> None:
        """Rewind, replay with another transform, read on, undo: everything is as before, down to the last column."""
        image = self.lab.image()
        ends = {number: self.places[number].position for number in partitions}
        self.rewind_back(partitions, shares)
        for number, end in ends.items():
            self.read(number, end - self.places[number].position + 4, variant, 11)
        self.undone(self.done[-1])
        assert self.lab.image() == image

    @rule(
        partitions=CHOSEN,
        shares=st.lists(st.floats(0, 0.99), min_size=PARTITIONS, max_size=PARTITIONS),
        variant=st.integers(0, 2),
        records=st.integers(0, 9),
        step=st.integers(3, 30),
        late=st.integers(0, 3),
    )
    def swap_beside(self, partitions: set[int], shares: list[float], variant: int, records: int, step: int, late: int) -> None:
        """Reads records again beside, with another transform, while the group reads on, ``late`` times during the swap. Nothing changes for
        readers until the swap, after which everything is as after a rewind whose replay has reached the group's positions."""
        targets = {number: int(self.places[number].position * shares[number]) for number in sorted(partitions)}
        scenario = FromFile({TopicPartition(self.lab.topic, number): target for number, target in targets.items()})
        rewind_id = self.lab.rewind(scenario, *self.scope(targets), beside=True).rewind_id

        def outputs(part: Slice) -> Iterator[TransformOutput]:
            return of_all_kinds(part, cities(part.partition.partition, variant, upsert=self.upsert))

        def read_on() -> None:
            self.lab.replay(rewind_id, outputs, step=step)
            if next(reads, None) is not None:
                for number in targets:
                    self.read(number, records, 0, step)
            self.the_sink_holds_what_it_should()
            self.the_group_is_where_it_should_be()
            self.every_record_is_accounted_for()

        reads = iter(range(late))
        read_on()
        self.lab.swap(rewind_id, read_on)
        swapped = Done(rewind_id, len(self.done), {})
        for number, start in targets.items():
            place = self.places[number]
            swapped.before[number] = (place.position, place.validated, start, place.take(start))
            for offset in range(start, place.position):
                place.add(offset, rows_of(number, offset, variant, upsert=self.upsert), upsert=self.upsert)
            place.validated = min(place.validated, start)
        self.done.append(swapped)

    @rule(partition=st.integers(0, PARTITIONS - 1), share=st.floats(0, 0.99), step=st.integers(3, 30))
    def replay(self, partition: int, share: float, step: int) -> None:
        """Replays everything from the start with one transform, then a part of it again: the rows are the same."""
        end = self.places[partition].position
        self.rewound(FromFile({TopicPartition(self.lab.topic, partition): 0}), {partition: 0})
        self.read(partition, end, 0, 17)
        before = self.lab.rows()
        target = int(end * share)
        self.rewound(ToOffset(target), {partition: target})
        self.read(partition, end - target, 0, step)
        assert self.lab.rows() == before

    @rule(partition=st.integers(0, PARTITIONS - 1), number=st.integers(0, 10))
    def erase(self, partition: int, number: int) -> None:
        """Erases some records, or a key, from the sink and from what is kept for undos. No replay or undo brings them back."""
        place, key = self.places[partition], f"key {partition} {number}"
        where = f"city = '{key}'" if self.upsert else f"kafka_partition = {partition} AND kafka_offset % 11 = {number}"
        kept = [rows for one in self.done if not one.undone and partition in one.before for rows in [one.before[partition][3][0]]]
        for rows, in_sink in [(place.rows, True), *((rows, False) for rows in kept)]:
            for row in [row for row in rows if (row[1] == key if self.upsert else row[0] % 11 == number)]:
                rows.remove(row)
                name, below = (row[1], place.position if in_sink else row[0] + 1) if self.upsert else (row[0], LOG_END)
                place.erased[name] = max(place.erased.get(name, 0), below)
        erase(self.lab, where)
        end = place.position
        self.rewound(FromFile({TopicPartition(self.lab.topic, partition): 0}), {partition: 0})
        self.read(partition, end, 0, 17)

    # ---- invariants

    @invariant()
    def the_group_is_where_it_should_be(self) -> None:
        found = self.lab.sql(
            "SELECT next_offset, validated_offset FROM tidemark.partition_offset WHERE group_id = %s ORDER BY partition", self.lab.group_id
        )
        assert found == [(place.position, place.validated) for place in self.places]

    @invariant()
    def the_sink_holds_what_it_should(self) -> None:
        found = self.lab.sql(f"SELECT kafka_partition, kafka_offset::int, city FROM {self.lab.table}")
        assert sorted(found) == [(number, *row) for number, place in enumerate(self.places) for row in sorted(place.rows)]
        failed = self.lab.sql(
            "SELECT partition, record_offset::int FROM tidemark.failed_record WHERE group_id = %s ORDER BY 1, 2", self.lab.group_id
        )
        assert failed == [(number, offset) for number, place in enumerate(self.places) for offset in sorted(place.failed)]

    @invariant()
    def every_record_is_accounted_for(self) -> None:
        self.lab.check()
        for number, place in enumerate(self.places):
            pieces = [(start, end) for partition, start, end in self.lab.ledger() if partition == number]
            ends = [0, *(end for _, end in pieces)]
            assert [start for start, _ in pieces] == ends[:-1]
            assert ends[-1] == place.position

    # ---- helpers

    def scope(self, partitions: Iterable[int]) -> list[str]:
        return [f"{self.lab.topic}:{number}" for number in sorted(partitions)]

    def rewound(self, scenario: Scenario, targets: dict[int, int]) -> None:
        made = Done(self.lab.rewind(scenario, *self.scope(targets)).rewind_id, len(self.done), {})
        for number, target in targets.items():
            place = self.places[number]
            if isinstance(scenario, ToCurrent) or (isinstance(scenario, ToLatest) and target == place.position):
                continue
            start = min(target, place.position)
            made.before[number] = (place.position, place.validated, start, place.take(start))
            place.position, place.validated = target, min(place.validated, start)
        self.done.append(made)

    def undone(self, one: Done) -> None:
        made = Done(self.lab.undo(one.rewind_id).rewind_id, len(self.done), {}, undo_of=one)
        for number, (position, validated, start, (rows, failed)) in one.before.items():
            place = self.places[number]
            made.before[number] = (place.position, place.validated, start, place.take(start))
            place.rows, place.failed = list(rows), list(failed)
            place.position, place.validated = position, max(validated, min(place.validated, start))
        one.undone = True
        self.done.append(made)

    def target(self, scenario: Scenario, number: int) -> int:
        place = self.places[number]
        match scenario:
            case ToOffset(offset):
                return offset
            case ShiftBy(offsets):
                return place.position + offsets
            case ToEarliest():
                return 0
            case ToLatest():
                return LOG_END
            case ToValidated():
                return place.validated
        return place.position

    def stands_on(self, one: Done) -> bool:
        """Whether a later rewind of the same partitions is in force and is not cancelled out by others that came after ``one``."""
        for later in self.done[one.number + 1 :]:
            root, undos = later.chain
            if later.undone or not set(later.before) & set(one.before):
                continue
            if undos % 2 == 0 or root.number <= one.number:
                return True
        return False


@pytest.mark.sampled
@pytest.mark.parametrize("upsert", [False, True], ids=["append", "upsert"])
def test_rewinds_and_undos_in_any_order_keep_everything_in_its_place(
    database_url: str, topics: Topics, project_dir: Path, upsert: bool
) -> None:
    """All examples share a topic and a database; each has a separate group and sink."""
    topic = topics.create(PARTITIONS)
    for partition in range(PARTITIONS):
        topics.produce(topic, ["x"] * LOG_END, partition=partition)

    def make() -> Lab:
        return Lab(Consumer(project_dir, database_url, topics), topic, key=("city",) if upsert else ())

    run_machine(Rewinds, database_url, number=10, steps=14, make=staticmethod(make), upsert=upsert)

"""Deletes in upsert sinks: late records, rewinds and undos leave the same rows as reading in order."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from tests.integration.rewind.lab import Lab, lab_on
from tests.support.erasing import erase
from tests.support.kafka_topics import Topics
from tests.support.ledger import payloads
from tests.support.ledger import rows as made_rows
from tests.support.sampling import examples
from tests.support.scenario import Scenario as Consumer

from tidemark.records.outcome import DELETED, TransformOutput, only
from tidemark.records.ranges import Slice
from tidemark.rewind.archive_retention import remove_archives
from tidemark.rewind.plan_model import ToOffset
from tidemark.sink import deletes
from tidemark.sink.commit import commit_slice
from tidemark.spec.model import Deletes

END = 40
SINK_DDL = {
    Deletes.HARD: "city text NOT NULL UNIQUE, population bigint",
    Deletes.SOFT: "city text NOT NULL UNIQUE, population bigint, kafka_deleted boolean NOT NULL DEFAULT false",
}

Script = Mapping[int, Sequence[str]]
"""What each record does, by offset: ``ulm`` loads the city's row, ``-ulm`` deletes it. A record may do several of these."""


@pytest.fixture(params=[Deletes.HARD, Deletes.SOFT])
def lab(request: pytest.FixtureRequest, scenario: Consumer, topics: Topics) -> Iterator[Lab]:
    with lab_on(scenario, topics, (END,), key=("city",), deletes=request.param, ddl=SINK_DDL[request.param]) as lab:
        yield lab


def read(lab: Lab, end: int, script: Script, step: int = END) -> None:
    """Commits from the position to ``end``."""
    target = lab.target()
    while lab.position() < end:
        part = lab.slice(min(end, lab.position() + step))
        commit_slice(target, part, outputs(part, script), payloads)


def outputs(part: Slice, script: Script) -> Iterator[TransformOutput]:
    words = [(offset, word) for offset in range(part.start, part.end) for word in script.get(offset, ())]
    cities = iter([word.lstrip("-") for _, word in words])
    output = TransformOutput({}, [offset for offset in range(part.start, part.end) if not script.get(offset)])
    if words:
        batch = made_rows(part, [offset for offset, _ in words], lambda _, cities=cities: next(cities))
        batch = batch.append_column(DELETED, pa.array([word.startswith("-") for _, word in words]))
        output = TransformOutput(only(batch), output.skipped)
    yield output


def live(lab: Lab) -> dict[str, int]:
    """The offset of each city whose row is not deleted."""
    where = "WHERE NOT kafka_deleted" if lab.layout.deletes is Deletes.SOFT else ""
    return dict(lab.sql(f"SELECT city, kafka_offset FROM {lab.table} {where}"))


def in_order(script: Script, end: int, without: range = range(0)) -> dict[str, int]:
    """The rows that reading ``[0, end)`` in order leaves, except for the offsets ``without``."""
    found: dict[str, int] = {}
    for offset in range(end):
        if offset in without:
            continue
        for word in script.get(offset, ()):
            found.pop(word.lstrip("-"), None)
            if not word.startswith("-"):
                found[word] = offset
    return found


def stored(lab: Lab) -> tuple[Any, ...]:
    """The sink, the deletions in force, the position and the ledger."""
    in_force = lab.sql(
        "SELECT kafka_offset, kafka_seq, key, kept FROM tidemark.deletion WHERE parked_by IS NULL AND sink = %s"
        " ORDER BY kafka_offset, kafka_seq",
        lab.table,
    )
    return sorted(map(str, lab.image().sink)), in_force, lab.position(), lab.ledger()


# ---- examples


def test_delete_removes_the_row_and_is_counted(lab: Lab) -> None:
    """Of a delete and a load of the same key, the last one wins, within a slice and between slices. A delete of a key without a row is no
    error."""
    read(lab, 6, {0: ["ulm"], 1: ["bonn"], 2: ["-ulm"], 3: ["-rom"], 4: ["-york", "york"], 5: ["bern", "-bern"]})
    assert live(lab) == {"bonn": 1, "york": 4}
    read(lab, 10, {6: ["-bonn"], 7: ["ulm"], 8: ["-york"], 9: ["york"]})
    assert live(lab) == {"ulm": 7, "york": 9}
    assert lab.sql("SELECT loaded, skipped, sink_rows, deleted FROM tidemark.batch ORDER BY start_offset") == [(6, 0, 8, 4), (4, 0, 4, 2)]
    lab.check()


# ---- any order

cities = st.sampled_from(["ulm", "bonn", "rom"])
words = st.one_of(cities, cities.map(lambda city: f"-{city}"))
scripts = st.dictionaries(st.integers(0, END - 1), st.lists(words, min_size=1, max_size=2), max_size=END).map(
    lambda found: {offset: found[offset] for offset in sorted(found)}
)


@settings(max_examples=examples(30), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_deletes_rewinds_and_undos_in_any_order(lab: Lab, data: st.DataObject) -> None:
    """After a rewind, the sink has the rows that reading in order up to the point leaves, except those that were overwritten. An undo
    restores the state before the rewind."""
    lab.sql("TRUNCATE tidemark.rewind, tidemark.deletion, tidemark.batch, tidemark.lost_range CASCADE")
    lab.sql("TRUNCATE tidemark.rewound_row, tidemark.rewound_batch, tidemark.undo_floor")
    lab.sql(f"TRUNCATE {lab.table}")
    lab.sql("UPDATE tidemark.partition_offset SET next_offset = 0, validated_offset = 0")
    script = data.draw(scripts)
    undoable: list[tuple[int, Any, Script]] = []
    overwritten: set[str] = set()
    skipped = range(0)
    for _ in range(data.draw(st.integers(4, 12))):
        action = data.draw(st.sampled_from(["read", "read", "rewind", "beside", "undo", "skip", "late"]))
        position = lab.position()
        if action == "read" and position < END:
            read(lab, data.draw(st.integers(position + 1, END)), script, data.draw(st.integers(1, END)))
        elif action in ("rewind", "beside") and position:
            lowest = skipped.stop if position > skipped.stop and data.draw(st.booleans()) else 0
            point, before = data.draw(st.integers(lowest, position - 1)), stored(lab)
            if point in skipped:
                continue  # its undo would restore the skipped range
            overwritten |= {word for offset in range(point, position) for word in script.get(offset, ()) if not word.startswith("-")}
            rewind_id = lab.rewind(ToOffset(point), f"{lab.topic}:0", beside=action == "beside").rewind_id
            undoable.append((rewind_id, before, script))
            if skipped and point <= skipped.start:
                skipped, undoable = range(0), []
            changed = data.draw(scripts)
            script = {offset: (script if offset < point else changed).get(offset, ()) for offset in range(END)}
            if action == "beside":
                lab.replay(rewind_id, functools.partial(outputs, script=script), step=data.draw(st.integers(1, END)))
                assert stored(lab) == before
                lab.swap(rewind_id)
                event("swapped")
        elif action == "undo" and undoable:
            rewind_id, before, script = undoable.pop()
            lab.undo(rewind_id)
            assert before is None or stored(lab) == before
            event("undone" if before else "undone after late records")
        elif action == "skip" and not skipped and position < END - 1:
            skipped, undoable = range(position, data.draw(st.integers(position + 1, END - 1))), []
            lab.rewind(ToOffset(skipped.stop), f"{lab.topic}:0", allow_loss=True)
        elif action == "late" and skipped:
            with lab.late(skipped.start, skipped.stop):
                read(lab, skipped.stop, script)
            skipped, undoable = range(0), [(rewind_id, None, then) for rewind_id, _, then in undoable]
            event("late")
        expected, found = in_order(script, lab.position(), skipped), live(lab)
        assert found.items() <= expected.items()
        assert expected.keys() - found.keys() <= overwritten
        lab.check()


# ---- how deletions are found


@pytest.mark.sampled
@pytest.mark.parametrize(("count", "analyzed"), [(20_000, False), (20_000, True), pytest.param(400_000, False, marks=pytest.mark.thorough)])
def test_next_deletion_of_a_key_is_one_look_into_the_index(lab: Lab, count: int, *, analyzed: bool) -> None:
    """With and without statistics, in a small and a large table, Postgres neither searches all deletions of a partition nor sorts those of
    a key."""
    lab.sql(
        "INSERT INTO tidemark.deletion (sink, kafka_topic_id, kafka_partition, kafka_offset, kafka_seq, digest, key)"
        f" SELECT %s, %s, 0, number, 0, {deletes.hashed(['city'])}, jsonb_build_object('city', city)"
        "   FROM (SELECT number, 'city ' || number %% 5000 AS city FROM generate_series(1, %s) number) made",
        lab.table, lab.topic_id, count,
    )  # fmt: skip
    if analyzed:
        lab.sql("ANALYZE tidemark.deletion")
    found = deletes.first_after(lab.table, ["newer.city"])
    plan = "\n".join(line for (line,) in lab.sql(f"EXPLAIN SELECT {found} FROM {lab.table} newer"))
    assert "Index Scan using deletion_key on deletion present" in plan
    assert plan.count("on deletion present") == 1, plan
    assert "Sort" not in plan


# ---- other features that handle deletions


@pytest.mark.sampled
def test_verify_compares_deletions(lab: Lab) -> None:
    script = {0: ["ulm"], 1: ["bonn"], 2: ["rom"], 10: ["-ulm"], 11: ["-bonn"], 12: ["york"]}
    read(lab, 20, script)
    done = lab.rewind(ToOffset(10), f"{lab.topic}:0")
    read(lab, 20, {10: ["-ulm"], 12: ["york"], 13: ["-rom"]})
    found = lab.verified(done.rewind_id)
    assert (found.equal, found.changed, found.gone, found.new) == (2, 0, 1, 1)
    assert [example.was for example in found.examples["gone"]] == [{"city": "rom"}]
    assert [example.now for example in found.examples["new"]] == [{"city": "bonn"}]


@pytest.mark.sampled
def test_erasure_removes_deleted_rows_and_their_keys(lab: Lab) -> None:
    """This includes the key of a deletion that found no row. No replay brings the rows back."""
    script = {0: ["ulm"], 1: ["bonn"], 10: ["-ulm"], 11: ["-rom"], 12: ["-bonn"]}
    read(lab, 20, script)
    erase(lab, "city IN ('ulm', 'rom')")
    assert lab.sql("SELECT key ->> 'city' FROM tidemark.deletion") == [("bonn",)]
    lab.rewind(ToOffset(0), f"{lab.topic}:0")
    read(lab, 5, script)
    assert live(lab) == {"bonn": 1}


@pytest.mark.sampled
def test_deleted_rows_are_kept_for_a_limited_time(lab: Lab) -> None:
    """Deletions stay, because they keep out late records. Those that a rewind took back are removed with its archive."""
    read(lab, 20, {0: ["ulm"], 1: ["bonn"], 10: ["-ulm"], 15: ["-bonn"]})
    lab.rewind(ToOffset(12), f"{lab.topic}:0")
    with lab.session() as connection:
        remove_archives(connection, timedelta(0))
    assert lab.sql("SELECT key ->> 'city', kept FROM tidemark.deletion") == [("ulm", None)]


def test_undo_restores_the_row_that_a_deletion_keeps_when_the_key_came_back(lab: Lab) -> None:
    """The key's row at the rewind's point is another one than the deletion's."""
    script = {0: ["ulm"], 1: ["ulm"], 8: ["-ulm"], 29: ["ulm"]}
    read(lab, END, script, 1)
    before = stored(lab)
    lab.undo(lab.rewind(ToOffset(8), f"{lab.topic}:0").rewind_id)
    assert stored(lab) == before

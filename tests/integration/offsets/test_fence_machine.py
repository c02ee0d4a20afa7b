"""Owners, zombies, twins, failures and jumps in any order, on a real Postgres: the fence holds after every step (I1, I2, I3)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import psycopg2
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule
from tests.support.ledger import DDL, TABLE, Group, never, of_all_kinds, payloads, rows
from tests.support.machines import run_machine
from tests.support.waiting import until

from tidemark.offsets import store
from tidemark.offsets.store import ClaimRefused, OffsetFenced
from tidemark.records.outcome import RecordCounts, TransformOutput, only
from tidemark.records.ranges import Claim, Generation, Slice, plan_batch
from tidemark.sink.commit import Receipt, commit_slice
from tidemark.sink.load import SinkRejected

PARTITIONS = 2
LOG_END = 10_000


@dataclass(frozen=True)
class Owner:
    """An attempt and its generation."""

    attempt: int
    generation: Generation

    @property
    def name(self) -> str:
        return f"attempt {self.attempt}"


@dataclass
class Model:
    """The expected state of a partition."""

    position: int = 0
    epoch: int = 0
    generation: int = 0
    owner: str | None = None
    pieces: tuple[tuple[int, int, str], ...] = ()  # start, end, "batch" or "lost"


def counts_of(part: Slice) -> RecordCounts:
    """The counts that `of_all_kinds` gives for a slice, computed independently."""
    digits = [offset % 10 for offset in range(part.start, part.end)]
    loaded = sum(digit > 3 for digit in digits)
    by = [digits.count(digit) for digit in range(5)]
    return RecordCounts(loaded, by[0], by[1], by[2], by[3], loaded + 2 * by[4])


class Fence(RuleBasedStateMachine):
    """Several owners compete for the partitions of one group. Some are zombies without knowing it."""

    watch: Any = None
    url = ""

    owners = Bundle("owners")
    claims = Bundle("claims")
    slices = Bundle("slices")
    done = Bundle("done")

    @initialize()
    def start(self) -> None:
        self.group = Group(self.url, self.watch, partitions=PARTITIONS)
        self.model = [Model() for _ in range(PARTITIONS)]

    # ---- what owners do

    @rule(target=owners)
    def a_newer_attempt_starts(self) -> Owner:
        with self.watch.cursor() as cur:
            return Owner(self.group.attempt(), store.next_generation(cur))

    @rule(target=claims, owner=owners, partition=st.integers(0, PARTITIONS - 1))
    def claim(self, owner: Owner, partition: int) -> Any:
        """A newer generation takes the partition, and its owner may claim it again. All others are refused."""
        model = self.model[partition]
        may_go_on = owner.generation == model.generation and model.owner in (owner.name, None)  # also after a release
        if owner.generation <= model.generation and not may_go_on:
            with pytest.raises(ClaimRefused) as raised:
                self.group.claim(partition, owner.name, owner.generation)
            assert (raised.value.current, raised.value.owner) == (model.generation, model.owner)
            return multiple()
        claim = self.group.claim(partition, owner.name, owner.generation)
        model.epoch, model.generation, model.owner = model.epoch + 1, owner.generation, owner.name
        assert (claim.position, claim.epoch) == (model.position, model.epoch)
        return claim, owner

    @rule(target=slices, held=claims, records=st.integers(1, 40))
    def plan(self, held: tuple[Claim, Owner], records: int) -> Any:
        claim, owner = held
        (part,) = plan_batch([claim], {claim.partition: LOG_END}, records)
        return part, owner

    @rule(target=done, planned=consumes(slices))
    def commit(self, planned: tuple[Slice, Owner]) -> Any:
        """A commit with the current epoch at the current position succeeds. Others are twins, or fenced before a row is produced."""
        part, owner = planned
        if self.may_commit(part):
            assert self.commit_slice(part, owner, of_all_kinds(part)) == Receipt(part, counts_of(part))
            self.moved(part, "batch")
            return planned
        twin = self.model[part.partition.partition]
        if (twin.epoch, twin.position) == (part.epoch, part.end) and (part.start, part.end, "batch") in twin.pieces:
            assert self.commit_slice(part, owner, never()).twin
            return planned
        self.is_fenced(planned)
        return multiple()

    @rule(target=claims, held=consumes(claims))
    def go_on_behind_what_was_committed(self, held: tuple[Claim, Owner]) -> tuple[Claim, Owner]:
        """Continues after the committed position, as a driver does after a batch, whether or not it still owns the partition."""
        claim, owner = held
        return replace(claim, position=max(claim.position, self.model[claim.partition.partition].position)), owner

    @rule(planned=done, other=owners)
    def duplicate_commit(self, planned: tuple[Slice, Owner], other: Owner) -> None:
        """A twin of the task commits the same slice again. It gets the receipt as long as the row still shows that commit, and is fenced
        afterwards. It never writes rows."""
        part, owner = planned
        model = self.model[part.partition.partition]
        if (model.epoch, model.position) == (part.epoch, part.end):
            assert self.commit_slice(part, owner, never()) == Receipt(part, counts_of(part), twin=True)
        else:
            self.is_fenced(planned)

    @rule(planned=slices, rejected=st.booleans())
    def failing_commit(self, planned: tuple[Slice, Owner], rejected: bool) -> None:
        """Postgres refuses a row, or the transform raises. Nothing is stored, and the slice may be retried."""
        part, owner = planned
        if not self.may_commit(part):
            return

        def judged() -> Iterator[TransformOutput]:
            yield from of_all_kinds(part)
            if rejected and (part.end - 1) % 10 > 3:
                yield TransformOutput(only(rows(part, [part.end - 1], "Atlantis")))
            raise LookupError("the transform broke")

        with pytest.raises((SinkRejected, LookupError)):
            self.commit_slice(part, owner, judged())

    @rule(target=claims, held=consumes(claims), by=st.integers(1, 30))
    def jump(self, held: tuple[Claim, Owner], by: int) -> Any:
        """A reset moves the position past records that are never read, and stores them as lost. A stale reset moves nothing."""
        claim, owner = held
        model = self.model[claim.partition.partition]
        to = claim.position + by
        good = (model.epoch, model.position) == (claim.epoch, claim.position)
        with contextlib.closing(psycopg2.connect(self.url)) as connection, connection, connection.cursor() as cur:
            if not good:
                with pytest.raises(OffsetFenced):
                    store.jump(cur, self.group.group_id, claim, to)
                return claim, owner
            lost = store.LostRange(claim.partition, claim.topic_id, claim.position, to, "retention")
            store.record_lost(cur, self.group.group_id, owner.attempt, lost)
            jumped = store.jump(cur, self.group.group_id, claim, to)
        self.moved(Slice(claim.partition, claim.topic_id, claim.position, to, claim.epoch), "lost")
        return jumped, owner

    @rule(held=claims)
    def release(self, held: tuple[Claim, Owner]) -> None:
        """Releases the partition if it is still held. The epoch stays, so slices in flight may still commit."""
        with contextlib.closing(psycopg2.connect(self.url)) as connection, connection, connection.cursor() as cur:
            store.release(cur, self.group.group_id, held[0])
        model = self.model[held[0].partition.partition]
        if model.epoch == held[0].epoch:
            model.owner = None

    # ---- invariants

    @invariant()
    def the_position_is_the_end_of_the_ledger(self) -> None:
        """The ledger and the lost ranges are contiguous from the first offset to the position. Epochs match the model."""
        found = self.group.sql(
            "SELECT partition, next_offset, owner_epoch, generation, owner, validated_offset FROM tidemark.partition_offset"
            " WHERE group_id = %s ORDER BY 1",
            self.group.group_id,
        )
        assert found == [(number, model.position, model.epoch, model.generation, model.owner, 0) for number, model in enumerate(self.model)]
        pieces = self.group.sql(
            "SELECT partition, start_offset, end_offset, 'batch' FROM tidemark.batch WHERE group_id = %s UNION ALL"
            " SELECT partition, start_offset, end_offset, 'lost' FROM tidemark.lost_range WHERE group_id = %s ORDER BY 1, 2",
            self.group.group_id, self.group.group_id,
        )  # fmt: skip
        assert pieces == [(number, *piece) for number, model in enumerate(self.model) for piece in model.pieces]
        for model in self.model:
            assert [start for start, _, _ in model.pieces] + [model.position] == [0] + [end for _, end, _ in model.pieces]

    @invariant()
    def the_sink_holds_the_ledgers_rows_and_no_other(self) -> None:
        """No row is duplicated or lost, and none belongs to a slice that was fenced or failed."""
        found = self.group.sql(
            f"SELECT kafka_partition, kafka_offset, count(*)::int FROM {TABLE} WHERE kafka_topic_id = %s GROUP BY 1, 2 ORDER BY 1, 2",
            self.group.topic_id,
        )
        assert found == [
            (number, offset, 3 if offset % 10 == 4 else 1)
            for number, model in enumerate(self.model)
            for start, end, kind in model.pieces
            if kind == "batch"
            for offset in range(start, end)
            if offset % 10 > 3
        ]

    @invariant()
    def every_record_is_accounted_for(self) -> None:
        self.group.check_conserved()

    def teardown(self) -> None:
        if hasattr(self, "group"):
            until(lambda: not self.group.sessions())

    # ---- helpers

    def may_commit(self, part: Slice) -> bool:
        model = self.model[part.partition.partition]
        return (model.epoch, model.position) == (part.epoch, part.start)

    def moved(self, part: Slice, kind: str) -> None:
        model = self.model[part.partition.partition]
        model.position = part.end
        model.pieces += ((part.start, part.end, kind),)

    def commit_slice(self, part: Slice, owner: Owner, judged: Iterator[TransformOutput]) -> Receipt:
        return commit_slice(self.group.target(attempt=owner.attempt), part, judged, payloads)

    def is_fenced(self, planned: tuple[Slice, Owner]) -> None:
        part, owner = planned
        with pytest.raises(OffsetFenced) as raised:
            self.commit_slice(part, owner, never())
        model = self.model[part.partition.partition]
        assert (raised.value.held, raised.value.current, raised.value.position) == (part.epoch, model.epoch, model.position)


def test_an_older_generation_claims_nothing(database_url: str) -> None:
    with contextlib.closing(psycopg2.connect(database_url)) as watch:
        group = Group(database_url, watch)
        with watch.cursor() as cur:
            older, newer = store.next_generation(cur), store.next_generation(cur)
        group.claim(owner="newer", generation=newer)
        with pytest.raises(ClaimRefused):
            group.claim(owner="older", generation=older)


def test_the_fence_holds_whatever_owners_do_in_whatever_order(database_url: str) -> None:
    """Any interleaving of claims, commits, twins, zombies, failures, jumps and releases. Each example uses a new group in one database."""
    with contextlib.closing(psycopg2.connect(database_url)) as watch:
        watch.autocommit = True
        with watch.cursor() as cur:
            cur.execute(DDL)
        run_machine(Fence, database_url, number=30, steps=35, url=database_url, watch=watch)

"""A consumer on a real topic and a real Postgres, whose slices are committed and rewound by hand."""

from __future__ import annotations

import contextlib
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import pyarrow as pa
import pytest
from psycopg2.extensions import cursor as PostgresCursor
from tests.support.by_hand import ByHand
from tests.support.deaths import deaths
from tests.support.documented import grants
from tests.support.kafka_topics import Topics
from tests.support.ledger import payloads, rows
from tests.support.scenario import Scenario as Consumer

from tidemark.db import session, transaction
from tidemark.migrations import migrate
from tidemark.offsets import store
from tidemark.offsets.store import TaskIdentity
from tidemark.profiles import Profile
from tidemark.quality import check_conservation
from tidemark.records.outcome import Disposition, TransformOutput, only, reject
from tidemark.records.ranges import Claim, Slice, TopicPartition
from tidemark.rewind import beside
from tidemark.rewind.beside import SideReplay
from tidemark.rewind.side import SidePart
from tidemark.rewind.verify import Verified, verify
from tidemark.sink.commit import Receipt, commit_slice
from tidemark.sink.staged import promote
from tidemark.sink.staging import make_staging, stage
from tidemark.sink.table import Column, Layout
from tidemark.sink.target import Target
from tidemark.spec.model import Deletes

COLUMNS = (Column("city", "text"), Column("population", "bigint"))
DDL = "city text, population bigint"

Transform = Callable[[int], Sequence[str]]
"""Returns the cities that a record is transformed to. If there are none, the record is skipped."""


def one_city(offset: int) -> list[str]:
    return [f"city {offset}"]


def of_all_kinds(part: Slice, transform: Transform = one_city) -> Iterator[TransformOutput]:
    """Outcomes by the offset's last digit: 0 skip, 1 retry, 2 fail, 4 three times the transform's rows, all others the transform's rows."""
    for start in range(part.start, part.end, 50):
        span = range(start, min(start + 50, part.end))
        loaded = {offset: list(transform(offset)) * (3 if offset % 10 == 4 else 1) for offset in span if offset % 10 > 2}
        offsets = [offset for offset, cities in loaded.items() for _ in cities]
        names = iter([city for cities in loaded.values() for city in cities])
        rejects = [
            reject(offset, Disposition.RETRY if offset % 10 == 1 else Disposition.FAIL, f"KeyError: {offset}")
            for offset in span
            if offset % 10 in (1, 2)
        ]
        skipped = [offset for offset in span if offset % 10 == 0 or (offset in loaded and not loaded[offset])]
        yield TransformOutput(only(rows(part, offsets, lambda _, names=names: next(names))) if offsets else {}, skipped, rejects)


class Hanging:
    """A slice that hangs in the middle of its COPY until ``go`` is set."""

    def __init__(self, part: Slice) -> None:
        self.part, self.stands, self.go = part, threading.Event(), threading.Event()

    def judged(self) -> Iterator[TransformOutput]:
        yield from of_all_kinds(self.part)
        self.stands.set()
        assert self.go.wait(60)


@dataclass
class Image:
    """Everything that a rewind changes."""

    sink: list[Any]
    ledger: list[Any]
    failed: list[Any]
    lost: list[Any]
    positions: list[Any]


class Lab(ByHand):
    """One group over one topic."""

    def __init__(
        self, consumer: Consumer, topic: str, *, key: Sequence[str] = (), deletes: Deletes = Deletes.REFUSE, ddl: str | None = None
    ) -> None:
        super().__init__(consumer)
        self.topic, self.key = topic, tuple(key)
        sink: dict[str, Any] = {"table": consumer.table} | ({"mode": "upsert", "key": list(key)} if key else {})
        if deletes is not Deletes.REFUSE:
            sink["deletes"] = deletes.value
        self.layout = Layout(consumer.table, COLUMNS, self.key, deletes=deletes)
        consumer.write(topics=topic, sink=sink)
        consumer.make_sink((DDL + (f", UNIQUE ({', '.join(key)})" if key else "")) if ddl is None else ddl)
        (described,) = self.cluster.topics([topic])
        self.partitions = described.partitions
        with self.watch.cursor() as cur:
            self.group_id = store.ensure_group(cur, self.spec.group)
            self.topic_id = store.ensure_topic(cur, topic, described.kafka_uuid)
            for partition in described.all():
                store.start_partition(cur, self.group_id, self.topic_id, partition.partition, 0)

    # ---- reading

    def claim(self, partition: int = 0) -> Claim:
        with session(self.url) as connection, transaction(connection) as cur:
            generation = store.next_generation(cur)
            return store.claim(cur, self.group_id, self.topic_id, TopicPartition(self.topic, partition), store.Owner(generation, "me"))

    def slice(self, end: int, partition: int = 0) -> Slice:
        claim = self.claim(partition)
        return Slice(claim.partition, claim.topic_id, claim.position, end, claim.epoch)

    def target(self, task: TaskIdentity | None = None) -> Target:
        with self.watch.cursor() as cur:
            attempt = store.new_attempt(cur, self.group_id, task or TaskIdentity())
            store.end_attempt(cur, attempt)
        return Target(self.url, self.group_id, attempt, (self.layout,))

    def read(
        self, end: int, partition: int = 0, transform: Transform = one_city, *, step: int = 1000, task: TaskIdentity | None = None
    ) -> list[Receipt]:
        """Commits the records from the position to ``end`` in batches of ``step``."""
        target, receipts = self.target(task), []
        while self.position(partition) < end:
            part = self.slice(min(end, self.position(partition) + step), partition)
            receipts.append(commit_slice(target, part, of_all_kinds(part, transform), payloads))
        return receipts

    def staged(self, *ends: int, beside: int | None = None, **cities: int) -> None:
        """Commits a staged batch of all partitions up to these ends, of the group or of the replay of a rewind ``beside``. Its rows do not
        come from single records: ``cities`` with their populations."""
        if beside is None:
            target = self.target()
            parts = [self.slice(end, partition) for partition, end in enumerate(ends) if end > self.position(partition)]
        else:
            replay = self.side(beside)
            target = replay.onto_shadows(self.target())
            parts = [self.side_slice(replay, part, end) for part, end in zip(replay.parts, ends, strict=True) if end > part.position]
        target = replace(target, layouts=tuple(replace(layout, by_record=False) for layout in target.layouts))
        table = make_staging(target, 1)
        columns = {"city": pa.array(list(cities), pa.string()), "population": pa.array(list(cities.values()), pa.int64())}
        staged = stage(target, table, parts, iter([pa.RecordBatch.from_pydict(columns)]), isolate=False)
        promote(target, parts, table, [staged], payloads, isolate=False)

    def side(self, rewind_id: int) -> SideReplay:
        with self.watch.cursor() as cur:
            return beside.find(cur, self.spec.group, rewind_id)

    def side_slice(self, replay: SideReplay, part: SidePart, end: int) -> Slice:
        with session(self.url) as connection, transaction(connection) as cur:
            owner = store.Owner(store.next_generation(cur), "me")
            claim = store.claim(cur, replay.side_id, part.topic_id, part.partition, owner)
        return Slice(part.partition, part.topic_id, claim.position, end, claim.epoch)

    def replay(
        self, rewind_id: int, outputs: Callable[[Slice], Iterator[TransformOutput]] = of_all_kinds, *, step: int = 1000
    ) -> SideReplay:
        """Commits the records of a replay beside up to where the group is."""
        replay = self.side(rewind_id)
        target = replay.onto_shadows(self.target())
        for part in replay.parts:
            for position in range(part.position, part.end, step):
                piece = self.side_slice(replay, part, min(part.end, position + step))
                commit_slice(target, piece, outputs(piece), payloads)
        return replay

    def trigger(self, name: str, event: str, body: str) -> None:
        """Creates a row trigger on the sink that runs this PL/pgSQL."""
        self.sql(f"CREATE FUNCTION lake.{name}() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN {body} END $$")
        self.sql(f"CREATE TRIGGER {name} {event} ON {self.table} FOR EACH ROW EXECUTE FUNCTION lake.{name}()")

    @contextlib.contextmanager
    def late(self, start: int, end: int) -> Iterator[None]:
        """In the block, the group is at ``start`` of partition 0 and may read to ``end``, although it has passed them and stored them as
        lost: as a backfill does."""
        ahead = self.position()
        self.sql("UPDATE tidemark.partition_offset SET next_offset = %s, validated_offset = 0 WHERE partition = 0", start)
        self.sql("DELETE FROM tidemark.lost_range WHERE partition = 0 AND start_offset = %s AND end_offset = %s", start, end)
        yield
        self.sql("UPDATE tidemark.partition_offset SET next_offset = %s WHERE partition = 0", ahead)

    # ---- stored state

    def position(self, partition: int = 0) -> int:
        return int(self.positions()[partition])

    def positions(self) -> list[int]:
        query = "SELECT next_offset FROM tidemark.partition_offset WHERE group_id = %s AND topic_id = %s ORDER BY partition"
        return [int(row[0]) for row in self.sql(query, self.group_id, self.topic_id)]

    def epochs(self) -> list[int]:
        query = "SELECT owner_epoch FROM tidemark.partition_offset WHERE group_id = %s ORDER BY topic_id, partition"
        return [int(row[0]) for row in self.sql(query, self.group_id)]

    def validate_to(self, offset: int, partition: int = 0) -> None:
        """Sets the validated offset, as a passed validation does."""
        self.sql(
            "UPDATE tidemark.partition_offset SET validated_offset = %s WHERE group_id = %s AND partition = %s",
            offset,
            self.group_id,
            partition,
        )

    def rows(self) -> list[Any]:
        order = "kafka_partition, kafka_offset, kafka_seq"
        return self.sql(f"SELECT {order}, city, population FROM {self.table} ORDER BY {order}")

    def cities(self) -> dict[str, int]:
        """Returns the population of each city in the sink."""
        return dict(self.sql(f"SELECT city, population FROM {self.table}"))

    def offsets(self, partition: int = 0) -> list[int]:
        """Returns the offsets of records that have rows in the sink."""
        query = f"SELECT DISTINCT kafka_offset FROM {self.table} WHERE kafka_partition = %s ORDER BY 1"
        return [int(row[0]) for row in self.sql(query, partition)]

    def ledger(self) -> list[tuple[int, int, int]]:
        """Returns partition, start and end of each batch and lost range."""
        query = (
            "SELECT partition, start_offset, end_offset FROM tidemark.batch WHERE group_id = %s UNION ALL"
            " SELECT partition, start_offset, end_offset FROM tidemark.lost_range WHERE group_id = %s ORDER BY 1, 2"
        )
        return [(partition, start, end) for partition, start, end in self.sql(query, self.group_id, self.group_id)]

    def image(self) -> Image:
        """Returns everything that a rewind changes, except epochs and times of positions. Equal before a rewind and after its undo."""

        def stored(table: str, order: str) -> list[Any]:
            return [row[0] for row in self.sql(f"SELECT to_jsonb(t) FROM {table} t WHERE group_id = %s ORDER BY {order}", self.group_id)]

        place = "topic_id, partition, next_offset, validated_offset"
        return Image(
            self.sql(f"SELECT * FROM {self.table} ORDER BY kafka_partition, kafka_offset, kafka_seq"),
            stored("tidemark.batch", "partition, start_offset"),
            stored("tidemark.failed_record", "partition, record_offset"),
            stored("tidemark.lost_range", "partition, start_offset"),
            self.sql(f"SELECT {place} FROM tidemark.partition_offset WHERE group_id = %s ORDER BY topic_id, partition", self.group_id),
        )

    def verified(self, rewind_id: int) -> Verified:
        """Returns what the replay of a rewind, or a replay beside, has changed."""
        with self.session() as connection:
            (found,) = verify(connection, rewind_id, {self.spec.name: {self.table: self.key}})
        return found

    def audit(self) -> list[Any]:
        """Returns all stored rows about rewinds, and the names of the existing archives."""
        tables = (
            "rewind",
            "rewind_group",
            "rewind_partition",
            "rewind_archive",
            "rewound_batch",
            "rewound_failed_record",
            "rewound_lost_range",
            "rewound_row",
            "deletion",
            "undo_floor",
        )
        kept = [sorted(str(row[0]) for row in self.sql(f"SELECT to_jsonb(t) FROM tidemark.{table} t")) for table in tables]
        archives = self.sql("SELECT relname FROM pg_class WHERE relnamespace = 'tidemark_archive'::regnamespace ORDER BY 1")
        return [*kept, archives]

    @contextlib.contextmanager
    def unchanged(self, error: type[Exception], match: str = "") -> Iterator[None]:
        """Checks that the block raises this error, and changes nothing."""
        before, audit = self.image(), self.audit()
        with pytest.raises(error, match=match):
            yield
        assert (self.image(), self.audit()) == (before, audit)

    def struck(self, act: Callable[[type[PostgresCursor]], object]) -> int:
        """Repeats ``act``, whose session dies one statement later each time, until it succeeds (`deaths`). Checks that nothing changes
        before. Returns the number of the last statement after which it died."""
        before, last = (self.image(), self.epochs(), self.audit()), 0
        for last in deaths(act, self.watch):
            assert (self.image(), self.epochs(), self.audit()) == before, f"after statement {last}"
        return last

    def struck_apply(self, rewind_id: int) -> int:
        """Applies the rewind like `struck`."""
        return self.struck(lambda cursor: self.apply(rewind_id, cursor=cursor))

    def check(self) -> None:
        """Checks that every record is accounted for (I3)."""
        with self.watch.cursor() as cur:
            assert check_conservation(cur, self.spec.group, [self.table], upsert=bool(self.key)) == []


@contextlib.contextmanager
def lab_on(consumer: Consumer, topics: Topics, counts: Iterable[int] = (100,), **options: Any) -> Iterator[Lab]:
    """A topic with ``counts`` records in its partitions, and a group that has read none of them."""
    numbers = list(counts)
    topic = topics.create(len(numbers))
    for partition, count in enumerate(numbers):
        topics.produce(topic, [f"{number}".encode() for number in range(count)], partition=partition)
    with contextlib.closing(Lab(consumer, topic, **options)) as lab:
        yield lab


@contextlib.contextmanager
def role_on(lab: Lab, profile: Profile, page: str) -> Iterator[str]:
    """Yields the URL of a role with this profile, and with the privileges on the sink that the page documents."""
    role = f"role_{uuid.uuid4().hex[:10]}"
    lab.sql(f"CREATE ROLE {role} LOGIN PASSWORD '{role}'")
    try:
        migrate(lab.url, grant_to=role, profiles=[profile])
        (on_sink,) = grants(page)
        lab.sql(on_sink.replace("lake.cities", lab.table).replace("tidemark_run", role))
        parts = urlsplit(lab.url)
        yield urlunsplit(parts._replace(netloc=f"{role}:{role}@{parts.hostname}:{parts.port}"))
    finally:
        lab.sql(f"DROP OWNED BY {role} CASCADE; DROP ROLE {role}")

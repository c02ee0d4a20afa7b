"""Rewinds beside with the roles of docs/security.md: which rights each step needs, and what a stolen role cannot do with them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

import psycopg2
import pytest
from tests.integration.rewind.lab import Lab, lab_on, of_all_kinds, role_on
from tests.integration.rewind.test_planted import ATTACHED
from tests.support.kafka_topics import Topics
from tests.support.ledger import payloads
from tests.support.planted import Trap
from tests.support.scenario import Scenario as Consumer

from tidemark.db import connect, session, transaction
from tidemark.offsets import store
from tidemark.profiles import Profile
from tidemark.records.ranges import Slice
from tidemark.rewind import beside
from tidemark.rewind.apply import RewindNotAllowed
from tidemark.rewind.beside import DiscardNotAllowed, ShadowBehind, ShadowMissing, ShadowRefused
from tidemark.rewind.plan_model import Plan, RewindState, ToOffset, Undo
from tidemark.rewind.rows.archive import ArchiveForged
from tidemark.rewind.verify import verify
from tidemark.sink.commit import commit_slice
from tidemark.sink.table import Column

RIGHTS = (
    "EXECUTE ON FUNCTION tidemark.take_over_side(bigint)",
    "UPDATE (sink) ON tidemark.deletion",
    "INSERT ON {table}",
)
"""Rights that a role needs for a swap, beyond those for any rewind."""


@pytest.fixture(params=[pytest.param("append", marks=pytest.mark.thorough), "upsert"])
def lab(request: pytest.FixtureRequest, scenario: Consumer, topics: Topics) -> Iterator[Lab]:
    options: dict[str, Any] = {} if request.param == "append" else {"key": ("city",)}
    with lab_on(scenario, topics, (60,), **options) as lab:
        yield lab


@pytest.fixture
def rewinder(lab: Lab) -> Iterator[str]:
    with role_on(lab, Profile.REWINDER, "docs/rewind.md") as url:
        yield url


@pytest.fixture
def runner(lab: Lab) -> Iterator[str]:
    with role_on(lab, Profile.RUNNER, "docs/deployment/index.md") as url:
        yield url


def give(lab: Lab, url: str, right: str) -> None:
    lab.sql(f"GRANT {right} ON {lab.table} TO {urlsplit(url).username}")


def begun(lab: Lab, url: str, target: int = 20) -> Plan:
    """A role plans a rewind beside and begins it."""
    with contextlib.closing(connect(url)) as connection:
        planned = lab.plan(ToOffset(target), connection=connection, beside=True)
        return lab.apply(planned.rewind_id, connection=connection).plan


def replay_as(lab: Lab, url: str, rewind_id: int) -> None:
    """A role reads the replay, in one commit."""
    with session(url) as connection, transaction(connection) as cur:
        replay = beside.find(cur, lab.group, rewind_id)
        (part,) = replay.parts
        claim = store.claim(cur, replay.side_id, part.topic_id, part.partition, store.Owner(store.next_generation(cur), "me"))
    piece = Slice(part.partition, part.topic_id, part.position, part.end, claim.epoch)
    commit_slice(replay.onto_shadows(replace(lab.target(), database_url=url)), piece, of_all_kinds(piece), payloads)


def swap_as(lab: Lab, url: str, rewind_id: int) -> Plan:
    with contextlib.closing(connect(url)) as connection:
        return lab.swap(rewind_id, connection=connection).plan


def test_one_role_decides_and_another_reads(lab: Lab, rewinder: str, runner: str) -> None:
    if lab.key:
        give(lab, rewinder, "UPDATE")
        give(lab, runner, "UPDATE")
    lab.read(50)
    before = lab.image()
    discarded, swapped = begun(lab, rewinder).rewind_id, None
    replay_as(lab, runner, discarded)
    with contextlib.closing(connect(rewinder)) as connection:
        assert verify(connection, discarded, {lab.spec.name: lab.spec.keys})[0].left == 0
        beside.discard(connection, discarded, by="ann", reason="the transform is still wrong")
        assert lab.image() == before
        swapped = begun(lab, rewinder).rewind_id
        replay_as(lab, runner, swapped)
        assert swap_as(lab, rewinder, swapped).state is RewindState.APPLIED
        lab.check()
        lab.apply(lab.plan(Undo(swapped), connection=connection).rewind_id, connection=connection)
    assert lab.image() == before


@pytest.mark.sampled
@pytest.mark.parametrize("missing", RIGHTS)
def test_swap_without_a_right_changes_nothing(lab: Lab, rewinder: str, missing: str) -> None:
    lab.read(50)
    rewind_id = begun(lab, rewinder).rewind_id
    lab.replay(rewind_id)
    lab.sql(f"REVOKE {missing.format(table=lab.table)} FROM {urlsplit(rewinder).username}")
    if "deletion" in missing and not lab.key:
        swap_as(lab, rewinder, rewind_id)
        return
    with lab.unchanged(RewindNotAllowed, "permission denied for"):
        swap_as(lab, rewinder, rewind_id)


def test_discard_needs_the_role_that_began(lab: Lab, rewinder: str) -> None:
    lab.read(50)
    rewind_id = lab.rewind(ToOffset(20), beside=True).rewind_id
    with contextlib.closing(connect(rewinder)) as connection, lab.unchanged(DiscardNotAllowed, "as the role that began it"):
        beside.discard(connection, rewind_id, by="ann")
    with lab.session() as connection:
        beside.discard(connection, rewind_id, by="ann")


def test_writers_of_the_sink_get_the_same_rights_to_the_shadow(lab: Lab, rewinder: str, runner: str) -> None:
    """And readers none: the rows are not yet decided on."""
    lab.read(50)
    lab.sql(f"REVOKE SELECT, UPDATE, DELETE ON {lab.table} FROM {urlsplit(runner).username}; GRANT SELECT ON {lab.table} TO PUBLIC")
    shadow = f"tidemark_archive.rewound_{begun(lab, rewinder).rewind_id}_1"
    rights = lab.sql(
        "SELECT DISTINCT privilege_type FROM pg_class, aclexplode(relacl) WHERE pg_class.oid = %s::regclass AND grantee = %s::regrole",
        shadow,
        urlsplit(runner).username,
    )
    assert rights == [("INSERT",)]
    assert lab.sql("SELECT count(*) FROM pg_class, aclexplode(relacl) WHERE pg_class.oid = %s::regclass AND grantee = 0", shadow) == [(0,)]


# ---- stolen roles


@pytest.fixture
def trap(lab: Lab, rewinder: str) -> Trap:
    return Trap(lab.url, rewinder)


@pytest.mark.sampled
@pytest.mark.parametrize("lab", ["upsert"], indirect=True)
@pytest.mark.parametrize("what", ATTACHED)
def test_what_the_owner_of_a_shadow_attaches_to_it_is_never_run(lab: Lab, trap: Trap, what: str) -> None:
    """Runs of the replay, comparison, validation, swap and discard refuse the shadow, and change nothing."""
    lab.read(50)
    rewind_id = begun(lab, trap.attacker).rewind_id
    lab.replay(rewind_id, step=10)
    lab.read(55)
    replay = lab.side(rewind_id)
    trap.plant(ATTACHED[what][0].format(replay.shadows[lab.table]))
    trap.calls()
    users: tuple[Callable[[], object], ...] = (
        lambda: lab.replay(rewind_id),
        lambda: beside.validate_replay(lab.url, lab.spec, replay),
    )
    with lab.session() as connection:
        deciders: tuple[Callable[[], object], ...] = (
            lambda: verify(connection, rewind_id, {lab.spec.name: lab.spec.keys}),
            lambda: beside.discard(connection, rewind_id, by="ann"),
        )
        for use in (*users, *deciders):
            with lab.unchanged(ArchiveForged, "cannot be trusted"):
                use()
    assert trap.calls() == 0


def test_side_group_of_a_stored_rewind_is_its_own_and_stays(lab: Lab, rewinder: str) -> None:
    """Otherwise a swap would move another group's ledger, and a discard delete it."""
    lab.read(50)
    first, second = begun(lab, rewinder).rewind_id, lab.plan(ToOffset(10), beside=False).rewind_id
    lab.sql("INSERT INTO tidemark.consumer_group (name) VALUES ('others')")
    (side,), (others,) = (lab.sql(f"SELECT {value}") for value in (
        f"(SELECT side_id FROM tidemark.rewind_group WHERE rewind_id = {first})",
        "(SELECT group_id FROM tidemark.consumer_group WHERE name = 'others')",
    ))  # fmt: skip
    forge = "UPDATE tidemark.rewind_group SET side_id = %s WHERE rewind_id = %s"
    with contextlib.closing(connect(rewinder)) as connection:
        for group, rewind_id, error in (
            (lab.group_id, second, psycopg2.errors.ForeignKeyViolation),
            (others[0], second, psycopg2.errors.ForeignKeyViolation),
            (side[0], second, psycopg2.errors.UniqueViolation),
            (None, first, psycopg2.errors.InsufficientPrivilege),
        ):
            with pytest.raises(error), transaction(connection) as cur:
                cur.execute(forge, (group, rewind_id))
        for function in ("take_over_side", "discard_side"):
            with pytest.raises(psycopg2.errors.InsufficientPrivilege, match="permission denied"), transaction(connection) as cur:
                cur.execute(f"SELECT tidemark.{function}(%s)", (second,))


def test_new_column_is_added_by_the_role_that_began(lab: Lab, rewinder: str, runner: str) -> None:
    lab.read(50)
    rewind_id = begun(lab, rewinder).rewind_id
    lab.sql(f"ALTER TABLE {lab.table} ADD note text DEFAULT 'new'")
    layouts = [replace(lab.layout, columns=(*lab.layout.columns, Column("note", "text")))]
    replay = lab.side(rewind_id)
    behind = lab.unchanged(ShadowBehind, "the new column note.* as the role that began it")
    with session(runner) as connection, behind, transaction(connection) as cur:
        beside.follow_columns(cur, replay, layouts)
    with session(rewinder) as connection, transaction(connection) as cur:
        beside.follow_columns(cur, replay, layouts)
    with session(runner) as connection, transaction(connection) as cur:
        beside.follow_columns(cur, replay, layouts)
    lab.replay(rewind_id)
    lab.swap(rewind_id)
    assert lab.sql(f"SELECT DISTINCT note FROM {lab.table}") == [("new",)]


def test_shadow_that_a_role_has_declared_gone_is_missed(lab: Lab, rewinder: str) -> None:
    lab.read(50)
    rewind_id = begun(lab, rewinder).rewind_id
    lab.replay(rewind_id)
    with contextlib.closing(connect(rewinder)) as connection, transaction(connection) as cur:
        cur.execute("UPDATE tidemark.rewind_archive SET put_back_at = clock_timestamp()")
    with lab.unchanged(ShadowMissing, "has no shadow of"):
        lab.swap(rewind_id)
    with lab.unchanged(ShadowMissing, "has no shadow of"):
        lab.replay(rewind_id)
    with lab.session() as connection, lab.unchanged(ShadowMissing, "has no shadow of"):
        verify(connection, rewind_id, {lab.spec.name: lab.spec.keys})


def test_deletions_are_moved_only_to_a_table_that_the_role_may_change(lab: Lab, rewinder: str) -> None:
    lab.read(5)
    lab.sql("""INSERT INTO tidemark.deletion (sink, kafka_topic_id, kafka_partition, kafka_offset, kafka_seq, digest, key)
               VALUES ('tidemark_archive.rewound_1_1', 1, 0, 1, 0, '', '{}')""")
    move = "UPDATE tidemark.deletion SET sink = %s"
    with contextlib.closing(connect(rewinder)) as connection:
        lab.sql("CREATE TABLE lake.others (a text)")
        for other in ("lake.others", "lake.none", "nowhere"):
            with pytest.raises(psycopg2.errors.InsufficientPrivilege), transaction(connection) as cur:
                cur.execute(move, (other,))
        with transaction(connection) as cur:
            cur.execute(move, (lab.table,))


def test_name_of_the_next_shadow_can_be_taken_but_not_used(lab: Lab, trap: Trap) -> None:
    lab.read(50)
    plan = lab.plan(ToOffset(20), beside=True).rewind_id
    trap.plant(f"CREATE TABLE tidemark_archive.rewound_{plan}_1 ()")
    with lab.unchanged(ArchiveForged, f"the table tidemark_archive.rewound_{plan}_1 already exists"):
        lab.apply(plan)


def test_table_whose_constraints_call_functions_is_read_beside_by_its_owner_only(lab: Lab, rewinder: str) -> None:
    """A copy with such a constraint would run code of another role than its owner's."""
    lab.sql("CREATE FUNCTION lake.fine(text) RETURNS boolean IMMUTABLE LANGUAGE sql AS 'SELECT true'")
    lab.sql(f"ALTER TABLE {lab.table} ADD CHECK (lake.fine(city))")
    lab.read(50)
    with contextlib.closing(connect(rewinder)) as connection:
        plan = lab.plan(ToOffset(20), connection=connection, beside=True).rewind_id
        with lab.unchanged(ShadowRefused, r"a copy of it depends on function lake.fine\(text\). .* without --beside"):
            lab.apply(plan, connection=connection)
    lab.apply(plan)
    lab.replay(plan)
    lab.swap(plan)
    lab.check()

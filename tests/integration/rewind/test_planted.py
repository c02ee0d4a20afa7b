"""A role that may rewind owns its archives. What it attaches to one, or puts in its place, is never run by the roles that read it later."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from datetime import timedelta

import psycopg2
import pytest
from tests.integration.rewind.lab import Lab, role_on
from tests.support.erasing import planned
from tests.support.planted import YES, Trap, run

from tidemark.db import connect, statements
from tidemark.profiles import Profile
from tidemark.rewind import archive_retention
from tidemark.rewind.apply import StalePlan
from tidemark.rewind.archive_retention import remove_archives
from tidemark.rewind.plan_model import ToOffset, Undo
from tidemark.rewind.rows.archive import ArchiveForged, open_archive
from tidemark.rewind.verify import NotVerifiable, verify

ATTACHED = {
    "view": ("ALTER TABLE {0} RENAME TO hidden; CREATE VIEW {0} AS SELECT * FROM tidemark_archive.hidden WHERE " + YES, "TABLE {0}"),
    "foreign view": ("ALTER TABLE {0} RENAME TO hidden; CREATE MATERIALIZED VIEW {0} AS SELECT * FROM tidemark_archive.hidden", None),
    "rule": ("CREATE RULE harmless AS ON DELETE TO {0} DO ALSO SELECT " + YES, "DELETE FROM {0}"),
    "trigger": ("CREATE TRIGGER harmless BEFORE DELETE ON {0} FOR EACH ROW EXECUTE FUNCTION planted.fire()", "DELETE FROM {0}"),
    "policy": ("ALTER TABLE {0} ENABLE ROW LEVEL SECURITY; CREATE POLICY harmless ON {0} USING (" + YES + ")", None),
    "child": ("CREATE TABLE planted.child (CHECK (" + YES + ")) INHERITS ({0})", "SELECT FROM {0} WHERE kafka_offset = 1"),
    "index": ("CREATE INDEX ON {0} (kafka_offset) WHERE " + YES, "SELECT FROM {0} WHERE kafka_offset = 1"),
    "check": ("ALTER TABLE {0} ADD CHECK (" + YES + ") NOT VALID", "UPDATE {0} SET city = city"),
    "default": ("ALTER TABLE {0} ALTER COLUMN city SET DEFAULT " + YES + "::text", "INSERT INTO {0} (kafka_offset) VALUES (1)"),
    "statistics": ("CREATE STATISTICS planted.harmless ON (" + YES + "), (kafka_offset % 7) FROM {0}", None),
    "type": ("ALTER TABLE {0} ALTER COLUMN population TYPE planted.odd USING ROW(1)", "INSERT INTO {1} (population) SELECT population FROM {0}"),  # noqa: E501
}  # fmt: skip
"""What the archive's owner does to it, and a statement that then runs what was planted, as the proof. None: nothing that a superuser reads
runs it."""


@pytest.fixture
def thief(lab: Lab) -> Iterator[str]:
    with role_on(lab, Profile.REWINDER, "docs/rewind.md") as url:
        yield url


@pytest.fixture
def trap(lab: Lab, thief: str) -> Trap:
    return Trap(lab.url, thief)


def rewound(lab: Lab, trap: Trap) -> int:
    """The attacker rewinds. Returns the rewind's id."""
    with contextlib.closing(connect(trap.attacker)) as connection:
        planned = lab.plan(ToOffset(20), f"{lab.topic}:0", connection=connection)
        return lab.apply(planned.rewind_id, connection=connection).plan.rewind_id


@pytest.mark.parametrize("what", ATTACHED)
def test_what_the_owner_of_an_archive_attaches_to_it_is_never_run(lab: Lab, trap: Trap, what: str) -> None:
    """Each reader of the archive refuses it, and changes nothing."""
    attach, proof = ATTACHED[what]
    lab.read(50)
    rewind_id = rewound(lab, trap)
    undo = lab.plan(Undo(rewind_id)).rewind_id
    archive = f"tidemark_archive.rewound_{rewind_id}_1"
    trap.plant(attach.format(archive))
    lab.sql("UPDATE tidemark.rewind SET applied_at = applied_at - interval '9 days'")
    trap.calls()
    with lab.session() as connection:
        readers: tuple[Callable[[], object], ...] = (
            lambda: verify(connection, rewind_id, {lab.spec.name: lab.spec.keys}),
            lambda: lab.plan(Undo(rewind_id)),
            lambda: lab.apply(undo),
            lambda: planned(lab, "kafka_offset = 25"),
        )
        for reader in readers:
            with lab.unchanged(ArchiveForged, "cannot be trusted"):
                reader()
        with pytest.raises(ArchiveForged):
            remove_archives(connection, timedelta(days=1))
    assert trap.calls() == 0
    if proof is not None:
        with contextlib.suppress(psycopg2.Error):
            run(lab.url, proof.format(archive, lab.table))
        assert trap.calls() > 0


def test_archive_of_a_role_that_may_not_create_any_is_refused(lab: Lab, trap: Trap) -> None:
    lab.read(50)
    rewind_id = rewound(lab, trap)
    role = run(trap.attacker, "SELECT current_user")[0][0]
    lab.sql(f"REVOKE CREATE ON SCHEMA tidemark_archive FROM {role}")
    with lab.session() as connection, pytest.raises(ArchiveForged, match=f"belongs to {role}, who may not create archives"):
        verify(connection, rewind_id, {lab.spec.name: lab.spec.keys})


def test_archive_stays_as_it_was_checked_until_the_transaction_ends(lab: Lab, trap: Trap) -> None:
    """Readers lock it, so what is attached later comes too late; readers do not wait for each other."""
    lab.read(50)
    rewind_id = rewound(lab, trap)
    row = {"rewind_id": rewind_id, "number": 1, "sink": lab.table, "relation": f"tidemark_archive.rewound_{rewind_id}_1"}
    with lab.session() as one, lab.session() as other:
        for connection in (one, other):
            with connection.cursor() as cur:
                open_archive(cur, row)
        for attach, _ in (ATTACHED[what] for what in ("view", "rule", "trigger", "policy", "index", "check", "type")):
            with pytest.raises(psycopg2.errors.LockNotAvailable):
                trap.plant("SET LOCAL lock_timeout = '100ms'", attach.format(row["relation"]))


def test_table_that_a_stored_rewind_names_is_touched_only_if_the_consumers_file_has_it(lab: Lab, trap: Trap) -> None:
    """Which table was stored is the choice of a role that may rewind. A query would run what its view calls, a DELETE its triggers."""
    lab.read(50)
    trap.plant(
        f"CREATE TABLE tidemark_archive.mine AS TABLE {lab.table}",
        "CREATE TRIGGER fires BEFORE DELETE ON tidemark_archive.mine FOR EACH ROW EXECUTE FUNCTION planted.fire()",
        f"CREATE VIEW tidemark_archive.shown AS SELECT * FROM tidemark_archive.mine WHERE {YES}",
    )
    done, plan = rewound(lab, trap), lab.plan(ToOffset(10), f"{lab.topic}:0")
    trap.calls()
    forge = "UPDATE tidemark.rewind_group SET sink = %s, sinks = NULL WHERE rewind_id = %s"
    lab.sql(forge, "tidemark_archive.shown", done)
    with lab.session() as connection, lab.unchanged(NotVerifiable, "tidemark_archive.shown is not a table of"):
        verify(connection, done, {lab.spec.name: lab.spec.keys})
    lab.sql(forge, "tidemark_archive.mine", plan.rewind_id)
    with lab.unchanged(StalePlan, "tidemark_archive.mine for .*; its file has the group"):
        lab.apply(plan.rewind_id)
    assert trap.calls() == 0
    run(lab.url, "SELECT FROM tidemark_archive.shown", "DELETE FROM tidemark_archive.mine")
    assert trap.calls() > 0


def test_archives_of_a_thief_keep_nobody_else_from_working(lab: Lab, trap: Trap, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether he takes the name of the next one, or locks his own, or names no relation at all."""
    monkeypatch.setattr(archive_retention, "LOCK_WAIT_S", 1)
    lab.read(50)
    rewind_id = rewound(lab, trap)
    plan = lab.plan(ToOffset(10), f"{lab.topic}:0").rewind_id
    trap.plant(f"CREATE TABLE tidemark_archive.rewound_{plan}_1 ()")
    with lab.unchanged(ArchiveForged, f"the table tidemark_archive.rewound_{plan}_1 already exists"):
        lab.apply(plan)
    lab.sql("UPDATE tidemark.rewind SET applied_at = applied_at - interval '9 days'")
    with contextlib.closing(psycopg2.connect(trap.attacker)) as thief, thief.cursor() as cur, lab.session() as connection:
        cur.execute(f"LOCK TABLE tidemark_archive.rewound_{rewind_id}_1")
        assert remove_archives(connection, timedelta(days=1)) == []
        thief.rollback()
        cur.execute("UPDATE tidemark.rewind_archive SET rows = rows")
        thief.rollback()
        assert [one.rewind_id for one in remove_archives(connection, timedelta(days=1))] == [rewind_id]
    lab.sql("UPDATE tidemark.rewind_archive SET removed_at = NULL, relation = 'a.b.c\".d'")
    lab.sql(statements("tidemark.doctor", "database.sql")["kept"].replace("%(overdue)s", "'1 day'"))


def test_row_that_an_undo_would_put_back_is_added_only_by_who_may_change_the_table(lab: Lab) -> None:
    lab.read(5)
    add = """INSERT INTO tidemark.rewound_row (rewind_id, group_id, topic_id, partition, sink, elsewhere,
                                               kafka_topic_id, kafka_partition, kafka_offset, kafka_seq, kept)
             VALUES (1, 1, 1, 0, %s, false, 1, 0, 1, 0, '{}')"""
    with role_on(lab, Profile.RUNNER, "docs/deployment/index.md") as url, contextlib.closing(connect(url)) as connection:
        with connection, connection.cursor() as cur:
            cur.execute(add, (lab.table,))
        lab.sql("CREATE TABLE lake.others (a text)")
        for other in ("lake.others", "lake.none", "nowhere"):
            with pytest.raises(psycopg2.errors.InsufficientPrivilege), connection, connection.cursor() as cur:
                cur.execute(add, (other,))

"""Which rights the role that applies rewinds needs, and what happens without them."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Iterator
from urllib.parse import urlsplit, urlunsplit

import psycopg2
import pytest
from tests.integration.rewind.lab import Lab
from tests.support.documented import grants
from tests.support.erasing import reading

from tidemark.db import connect
from tidemark.erase import erasure
from tidemark.erase.erasure import EraseNotAllowed, Person
from tidemark.offsets.store import SessionNotEnded
from tidemark.profiles import Profile
from tidemark.rewind import apply as applying
from tidemark.rewind.apply import RewindNotAllowed
from tidemark.rewind.guards import RowsStay
from tidemark.rewind.model import ToOffset, Undo
from tidemark.rewind.plan import PlanRefused
from tidemark.schema import migrate

RIGHTS = (
    "CREATE ON SCHEMA tidemark",
    "DELETE ON tidemark.batch, tidemark.failed_record, tidemark.lost_range",
    "DELETE ON tidemark.rewound_batch, tidemark.rewound_failed_record, tidemark.rewound_lost_range",
    "DELETE ON {table}",
)
"""Rights that a role needs to apply rewinds. If one is missing, nothing changes."""


@pytest.fixture
def grant(lab: Lab) -> Iterator[Callable[..., str]]:
    """Yields a function that grants the test's role its profile and the rights in docs/rewind.md, except the given ones, and returns its
    URL."""
    role = f"rewinder_{uuid.uuid4().hex[:10]}"
    lab.sql(f"CREATE ROLE {role} LOGIN PASSWORD '{role}'")
    parts = urlsplit(lab.url)
    url = urlunsplit(parts._replace(netloc=f"{role}:{role}@{parts.hostname}:{parts.port}"))

    def give(*missing: str) -> str:
        migrate(lab.url, grant_to=role, profiles=[Profile.REWINDER])
        (on_sink,) = grants("docs/rewind.md")
        lab.sql(on_sink.replace("lake.cities", lab.table).replace("tidemark_run", role))
        for right in missing:
            lab.sql(f"REVOKE {right.format(table=lab.table)} FROM {role}")
        return url

    yield give
    lab.sql(f"DROP OWNED BY {role} CASCADE")
    lab.sql(f"DROP ROLE {role}")


def test_a_role_with_the_rights_to_rewind_plans_applies_and_undoes(lab: Lab, grant: Callable[..., str]) -> None:
    url = grant()
    lab.read(50)
    before = lab.image()
    with contextlib.closing(connect(url, application="tidemark rewind")) as connection:
        planned = lab.plan(ToOffset(20), f"{lab.topic}:0", connection=connection)
        done = lab.apply(planned.rewind_id, connection=connection).plan
        lab.check()
        lab.apply(lab.plan(Undo(done.rewind_id), connection=connection).rewind_id, connection=connection)
    assert lab.image() == before


@pytest.mark.parametrize("missing", range(len(RIGHTS)))
def test_a_role_that_lacks_a_right_changes_nothing_and_is_told(lab: Lab, grant: Callable[..., str], missing: int) -> None:
    """It can still plan, and see what would happen."""
    url = grant(RIGHTS[missing])
    lab.read(50)
    with contextlib.closing(connect(url, application="tidemark rewind")) as connection:
        planned = lab.plan(ToOffset(20), f"{lab.topic}:0", connection=connection)
        rewind_id = planned.rewind_id
        if missing == 2:  # only an undo deletes from these tables
            lab.apply(rewind_id, connection=connection)
            rewind_id = lab.plan(Undo(rewind_id), connection=connection).rewind_id
        before, audit = lab.image(), lab.audit()
        with pytest.raises(RewindNotAllowed, match="permission denied for") as raised:
            lab.apply(rewind_id, connection=connection)
    assert "The role needs DELETE on the sink" in str(raised.value)
    assert (lab.image(), lab.audit()) == (before, audit)
    assert isinstance(raised.value.__cause__, psycopg2.Error)


@pytest.mark.parametrize("force", [False, True])
def test_row_security_that_hides_rows_refuses_the_plan_and_the_rewind(lab: Lab, grant: Callable[..., str], force: bool) -> None:
    """Rows that the role cannot see would stay, and the replay would load them again. Row security applies to owners only under FORCE."""
    url = grant()
    lab.read(50)
    before = lab.image()
    with contextlib.closing(connect(url, application="tidemark rewind")) as connection:
        rewind_id = lab.plan(ToOffset(20), f"{lab.topic}:0", connection=connection).rewind_id
        lab.sql(f"CREATE POLICY few_cities ON {lab.table} USING (kafka_offset < 30)")
        lab.sql(f"ALTER TABLE {lab.table} ENABLE ROW LEVEL SECURITY")
        if force:
            lab.sql(f"ALTER TABLE {lab.table} FORCE ROW LEVEL SECURITY")
            lab.sql(f"ALTER TABLE {lab.table} OWNER TO {url.split('//')[1].split(':')[0]}")
        with pytest.raises(PlanRefused, match="few_cities"):
            lab.plan(ToOffset(20), f"{lab.topic}:0", connection=connection)
        with pytest.raises(RowsStay, match="few_cities"):
            lab.apply(rewind_id, connection=connection)
        assert lab.image() == before
        lab.sql(f"ALTER TABLE {lab.table} NO FORCE ROW LEVEL SECURITY")
        if force:
            assert lab.apply(rewind_id, connection=connection).plan.groups[0].partitions[0].sink_rows == 27
    if force:
        lab.sql(f"ALTER TABLE {lab.table} OWNER TO CURRENT_USER")


def test_a_role_that_may_not_end_a_commits_session_is_told_which_right_is_missing(
    lab: Lab, grant: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(applying, "GRACE_MS", 200)
    url = grant()
    lab.read(50)
    with contextlib.closing(connect(url, application="tidemark rewind")) as connection:
        planned = lab.plan(ToOffset(20), f"{lab.topic}:0", connection=connection)
        with contextlib.closing(connect(lab.url, application="tidemark/1/1")) as commit:
            commit.cursor().execute("UPDATE tidemark.partition_offset SET next_offset = next_offset")
            with pytest.raises(SessionNotEnded, match="pg_signal_backend"):
                lab.apply(planned.rewind_id, connection=connection)


def test_erasure_needs_every_right_and_sight_of_every_row(lab: Lab, grant: Callable[..., str]) -> None:
    """Rows hidden by row security would stay, so the role is refused, like one that may not delete."""
    url = grant("DELETE ON {table}")
    lab.read(20)
    person, reason = Person(where="city = 'city 13'"), "asked for by the customer"
    with contextlib.closing(connect(url, application="tidemark erase")) as connection:
        made = erasure.plan(connection, lab.cluster, lab.spec, person, reading(lab), reason=reason, by="ann").erasure
        with pytest.raises(EraseNotAllowed, match="permission denied for table"):
            erasure.apply(connection, lambda _: lab.spec, made.erasure_id, person, reading(lab), by="ann")
        grant()
        lab.sql(f"CREATE POLICY few_cities ON {lab.table} USING (kafka_offset < 10)")
        lab.sql(f"ALTER TABLE {lab.table} ENABLE ROW LEVEL SECURITY")
        with pytest.raises(EraseNotAllowed, match="row-level security"):
            erasure.plan(connection, lab.cluster, lab.spec, person, reading(lab), reason=reason, by="ann")
        with pytest.raises(EraseNotAllowed, match="row-level security"):
            erasure.apply(connection, lambda _: lab.spec, made.erasure_id, person, reading(lab), by="ann")
        assert 13 in lab.offsets()
        lab.sql(f"ALTER TABLE {lab.table} DISABLE ROW LEVEL SECURITY")
        assert erasure.apply(connection, lambda _: lab.spec, made.erasure_id, person, reading(lab), by="ann").sink_rows == 1
    assert 13 not in lab.offsets()

"""Which rights the role that applies rewinds needs, and what happens without them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest
from tests.integration.rewind.lab import Lab, role_on
from tests.support.erasing import reading

from tidemark.db import connect
from tidemark.erase import erasure
from tidemark.erase.erasure import EraseNotAllowed, Person
from tidemark.offsets.store import SessionNotEnded
from tidemark.profiles import Profile
from tidemark.rewind import apply as applying
from tidemark.rewind.apply import RewindNotAllowed
from tidemark.rewind.guards import RowsStay
from tidemark.rewind.plan import PlanRefused
from tidemark.rewind.plan_model import ToOffset, Undo

RIGHTS = (
    "CREATE ON SCHEMA tidemark_archive",
    "EXECUTE ON FUNCTION tidemark.take_from_ledger(bigint)",
    "EXECUTE ON FUNCTION tidemark.put_back_in_ledger(bigint)",
    "DELETE ON {table}",
)
"""Rights that a role needs to apply rewinds. If one is missing, nothing changes."""


@pytest.fixture
def url(lab: Lab) -> Iterator[str]:
    """The URL of a role with the profile and the privileges in docs/rewind.md."""
    with role_on(lab, Profile.REWINDER, "docs/rewind.md") as url:
        yield url


def revoke(lab: Lab, right: str, url: str) -> None:
    lab.sql(f"REVOKE {right.format(table=lab.table)} FROM {urlsplit(url).username}")


def test_a_role_with_the_rights_to_rewind_plans_applies_and_undoes(lab: Lab, url: str) -> None:
    lab.read(50)
    before = lab.image()
    with contextlib.closing(connect(url, application="tidemark rewind")) as connection:
        planned = lab.plan(ToOffset(20), f"{lab.topic}:0", connection=connection)
        done = lab.apply(planned.rewind_id, connection=connection).plan
        lab.check()
        lab.apply(lab.plan(Undo(done.rewind_id), connection=connection).rewind_id, connection=connection)
    assert lab.image() == before


@pytest.mark.sampled
@pytest.mark.parametrize("missing", range(len(RIGHTS)))
def test_a_role_that_lacks_a_right_changes_nothing_and_is_told(lab: Lab, url: str, missing: int) -> None:
    """It can still plan, and see what would happen."""
    revoke(lab, RIGHTS[missing], url)
    lab.read(50)
    with contextlib.closing(connect(url, application="tidemark rewind")) as connection:
        planned = lab.plan(ToOffset(20), f"{lab.topic}:0", connection=connection)
        rewind_id = planned.rewind_id
        if missing == 2:  # only an undo calls it
            lab.apply(rewind_id, connection=connection)
            rewind_id = lab.plan(Undo(rewind_id), connection=connection).rewind_id
        with lab.unchanged(RewindNotAllowed, r"(?s)permission denied for.*The role needs DELETE on the sink"):
            lab.apply(rewind_id, connection=connection)


@pytest.mark.sampled
@pytest.mark.parametrize("force", [False, True])
def test_row_security_that_hides_rows_refuses_the_plan_and_the_rewind(lab: Lab, url: str, force: bool) -> None:
    """Rows that the role cannot see would stay, and the replay would load them again. Row security applies to owners only under FORCE."""
    lab.read(50)
    before = lab.image()
    with contextlib.closing(connect(url, application="tidemark rewind")) as connection:
        rewind_id = lab.plan(ToOffset(20), f"{lab.topic}:0", connection=connection).rewind_id
        lab.sql(f"CREATE POLICY few_cities ON {lab.table} USING (kafka_offset < 30)")
        lab.sql(f"ALTER TABLE {lab.table} ENABLE ROW LEVEL SECURITY")
        if force:
            lab.sql(f"ALTER TABLE {lab.table} FORCE ROW LEVEL SECURITY")
            lab.sql(f"ALTER TABLE {lab.table} OWNER TO {urlsplit(url).username}")
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
    lab: Lab, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(applying, "GRACE_MS", 200)
    lab.read(50)
    with contextlib.closing(connect(url, application="tidemark rewind")) as connection:
        planned = lab.plan(ToOffset(20), f"{lab.topic}:0", connection=connection)
        with contextlib.closing(connect(lab.url, application="tidemark/1/1")) as commit:
            commit.cursor().execute("UPDATE tidemark.partition_offset SET next_offset = next_offset")
            with pytest.raises(SessionNotEnded, match="pg_signal_backend"):
                lab.apply(planned.rewind_id, connection=connection)


def test_erasure_needs_every_right_and_sight_of_every_row(lab: Lab, url: str) -> None:
    """Rows hidden by row security would stay, so the role is refused, like one that may not delete."""
    revoke(lab, "DELETE ON {table}", url)
    lab.read(20)
    person, reason = Person(where="city = 'city 13'"), "asked for by the customer"
    with contextlib.closing(connect(url, application="tidemark erase")) as connection:
        made = erasure.plan(connection, lab.cluster, lab.spec, person, reading(lab), reason=reason, by="ann").erasure
        with pytest.raises(EraseNotAllowed, match="permission denied for table"):
            erasure.apply(connection, lambda _: lab.spec, made.erasure_id, person, reading(lab), by="ann")
        lab.sql(f"GRANT DELETE ON {lab.table} TO {urlsplit(url).username}")
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

"""Postgres stops responding: nothing waits for it longer than documented, and locks are released."""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Iterator

import psycopg2
import pytest
from tests.support import black_hole
from tests.support.black_hole import BlackHole
from tests.support.ledger import DDL, TABLE, Group, rows
from tests.support.waiting import until

from tidemark import db
from tidemark.db import answering, session, transaction
from tidemark.driver import launch
from tidemark.driver.launch import AttemptGone
from tidemark.errors import DatabaseReadOnly, DatabaseUnavailable, LockTimeout, StatementTimeout
from tidemark.records.outcome import TransformOutput, only
from tidemark.records.ranges import Slice
from tidemark.sink import commit as commit_module
from tidemark.sink.load import SinkRejected


@pytest.fixture
def hole(database_url: str) -> Iterator[BlackHole]:
    with black_hole.before(database_url) as hole:
        yield hole


@pytest.fixture
def group(database_url: str) -> Iterator[Group]:
    with contextlib.closing(psycopg2.connect(database_url)) as watch:
        group = Group(database_url, watch)
        group.sql(DDL)
        yield group
        group.check_conserved()


def with_settings(url: str, settings: str) -> str:
    return f"{url}{'&' if '?' in url else '?'}{settings}"


def read_only(url: str) -> str:
    return with_settings(url, "options=-cdefault_transaction_read_only%3Don")


def test_session_has_bounds_by_default_and_the_url_wins(database_url: str) -> None:
    """The kernel detects a vanished peer within a minute, unless the URL sets other limits."""
    names = ("connect_timeout", "keepalives_idle", "tcp_user_timeout")
    other = with_settings(database_url, "connect_timeout=3&tcp_user_timeout=5000")
    for url, bounds in ((database_url, ["10", "30", "60000"]), (other, ["3", "30", "5000"])):
        with session(url) as connection:
            assert [connection.get_dsn_parameters()[name] for name in names] == bounds


def test_statement_timeout_of_the_role_is_named(database_url: str) -> None:
    """Not as an outage that only has to be waited for. `doctor` warns of the setting."""
    limited = with_settings(database_url, "options=-cstatement_timeout%3D1000")
    with session(limited) as connection, pytest.raises(StatementTimeout, match="SET statement_timeout = 0"), transaction(connection) as cur:
        cur.execute("SELECT pg_sleep(60)")


def test_server_lets_a_commits_locks_go_when_its_client_has_vanished(hole: BlackHole, group: Group, monkeypatch) -> None:
    """The server's keepalives detect it. By default they start after two hours. The commit sets them for its transaction only, so that the
    next client of a pooler does not inherit them."""
    with session(hole.url) as connection:
        with transaction(connection) as cur:
            cur.execute(db.RELEASE_IF_LOST)
            assert keepalives(cur) == ["30", "10", "3", "60000"]
        with transaction(connection) as cur:
            assert keepalives(cur) != ["30", "10", "3", "60000"]
    monkeypatch.setattr(commit_module, "RELEASE_IF_LOST", "SELECT 1 / 0")
    with pytest.raises(SinkRejected, match="division by zero"):
        group.commit(group.slice())


def keepalives(cur: db.Cursor) -> list[str]:
    names = ("tcp_keepalives_idle", "tcp_keepalives_interval", "tcp_keepalives_count", "tcp_user_timeout")
    cur.execute("SELECT name, setting FROM pg_settings WHERE name = ANY (%s)", (list(names),))
    found = dict(cur.fetchall())
    return [found[name] for name in names]


def endless(part: Slice, hole: BlackHole, way: str) -> Iterator[TransformOutput]:
    """Yields more rows than the buffers along the way can hold. After the first row, nothing passes any more."""
    for offset in range(part.start, part.end):
        yield TransformOutput(only(rows(part, [offset], "x" * 1_000_000)))
        getattr(hole, way).set()


def test_copy_to_a_peer_that_takes_nothing_is_an_outage(hole: BlackHole, group: Group) -> None:
    """The peer's window is closed, and its kernel acknowledges every probe. ``tcp_user_timeout`` ends this too."""
    part = group.slice(end=200)
    begun = time.monotonic()
    with pytest.raises(DatabaseUnavailable):
        group.commit(part, endless(part, hole, "stand_still"), url=f"{hole.url}&tcp_user_timeout=2000")
    assert time.monotonic() - begun < 60
    hole.close()
    until(lambda: not group.sessions())
    assert group.counted() == (0, 0, 0, 0)


def test_commit_that_is_never_answered_is_an_outage(hole: BlackHole, group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    """The peer accepts everything and never responds, like a stuck pooler. The session is given up and stores nothing."""
    monkeypatch.setattr(commit_module, "answering", lambda connection, url: answering(connection, 1.0))
    part = group.slice(end=3)
    with pytest.raises(DatabaseUnavailable):
        group.commit(part, endless(part, hole, "swallow"), url=hole.url)
    hole.close()
    until(lambda: not group.sessions())
    assert group.counted() == (0, 0, 0, 0)


def test_server_that_works_is_not_given_up(database_url: str) -> None:
    """While bytes pass, and between two statements, a session does not count as silent."""
    with session(database_url) as connection, answering(connection, 3.0), transaction(connection) as cur:
        for _ in range(3):
            cur.execute("SELECT pg_sleep(1.1)")
        time.sleep(3.5)
        cur.execute("SELECT 1")


def test_long_silence_is_logged(hole: BlackHole, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """The driver's own session may be the only one that gets no answer."""
    monkeypatch.setattr(db, "REPORT_AFTER_S", 0.5)
    caplog.set_level("INFO", "tidemark")
    with contextlib.suppress(DatabaseUnavailable), session(hole.url) as connection, answering(connection, 3.0, url=hole.url):
        hole.swallow.set()
        with transaction(connection) as cur:
            cur.execute("SELECT 1")
    until(lambda: "waiting for=the result of a statement since_s=" in caplog.text)


def test_commit_behind_a_locked_table_names_the_sessions_that_lock_it(
    group: Group, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An ALTER TABLE waits for a reader that is idle in its transaction, and the commit waits for both."""
    monkeypatch.setattr(db, "REPORT_AFTER_S", 0.5)
    monkeypatch.setattr(db, "LOOK_EVERY_S", 0.1)
    monkeypatch.setattr(commit_module, "LOCK_TIMEOUT_MS", 5_000)
    with session(group.url, application="a report") as reader, session(group.url, application="a migration") as writer:
        with reader.cursor() as cur:
            cur.execute(f"SELECT FROM {TABLE}")
        altering = threading.Thread(target=alter, args=(writer,))
        altering.start()
        until(lambda: group.sql("SELECT count(*) FROM pg_locks WHERE NOT granted") == [(1,)])
        with pytest.raises(LockTimeout, match="canceling statement due to lock timeout"):
            group.commit(group.slice())
        reader.rollback()
        altering.join()
    (line,) = [record.getMessage() for record in caplog.records if "what=statement" in record.getMessage()][:1]
    assert re.search(r"held_by=.*a report \(pid \d+, role .*a migration|held_by=.*a migration \(pid \d+, role .*a report", line)


def alter(connection: db.Connection) -> None:
    with transaction(connection) as cur:
        cur.execute(f"ALTER TABLE {TABLE} ADD COLUMN gate text")


def test_transform_may_take_longer_than_postgres_may_be_silent(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    """While it computes the rows of a COPY, Postgres waits for it."""
    monkeypatch.setattr(commit_module, "answering", lambda connection, url: answering(connection, 3.0))
    part = group.slice(end=3)

    def slow() -> Iterator[TransformOutput]:
        for offset in range(part.start, part.end):
            time.sleep(3.5)
            yield TransformOutput(only(rows(part, [offset], "x")))

    group.commit(part, slow())
    assert group.counted() == (3, 3, 0, 1)


def test_read_only_server_is_an_outage_that_says_what_to_point_at(database_url: str, group: Group) -> None:
    """The server is a standby, or a failover has not promoted it yet. A retry may reach another server."""
    url = read_only(database_url)
    part = group.slice()
    with pytest.raises(DatabaseReadOnly, match="target_session_attrs=read-write") as raised:
        group.commit(part, url=url)
    assert raised.value.retriable
    with session(url) as connection, pytest.raises(DatabaseReadOnly), transaction(connection) as cur:
        cur.execute("DELETE FROM tidemark.attempt")


def test_follower_says_since_when_it_has_heard_nothing(hole: BlackHole, group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    """Following a driver does not wait for Postgres: the driver's output still arrives, and a kill still works."""
    following = launch.Follow(hole.url, group.attempt())
    heard: list[launch.Progress] = []
    said: list[str] = []
    try:
        until(lambda: following.show(heard.append, said.append) or heard)
        assert said == []
        monkeypatch.setattr(launch, "SILENT_S", 1.0)
        hole.swallow.set()
        until(lambda: following.show(heard.append, said.append) or said)
        begun = time.monotonic()
        following.show(heard.append, said.append)
        assert time.monotonic() - begun < 10  # it does not wait for the answer, which never comes
        assert len(said) == 1
        assert re.match(r"no answer from Postgres since \d\d:\d\d:\d\d UTC", said[0])
    finally:
        hole.close()
        following.close()


def test_follower_whose_attempt_is_gone_says_what_happened(group: Group) -> None:
    """A failover to a lagging replica, or a restore, removes the attempt's row and what the attempt committed."""
    attempt = group.attempt()
    heard: list[launch.Progress] = []
    with contextlib.closing(launch.Follow(group.url, attempt)) as following:
        until(lambda: following.show(heard.append, heard.append) or heard)
        group.sql("DELETE FROM tidemark.attempt WHERE attempt_id = %s", attempt)
        with pytest.raises(AttemptGone, match=f"attempt {attempt} is gone.*the next run reads"):
            until(lambda: following.show(heard.append, heard.append))
    with pytest.raises(AttemptGone):
        launch.progress(group.url, attempt)
    assert AttemptGone.retriable


def test_end_of_an_attempt_is_asked_for_again_while_the_server_is_read_only(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failover of less than a minute does not leave the attempt of a dead driver RUNNING."""
    attempt = group.attempt()
    ways = iter([read_only(group.url)])
    monkeypatch.setattr(launch, "session", lambda url: session(next(ways, url)))
    with pytest.raises(launch.DriverDied):
        launch.outcome(group.url, attempt, launch.DriverDied(attempt_id=attempt, status=-9))
    assert group.sql("SELECT state FROM tidemark.attempt WHERE attempt_id = %s", attempt) == [("FAILED",)]

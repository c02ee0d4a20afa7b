"""Waiting for a group: a notification ends the wait, and a lost one only costs time."""

from __future__ import annotations

import contextlib
import os
import resource
import select
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psycopg2
import pytest
from tests.integration.group.players import Scene
from tests.support.waiting import until

from tidemark.errors import BadInput
from tidemark.group import wake as wake_module
from tidemark.group.wake import MISSED, Wakeups

LONG_S = 60.0
"""A wait that nothing ends takes so long that it exceeds `SOON_S`, the limit of an early end."""
SOON_S = 15.0
SHORT_S = 0.05
FD_SETSIZE = 1024


@pytest.fixture
def wakeups(scene: Scene) -> Iterator[Wakeups]:
    with contextlib.closing(Wakeups(scene.url, scene.group)) as wakeups:
        yield wakeups


def ends_early(wakeups: Wakeups) -> bool:
    began = time.monotonic()
    wakeups.wait(LONG_S)
    return time.monotonic() - began < SOON_S


def takes_its_time(wakeups: Wakeups) -> bool:
    began = time.monotonic()
    wakeups.wait(SHORT_S)
    return time.monotonic() - began >= SHORT_S


def listeners(scene: Scene) -> list[int]:
    return [
        pid
        for (pid,) in scene.sql(
            "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND query = %s",
            f"LISTEN {wake_module.channel_of(scene.group)}",
        )
    ]


def test_every_transition_ends_a_wait(scene: Scene, wakeups: Wakeups) -> None:
    """In PreparingRebalance, members must rejoin. In CompletingRebalance, a parked JoinGroup has its answer; in Stable, a parked
    SyncGroup."""
    a, b = scene.player("a"), scene.player("b")
    a.ask_for_id()
    assert takes_its_time(wakeups), "an id that is handed out is no transition"
    for act in (a.join, a.assign, b.join, a.join, b.joined, a.assign, b.leave):
        before = scene.state
        act()
        if scene.state != before:
            assert ends_early(wakeups)
        assert takes_its_time(wakeups), "one transition ends one wait"


def test_heartbeats_send_no_notification(scene: Scene) -> None:
    """The commit of a notification takes a lock that all databases of the server share. Heartbeats must not take it."""
    a = scene.player("a")
    scene.start(a)
    channel = wake_module.channel_of(scene.group)
    with contextlib.closing(psycopg2.connect(scene.url)) as listener:
        listener.autocommit = True
        with listener.cursor() as cur:
            cur.execute(f"LISTEN {channel}")
        a.heartbeat()
        a.sync()
        scene.sql("SELECT pg_notify(%s, 'the end')", channel)  # notifications arrive in the order of their commits
        heard: list[str] = []
        while "the end" not in heard:
            assert select.select([listener], [], [], SOON_S)[0]
            listener.poll()
            heard = [each.payload for each in listener.notifies]
    assert heard == ["the end"]


def test_another_group_ends_no_wait(scene: Scene, wakeups: Wakeups) -> None:
    """Each group has a separate channel."""
    Scene(scene.url, scene.connection, scene.group + "-other").player("a", instance="i").join()
    assert takes_its_time(wakeups)


def test_a_process_with_many_open_files_waits_as_any_other(scene: Scene) -> None:
    """``select`` only supports file descriptors up to 1023."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with contextlib.ExitStack() as files:
        files.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        while files.enter_context(Path(os.devnull).open()).fileno() < FD_SETSIZE:
            pass
        with contextlib.closing(Wakeups(scene.url, scene.group)) as wakeups:
            assert takes_its_time(wakeups)
            scene.player("a", instance="i").join()
            assert ends_early(wakeups)
            wakeups.wake()
            assert ends_early(wakeups)


def test_another_thread_ends_the_wait_that_is_under_way(wakeups: Wakeups) -> None:
    """A thread does this to close the member or to make it rejoin."""
    done = threading.Event()
    thread = threading.Thread(target=lambda: (wakeups.wait(LONG_S), done.set()))
    thread.start()
    wakeups.wake()
    assert done.wait(SOON_S)
    thread.join()


def test_a_wake_before_the_wait_ends_it_once(wakeups: Wakeups) -> None:
    """It does not matter how often `wake` was called."""
    for _ in range(10_000):
        wakeups.wake()
    assert ends_early(wakeups)
    until(lambda: takes_its_time(wakeups))


def test_a_lost_connection_costs_time_and_is_made_again(scene: Scene, wakeups: Wakeups, monkeypatch: pytest.MonkeyPatch) -> None:
    """The wait takes its full time. Once the connection is back, the wait returns at once, because notifications may have been missed."""
    monkeypatch.setattr(wake_module, "RECONNECT_AFTER_S", 60.0)
    scene.sql("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid = ANY (%s)", listeners(scene))
    until(lambda: listeners(scene) == [])
    assert takes_its_time(wakeups)
    scene.player("a", instance="i").join()  # this notification is lost
    assert takes_its_time(wakeups), "not tried again at once: a server that is away answers slowly"
    monkeypatch.setattr(wakeups, "_next_try", 0.0)
    assert wakeups.wait(LONG_S) == (MISSED,)
    scene.player("b", instance="j").join()
    assert ends_early(wakeups)


@pytest.mark.parametrize("source", ["", "?password_command=false"], ids=["server", "password"])
def test_without_a_server_or_its_password_every_wait_takes_its_time(source: str) -> None:
    """Polling is the fallback; no error is raised."""
    with contextlib.closing(Wakeups(f"postgresql://nobody@127.0.0.1:1/none{source}", "departures")) as wakeups:
        assert takes_its_time(wakeups)
        assert takes_its_time(wakeups)


def test_a_bad_address_is_said_at_once() -> None:
    """Retrying would not help."""
    with pytest.raises(BadInput):
        Wakeups("host=127.0.0.1", "departures")


def test_closing_ends_the_session_and_may_be_repeated(scene: Scene) -> None:
    """A `wake` after that does nothing."""
    wakeups = Wakeups(scene.url, scene.group)
    assert len(listeners(scene)) == 1
    wakeups.close()
    wakeups.close()
    wakeups.wake()
    until(lambda: listeners(scene) == [])

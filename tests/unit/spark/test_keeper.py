"""The keeper goes on when it cannot serve one request. Here it is a thread, and forks nothing."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.waiting import until

from tidemark.driver import keeper_client
from tidemark.spark import keeper


@pytest.fixture
def forks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The threads that wanted to fork; none could, as at the limit of processes."""
    threads: list[str] = []

    def fork() -> int:
        threads.append(threading.current_thread().name)
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", fork)
    return threads


@pytest.fixture
def serving(forks: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Thread]:
    monkeypatch.setattr(keeper_client, "socket_path", lambda env: tmp_path / "k.sock")
    monkeypatch.setattr(keeper, "LOOK_EVERY_S", 0.05)
    monkeypatch.setattr(keeper.gc, "freeze", lambda: None)
    thread = threading.Thread(target=keeper.Keeper(tmp_path / "k.sock").serve, name="keeper")
    thread.start()
    yield thread
    (tmp_path / "k.sock").unlink(missing_ok=True)  # ends it
    thread.join()


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_process_that_cannot_be_forked_is_left_to_its_task(serving: threading.Thread, forks: list[str]) -> None:
    """Other drivers run on, and no file stays open: the next request is answered as the first."""
    files = open_files()
    for _ in range(2):
        with pytest.raises(keeper_client.KeeperUnavailable, match=r"could not fork; its log is .*k\.log"):
            keeper_client.start_driver(["driver.py"], os.environ)
    assert forks == ["keeper", "keeper"]
    assert serving.is_alive()
    until(lambda: open_files() == files, "the keeper has closed its files")


def test_great_expectations_that_cannot_be_imported_is_left_to_the_call(
    serving: threading.Thread, forks: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It raises the error for its caller."""

    def broken() -> None:
        raise AttributeError("module 'numpy' has no attribute 'product'")

    monkeypatch.setattr(keeper, "great_expectations", broken)
    with pytest.raises(keeper_client.KeeperUnavailable):  # nothing can be forked here
        keeper_client.call_in_fork(os.getpid)
    assert forks == ["keeper"]
    assert serving.is_alive()


def test_message_that_the_keeper_does_not_know_is_left_to_its_sender(serving: threading.Thread) -> None:
    with keeper_client._connect(os.environ) as connection:
        keeper_client.send(connection, {"attach": "a job group"})  # without the file
        assert keeper_client.receive(connection) is None
    assert serving.is_alive()

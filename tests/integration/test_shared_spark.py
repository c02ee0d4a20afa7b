"""Small runs that share a Spark application: a keeper forks their drivers, and whatever dies, nothing else goes wrong."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from tests.attempts import Attempt, all_gone
from tests.points import until
from tests.scenario import ARROW, PLAIN, SPARK, Scenario

from tidemark.consume import keeper
from tidemark.consume.launch import Progress
from tidemark.offsets.store import TaskIdentity


@pytest.fixture(scope="module", autouse=True)
def keepers() -> Iterator[None]:
    """Keepers of this module's own, which are gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="tidemark-kept-") as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIDEMARK_STATE", folder)
        yield
        running = tree()
        keeper.stop_keepers()
        until(lambda: all_gone(running), "the keeper and what it has started are gone", 30)


def the_keeper() -> psutil.Process:
    """The one that this module's runs use."""
    (found,) = [
        process
        for process in psutil.process_iter()
        if keeper.MODULE in (words := command(process))
        and str(keeper._folder()) in words[-1]
        and keeper.MODULE not in command(process.parent())
    ]
    return found


def command(process: psutil.Process | None) -> list[str]:
    try:
        return process.cmdline() if process else []
    except psutil.Error:
        return []


def tree() -> list[psutil.Process]:
    top = the_keeper()
    return [top, *top.children(recursive=True)]


def run(scenario: Scenario) -> Progress:
    attempt = Attempt(scenario.spec, scenario.connections, scenario.folder, TaskIdentity(), kept=True)
    try:
        done = attempt.wait(120)
    finally:
        attempt.end()
    print(attempt.log)
    if isinstance(done, Exception):
        raise done
    assert done is not None
    return done


def jvms() -> list[int]:
    return [process.pid for process in tree() if process.name() == "java"]


@pytest.mark.parametrize("transform", [PLAIN, ARROW, SPARK], ids=["function", "arrow", "spark"])
def test_small_run_of_each_form_uses_the_application_that_is_there(scenario: Scenario, transform: str) -> None:
    topic = scenario.topics.create(2)
    scenario.topics.produce(topic, [b"a", b"b"])
    scenario.topics.produce(topic, [b"c"], partition=1)
    scenario.write(transform, topics=topic).make_sink("payload bytea")
    assert run(scenario).counts["loaded"] == 3
    (jvm,) = jvms()
    scenario.topics.produce(topic, [b"d"])
    import time

    t = time.time()
    assert run(scenario).counts["loaded"] == 1
    print("took", time.time() - t)
    assert jvms() == [jvm]
    scenario.check()

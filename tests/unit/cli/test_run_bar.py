"""The phases of a run's progress bar."""

from __future__ import annotations

import pytest

from tidemark.cli.consume import Phase, RunBar
from tidemark.driver.applications import Application
from tidemark.driver.launch import ClusterDriver, PartitionResult, Progress

READS = "2026-03-24 14:00:00,000 INFO tidemark.consume.run reading group=orders attempt=1 slices=2 offsets=5"


def progress(committed: int, *, state: str = "RUNNING", planned: bool = True, driver: ClusterDriver | None = None) -> Progress:
    parts = (PartitionResult("orders", 0, 0, committed, 5),) if planned else ()
    return Progress(1, state, planned, parts, (), driver)


def test_phases_follow_the_run_and_never_go_back() -> None:
    bar = RunBar("orders", starts_first=False)
    phases = [bar.phase]
    steps = [
        lambda: bar.show(progress(0, planned=False)),
        lambda: bar.show(progress(0)),
        lambda: bar.note_line("2026-03-24 14:00:00,000 INFO tidemark.consume.claims partition starts group=orders"),
        lambda: bar.note_line(READS),
        lambda: bar.show(progress(3)),
        lambda: bar.note_line(READS),
        lambda: bar.show(progress(5, state="COMMITTED")),
    ]
    for step in steps:
        step()
        phases.append(bar.phase)
    assert phases == [
        Phase.PLANNING, Phase.PLANNING, Phase.STARTING, Phase.STARTING, Phase.READING, Phase.COMMITTING, Phase.COMMITTING, Phase.DONE,
    ]  # fmt: skip


def test_driver_on_a_cluster_reads_once_it_has_planned() -> None:
    bar = RunBar("orders", starts_first=False)
    bar.enter(Phase.WAITING)
    application = Application(master="yarn", name="orders")
    bar.show(progress(0, driver=ClusterDriver(application, started=True, alive=True, age_s=1.0)))
    assert bar.phase is Phase.READING


def test_run_that_fails_is_not_done() -> None:
    bar = RunBar("orders", starts_first=False)
    bar.show(progress(3, state="FAILED"))
    assert bar.phase is Phase.COMMITTING


@pytest.mark.parametrize("starts_first", [False, True])
def test_continuous_run_starts_spark_before_it_plans(starts_first: bool) -> None:
    assert RunBar("orders", starts_first=starts_first).phase is (Phase.STARTING if starts_first else Phase.PLANNING)

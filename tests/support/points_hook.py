"""Holds a commit at a numbered step if a test has ordered it. Runs in the process that commits; see `tests.support.points`.

A copy among a test's transforms lets every process that commits import it, so it may use only the standard library. An order is taken
once, by the first commit that matches, even if that process then dies. Its mark tells the test that the point was reached.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

FOLDER = "TIDEMARK_TEST_POINTS"
LOOK_EVERY_S = 0.01


def hook(step: Any, part: Any) -> None:
    """``TIDEMARK_STEP_HOOK=points_hook:hook``. Returns immediately if no order matches, otherwise when the test releases the point."""
    here = {
        "step": step.name,
        "topic": part.partition.topic,
        "partition": part.partition.partition,
        "epoch": part.epoch,
    }
    for order in sorted(Path(os.environ[FOLDER]).glob("*.order")):
        if _meant(order, here, part.start) and _taken(order):
            mark = {**here, "start": part.start, "end": part.end, "pid": os.getpid(), "jobs": _jobs()}
            fresh = order.with_suffix(".new")
            fresh.write_text(json.dumps(mark))
            fresh.rename(order.with_suffix(".mark"))
            _wait_for(order.with_suffix(".go"))
            return


def _jobs() -> str | None:
    """The name that the driver gave its Spark jobs; `None` outside Spark's workers."""
    if "pyspark" not in sys.modules:
        return None
    from pyspark import TaskContext

    context = TaskContext.get()
    return context.getLocalProperty("spark.jobGroup.id") if context else None


def _meant(order: Path, here: dict[str, Any], start: int) -> bool:
    try:
        wanted = json.loads(order.read_text())
    except FileNotFoundError:  # another process has taken it
        return False
    after = wanted.pop("after")
    if after is not None and not order.with_name(f"{after}.mark").exists():
        return False
    return start >= wanted.pop("start") and all(here[name] == value for name, value in wanted.items())


def _taken(order: Path) -> bool:
    try:
        order.rename(order.with_suffix(".taken"))
    except FileNotFoundError:
        return False
    return True


def _wait_for(file: Path) -> None:
    pause = threading.Event()
    while not file.exists() and file.parent.exists():
        pause.wait(LOOK_EVERY_S)

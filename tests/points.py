"""Points: steps of commits that a test orders to be held, finds reached, strikes at, and lets go.

A point is reached once. Who reaches it - a Python worker of Spark, a thread of the test, a task of Airflow - leaves a mark and stands
still until the point is released or its process ends. A test whose point was never reached fails (`Points.check_all_reached`).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import psutil
from tenacity import RetryError, Retrying, retry_if_result, stop_after_delay, wait_fixed

from tests import points_hook
from tidemark.sink.steps import Step

REACHED_WITHIN_S = 180


@dataclass(frozen=True, slots=True)
class Mark:
    """Who stands at a point: the process, and the slice that it commits."""

    step: Step
    topic: str
    partition: int
    start: int
    end: int
    epoch: int
    pid: int
    jobs: str | None

    @property
    def attempt_id(self) -> int:
        """The attempt whose Spark job this is."""
        assert self.jobs is not None
        return int(self.jobs.rpartition(" ")[2])

    @property
    def process(self) -> psutil.Process:
        return psutil.Process(self.pid)

    def ancestor(self, *, program: str) -> psutil.Process:
        """The nearest process above with this program: the JVM of a Python worker is ``java``."""
        return next(parent for parent in self.process.parents() if parent.name() == program)


class Point:
    """One order: hold whoever comes first to this step of such a slice."""

    def __init__(self, file: Path, what: str) -> None:
        self._file = file
        self._what = what

    @property
    def name(self) -> str:
        return self._file.stem

    @property
    def is_reached(self) -> bool:
        return self._file.with_suffix(".mark").exists()

    def reached(self, within_s: float = REACHED_WITHIN_S) -> Mark:
        """Who stands there, as soon as somebody does."""
        until(lambda: self.is_reached, f"reached: {self._what}", within_s)
        mark = json.loads(self._file.with_suffix(".mark").read_text())
        return Mark(**mark | {"step": Step[mark["step"]]})

    def release(self) -> None:
        """Lets whoever stands there, or comes later, go on."""
        self._file.with_suffix(".go").touch()

    def __str__(self) -> str:
        return self._what


class Points:
    """The orders of a test, in a folder that it shares with all processes that commit."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._numbers = count(1)
        self._made: list[Point] = []

    @property
    def env(self) -> dict[str, str]:
        """What a process that commits needs in its environment, beside the hook among its transforms."""
        return {"TIDEMARK_STEP_HOOK": "points_hook:hook", points_hook.FOLDER: str(self.folder)}

    @staticmethod
    def install(transforms: Path) -> None:
        """Puts the hook among the transforms, which travel to every process that commits."""
        shutil.copy(str(points_hook.__file__), transforms / "points_hook.py")

    def at(self, step: Step, *, start: int = 0, after: Point | None = None, hold: bool = True, **slice_: Any) -> Point:
        """A new point: the first commit to reach ``step`` with a slice that starts at ``start`` or behind it, of this ``topic``,
        ``partition`` and ``epoch`` where they are given, once the point ``after`` has been reached. Of two orders that fit, the older is
        taken first. Without ``hold`` whoever comes leaves his mark and goes on."""
        file = self.folder / f"{next(self._numbers):04}.order"
        point = Point(file, f"{step.name} {slice_}, from offset {start}")
        if not hold:
            point.release()
        fresh = file.with_suffix(".draft")
        fresh.write_text(json.dumps({"step": step.name, "start": start, "after": after and after.name, **slice_}))
        fresh.rename(file)
        self._made.append(point)
        return point

    def release_all(self) -> None:
        for point in self._made:
            point.release()

    def check_all_reached(self) -> None:
        """A fault that was never reached proves nothing."""
        missed = [str(point) for point in self._made if not point.is_reached]
        assert not missed, f"never reached: {missed}"


def until(condition: Callable[[], Any], what: str, within_s: float = 180) -> Any:
    """The first true answer of ``condition``, asked again and again."""
    retrying = Retrying(retry=retry_if_result(lambda found: not found), stop=stop_after_delay(within_s), wait=wait_fixed(0.02))
    try:
        return retrying(condition)
    except RetryError:
        raise AssertionError(f"not within {within_s:g} s: {what}") from None

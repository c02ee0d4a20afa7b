"""Points: steps of commits at which a test orders a process to be held, injects a fault, and releases it.

A point is reached once. The process or thread that reaches it - a Python worker of Spark, a thread of the test, an Airflow task - leaves a
mark and waits until the point is released or its process ends. A test with an unreached point fails (`Points.check_all_reached`).
"""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support import points_hook
from tests.support.waiting import until
from tidemark.sink.steps import Step

REACHED_WITHIN_S = 180


@dataclass(frozen=True, slots=True)
class Mark:
    """The process that waits at a point, and the slice that it commits."""

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
        """The attempt that the process's Spark job belongs to."""
        return int(self.jobs.rpartition(" ")[2])

    @property
    def process(self) -> psutil.Process:
        return psutil.Process(self.pid)

    def ancestor(self, *, program: str) -> psutil.Process:
        """The nearest ancestor process that runs this program: ``java`` is the JVM of a Python worker."""
        return next(parent for parent in self.process.parents() if parent.name() == program)


class Point:
    """One order: hold the first commit that reaches this step with a matching slice."""

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
        """Waits until the point is reached, and returns its mark."""
        until(lambda: self.is_reached, f"reached: {self._what}", within_s)
        mark = json.loads(self._file.with_suffix(".mark").read_text())
        return Mark(**mark | {"step": Step[mark["step"]]})

    def release(self) -> None:
        """Releases the process that waits at the point, or the one that reaches it later."""
        self._file.with_suffix(".go").touch()

    def __str__(self) -> str:
        return self._what


class Points:
    """The orders of a test, in a folder shared with all processes that commit."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._numbers = count(1)
        self._made: list[Point] = []

    @property
    def env(self) -> dict[str, str]:
        """The environment variables that a committing process needs, in addition to the hook among its transforms."""
        return {"TIDEMARK_STEP_HOOK": "points_hook:hook", points_hook.FOLDER: str(self.folder)}

    @staticmethod
    def install(transforms: Path) -> None:
        """Copies the hook to the transforms, which every process that commits gets."""
        shutil.copy(str(points_hook.__file__), transforms / "points_hook.py")

    def at(self, step: Step, *, start: int = 0, after: Point | None = None, hold: bool = True, **slice_: Any) -> Point:
        """Creates a point for the first commit that reaches ``step`` with a slice that starts at ``start`` or later and has this ``topic``,
        ``partition`` and ``epoch``, if given. With ``after``, only once that point has been reached. If two orders match, the older one is
        taken first. Without ``hold``, the commit leaves its mark and continues."""
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
        """Fails if a point was not reached: a fault that did not happen proves nothing."""
        missed = [str(point) for point in self._made if not point.is_reached]
        assert not missed, f"never reached: {missed}"


@contextlib.contextmanager
def points_among(transforms: Path) -> Iterator[Points]:
    """Points in every process that inherits this one's environment and has these transforms. Each of them must be reached in the block."""
    with tempfile.TemporaryDirectory(prefix="tidemark-points-") as folder, pytest.MonkeyPatch.context() as patch:
        points = Points(Path(folder))
        points.install(transforms)
        for name, value in points.env.items():
            patch.setenv(name, value)
        try:
            yield points
        finally:
            points.release_all()
        points.check_all_reached()

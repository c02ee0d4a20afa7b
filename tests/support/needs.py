"""Programs that some tests need and that pip cannot install. ``make programs`` installs them on Debian.

``@pytest.mark.needs("chromium")`` omits a test where the program is missing, and the run ends with a list of such tests. With ``CI`` set,
nothing is omitted: a missing program, or a skipped test, fails the run.
"""

from __future__ import annotations

import os
import shutil
from collections import defaultdict
from collections.abc import Iterable
from functools import cache
from typing import Any

import pytest

NAMES = {
    "chromium": ("chromium", "chromium-browser", "google-chrome"),
    "jq": ("jq",),
    "pgbouncer": ("pgbouncer",),
    "prometheus": ("prometheus",),
}
PATH = os.pathsep.join((os.environ.get("PATH", os.defpath), "/usr/sbin"))
"""Debian keeps daemons outside a user's path."""


@cache
def program(name: str) -> str | None:
    """The path of a program that this machine has."""
    return next(filter(None, (shutil.which(one, path=PATH) for one in NAMES[name])), None)


class Needs:
    """Omits tests whose program is missing, and reports them."""

    def __init__(self) -> None:
        self._omitted: dict[str, set[str]] = defaultdict(set)
        self._strict = bool(os.environ.get("CI"))

    def omit(self, items: Iterable[pytest.Item]) -> set[pytest.Item]:
        """The tests to omit here. In CI, raises `pytest.UsageError` instead."""
        found = set()
        for item in items:
            for name in (name for marker in item.iter_markers("needs") for name in marker.args if not program(name)):
                found.add(item)
                self._omitted[name].add(item.nodeid.partition("::")[0])
        if found and self._strict:
            raise pytest.UsageError(f"the tests need {', '.join(sorted(self._omitted))}: install them with `make programs`")
        return found

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        reporter: Any = session.config.pluginmanager.get_plugin("terminalreporter")
        if self._strict and reporter and reporter.stats.get("skipped") and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self._strict and terminalreporter.stats.get("skipped"):
            terminalreporter.write_line("\nNo test may be skipped in CI.", red=True)
        for name, files in sorted(self._omitted.items()):
            terminalreporter.write_line(f"\nNot tried, because {name} is missing (`make programs` installs it): {', '.join(sorted(files))}")

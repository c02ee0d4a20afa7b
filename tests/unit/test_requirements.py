"""The lock needs nothing beside itself: any installer that checks hashes can install it."""

from __future__ import annotations

import re
from importlib.metadata import distribution

from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tidemark import project

LOCK = (project.root() / "requirements.txt").read_text(encoding="utf-8")
LOCKED = {
    name
    for name, marker in re.findall(r"^([\w.-]+)==[^\s;]+(?: ; (.*?))? \\$", LOCK, re.MULTILINE)
    if not marker or Marker(marker).evaluate()
}
"""What is installed under this Python; the lock also has what others need."""


def test_lock_has_all_that_its_packages_require() -> None:
    """An override that leaves a package out holds in the project's folder only."""
    missing = {
        f"{name} requires {requirement.name}"
        for name in LOCKED
        for requirement in map(Requirement, distribution(name).requires or ())
        if canonicalize_name(requirement.name) not in LOCKED and (requirement.marker is None or requirement.marker.evaluate({"extra": ""}))
    }
    assert missing == set()

"""The lock file is complete: any installer that checks hashes can install it."""

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
"""The packages for this Python; the lock file also has those for others."""


def test_lock_has_all_that_its_packages_require() -> None:
    """An override that omits a package is known only in the project's folder."""
    missing = {
        f"{name} requires {requirement.name}"
        for name in LOCKED
        for requirement in map(Requirement, distribution(name).requires or ())
        if canonicalize_name(requirement.name) not in LOCKED and (requirement.marker is None or requirement.marker.evaluate({"extra": ""}))
    }
    assert missing == set()

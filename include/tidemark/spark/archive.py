"""The class-data archive of a driver's JVM: Spark's classes, read and verified once, and mapped into memory by every later driver.

It takes more than half off a cold start. The JVM maps an archive only under the Java and the class path that it was built with, so there is
one for each of these, in the cache beside the jars. If there is none, the driver has one built in the background after its run
(`tidemark.spark.build_archive`): half a minute of CPU at a low priority, 160 MB.

An archive only saves time. It appears complete, by a rename, with its size in its name, and the JVM compares its checksums. One that is
missing, truncated, damaged or of another Java is ignored.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tidemark.jvm.jars import cache

BUILDER = "tidemark.spark.build_archive"
"""The module that builds an archive."""
RETRY_S = 24 * 3600
"""How long nobody begins again after an attempt to make an archive: what fails here would fail in every run."""
UNUSED_S = 30 * 24 * 3600
"""Archives that no driver has used for so long go when another is made: a newer Java or Spark has taken their place."""


@dataclass(frozen=True, slots=True)
class Archive:
    """The archive for one Java and one class path, made or not."""

    folder: Path
    key: str

    @classmethod
    def of(cls, java: Path, spark_home: Path, jars: Sequence[Path]) -> Archive:
        """For this Java and what it would compare: the path, size and time of each jar, Spark's and ours. And for how it is made here."""
        home = java.resolve().parents[1]
        builder = Path(__file__).with_name("build_archive.py").read_text()
        about = [
            f"{home} {spark_home} {os.environ.get('SPARK_DIST_CLASSPATH', '')}",
            builder,
        ]
        for file in (home / "lib" / "modules", *jars, *sorted((spark_home / "jars").glob("*.jar"))):
            with contextlib.suppress(OSError):
                stat = file.stat()
                about.append(f"{file} {stat.st_size} {int(stat.st_mtime)}")
        return cls(cache() / "classes", hashlib.sha256("\n".join(about).encode()).hexdigest()[:16])

    @property
    def log(self) -> Path:
        """What the last attempt to make the archive said, while there is none. Whoever creates this file has the turn."""
        return self.folder / f"{self.key}.log"

    def find(self) -> Path | None:
        """The file, if it is there and complete; notes that it is in use."""
        for found in self.folder.glob(f"{self.key}-*.jsa"):
            with contextlib.suppress(OSError):
                if found.name == self.name(found.stat().st_size):
                    with contextlib.suppress(OSError):
                        os.utime(found)
                    return found
        return None

    def make_later(self) -> None:
        """Has the archive made once this process has ended by itself. One that is killed leaves it to the next."""
        atexit.register(self._begin)

    def name(self, size: int) -> str:
        """The file's name, once it is complete."""
        return f"{self.key}-{size}.jsa"

    def _begin(self) -> None:
        """Starts a process that makes the archive, unless another has the turn or the cache cannot be written to.

        It is in a session of its own, because the driver's process group is killed when the driver has ended.
        """
        # the shell ends at once and leaves nobody's child behind
        command = ["sh", "-c", '"$@" &', "sh", "nice", sys.executable, "-P", "-m", BUILDER]
        env = {name: value for name, value in os.environ.items() if not name.startswith("TIDEMARK_") or name == "TIDEMARK_CACHE"}
        with contextlib.suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            if self.log.exists() and _age_s(self.log) > RETRY_S:
                self.log.unlink()
            with self.log.open("x") as log:
                streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
                subprocess.run(command, **streams, env=env, cwd=self.folder, start_new_session=True, check=False)

    def tidy(self) -> None:
        """Removes what earlier attempts left, and archives that no driver has used for `UNUSED_S`."""
        for old in self.folder.iterdir():
            with contextlib.suppress(OSError):
                if _age_s(old) > (RETRY_S if old.name.startswith(".") else UNUSED_S):
                    old.unlink()


def _age_s(file: Path) -> float:
    return time.time() - file.stat().st_mtime

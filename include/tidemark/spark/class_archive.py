"""The class-data archive of a driver's JVM: Spark's classes, loaded and verified once, then mapped into memory by every later driver.

It more than halves the time of a cold start. The JVM uses an archive only with the Java and class path it was built with, so each
combination has its own, in the cache beside the jars. If an archive is missing, the driver starts its build in the background after the run
(`tidemark.spark.build_archive`): half a minute of CPU time at low priority, 160 MB.

An archive only saves time. It is renamed into place once complete, with its size in its name, and the JVM verifies its checksums. An
archive that is missing, truncated, damaged or from another Java is ignored.
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
"""How long to wait before the next attempt to build an archive: a failure would repeat in every run."""
UNUSED_S = 30 * 24 * 3600
"""Archives unused for this long are removed when another is built: a newer Java or Spark has replaced them."""


@dataclass(frozen=True, slots=True)
class Archive:
    """The archive for one Java and one class path, whether it exists or not."""

    folder: Path
    key: str

    @classmethod
    def of(cls, java: Path, spark_home: Path, jars: Sequence[Path]) -> Archive:
        """The archive for these files. Its key covers what Java compares (path, size and time of each jar) and the builder's source."""
        home = java.resolve().parents[1]
        builder = Path(__file__).with_name("build_archive.py").read_text()
        parts = [
            f"{home} {spark_home} {os.environ.get('SPARK_DIST_CLASSPATH', '')}",
            builder,
        ]
        for file in (home / "lib" / "modules", *jars, *sorted((spark_home / "jars").glob("*.jar"))):
            with contextlib.suppress(OSError):
                stat = file.stat()
                parts.append(f"{file} {stat.st_size} {int(stat.st_mtime)}")
        return cls(cache() / "classes", hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16])

    @property
    def log(self) -> Path:
        """The output of the last attempt, until the archive exists. The process that creates this file builds it."""
        return self.folder / f"{self.key}.log"

    def find(self) -> Path | None:
        """The file, if it exists and is complete. Marks it as used."""
        for file in self.folder.glob(f"{self.key}-*.jsa"):
            with contextlib.suppress(OSError):
                if file.name == self.name(file.stat().st_size):
                    with contextlib.suppress(OSError):
                        os.utime(file)
                    return file
        return None

    def make_later(self) -> None:
        """Builds the archive after this process has ended normally. If it is killed, the next driver builds the archive."""
        atexit.register(self._start_build)

    def name(self, size: int) -> str:
        """The name of the complete file."""
        return f"{self.key}-{size}.jsa"

    def _start_build(self) -> None:
        """Starts a process that builds the archive, unless another one is building it or the cache is not writable.

        The process gets its own session, because the driver's process group is killed once the driver has ended.
        """
        # the shell ends at once, so the builder is an orphan that no parent has to reap
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
        """Removes leftovers of earlier attempts, and archives that no driver has used for `UNUSED_S`."""
        for old in self.folder.iterdir():
            with contextlib.suppress(OSError):
                if _age_s(old) > (RETRY_S if old.name.startswith(".") else UNUSED_S):
                    old.unlink()


def _age_s(file: Path) -> float:
    return time.time() - file.stat().st_mtime

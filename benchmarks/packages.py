"""What the other contestants need: jars by the Ivy that pyspark ships, Quix Streams in an environment of its own.

What cannot be had is said in one line, and its contestants are left out.
"""

from __future__ import annotations

import hashlib
import html
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from tidemark.jvm.jars import cache, cause
from tidemark.jvm.java import find_java

RECIPE = Path(__file__).with_name("ivy.xml")
QUIX = "quixstreams[postgresql]==3.28.1"
_LIMIT_S = 600
_SETTINGS = """<ivysettings>
  <settings defaultResolver="mirror"/>
  <resolvers><ibiblio name="mirror" m2compatible="true" root="{root}"/></resolvers>
</ivysettings>
"""


class Unobtainable(Exception):
    """A package or jar that could not be had."""


def jars(configuration: str, report: Callable[[str], None]) -> list[Path]:
    """The jars of a configuration of ``ivy.xml``, from the cache that the embedded stack uses, fetched if they are not in it.

    Raises `Unobtainable`.
    """
    folder = cache() / "jars" / f"bench-{hashlib.sha256(RECIPE.read_bytes()).hexdigest()[:12]}" / configuration
    if not folder.is_dir():
        report(f"fetching the jars for {configuration} (once)")
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".fetch-") as work:
            _retrieve(configuration, Path(work))
            shutil.rmtree(folder, ignore_errors=True)
            (Path(work) / configuration).rename(folder)
    return sorted(folder.glob("*.jar"))


def _retrieve(configuration: str, work: Path) -> None:
    settings: list[str | Path] = []
    if mirror := os.environ.get("TIDEMARK_MAVEN_MIRROR"):
        (work / "settings.xml").write_text(_SETTINGS.format(root=html.escape(mirror, quote=True)))
        settings = ["-settings", work / "settings.xml"]
    pyspark = importlib.util.find_spec("pyspark")
    if pyspark is None or pyspark.origin is None:
        raise Unobtainable("pyspark, whose Ivy fetches jars, is not installed")
    ivy = sorted((Path(pyspark.origin).parent / "jars").glob("ivy-*.jar"))[-1]
    command: list[str | Path] = [
        *(find_java(), "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", f"-Divy.default.ivy.user.dir={work}", "-jar", ivy, *settings),
        *("-ivy", RECIPE, "-cache", work / "cache", "-types", "jar", "bundle", "-confs", configuration),
        *("-retrieve", f"{work}/[conf]/[artifact]-[revision].[ext]"),
    ]
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=_LIMIT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise Unobtainable(f"Ivy took longer than {_LIMIT_S} s") from error
    if done.returncode != 0 or not any((work / configuration).glob("*.jar")):
        raise Unobtainable(cause(done.stdout))


def quix_python(build: Path, report: Callable[[str], None]) -> Path:
    """The interpreter of an environment with Quix Streams, whose dependencies do not fit beside ours. Raises `Unobtainable`."""
    environment = build / "quix"
    python = environment / "bin" / "python"
    ready = environment / ".ready"
    if ready.is_file() and ready.read_text() == QUIX:
        return python
    report(f"installing {QUIX} (once)")
    uv = shutil.which("uv", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    if uv is None:
        raise Unobtainable("uv is not installed")
    shutil.rmtree(environment, ignore_errors=True)
    commands = (
        [uv, "venv", "--quiet", "--python", sys.executable, str(environment)],
        [uv, "pip", "install", "--quiet", "--compile-bytecode", "--python", str(python), QUIX],
    )
    for command in commands:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_LIMIT_S)
        if done.returncode != 0:
            lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
            raise Unobtainable(lines[-1] if lines else "pip said nothing")
    ready.write_text(QUIX)
    return python

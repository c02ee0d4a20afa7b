"""The jars of the Kafka broker, of Spark's Kafka connector and of the schema registry, fetched once by the Ivy that pyspark ships.

They are in a cache that all projects share (``TIDEMARK_CACHE``, default: ``~/.cache/tidemark``), in a folder for each recipe, named after
the digest of its file. A rename creates the complete folder, with ``jars.json`` listing its files; from then on neither Ivy nor a network
is needed. A process that is killed halfway leaves a temporary folder, which the next one removes. Concurrent processes take turns.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import html
import importlib.util
import json
import os
import re
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata, resources
from pathlib import Path
from urllib.parse import urlsplit

from tidemark.errors import BadInput
from tidemark.jvm.errors import FolderUnusable, JarsDiffer, JarsUnavailable, without_password
from tidemark.jvm.java import find_java
from tidemark.packages import ExtraMissing

JAR_SETTINGS = ("spark.jars", "spark.jars.packages", "spark.yarn.dist.jars", "spark.driver.extraClassPath")
"""Spark's settings that provide the Kafka connector from elsewhere: the user's, or the cluster image's."""

_LIMIT_S = 900
"""A slow connection may take minutes for 140 MB; a dead one must time out."""
_CAUSE_PATTERNS = ("Server access error", "Host ", "Connection", "SERVER ERROR", "not found", "FAILED", "Exception")
"""Substrings of the lines of Ivy's output that explain a failure, the most specific first."""
_SETTINGS = """<ivysettings>
  <settings defaultResolver="mirror"/>
  <resolvers><ibiblio name="mirror" m2compatible="true" root="{root}"/></resolvers>
</ivysettings>
"""


@dataclass(frozen=True, slots=True)
class Recipe:
    """A file for Ivy, whose configurations are downloaded together."""

    file: str | Path
    """A path, or the name of a file in this package."""
    configurations: tuple[str, ...]
    what: str
    size: str

    def read(self) -> bytes:
        file = self.file if isinstance(self.file, Path) else resources.files("tidemark.jvm").joinpath(self.file)
        return file.read_bytes()

    def revision(self, name: str) -> str | None:
        """The version number of a module."""
        match = re.search(rf'name="{re.escape(name)}" rev="([0-9.]*[0-9])', self.read().decode())
        return match[1] if match else None

    def hashes(self) -> dict[str, str] | None:
        """The SHA-256 of each file, by ``configuration/name``, in the format of `sha256sum`; None for an external recipe."""
        if isinstance(self.file, Path):
            return None
        lines = resources.files("tidemark.jvm").joinpath(self.file).with_suffix(".sha256").read_text().splitlines()  # type: ignore[attr-defined]
        return {name: digest for digest, name in map(str.split, lines)}


KAFKA = Recipe("ivy.xml", ("broker", "spark"), "the jars of Kafka and of Spark's connector", "60 MB")
CONNECTORS = {
    release: Recipe(f"connector-{release}.xml", ("spark",), f"the jars of Spark's connector {release}", "10 MB")
    for release in ("4.0", "4.1")
}
"""The connector of releases of PySpark that `KAFKA` does not serve."""
REGISTRY = Recipe("registry.xml", ("registry",), "the jars of the schema registry", "140 MB")


def broker_jars(report: Callable[[str], None] | None = None) -> list[Path]:
    """The class path of a Kafka broker, all jars in one folder; downloads them unless they are in the cache.

    Calls ``report`` when a download starts. Raises `JarsUnavailable` if it fails, `JarsDiffer` if the jars are not the tested ones,
    `JavaUnusable` if Ivy cannot run.
    """
    return jars_of(KAFKA, "broker", report)


def spark_jars(report: Callable[[str], None] | None = None) -> list[Path]:
    """The jars of the Kafka connector for the installed PySpark, for ``spark.jars``; otherwise like `broker_jars`."""
    try:
        release = ".".join(metadata.version("pyspark").split(".")[:2])
    except metadata.PackageNotFoundError:
        raise ExtraMissing(module="pyspark", extra="driver") from None
    return jars_of(CONNECTORS.get(release, KAFKA), "spark", report)


def registry_jars(report: Callable[[str], None] | None = None) -> list[Path]:
    """The jars of the schema registry, in the folders of its distribution; otherwise like `broker_jars`."""
    return jars_of(REGISTRY, "registry", report)


def cache() -> Path:
    """The folder for downloaded files: ``TIDEMARK_CACHE`` (default: ``~/.cache/tidemark``)."""
    folder = os.environ.get("TIDEMARK_CACHE")
    return Path(folder).resolve() if folder else Path.home() / ".cache" / "tidemark"


def jars_of(recipe: Recipe, configuration: str, report: Callable[[str], None] | None = None) -> list[Path]:
    """The jars of one configuration of a recipe; otherwise like `broker_jars`."""
    folder = cache() / "jars" / hashlib.sha256(recipe.read()).hexdigest()[:12]
    listed = _cached(folder, recipe)
    if listed is None:
        with _exclusive(folder.parent, report):
            listed = _cached(folder, recipe)  # the process before this one may have fetched them
            if listed is None:
                listed = _fetch(folder, recipe, report)
    return [folder / configuration / name for name in listed[configuration]]


def _cached(folder: Path, recipe: Recipe) -> dict[str, dict[str, int]] | None:
    """File names and sizes by configuration; None for an incomplete folder."""
    try:
        listed: dict[str, dict[str, int]] = json.loads((folder / "jars.json").read_bytes())
        for configuration in recipe.configurations:
            for name, size in listed[configuration].items():
                if (folder / configuration / name).stat().st_size != size:
                    return None
    except (OSError, ValueError, KeyError, AttributeError):
        return None
    return listed


@contextlib.contextmanager
def _exclusive(parent: Path, report: Callable[[str], None] | None) -> Iterator[None]:
    """Admits one process at a time; the system releases the lock of a killed process."""
    try:
        parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(parent / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise FolderUnusable(folder=parent, cause=str(error.strerror), fix="Set TIDEMARK_CACHE to another folder.") from error
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if report:
                report("waiting for another process that is fetching the jars")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _fetch(folder: Path, recipe: Recipe, report: Callable[[str], None] | None) -> dict[str, dict[str, int]]:
    ivy, java = _ivy(), find_java()
    if report:
        report(f"fetching {recipe.what} ({recipe.size}, once)")
    for stale in folder.parent.glob(".fetch-*"):
        shutil.rmtree(stale, ignore_errors=True)
    fetched = Path(tempfile.mkdtemp(prefix=".fetch-", dir=folder.parent))
    try:
        work = fetched / "ivy"
        work.mkdir()
        _resolve(java, ivy, recipe, work, fetched)
        shutil.rmtree(work)
        _check_hashes(recipe, fetched)
        listed = {configuration: _unpack(fetched / configuration) for configuration in recipe.configurations}
        (fetched / "jars.json").write_text(json.dumps(listed, indent=1))
        shutil.rmtree(folder, ignore_errors=True)  # an old folder that lacks a jar
        fetched.chmod(0o755)
        fetched.rename(folder)
    finally:
        shutil.rmtree(fetched, ignore_errors=True)
    return listed


def _check_hashes(recipe: Recipe, folder: Path) -> None:
    expected = recipe.hashes()
    if expected is None:
        return
    actual = {file.relative_to(folder).as_posix(): hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.glob("*/*")}
    if differ := sorted(name for name in expected.keys() | actual.keys() if expected.get(name) != actual.get(name)):
        raise JarsDiffer(what=recipe.what, files=differ)


def _unpack(folder: Path) -> dict[str, int]:
    """Unpacks and deletes the folder's archives. Returns all jars with their sizes."""
    for archive in folder.glob("*.tar.gz"):
        with tarfile.open(archive) as packed:
            packed.extractall(folder, filter="data")
        archive.unlink()
    return {jar.relative_to(folder).as_posix(): jar.stat().st_size for jar in sorted(folder.rglob("*.jar"))}


def _resolve(java: Path, ivy: Path, recipe: Recipe, work: Path, target: Path) -> None:
    """Runs Ivy, which puts each configuration's jars into a folder of ``target``, and its own files into ``work``."""
    (work / "ivy.xml").write_bytes(recipe.read())
    mirror = _mirror()
    settings: list[str | Path] = []
    if mirror:
        (work / "settings.xml").write_text(_SETTINGS.format(root=html.escape(mirror, quote=True)))
        settings = ["-settings", work / "settings.xml"]
    command: list[str | Path] = [
        *(java, "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", f"-Divy.default.ivy.user.dir={work}", "-jar", ivy, *settings),
        *("-ivy", work / "ivy.xml", "-cache", work / "cache", "-types", "jar", "bundle", "tar.gz"),
        *("-confs", *recipe.configurations),
        *("-retrieve", f"{target}/[conf]/[artifact]-[revision].[ext]"),
    ]
    try:
        process = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=_LIMIT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise JarsUnavailable(what=recipe.what, cache=target.parent, cause=f"Ivy took longer than {_LIMIT_S} s", mirror=mirror) from error
    if process.returncode != 0 or not all(any((target / name).glob("*.*")) for name in recipe.configurations):
        raise JarsUnavailable(what=recipe.what, cache=target.parent, cause=cause(process.stdout), mirror=mirror)


def _mirror() -> str | None:
    url = os.environ.get("TIDEMARK_MAVEN_MIRROR")
    if url and urlsplit(url).scheme not in {"http", "https", "file"}:
        raise BadInput(
            what="TIDEMARK_MAVEN_MIRROR", found=without_password(url), fix="Write the URL of a Maven repository, https://host/path."
        )
    return url or None


def cause(output: str) -> str:
    """The line of Ivy's output that best explains its failure."""
    lines = [line.strip() for line in output.splitlines()]
    for pattern in _CAUSE_PATTERNS:
        for line in lines:
            if pattern in line:
                return line
    return next((line for line in reversed(lines) if line), "Ivy printed nothing")


def _ivy() -> Path:
    pyspark = importlib.util.find_spec("pyspark")  # finds it without importing it
    if pyspark is None or pyspark.origin is None:
        raise ExtraMissing(module="pyspark", extra="driver")
    jars = sorted((Path(pyspark.origin).parent / "jars").glob("ivy-*.jar"))
    if not jars:
        raise ExtraMissing(module="pyspark.jars", extra="driver")
    return jars[-1]

"""The class-data archive: which one a driver uses, which driver starts building one, and when. A script replaces the builder's Python."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from tests.support.waiting import until

from tidemark.spark import class_archive as module
from tidemark.spark.class_archive import Archive
from tidemark.spark.session import _alone

MAKER = """#!/bin/sh
echo "$(ps -o sid= -p $$) $(ps -o ni= -p $$) $3 ${TIDEMARK_CACHE-none} ${TIDEMARK_DATABASE_URL-none}" >> started
"""
LATER = """
import os, sys
from pathlib import Path
from tidemark.spark.class_archive import Archive
Archive(Path(sys.argv[1]), "k").make_later()
sys.executable = sys.argv[2]
sys.stdout.write("ready\\n")
sys.stdout.flush()
sys.stdin.readline()
"""


@pytest.fixture
def archive(tmp_path: Path) -> Archive:
    return Archive(tmp_path / "classes", "k")


@pytest.fixture
def maker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A script in place of the builder's Python interpreter. It records each start in the archive's folder."""
    script = tmp_path / "maker"
    script.write_text(MAKER)
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    return script


def made(archive: Archive, content: str = "0123456789", size: int | None = None) -> Path:
    archive.folder.mkdir(exist_ok=True)
    file = archive.folder / f"{archive.key}-{len(content) if size is None else size}.jsa"
    file.write_text(content)
    return file


def started(archive: Archive, least: int = 0) -> list[list[str]]:
    """What each builder process found in its environment. Waits for running builders to end and for ``least`` records, because a process
    has no command line while it becomes another program."""
    script, notes = str(archive.folder.with_name("maker")), archive.folder / "started"

    def found() -> list[list[str]]:
        return [line.split() for line in notes.read_text().splitlines()] if notes.exists() else []

    def ended() -> bool:
        return not any(script in (process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"]))

    until(lambda: ended() and len(found()) >= least)
    return found()


def age(file: Path, seconds: float) -> None:
    moment = time.time() - seconds
    os.utime(file, (moment, moment))


def test_a_complete_archive_is_found_and_marked_as_used(archive: Archive) -> None:
    file = made(archive)
    age(file, 1000)
    assert archive.find() == file
    assert time.time() - file.stat().st_mtime < 100


def test_an_archive_that_was_cut_off_is_not_used(archive: Archive) -> None:
    """The JVM would map the truncated file and crash, so the size is first compared with the one in the name. An archive for another Java
    or class path is not used either."""
    made(archive, "0123", size=10)
    made(Archive(archive.folder, "other"))
    assert archive.find() is None


def test_a_cache_that_cannot_be_written_to_is_left_alone(archive: Archive, maker: Path) -> None:
    assert archive.find() is None
    archive.folder.write_text("a file where the folder should be")
    archive._start_build()
    assert archive.find() is None
    assert archive.folder.read_text() == "a file where the folder should be"


def test_each_java_and_class_path_has_an_archive_of_its_own(tmp_path: Path) -> None:
    """Every change for which the JVM would refuse the archive changes its key. Otherwise the archive would never be rebuilt."""

    def place(name: str, text: str = "x") -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        age(path, 1000)
        return path

    place("jdk/lib/modules")
    java, jars, spark = place("jdk/bin/java"), [place("connector.jar")], place("spark/jars/core.jar").parents[1]
    found = [Archive.of(java, spark, jars)]
    assert Archive.of(java, spark, jars) == found[0]
    for change in (
        lambda: place("jdk/lib/modules", "another build"),
        lambda: place("connector.jar", "another"),
        jars[0].touch,
        lambda: place("spark/jars/core.jar", "another"),
        lambda: jars.append(place("pool.jar")),
    ):
        change()
        found.append(Archive.of(java, spark, jars))
    found.append(Archive.of(java, place("newer/jars/core.jar", "another").parents[1], jars))
    assert len({archive.key for archive in found}) == 7


def test_it_is_made_beside_the_run_in_a_session_of_its_own_at_a_low_priority(
    archive: Archive, maker: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launcher kills the driver's process group when the driver has ended. The builder needs no credentials."""
    monkeypatch.setenv("TIDEMARK_CACHE", "the-cache")
    monkeypatch.setenv("TIDEMARK_DATABASE_URL", "postgresql://secret")
    archive._start_build()
    ((session, nice, what, cache, database),) = started(archive, 1)
    assert int(session) != os.getsid(0)
    assert int(nice) > os.nice(0)
    assert (what, cache, database) == (module.BUILDER, "the-cache", "none")


def test_of_many_drivers_that_end_at_once_one_has_it_made(archive: Archive, maker: Path) -> None:
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda _: archive._start_build(), range(16)))
    assert len(started(archive, 1)) == 1


def test_what_failed_is_tried_again_after_a_day_and_not_in_every_run(archive: Archive, maker: Path) -> None:
    archive._start_build()
    archive._start_build()
    age(archive.log, module.RETRY_S - 60)
    archive._start_build()
    assert len(started(archive, 1)) == 1
    age(archive.log, module.RETRY_S + 60)
    archive._start_build()
    assert len(started(archive, 2)) == 2


@pytest.mark.parametrize("killed", [False, True])
def test_it_is_begun_when_the_driver_has_ended_by_itself(archive: Archive, maker: Path, killed: bool) -> None:
    """It is not started earlier, so that the run has all cores. A driver that is killed does not start it."""
    python = Path(sys.prefix) / "bin" / "python"
    command = [python, "-W", "error", "-c", LATER, archive.folder, maker]
    driver = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    assert driver.stdout.readline() == "ready\n"
    assert not archive.folder.exists()
    if killed:
        driver.kill()
    _, said = driver.communicate("\n")
    assert (driver.returncode, said) == (-signal.SIGKILL if killed else 0, "")
    assert archive.folder.exists() is not killed
    least = 0 if killed else 1
    assert len(started(archive, least)) == least


def test_archives_out_of_use_and_what_killed_makers_left_are_cleared_away(archive: Archive) -> None:
    in_use, unused = made(Archive(archive.folder, "a")), made(Archive(archive.folder, "b"))
    being_made, left = archive.folder / ".c-1", archive.folder / ".d-2"
    for file, seconds in (
        (in_use, module.UNUSED_S - 60),
        (unused, module.UNUSED_S + 60),
        (being_made, 60),
        (left, module.RETRY_S + 60),
    ):
        file.touch()
        age(file, seconds)
    archive.tidy()
    assert set(archive.folder.iterdir()) == {in_use, being_made}


def test_class_path_is_set_where_the_driver_is_the_only_jvm_and_no_file_sets_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``spark-defaults.conf`` may have a class path and options, which the driver's settings would replace."""
    monkeypatch.delenv("PYSPARK_SUBMIT_ARGS", raising=False)
    monkeypatch.setenv("SPARK_CONF_DIR", str(tmp_path))
    assert all(map(_alone, ("local", "local[1]", "local[*]", "local[2,3]")))
    assert not any(map(_alone, ("local-cluster[2,1,1024]", "spark://localhost:7077", "yarn", "k8s://https://host")))
    (tmp_path / "spark-defaults.conf").write_text("spark.driver.extraClassPath /opt/jdbc.jar\n")
    assert not _alone("local[2]")
    monkeypatch.delenv("SPARK_CONF_DIR")
    monkeypatch.setenv("PYSPARK_SUBMIT_ARGS", "--driver-class-path /opt/jdbc.jar pyspark-shell")
    assert not _alone("local[2]")

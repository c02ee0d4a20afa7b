"""A cold driver starts from an archive of Spark's classes, which is created automatically. Uses real JVMs."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.support.waiting import until

from tidemark.jvm.jars import cache, spark_jars
from tidemark.jvm.java import find_java, released
from tidemark.spark.session import COLLECTOR, LARGE_YOUNG, SMALL_YOUNG, ZERO_TLAB, ZERO_TLAB_VERSIONS, local_archive

DRIVER = """
import json, sys
from pathlib import Path
from pyspark import SparkContext
from tidemark.connections import Connections
from tidemark.spark.session import start_session
from tidemark.spec import find_consumer
from tidemark.spec.user_transform import Form

records, conf, specs = json.loads(sys.argv[1])
spark = start_session(find_consumer("departures", Path(specs)), Connections("", {}, "local[2]", conf), 1, [], Form.SPARK, records)
process = Path("/proc") / str(SparkContext._gateway.proc.pid)
words, maps = (process / "cmdline").read_text().split("\\0"), (process / "maps").read_text().splitlines()
found = {
    "sum": spark.range(1000).selectExpr("sum(id)").first()[0],
    "kafka": spark.read.format("kafka").option("kafka.bootstrap.servers", "host:1").option("subscribe", "t").load().columns,
    "options": [word for word in words if word.startswith(("-XX:T", "-XX:+UseP", "-XX:N", "-XX:+Zero", "-Xmn", "-Dmine", "-Dtheirs"))],
    "archives": sorted({line[line.index("/") :] for line in maps if line.endswith(".jsa")}),
}
spark.stop()
print(json.dumps(found))
"""
"""Starts a driver's session, and prints its JVM's options and the archives that the JVM has mapped."""
FIRST_LIMIT_S = 300


@pytest.fixture(scope="module")
def archive() -> Path:
    """The archive of this environment, in the cache that all runs use; created if it does not exist, which takes a minute."""
    made = subprocess.run(
        [sys.executable, "-m", "tidemark.spark.build_archive"], check=True, timeout=FIRST_LIMIT_S, stdout=subprocess.PIPE, text=True
    )
    return Path(made.stdout.splitlines()[-1])


@pytest.fixture
def drivers(tmp_path: Path) -> Iterator[Drivers]:
    """Drivers with an empty cache."""
    with contextlib.ExitStack() as stack:
        yield Drivers(tmp_path, stack)


class Drivers:
    """Starts drivers of one consumer that share a separate cache."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack) -> None:
        self._stack = stack
        self._specs = folder / "consumers"
        self._specs.mkdir()
        (self._specs / "departures.yaml").write_text("group: g\ntopics: [t]\ntransform: m:f\nsink: {table: lake.t}\n")
        self.cache = folder / "the cache"
        self.cache.mkdir()
        spark_jars()
        (self.cache / "jars").symlink_to(cache() / "jars")
        self.classes = self.cache / "classes"

    def start(self, cache: Path, *, records: int | None = 0, conf: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
        env = {name: value for name, value in os.environ.items() if not name.startswith(("SPARK_", "PYSPARK_"))}
        driver = subprocess.Popen(
            [sys.executable, "-c", DRIVER, json.dumps([records, conf or {}, str(self._specs)])],
            env=env | {"TIDEMARK_CACHE": str(cache)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._stack.enter_context(driver)
        self._stack.callback(driver.kill)  # its JVM ends with it
        return driver

    def makers(self) -> list[psutil.Process]:
        """The processes that are building an archive for the cache."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.cwd() == str(self.classes) and "tidemark.spark.build_archive" in process.cmdline():
                    found.append(process)
        return found


def ended(driver: subprocess.Popen[str]) -> dict[str, Any]:
    """Returns what a driver printed. Like the launcher, kills its process group once it has ended. Any output on stderr is a failure."""
    told, said = driver.communicate(timeout=FIRST_LIMIT_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(driver.pid, signal.SIGKILL)
    assert (driver.returncode, said) == (0, "")
    found: dict[str, Any] = json.loads(told)
    assert (found["sum"], found["kafka"][:2]) == (499500, ["key", "value"])
    return found


@pytest.mark.thorough
def test_a_driver_maps_the_archive_and_the_users_options_have_the_last_word(drivers: Drivers, archive: Path) -> None:
    """If an option is given twice, the JVM takes the last one. A run with little work for the JVM is compiled by C1."""
    conf = {"spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=4 -Dmine=1", "spark.driver.defaultJavaOptions": "-Dtheirs=1"}
    found = ended(drivers.start(cache(), conf=conf))
    assert str(archive) in found["archives"]
    assert found["options"] == ["-XX:TieredStopAtLevel=1", COLLECTOR, SMALL_YOUNG, "-Dtheirs=1", "-XX:TieredStopAtLevel=4", "-Dmine=1"]


@pytest.mark.thorough
def test_a_driver_through_whose_jvm_records_pass_has_memory_cleared_in_large_pieces(drivers: Drivers, archive: Path) -> None:
    found = ended(drivers.start(cache(), records=None))
    assert str(archive) in found["archives"]
    assert found["options"] == [COLLECTOR, LARGE_YOUNG, *([ZERO_TLAB] if released(find_java()) in ZERO_TLAB_VERSIONS else [])]


@pytest.mark.thorough
@pytest.mark.parametrize("where", ["spark.driver.extraJavaOptions", "spark.driver.defaultJavaOptions", "JDK_JAVA_OPTIONS"])
def test_a_collector_that_somebody_has_chosen_is_the_only_one(
    drivers: Drivers, archive: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A JVM with two collectors does not start. The archive is mapped although it was created with a different collector."""
    chosen = "-XX:+UseSerialGC"
    conf = {where: chosen} if where.startswith("spark.") else {}
    if not conf:
        monkeypatch.setenv(where, chosen)
    found = ended(drivers.start(cache(), conf=conf))
    assert str(archive) in found["archives"]
    assert not {COLLECTOR, SMALL_YOUNG, LARGE_YOUNG} & set(found["options"])


@pytest.mark.thorough  # tests/unit/spark/test_archive.py: of many drivers that end at once, one has it made
def test_of_two_first_drivers_at_once_both_succeed_and_one_has_the_archive_made(drivers: Drivers) -> None:
    """The process that builds it survives when the launcher kills the driver's process group."""
    for first in [drivers.start(drivers.cache), drivers.start(drivers.cache)]:
        assert not any(file.startswith(str(drivers.classes)) for file in ended(first)["archives"])
    (maker,) = until(drivers.makers)
    assert [file.suffix for file in drivers.classes.iterdir() if not file.name.startswith(".")] == [".log"]
    assert len(drivers.makers()) == 1
    os.killpg(os.getpgid(maker.pid), signal.SIGKILL)


@pytest.mark.thorough
def test_an_archive_that_is_damaged_or_cannot_be_kept_costs_time_only(drivers: Drivers, archive: Path, tmp_path: Path) -> None:
    """The damaged archive has the right size but wrong contents. The drivers start without it, and print nothing about it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIDEMARK_CACHE", str(drivers.cache))
        mine = local_archive(find_java())
    size = archive.stat().st_size
    mine.folder.mkdir()
    damaged = mine.folder / f"{mine.key}-{size}.jsa"
    with archive.open("rb") as good, damaged.open("wb") as bad:
        bad.write(good.read())
        bad.seek(size // 8)
        bad.write(os.urandom(size // 2))
    assert mine.find() == damaged
    unwritable = tmp_path / "unwritable"
    unwritable.mkdir()
    (unwritable / "jars").symlink_to(cache() / "jars")
    (unwritable / "classes").write_text("a file where the folder should be")
    for driver in [drivers.start(drivers.cache), drivers.start(unwritable, records=None)]:
        found = ended(driver)
        assert not any(file.startswith(str(tmp_path)) for file in found["archives"])

"""The class-data archive of a driver's JVM: Spark's classes, read and verified once, and mapped into memory by every later driver.

It takes more than half off a cold start. The JVM maps one only under the Java and the class path that it was made with, so there is one
for each of these, in the cache beside the jars. A driver that finds none has it made when its own run is over, by a process of its own at
a low priority: half a minute of CPU, 160 MB. ``python -m tidemark.spark.archive`` makes it at once if it is not there, as for an image.

An archive is a matter of speed alone. It appears complete, by a rename, with its size in its name, and the JVM compares its checksums:
one that is missing, cut off, damaged or of another Java is passed over.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tidemark.jvm.jars import cache
from tidemark.jvm.java import find_java

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

RETRY_S = 24 * 3600
"""How long nobody begins again after an attempt to make an archive: what fails here would fail in every run."""
UNUSED_S = 30 * 24 * 3600
"""Archives that no driver has used for so long go when another is made: a newer Java or Spark has taken their place."""
NOBODY = {
    "kafka.bootstrap.servers": "127.0.0.1:1",
    "kafka.request.timeout.ms": "200",
    "kafka.default.api.timeout.ms": "200",
    "fetchOffset.numRetries": "1",
    "assign": '{"t": [0]}',
    "includeHeaders": "true",
}
"""A Kafka source that is refused: enough to load most of the connector and of its client."""


@dataclass(frozen=True, slots=True)
class Archive:
    """The archive for one Java and one class path, made or not."""

    folder: Path
    key: str

    @classmethod
    def of(cls, java: Path, spark_home: Path, jars: Sequence[Path]) -> Archive:
        """For this Java and what it would compare: the path, size and time of each jar, Spark's and ours. And for how it is made here."""
        home = java.resolve().parents[1]
        about = [f"{home} {spark_home} {os.environ.get('SPARK_DIST_CLASSPATH', '')}", Path(__file__).read_text()]
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
                if found.name == self._name(found.stat().st_size):
                    with contextlib.suppress(OSError):
                        os.utime(found)
                    return found
        return None

    def make_later(self) -> None:
        """Has the archive made once this process has ended by itself. One that is killed leaves it to the next."""
        atexit.register(self._begin)

    def make(self) -> Path:
        """Makes the archive, with a JVM that starts as a local driver's does and is asked what a run asks of it."""
        from tidemark.spark.session import archived_session

        self.folder.mkdir(parents=True, exist_ok=True)
        self._tidy()
        fresh = self.folder / f".{self.key}-{os.getpid()}"
        try:
            with archived_session(fresh) as spark:
                _exercise(spark)
            with fresh.open("rb") as file:
                os.fsync(file.fileno())
            for older in self.folder.glob(f"{self.key}-*.jsa"):  # cut off, else nobody would have made this one
                older.unlink(missing_ok=True)
            made = fresh.rename(self.folder / self._name(fresh.stat().st_size))
        finally:
            fresh.unlink(missing_ok=True)
        self.log.unlink(missing_ok=True)
        return made

    def _name(self, size: int) -> str:
        return f"{self.key}-{size}.jsa"

    def _begin(self) -> None:
        """Starts a process that makes the archive, unless another has the turn or the cache cannot be written to.

        It is in a session of its own, because the driver's process group is killed when the driver has ended.
        """
        # the shell ends at once and leaves nobody's child behind
        command = ["sh", "-c", '"$@" &', "sh", "nice", sys.executable, "-P", "-m", __name__]
        env = {name: value for name, value in os.environ.items() if not name.startswith("TIDEMARK_") or name == "TIDEMARK_CACHE"}
        with contextlib.suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            if self.log.exists() and _age_s(self.log) > RETRY_S:
                self.log.unlink()
            with self.log.open("x") as log:
                streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
                subprocess.run(command, **streams, env=env, cwd=self.folder, start_new_session=True, check=False)

    def _tidy(self) -> None:
        for old in self.folder.iterdir():
            with contextlib.suppress(OSError):
                if _age_s(old) > (RETRY_S if old.name.startswith(".") else UNUSED_S):
                    old.unlink()


def _age_s(file: Path) -> float:
    return time.time() - file.stat().st_mtime


def _exercise(spark: SparkSession) -> None:
    """Both ways of reading, with some of what transforms often use: all but a broker's answers."""
    from py4j.protocol import Py4JJavaError

    spark.sparkContext.parallelize([1], 1).mapPartitions(list).collect()
    names = ("topic", "partition", "offset", "timestamp", "key", "value", "headers")
    given = [*names, *(f"{name} AS kafka_{name}" for name in names[:3])]
    records = spark.read.format("kafka").options(**NOBODY).load().selectExpr(*given)
    with contextlib.suppress(Py4JJavaError):
        _transform(records)._jdf.queryExecution().executedPlan()  # noqa: SLF001 - as `tidemark.spark.plan` asks
    one = ("t", 0, 0, datetime.now(UTC), b"key", b'{"id": 1, "name": "one"}', [("name", b"value")], "t", 0, 0)
    rows = _transform(spark.createDataFrame([one], records.schema))
    for result in (rows, rows.groupBy("kafka_partition").count()):
        result.mapInArrow(_counted, "rows bigint").collect()


def _transform(records: DataFrame) -> DataFrame:
    from pyspark.sql import functions as F

    text = F.col("value").cast("string")
    event = F.from_json(text, "id bigint, name string, amount double, happened_at timestamp, tags array<string>")
    columns = ("event.*", "timestamp", "kafka_topic", "kafka_partition", "kafka_offset")
    return records.withColumn("event", event).where(F.length(text) > 0).select(*columns).withColumn("day", F.to_date("timestamp"))


def _counted(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    import pyarrow as pa

    yield pa.RecordBatch.from_pydict({"rows": [sum(batch.num_rows for batch in batches)]})


def main() -> None:
    from tidemark.spark.session import local_archive

    archive = local_archive(find_java())
    sys.stdout.write(f"{archive.find() or archive.make()}\n")


if __name__ == "__main__":
    main()

"""The cache of jars is filled once, completely or not at all. A script replaces Java and Ivy; nothing is downloaded."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import pickle
import shutil
import signal

import pytest
from tests.support.waiting import until

from tidemark.errors import BadInput
from tidemark.jvm import jars
from tidemark.jvm.errors import FolderUnusable, JarsDiffer, JarsUnavailable

IVY = """#!/bin/sh
if [ "$1" = -version ]; then echo 'openjdk version "17.0.1"' >&2; exit 0; fi
echo x >> {runs}
while [ "$1" != -retrieve ]; do shift; done
target=${{2%%/\\[conf\\]*}}
mkdir $target/broker $target/spark
echo 1 > $target/broker/kafka_2.13-4.3.1.jar
sleep {pause}
echo 22 > $target/spark/connector-4.2.0.jar
{end}
"""


@pytest.fixture
def ivy(tmp_path, monkeypatch):
    """Creates an Ivy that takes ``pause`` seconds and ends with the shell lines ``end``. Returns a function that counts its runs."""
    monkeypatch.setattr(jars, "CONNECTORS", {})  # as with the locked PySpark
    monkeypatch.setenv("TIDEMARK_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "java"))
    monkeypatch.delenv("TIDEMARK_MAVEN_MIRROR", raising=False)
    files = {"broker/kafka_2.13-4.3.1.jar": b"1\n", "spark/connector-4.2.0.jar": b"22\n"}
    monkeypatch.setattr(jars.Recipe, "hashes", lambda _: {name: hashlib.sha256(text).hexdigest() for name, text in files.items()})
    runs = tmp_path / "runs"

    def make(pause=0, end=""):
        program = tmp_path / "java" / "bin" / "java"
        program.parent.mkdir(parents=True, exist_ok=True)
        program.write_text(IVY.format(runs=runs, pause=pause, end=end))
        program.chmod(0o755)
        return lambda: len(runs.read_text().splitlines()) if runs.exists() else 0

    return make


@pytest.mark.parametrize(
    "end",
    [
        "echo 23 > $target/spark/connector-4.2.0.jar",
        "echo 1 > $target/spark/more.jar",
        "rm $target/broker/*.jar; echo > $target/broker/a.jar",
    ],
)
def test_file_that_is_not_the_tested_one_is_refused(ivy, tmp_path, end):
    """A changed, a further and a missing jar. Nothing stays in the cache; the next try fetches all of them."""
    ivy(end=end)
    with pytest.raises(JarsDiffer, match=r"connector-4.2.0.jar|more.jar|broker/a.jar, broker/kafka"):
        jars.spark_jars()
    assert [path.name for path in (tmp_path / "cache" / "jars").iterdir()] == ["lock"]
    ivy()
    assert names(jars.spark_jars()) == ["connector-4.2.0.jar"]


def test_recipes_have_the_hash_of_each_file():
    for recipe in (jars.KAFKA, jars.REGISTRY, *jars.CONNECTORS.values()):
        hashes = recipe.hashes()
        assert {name.partition("/")[0] for name in hashes} == set(recipe.configurations)
        assert all(len(digest) == 64 for digest in hashes.values())


@pytest.mark.parametrize(("pyspark", "connector"), [("4.0.5", "4.0.1"), ("4.1.0", "4.1.1"), ("4.2.1", "4.2.0"), ("4.3.0", "4.2.0")])
def test_connector_is_that_of_the_installed_pyspark(monkeypatch, pyspark, connector):
    monkeypatch.setattr(jars.metadata, "version", lambda _: pyspark)
    monkeypatch.setattr(jars, "jars_of", lambda recipe, *_: recipe.revision("spark-sql-kafka-0-10_2.13"))
    assert jars.spark_jars() == connector


def names(paths):
    return [path.name for path in paths]


def test_jars_are_fetched_once_and_serve_both_users(ivy, tmp_path):
    """One resolution fetches the broker's class path and the connector's jars. The second call starts no process and needs no Java. The
    cache has a list of the jars' names and sizes: one that vanished or was cut off is fetched again."""
    runs, told = ivy(), []
    assert names(jars.broker_jars(told.append)) == ["kafka_2.13-4.3.1.jar"]
    shutil.rmtree(tmp_path / "java")
    assert names(jars.spark_jars(told.append)) == ["connector-4.2.0.jar"]
    assert runs() == 1
    assert told == ["fetching the jars of Kafka and of Spark's connector (60 MB, once)"]
    ivy()
    jars.broker_jars()[0].unlink()
    assert jars.broker_jars()[0].is_file()
    jars.spark_jars()[0].write_text("")
    assert jars.spark_jars()[0].read_text() == "22\n"
    assert runs() == 3


def test_the_registrys_distribution_is_unpacked_and_kept_apart(ivy, monkeypatch):
    """Its jars keep their folders, and the archive is deleted. It is fetched separately: users without a registry never download it."""
    pack = (
        "cd $target; mkdir lib registry; echo 1 > lib/a.jar; echo 22 > app-runner.jar; tar czf registry/app-2.5.tar.gz app-runner.jar lib"
    )
    monkeypatch.setattr(jars.Recipe, "hashes", lambda _: None)  # the archive has the time at which it was packed
    runs, told = ivy(end=pack), []
    program, library = jars.registry_jars(told.append)
    assert (program.name, program.read_text()) == ("app-runner.jar", "22\n")
    assert library == program.parent / "lib" / "a.jar"
    assert sorted(path.name for path in program.parent.iterdir()) == ["app-runner.jar", "lib"]
    library.unlink()
    assert all(path.is_file() for path in jars.registry_jars(told.append))
    assert runs() == 2
    assert told == ["fetching the jars of the schema registry (140 MB, once)"] * 2
    assert program.parent.parent != jars.broker_jars()[0].parent.parent


def test_two_processes_at_once_fetch_once(ivy):
    """The second process waits for the first and uses its jars."""
    runs = ivy(pause=0.5)
    other = multiprocessing.get_context("fork").Process(target=jars.broker_jars)
    other.start()
    until(lambda: runs() == 1)
    jars.broker_jars()
    other.join()
    assert (other.exitcode, runs()) == (0, 1)


def test_a_killed_fetch_leaves_nothing_that_counts(ivy):
    """Its temporary folder is not part of the cache. The next process removes it and fetches the jars again."""
    runs = ivy(pause=60)
    process = multiprocessing.get_context("fork").Process(target=lambda: (os.setsid(), jars.broker_jars()))
    process.start()
    until(lambda: list(jars.cache().glob("jars/.fetch-*/broker/*.jar")))
    assert process.pid is not None
    os.killpg(process.pid, signal.SIGKILL)
    process.join()
    ivy()
    assert names(jars.spark_jars()) == ["connector-4.2.0.jar"]
    assert runs() == 2
    assert list(jars.cache().glob("jars/.fetch-*")) == []


def test_a_failed_fetch_tells_ivys_reason_and_what_to_do(ivy, monkeypatch):
    """Nothing of the fetch is kept. A password in the mirror's URL is not printed, and the error can be pickled."""
    ivy(end="echo 'Server access error at url http://u:secret@127.0.0.1:9/m/x.pom (java.net.ConnectException: Connection refused)'; exit 1")
    monkeypatch.setenv("TIDEMARK_MAVEN_MIRROR", "http://u:secret@127.0.0.1:9/m")
    with pytest.raises(JarsUnavailable) as failed:
        jars.spark_jars()
    text = str(pickle.loads(pickle.dumps(failed.value)))
    assert "from the mirror http://127.0.0.1:9/m: Server access error at url http://127.0.0.1:9/m/x.pom" in text
    assert "TIDEMARK_MAVEN_MIRROR" in text
    assert "secret" not in text
    with pytest.raises(JarsUnavailable, match=r"^The jars of the schema registry are not in .* and could not be fetched"):
        jars.registry_jars()
    assert list((jars.cache() / "jars").glob("[!l]*")) == []


def test_a_mirror_and_a_cache_that_cannot_be_used_are_refused(ivy, tmp_path, monkeypatch):
    """The cache is the user's unless it is named."""
    ivy()
    monkeypatch.setenv("TIDEMARK_MAVEN_MIRROR", "repository.example")
    with pytest.raises(BadInput, match=r"TIDEMARK_MAVEN_MIRROR: repository\.example"):
        jars.spark_jars()
    (tmp_path / "file").touch()
    monkeypatch.setenv("TIDEMARK_CACHE", str(tmp_path / "file"))
    with pytest.raises(FolderUnusable, match="TIDEMARK_CACHE"):
        jars.spark_jars()
    monkeypatch.delenv("TIDEMARK_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert jars.cache() == tmp_path / ".cache" / "tidemark"


@pytest.mark.parametrize(
    ("output", "told"),
    [
        ("a\n\tmodule not found: org.apache.kafka#kafka_2.13;4.3.1\nb", "module not found: org.apache.kafka#kafka_2.13;4.3.1"),
        ("Exception in thread main\n\n", "Exception in thread main"),
        ("x\nlast words\n\n", "last words"),
        ("", "Ivy printed nothing"),
    ],
)
def test_the_telling_line_of_ivys_output_is_found(output, told):
    assert jars.cause(output) == told

"""A local Spark listens on loopback, where every user of the host can connect: its driver gives nothing to those without its secret."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tidemark import project
from tidemark.spark.session import end_jvm, small_session


@pytest.fixture(scope="module")
def spark() -> Iterator[Any]:
    end_jvm()
    spark = small_session()
    yield spark
    spark.stop()
    end_jvm()


def test_driver_in_local_mode_refuses_clients_without_its_secret(spark: Any) -> None:
    """The endpoint that is looked up knows where every broadcast is."""
    jvm, settings = spark.sparkContext._jvm, spark.sparkContext.getConf()
    conf = jvm.org.apache.spark.SparkConf(False).set("spark.rpc.lookupTimeout", "30s")
    file = getattr(jvm.org.apache.spark.internal.config, "package$").__getattr__("MODULE$").AUTH_SECRET_FILE()
    stranger = jvm.org.apache.spark.SecurityManager(conf, jvm.scala.Option.empty(), file)
    client = jvm.org.apache.spark.rpc.RpcEnv.create("stranger", "127.0.0.1", 0, conf, stranger, True)
    try:
        driver = jvm.org.apache.spark.rpc.RpcAddress("127.0.0.1", int(settings.get("spark.driver.port")))
        with pytest.raises(Exception, match=r"java\.lang\.IllegalStateException: Expected SaslMessage|SparkException"):
            client.setupEndpointRef(driver, "BlockManagerMaster")
    finally:
        client.shutdown()


def test_files_of_a_local_application_are_in_a_folder_of_its_user(spark: Any) -> None:
    """Blocks, shuffles and what a session adds: Spark lets every user of the host read them."""
    own = project.own_tmp()
    assert own.stat().st_mode & 0o777 == 0o700
    jvm = spark.sparkContext._jvm
    folders = [Path(str(each)) for each in jvm.org.apache.spark.SparkEnv.get().blockManager().diskBlockManager().localDirs()]
    for folder in (*folders, Path(jvm.java.lang.System.getProperty("java.io.tmpdir"))):
        assert folder.is_relative_to(own)


def test_tasks_run_as_before(spark: Any) -> None:
    """Python's workers get the broadcast, and a shuffle works."""
    factor = spark.sparkContext.broadcast(3)
    numbers = spark.sparkContext.parallelize(range(4), 2).map(lambda number: (number % 2, number * factor.value))
    assert sorted(numbers.reduceByKey(lambda a, b: a + b).collect()) == [(0, 6), (1, 12)]

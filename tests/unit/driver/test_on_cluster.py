"""Drivers on a cluster: what is refused before a submission, what the cluster manager's answers mean, and when an attempt ends."""

from __future__ import annotations

import os
import sys
import zipfile
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from tidemark import project
from tidemark.connections import DEPLOY_MODE, Connections
from tidemark.driver.applications import Application, Report, Stage, failure_cause, pod_report, require_hadoop_conf, yarn_report
from tidemark.driver.launch import ClusterDriver
from tidemark.driver.on_cluster import DriverEnded, DriverNotStarted, DriverSilent, judge, next_look_s
from tidemark.driver.submission import (
    START_LIMIT,
    VARIABLES,
    SubmissionFailed,
    _escaped,
    _zip_project,
    cluster_settings,
    new_application,
    submit,
)
from tidemark.errors import BadInput
from tidemark.spec import ConsumerSpec, load_consumer

AUTHENTICATED = {DEPLOY_MODE: "cluster", "spark.authenticate": "true"}


@pytest.fixture
def spec(tmp_path: Path) -> ConsumerSpec:
    (tmp_path / "flights.yaml").write_text(
        "topics: [flights]\nsink: {table: a.b}\ntransform: t:t\nspark: {conf: {spark.executor.cores: '4'}}\n"
    )
    return load_consumer(tmp_path / "flights.yaml")


@pytest.fixture
def hadoop_conf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of YARN's settings, which the environment names."""
    folder = tmp_path / "hadoop"
    folder.mkdir()
    (folder / "yarn-site.xml").write_text("<configuration/>")
    for name in ("YARN_CONF_DIR", "SPARK_HOME", "SPARK_CONF_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HADOOP_CONF_DIR", str(folder))
    return folder


def connections(master: str = "yarn", **conf: str) -> Connections:
    return Connections("postgresql://lake", {"bootstrap.servers": "k:9092"}, master, {**AUTHENTICATED, **conf})


def test_settings_of_consumer_and_connection_are_submitted_and_the_network_is_encrypted(spec: ConsumerSpec, hadoop_conf: Path) -> None:
    """YARN starts no second driver by itself. The driver has the caller's Python, unless a setting names another."""
    settings = cluster_settings(spec, connections(**{"spark.yarn.queue": "night", "spark.yarn.maxAppAttempts": "4"}))
    assert settings is not None
    expected = {
        "spark.yarn.queue": "night", "spark.executor.cores": "4", "spark.yarn.maxAppAttempts": "1", "spark.pyspark.python": sys.executable,
        "spark.network.crypto.enabled": "true",
    }  # fmt: skip
    assert {name: settings.conf.get(name) for name in expected} == expected
    assert DEPLOY_MODE not in settings.conf
    assert settings.start_limit == timedelta(minutes=10)
    assert cluster_settings(spec, Connections("postgresql://lake", {"bootstrap.servers": "k"}, "yarn")) is None


@pytest.mark.parametrize(
    ("master", "conf", "message"),
    [
        ("local[2]", {}, r"local\[2\] cannot run drivers"),
        ("spark://m:7077", {}, "spark://m:7077 cannot run drivers"),
        ("yarn", {DEPLOY_MODE: "both"}, "its deploy mode is both. Write client or cluster"),
        ("yarn", {START_LIMIT: "10 min"}, 'spark.tidemark.startLimit: "10 min" is not a duration. write a number and a unit'),
    ],
)
def test_settings_that_a_submission_would_fail_with_are_refused_before(
    spec: ConsumerSpec, hadoop_conf: Path, master: str, conf: dict[str, str], message: str
) -> None:
    with pytest.raises(BadInput, match=message):
        cluster_settings(spec, connections(master, **conf))


def test_cluster_without_authentication_is_refused_unless_spark_itself_is_configured(
    spec: ConsumerSpec, hadoop_conf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its settings are submitted with the others, which override them."""
    open_to_all = Connections("postgresql://lake", {"bootstrap.servers": "k"}, "yarn", {DEPLOY_MODE: "cluster"})
    with pytest.raises(BadInput, match=r"spark\.authenticate is not set"):
        cluster_settings(spec, open_to_all)
    own = {
        "spark.authenticate": "true", "spark.other": "a \\ b=c\t#", "spark.executor.cores": "2", "spark.yarn.maxAppAttempts": "3",
    }  # fmt: skip
    written = "".join(f"{_escaped(name)} = {_escaped(value)}\n" for name, value in own.items())
    (hadoop_conf / "spark-defaults.conf").write_text(f"# spark.ours\n{written}\nspark.long   one,\\\n    two\nother=1\n")
    monkeypatch.setenv("SPARK_CONF_DIR", str(hadoop_conf))
    settings = cluster_settings(spec, open_to_all)
    assert settings is not None
    expected = {**own, "spark.executor.cores": "4", "spark.yarn.maxAppAttempts": "1", "spark.long": "one,two", "other": None}
    assert {name: settings.conf.get(name) for name in expected} == expected


def test_missing_settings_of_yarn_are_named_with_what_to_set(hadoop_conf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spark's own ``spark-env.sh`` may set the variable, too."""
    require_hadoop_conf()
    (hadoop_conf / "yarn-site.xml").unlink()
    with pytest.raises(BadInput, match=r"HADOOP_CONF_DIR: .*hadoop has no yarn-site\.xml"):
        require_hadoop_conf()
    monkeypatch.delenv("HADOOP_CONF_DIR")
    with pytest.raises(BadInput, match=r"HADOOP_CONF_DIR: it is not set, and the master is yarn\. Set it to the folder"):
        require_hadoop_conf()
    monkeypatch.setenv("SPARK_CONF_DIR", str(hadoop_conf))
    (hadoop_conf / "spark-env.sh").write_text("export HADOOP_CONF_DIR=/etc/hadoop/conf\n")
    require_hadoop_conf()


SUBMIT = """#!/bin/sh
echo "$@" > {folder}/arguments
while [ "$1" != --properties-file ]; do shift; done
cp "$2" {folder}/properties
echo "26/11/28 02:21:51 INFO Client: Uploading resource file:/tmp/a.zip -> hdfs://n/user/ann/.sparkStaging/application_1_0001/a.zip"
echo "    tracking URL: http://rm/proxy/application_1_0001/"
exit {status}
"""
"""A spark-submit that keeps what it got."""


def submission(spec: ConsumerSpec, folder: Path, monkeypatch: pytest.MonkeyPatch, status: int = 0) -> Application:
    (folder / "bin").mkdir()
    (folder / "bin" / "spark-submit").write_text(SUBMIT.format(folder=folder, status=status))
    (folder / "bin" / "spark-submit").chmod(0o700)
    monkeypatch.setenv("SPARK_HOME", str(folder))
    configured = connections(**{"spark.jars": "kafka.jar", "spark.files": "mine"})
    settings = cluster_settings(spec, configured)
    assert settings is not None
    return submit(new_application(settings, "flights", 7), settings, configured, ["flights"], "a title", lambda: False)


def test_driver_is_submitted_with_the_project_and_secrets_in_files(
    spec: ConsumerSpec, hadoop_conf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The arguments are those that all supported releases of Spark have. The files are gone afterwards."""
    application = submission(spec, hadoop_conf, monkeypatch)
    staging = "hdfs://n/user/ann/.sparkStaging"
    expected = replace(application, id="application_1_0001", staging=staging, url="http://rm/proxy/application_1_0001/")
    assert application == expected
    arguments, properties = ((hadoop_conf / name).read_text() for name in ("arguments", "properties"))
    file = arguments.split()[5]
    assert arguments.split() == [
        "--master", "yarn", "--deploy-mode", "cluster", "--properties-file", file, "--name", "a", "title", str(project.consume_job()),
        "flights", "--application", application.name,
    ]  # fmt: skip
    folder = Path(file).parent
    assert not folder.exists()
    lines = properties.splitlines()
    assert f"spark.files = mine,{_escaped(f'{folder / VARIABLES}#{VARIABLES}')}" in lines
    assert f"spark.yarn.tags = {application.name}" in lines
    assert "postgresql" not in arguments + properties


def test_files_of_any_age_and_editors_locks_do_not_stop_a_submission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bazel, Nix and many images set the time of files to 1970, which zip files cannot have. An editor's lock is a link to nothing."""
    monkeypatch.setenv("TIDEMARK_HOME", str(tmp_path))
    (tmp_path / project.CONSUMERS).mkdir(parents=True)
    (file := tmp_path / project.CONSUMERS / "flights.yaml").write_text("topics: [flights]")
    os.utime(file, (0, 0))
    (file.parent / ".#flights.yaml").symlink_to("ann@host.1234:1700000000")
    _zip_project(tmp_path / "project.zip")
    with zipfile.ZipFile(tmp_path / "project.zip") as archive:
        assert archive.namelist() == [f"{project.CONSUMERS}/flights.yaml"]


def test_submission_that_fails_says_why(spec: ConsumerSpec, hadoop_conf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SubmissionFailed, match="could not be submitted to yarn: tracking URL"):
        submission(spec, hadoop_conf, monkeypatch, status=1)
    monkeypatch.setenv("SPARK_HOME", "/nowhere")
    with pytest.raises(BadInput, match="SPARK_HOME: /nowhere has no bin/spark-submit"):
        cluster_settings(spec, connections())


def test_name_of_an_application_is_a_label_of_yarn_and_kubernetes_and_never_used_twice(spec: ConsumerSpec, hadoop_conf: Path) -> None:
    settings = cluster_settings(spec, connections())
    assert settings is not None
    names = {new_application(settings, "Flüge " * 20, 7).name for _ in range(20)}
    assert len(names) == 20
    assert all(name.isascii() and name == name.lower() and len(name) <= 63 and name.startswith("tidemark-fl-ge") for name in names)
    on_kubernetes = cluster_settings(spec, connections("k8s://https://api", **{"spark.kubernetes.namespace": "lake"}))
    assert on_kubernetes is not None
    application = new_application(on_kubernetes, "flights", 7)
    assert application.id == f"lake:{application.name}"


YARN = """Application Report :
\tApplication-Id : application_1_0001
\tApplication-Name : tidemark : x
\tState : {state}
\tFinal-State : {final}
\tTracking-URL : http://rm/cluster/app/application_1_0001
\tDiagnostics : {diagnostics}
\tUnmanaged Application : false
\tTimeoutType : LIFETIME\tExpiryTime : UNLIMITED
"""


@pytest.mark.parametrize(
    ("state", "final", "diagnostics", "expected"),
    [
        (
            "ACCEPTED",
            "UNDEFINED",
            "[Sat] Queue is full.\n Details : AM = 1; ",
            Report(Stage.WAITING, "[Sat] Queue is full. Details : AM = 1;"),
        ),
        ("RUNNING", "UNDEFINED", "", Report(Stage.RUNNING)),
        ("FINISHED", "SUCCEEDED", "", Report(Stage.ENDED, "SUCCEEDED")),
        ("KILLED", "KILLED", "Application was killed by user ann", Report(Stage.ENDED, "KILLED: Application was killed by user ann")),
        ("FAILED", "FAILED", "AM exited\nwith  exitCode: 13", Report(Stage.ENDED, "FAILED: AM exited with exitCode: 13")),
    ],
)
def test_report_of_yarn_is_read(state: str, final: str, diagnostics: str, expected: Report) -> None:
    assert yarn_report(YARN.format(state=state, final=final, diagnostics=diagnostics)) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Application status (driver):\n\t pod name: x\n\t phase: Pending\n", Report(Stage.WAITING, "Pending")),
        ("\t phase: Running\n\t container status:\n\t\t container state: running\n", Report(Stage.RUNNING, "Running, running")),
        ("\t phase: Failed\n\t\t exit code: 1\n\t\t termination reason: OOMKilled\n", Report(Stage.ENDED, "Failed, 1, OOMKilled")),
        ("No applications found.", Report(Stage.GONE)),
    ],
)
def test_report_of_kubernetes_is_read(text: str, expected: Report) -> None:
    assert pod_report(text) == expected


def test_cause_of_a_failed_program_is_its_exception_and_not_its_log() -> None:
    log = "WARNING: Using incubator modules\n26/11/28 02:21:51 INFO Client: Uploading\n"
    thrown = 'Exception in thread "main" org.x.YarnException: unknown queue: nope\n\tat org.x.Client.run(Client.java:1)\n'
    assert failure_cause(log + thrown) == 'Exception in thread "main" org.x.YarnException: unknown queue: nope'
    assert failure_cause(log + "Error: Missing application resource.\n") == "Error: Missing application resource."
    assert failure_cause(log) == "it printed nothing"


LIMIT = timedelta(minutes=10)


def driver(*, started: bool = True, age_s: float = 30.0) -> ClusterDriver:
    return ClusterDriver(Application("yarn", "tidemark-flights-7", "application_1_0001"), started=started, alive=False, age_s=age_s)


@pytest.mark.parametrize(
    ("waiting", "report", "unseen_s", "expected"),
    [
        (driver(started=False, age_s=599), Report(Stage.WAITING, "queue is full"), 599, None),
        (
            driver(started=False, age_s=600),
            Report(Stage.WAITING, "queue is full"),
            600,
            (DriverNotStarted, "within 10m .*queue is full.*startLimit"),
        ),
        (driver(started=False, age_s=600), Report(Stage.RUNNING), 600, (DriverNotStarted, "running")),
        (driver(started=False), Report(Stage.ENDED, "FAILED: no Python"), 10, (DriverEnded, "FAILED: no Python")),
        (driver(), Report(Stage.RUNNING), 299, None),
        (driver(), Report(Stage.RUNNING), 300, (DriverSilent, "no session on Postgres for 5m")),
        (driver(), Report(Stage.ENDED, "KILLED"), 1, (DriverEnded, r"attempt 7 .*application_1_0001: KILLED\. Its commits stay")),
        (driver(), Report(Stage.GONE), 1, (DriverEnded, "does not know it any more")),
    ],
)
def test_attempt_ends_when_its_driver_cannot_store_a_result_any_more(waiting: Any, report: Report, unseen_s: float, expected: Any) -> None:
    """The reason is the cluster manager's. A wait in a queue, and one for Postgres, are bounded."""
    problem = judge(7, waiting, report, unseen_s, LIMIT)
    if expected is None:
        assert problem is None
    else:
        kind, message = expected
        with pytest.raises(kind, match=message):
            raise problem or AssertionError


def test_cluster_manager_is_asked_less_and_less_often() -> None:
    looks = [10.0]
    while looks[-1] < 300:
        looks.append(next_look_s(looks[-1]))
    assert looks == [10, 20, 40, 80, 140, 200, 260, 320]


def test_property_is_read_by_java_as_it_was() -> None:
    assert _escaped("a b=c:d\\e#f\n") == "a\\ b\\=c\\:d\\\\e\\#f\\n"

"""A JVM that hangs during its start does not block a driver for longer than the limit."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import zipfile
from pathlib import Path

import pytest
from tests.support.waiting import until

from tidemark import project
from tidemark.spark import session

CODE = """
from tidemark.spark import session

session.JVM_LIMIT_S = 1.0
try:
    session._start_jvm("local[1]", {})
except session.JvmHangs as error:
    print(error, error.retriable)
"""


def test_jvm_that_hangs_while_it_starts_is_killed_and_is_an_outage(tmp_path: Path) -> None:
    """pyspark itself would wait indefinitely."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "spark-submit").write_text("#!/bin/sh\nexec sleep 600\n")
    (tmp_path / "bin" / "spark-submit").chmod(0o755)
    env = {**os.environ, "SPARK_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", CODE], env=env, capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL)
    assert done.stdout.startswith("Spark's JVM did not start within 1 s and was killed."), done.stderr
    assert done.stdout.endswith("True\n")


def test_folder_that_another_user_made_first_does_not_stop_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The temporary folder is open to all users of the host. Spark's files go to a new private folder then."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("SPARK_SUBMIT_OPTS", "")
    monkeypatch.delenv("SPARK_LOCAL_DIRS", raising=False)
    taken = tmp_path / f"tidemark-{os.geteuid()}"
    taken.mkdir()
    taken.chmod(0o777)
    folder = Path(session._private()["spark.local.dir"])
    assert folder.parent == tmp_path
    assert folder.stat().st_mode & 0o777 == 0o700
    assert str(folder) in os.environ["SPARK_SUBMIT_OPTS"]


SECRETS = {
    "spark.hadoop.fs.azure.account.key.x.dfs.core.windows.net": "leak1",
    "spark.hadoop.fs.azure.sas.x.blob.core.windows.net": "leak2",
    "spark.executorEnv.DATABASE_URL": "postgres://u:leak3@h",
    "spark.executor.extraJavaOptions": "-Djavax.net.ssl.keyStorePassword=leak4",
    "spark.driver.passwd": "leak5",
    "spark.kubernetes.driverEnv.API_KEY": "leak6",
    "spark.jars.repositories": "https://u:leak7@host",
    "spark.hadoop.fs.s3a.secret.key": "leak8",
}


def test_only_what_the_jvm_needs_at_its_start_is_on_its_command_line(tmp_path: Path) -> None:
    """Every user of the host can read it."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "spark-submit").write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > {tmp_path}/words; exit 1\n')
    (tmp_path / "bin" / "spark-submit").chmod(0o755)
    given = {**SECRETS, "spark.driver.memory": "2g", "spark.driver.extraJavaOptions": "-Dx=y", "spark.sql.shuffle.partitions": "3",
             "spark.driver.extraClassPath": "/cache/spark-token-provider.jar"}  # fmt: skip
    code = f"from tidemark.spark import session\nsession._start_jvm('local[1]', {given!r})"
    env = {**os.environ, "SPARK_HOME": str(tmp_path)}
    subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, timeout=120, stdin=subprocess.DEVNULL, check=False)
    words = (tmp_path / "words").read_text()
    assert "leak" not in words
    assert "spark.driver.memory=2g" in words
    assert "spark.driver.extraClassPath=/cache/spark-token-provider.jar" in words
    assert "spark.driver.extraJavaOptions=-Dx=y" in words
    assert "shuffle" not in words


def test_transforms_of_any_age_and_editors_locks_do_not_stop_a_run(tmp_path: Path) -> None:
    """Bazel, Nix and many images set the time of files to 1970, which zip files cannot have. An editor's lock is a link to nothing."""
    (tmp_path / "flights.py").write_text("pass")
    os.utime(tmp_path / "flights.py", (0, 0))
    (tmp_path / ".#flights.py").symlink_to("ann@host.1234:1700000000")
    with zipfile.ZipFile(session._zip_modules([tmp_path, tmp_path / "missing"])) as archive:
        assert archive.namelist() == ["flights.py"]


@pytest.mark.parametrize("what", ["file", "link to nothing", "link to itself", "link to a folder"])
def test_file_of_another_user_in_the_place_of_a_folder_does_not_stop_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("SPARK_SUBMIT_OPTS", "")
    place, other = tmp_path / f"tidemark-{os.geteuid()}", tmp_path / "other"
    other.mkdir()
    if what == "file":
        place.touch()
    else:
        place.symlink_to({"link to nothing": tmp_path / "none", "link to itself": place, "link to a folder": other}[what])
    with pytest.raises(PermissionError):
        project.own_tmp()
    folder = Path(session._private()["spark.local.dir"])
    assert folder.stat().st_mode & 0o777 == 0o700
    assert list(other.iterdir()) == []


def test_output_of_a_jvm_that_started_takes_no_space(capfd: pytest.CaptureFixture[str]) -> None:
    """Its Python workers print to it as long as it lives. It does not wait either, and nothing is shown."""
    with session._quiet_unless_failed():
        jvm = subprocess.Popen(["sh", "-c", "read go; head -c 10000000 /dev/zero >&2"], stdin=subprocess.PIPE)
    assert Path(f"/proc/{jvm.pid}/fd/2").readlink().name.startswith("pipe:")
    jvm.communicate(b"\n", timeout=60)
    until(lambda: "hidden output" not in {thread.name for thread in threading.enumerate()}, "the reader has ended with the JVM")
    assert capfd.readouterr().err == ""


def test_output_of_a_jvm_that_did_not_start_is_shown(capfd: pytest.CaptureFixture[str]) -> None:
    """As much as may be of interest."""
    script = "head -c 1000000 /dev/zero | tr '\\0' x >&2; echo No memory. >&2; exit 1"
    with pytest.raises(subprocess.CalledProcessError), session._quiet_unless_failed():
        subprocess.run(["sh", "-c", script], check=True)
    shown = capfd.readouterr().err
    assert shown.endswith("xNo memory.\n")
    assert len(shown) == session.HIDDEN_BYTES

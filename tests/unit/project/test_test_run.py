"""What a run of the tests omits, shares out and costs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support import costs
from tests.support.shared import IN_ONE_SPARK, ONE_AIRFLOW, ONE_PAGE, ONE_SPARK, scope, shard
from tests.support.waiting import until

FILES = st.sets(st.text("abc", min_size=1, max_size=3), min_size=1, max_size=20)


@given(FILES, st.dictionaries(st.text("abc", min_size=1, max_size=3), st.floats(0.1, 100)), st.integers(1, 6))
def test_shards_have_each_file_once_and_cost_about_the_same(files: set[str], spent: Mapping[str, float], of: int) -> None:
    """No shard is more expensive than another one by more than its cheapest file."""
    shards = [shard(files, number, of, spent) for number in range(1, of + 1)]
    assert sorted(file for each in shards for file in each) == sorted(files)
    sums = [sum(spent.get(file, 0.5) for file in each) for each in shards]
    for each, total in zip(shards, sums, strict=True):
        assert not each or total - min(spent.get(file, 0.5) for file in each) <= min(sums) + 1e-9


def test_files_that_share_one_airflow_or_spark_stay_together() -> None:
    assert scope("tests/e2e/test_consume_dag.py::test_a[x]") == scope("tests/e2e/test_watch_dag.py::test_b") == ONE_AIRFLOW
    assert scope("tests/e2e/page/test_forms.py::test_c") == scope("tests/e2e/page/test_views.py::test_d") == ONE_PAGE
    assert {scope(f"{file}::test_a") for file in IN_ONE_SPARK} == {ONE_SPARK}
    root = Path(__file__).parents[3]
    users = {str(path.relative_to(root)) for path in root.glob("tests/*/**/test_*.py") if "session_here" in path.read_text()}
    assert users - {"tests/unit/project/test_test_run.py"} <= IN_ONE_SPARK
    assert scope("tests/unit/test_a.py::test_d") == "tests/unit/test_a.py"


BURN = "import time\nwhile time.process_time() < 0.5: pass\ntime.sleep(3)"


@pytest.mark.parametrize("daemon", [False, True], ids=["child", "daemon"])
def test_cpu_of_a_process_that_has_ended_counts(monkeypatch: pytest.MonkeyPatch, daemon: bool) -> None:
    """Also that of a daemon, which is no child any more."""
    mark = f"test-{os.getpid()}-{daemon}"
    monkeypatch.setenv(costs.VARIABLE, mark)
    meter = costs.Meter(mark)
    before = meter.now().cpu_s
    if daemon:
        apart = "start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL"
        start = f"import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', {BURN!r}], {apart}).pid)"
        pid = subprocess.run([sys.executable, "-c", start], check=True, capture_output=True, text=True).stdout.strip()
        until(lambda: meter.now().cpu_s and not Path(f"/proc/{pid}").exists(), "the daemon ends")
    else:
        subprocess.run([sys.executable, "-c", BURN], check=True)
    assert 0.4 < meter.now().cpu_s - before < 5


def test_process_of_another_run_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    meter = costs.Meter("mine")
    with subprocess.Popen(["sleep", "60"], env={costs.VARIABLE: "others"}) as other:
        meter.now()
        assert (other.pid in {pid for pid, _ in meter._last}) is True, "a child of this process"
        assert not meter._is_marked(other.pid)
        other.kill()


TESTS = """
import pytest

@pytest.mark.thorough
def test_long(): ...

@pytest.mark.sampled
@pytest.mark.parametrize("number", range(9))
def test_matrix(number): ...

@pytest.mark.needs("chromium")
def test_browser(): ...

def test_skipped():
    pytest.skip("always")
"""
CONFTEST = """
from tests.support import needs, sampling

needs.NAMES["chromium"] = ("no-such-program",)
NEEDS = needs.Needs()

def pytest_configure(config):
    config.pluginmanager.register(NEEDS)

def pytest_collection_modifyitems(items):
    omitted = NEEDS.omit(items) | sampling.left_out(items, 0)
    items[:] = [item for item in items if item not in omitted]
"""


def run(folder: Path, tests: str = TESTS, **env: str) -> str:
    (folder / "test_it.py").write_text(tests)
    (folder / "conftest.py").write_text(CONFTEST)
    root = Path(__file__).parents[3]
    plain = {name: value for name, value in os.environ.items() if name != "CI" and not name.startswith(("TIDEMARK_TEST", "PYTEST"))}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-c", str(root / "pyproject.toml"), str(folder)]
    env = plain | {"PYTHONPATH": str(root)} | env
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, cwd=folder)
    return f"{done.returncode}\n{done.stdout}{done.stderr}"


def test_short_run_omits_and_says_what_it_could_not_try(tmp_path: Path) -> None:
    """In CI, a missing program and a skipped test fail the run."""
    short = run(tmp_path)
    assert short.startswith("0\n")
    assert "1 passed, 1 skipped" in short
    assert "Not tried, because chromium is missing (`make programs` installs it)" in short
    assert "10 passed, 1 skipped" in run(tmp_path, TIDEMARK_TEST_ALL="1")
    assert "the tests need chromium: install them with `make programs`" in run(tmp_path, CI="1")


def test_skipped_test_fails_in_ci(tmp_path: Path) -> None:
    tests = TESTS.partition("@pytest.mark.needs")[0] + TESTS.partition("def test_browser(): ...")[2]
    failed = run(tmp_path, tests, CI="1")
    assert failed.startswith("1\n")
    assert "No test may be skipped in CI." in failed

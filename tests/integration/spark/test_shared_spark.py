"""Small runs share a Spark application: a keeper forks their drivers. Whatever dies, every record is stored once and no process remains."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import psutil
import pytest
from tests.support.attempts import Attempt, all_gone
from tests.support.orders import Orders, order
from tests.support.points import Mark, Points, points_among
from tests.support.scenario import ARROW, PLAIN, SPARK, STARTS_A_PROCESS, Scenario
from tests.support.waiting import until

from tidemark.connections import DATABASE_URL, FILES, KAFKA_CONFIG, SPARK_CONF
from tidemark.driver import keeper_client
from tidemark.driver.launch import Progress, kill_group
from tidemark.errors import BadInput, TidemarkError
from tidemark.offsets.store import TaskIdentity
from tidemark.sink.steps import Step

FORMS = {"function": PLAIN, "arrow": ARROW, "spark": SPARK}
CREDENTIALS = ("AIRFLOW_CONN_TIDEMARK_POSTGRES", "AIRFLOW__API_AUTH__JWT_SECRET", "AIRFLOW__API__SECRET_KEY", "SOMEBODYS_TOKEN")
SECRET = "s3cr3t"


@contextlib.contextmanager
def own_keepers() -> Iterator[None]:
    """Within the block, runs use separate keepers, which end with it."""
    with tempfile.TemporaryDirectory(prefix="tidemark-kept-") as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIDEMARK_STATE", folder)
        yield
        running = tree()
        keeper_client.stop_keepers()
        until(lambda: all_gone(running), "the keeper and what it has started are gone")
        shutil.rmtree(keeper_client._folder())


@pytest.fixture(scope="module", autouse=True)
def keepers() -> Iterator[None]:
    """They are started by tasks with `CREDENTIALS`."""
    with own_keepers(), pytest.MonkeyPatch.context() as patch:
        for name in CREDENTIALS:
            patch.setenv(name, SECRET)
        yield


@pytest.fixture
def apart() -> Iterator[None]:
    """No keeper is running yet."""
    with own_keepers():
        yield


@pytest.fixture
def make_scenario(scenario: Scenario, tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Scenario]:
    """Creates further consumers, each in separate folders."""
    return lambda: Scenario(tmp_path_factory.mktemp("project"), scenario.database_url, scenario.topics)


@pytest.fixture
def points(scenario: Scenario) -> Iterator[Points]:
    with points_among(scenario.folders[0]) as points:
        yield points


def kept() -> list[psutil.Process]:
    """The keepers of these runs, without their forks, which have the same command line."""
    mine = [process for process in psutil.process_iter() if str(keeper_client._folder()) in " ".join(command(process)[-1:])]
    return [process for process in mine if parent(process) not in {other.pid for other in mine}]


def command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def name(process: psutil.Process) -> str:
    """Empty if the process has ended."""
    try:
        return process.name()
    except psutil.NoSuchProcess:
        return ""


def parent(process: psutil.Process) -> int:
    """0 if the process has ended."""
    try:
        return process.ppid()
    except psutil.NoSuchProcess:
        return 0


def children(process: psutil.Process, *, recursive: bool = False) -> list[psutil.Process]:
    """None if the process has ended."""
    try:
        return process.children(recursive=recursive)
    except psutil.NoSuchProcess:
        return []


def tree() -> list[psutil.Process]:
    return [process for top in kept() for process in (top, *children(top, recursive=True))]


def jvms() -> list[psutil.Process]:
    return [process for process in tree() if name(process) == "java"]


def unreaped() -> list[psutil.Process]:
    """The zombies among the forks of the keepers."""
    found = []
    for fork in (fork for top in kept() for fork in children(top)):
        with contextlib.suppress(psutil.NoSuchProcess):
            if fork.status() == psutil.STATUS_ZOMBIE:
                found.append(fork)
    return found


def started(scenario: Scenario) -> Attempt:
    return Attempt(scenario.spec, scenario.connections, scenario.folder, TaskIdentity(), kept=True)


def run(scenario: Scenario) -> Progress:
    attempt = started(scenario)
    try:
        done = attempt.wait()
    finally:
        attempt.end()
    assert isinstance(done, Progress), f"{done}\n{attempt.log}"
    return done


def consumer(scenario: Scenario, transform: str = PLAIN, values: int = 3, **keys: object) -> Scenario:
    """A consumer with records in its topic."""
    topic = scenario.topics.create()
    scenario.topics.produce(topic, [b"%d" % number for number in range(values)])
    return scenario.write(transform, topics=topic, **keys).make_sink("payload bytea")


@pytest.mark.sampled
@pytest.mark.parametrize("form", FORMS)
def test_runs_of_each_form_use_the_application_that_is_there(scenario: Scenario, form: str) -> None:
    consumer(scenario, FORMS[form])
    assert run(scenario).counts["loaded"] == 3
    (jvm,) = jvms()
    scenario.topics.produce(scenario.spec.topics[0], [b"d"])
    assert run(scenario).counts["loaded"] == 1
    assert jvms() == [jvm]
    scenario.check()


@pytest.mark.thorough
@pytest.mark.sampled
@pytest.mark.parametrize(
    "keys", [{"spark": {"conf": {"spark.sql.shuffle.partitions": "3"}}}, {"spark": {"shared": False}}], ids=["settings", "not-shared"]
)
def test_consumer_with_settings_of_its_own_has_its_own_application(scenario: Scenario, points: Points, keys: dict[str, object]) -> None:
    consumer(scenario, **keys)
    point = points.at(Step.COMMIT)
    attempt = started(scenario)
    jvm = point.reached().ancestor(program="java")
    assert jvm in psutil.Process(attempt.driver.pid).children(recursive=True)
    point.release()
    assert isinstance(attempt.wait(), Progress), attempt.log
    until(lambda: all_gone([jvm]), "its JVM is gone")
    scenario.check()


@pytest.mark.thorough
@pytest.mark.usefixtures("apart")
def test_small_run_gets_a_core_as_soon_as_a_long_one_has_ended_a_task(
    scenario: Scenario, make_scenario: Callable[[], Scenario], points: Points
) -> None:
    """It does not wait for all tasks of a run that has begun before. The two cores are held by two of its four tasks."""
    topic = scenario.feed([b"long"], PLAIN, partitions=4, ddl="payload bytea")
    held = [points.at(Step.COMMIT, topic=topic, partition=partition) for partition in range(4)]
    long = started(scenario)
    until(lambda: sum(point.is_reached for point in held) == 2, "both cores are busy")
    small = consumer(make_scenario())
    points.install(small.folders[0])
    attempt = started(small)
    until(lambda: "partitions claimed" in attempt.log, "the small run is about to read")
    first, second = (point for point in held if point.is_reached)
    first.release()
    until(lambda: not attempt.running or sum(point.is_reached for point in held) == 3, "the next task runs")
    second.release()  # by now, the small run's job is waiting
    done = attempt.wait()
    assert isinstance(done, Progress), attempt.log
    for point in held:
        point.release()
    assert isinstance(long.wait(), Progress), long.log
    assert (scenario.rows(), small.rows()) == ([b"long"] * 4, [b"0", b"1", b"2"])


# Processes that die


def victims(mark: Mark) -> dict[str, Callable[[], psutil.Process]]:
    jvm = mark.ancestor(program="java")
    return {
        "worker": lambda: mark.process,
        "jvm": lambda: jvm,
        "holder": lambda: jvm.parents()[0],
        "keeper": lambda: jvm.parents()[1],
    }


@pytest.mark.parametrize("form", ["function", "spark"])
@pytest.mark.parametrize(
    "victim", [pytest.param("worker", marks=pytest.mark.thorough), "jvm", pytest.param("holder", marks=pytest.mark.thorough), "keeper"]
)
@pytest.mark.sampled("form", "victim")
def test_whatever_is_killed_in_a_commit_the_next_attempt_loads_every_record_once(
    scenario: Scenario, points: Points, victim: str, form: str
) -> None:
    """The processes that the killed one started, and the driver that it worked for, end too. The slice in flight is rolled back."""
    consumer(scenario, FORMS[form])
    point = points.at(Step.COMMIT)
    attempt = started(scenario)
    mark = point.reached()
    ends = [psutil.Process(attempt.driver.pid), mark.process]
    struck = victims(mark)[victim]()
    if victim != "worker":
        ends += [struck, *struck.children(recursive=True)]
    before = kept()
    struck.kill()
    ended = attempt.wait()
    until(lambda: all_gone(ends), f"{[process.pid for process in ends]} gone")
    assert isinstance(ended, TidemarkError), ended
    assert ended.retriable, ended
    assert scenario.positions() == {(scenario.spec.topics[0], 0): 0}
    assert run(scenario).counts["loaded"] == 3
    assert (kept() == before) == (victim != "keeper"), "the keeper outlives what it has started"
    if victim != "keeper":
        until(lambda: not unreaped(), "the keeper has waited for its forks")
    scenario.check()


@pytest.mark.thorough
def test_run_after_the_daemons_end_gets_another(scenario: Scenario) -> None:
    run(consumer(scenario))
    (jvm,) = jvms()
    for daemon in jvm.children():
        daemon.kill()
    scenario.topics.produce(scenario.spec.topics[0], [b"next"])
    run(scenario)
    assert jvms() == [jvm]
    scenario.check()


TASK = """
import json, sys
from pathlib import Path
from tidemark.driver.launch import DriverArguments, run_attempt
from tidemark.connections import from_env
from tidemark.consume.run import open_attempt
from tidemark.offsets.store import TaskIdentity

name, folder = sys.argv[1:]
connections = from_env()
attempt = open_attempt(connections.database_url, name, TaskIdentity())
arguments = DriverArguments(name, attempt, Path(folder) / "consumers", [Path(folder) / "transforms"])
started = lambda driver: print(driver.pid, flush=True)
run_attempt(arguments, connections, on_log=print, on_start=started, with_keeper=True)
"""


@pytest.mark.thorough
@pytest.mark.sampled
@pytest.mark.usefixtures("apart")
@pytest.mark.parametrize("stopped", [False, True], ids=["killed", "stopped-first"])
def test_driver_and_its_job_end_with_the_task(scenario: Scenario, points: Points, *, stopped: bool) -> None:
    """Even if the driver cannot notice the task's end because it is stopped."""
    consumer(scenario)
    point = points.at(Step.COMMIT)
    words = [sys.executable, "-c", TASK, scenario.name, str(scenario.folder)]
    env = scenario.env() | points.env | {"TIDEMARK_STATE": os.environ["TIDEMARK_STATE"]}
    with subprocess.Popen(words, env=env, stdout=subprocess.PIPE, text=True) as task:
        driver = psutil.Process(int(task.stdout.readline()))
        mark = point.reached()
        worker = mark.process
        if stopped:
            driver.suspend()
        task.kill()
    until(lambda: all_gone([driver, worker]), "driver and worker gone")
    assert run(scenario).counts["loaded"] == 3
    scenario.check()


@pytest.mark.thorough
def test_others_go_on_when_one_driver_is_killed(scenario: Scenario, make_scenario: Callable[[], Scenario], points: Points) -> None:
    other = consumer(make_scenario())
    points.install(other.folder / "transforms")
    consumer(scenario)
    held = [points.at(Step.COMMIT, topic=one.spec.topics[0]) for one in (scenario, other)]
    one, two = started(scenario), started(other)
    first, second = (point.reached() for point in held)
    assert first.ancestor(program="java") == second.ancestor(program="java")
    psutil.Process(one.driver.pid).kill()
    assert isinstance(one.wait(), TidemarkError)
    held[1].release()
    assert isinstance(two.wait(), Progress), two.log
    other.check()
    assert run(scenario).counts["loaded"] == 3


def test_driver_can_be_killed_as_soon_as_its_process_id_is_known(tmp_path: Path) -> None:
    """Its process group exists by then, so no kill is lost."""
    (tmp_path / "stands.py").write_text("import time\ntime.sleep(600)\n")
    for _ in range(10):
        driver = keeper_client.start_driver([str(tmp_path / "stands.py")], os.environ)
        with driver.stdout:
            kill_group(driver)
            assert driver.wait(60) == -signal.SIGKILL


def test_processes_that_a_transform_has_started_end_with_its_task(scenario: Scenario) -> None:
    run(consumer(scenario, STARTS_A_PROCESS, values=2))
    until(lambda: not any(psutil.pid_exists(int(pid)) for pid in scenario.rows()))
    assert len(scenario.rows()) == 2


# Calls


def wrong(text: str) -> None:
    raise BadInput(what="a call", found=text, fix="Try it.")


def test_function_is_called_in_a_fork_with_the_callers_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its error is the caller's."""
    monkeypatch.setenv("STAGE", "called")
    assert keeper_client.call_in_fork(partial(os.getenv, "STAGE")) == "called"
    assert keeper_client.call_in_fork(os.getpid) != os.getpid()
    with pytest.raises(BadInput, match="a call: nothing"):
        keeper_client.call_in_fork(partial(wrong, "nothing"))
    with pytest.raises(keeper_client.CallDied):
        keeper_client.call_in_fork(partial(os._exit, 3))


@pytest.mark.thorough
@pytest.mark.usefixtures("apart")
def test_each_sparks_settings_have_an_application_of_their_own_and_all_have_one_keeper(scenario: Scenario) -> None:
    """The settings of a connection may be secret, and may differ between consumers. A call does not know the driver's connections."""
    run(consumer(scenario))
    keeper_client.call_in_fork(os.getpid)
    scenario.connections = replace(scenario.connections, spark_conf={"spark.hadoop.some.password": "x"})
    scenario.topics.produce(scenario.spec.topics[0], [b"next"])
    run(scenario)
    assert len(jvms()) == 2
    assert len(kept()) == 1
    scenario.check()


# Effects of one run on the next


LEAVES = """
    import json, os, sys

    import shared_name

    from tidemark.transform import Record

    FOUND = [shared_name.VALUE, os.environ.get("STAGE"), OTHER in os.environ, OTHER in sys.modules]  # at import, as much code does
    os.environ[__name__] = "left behind"


    def transform(record: Record):
        return {"payload": json.dumps(FOUND).encode()}
"""


def test_run_sees_nothing_of_another_and_has_the_environment_of_its_own_task(
    scenario: Scenario, make_scenario: Callable[[], Scenario], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not the environment of the task that started the keeper. Modules of the same name are each consumer's own, and the next run uses a
    changed transform."""
    both = [consumer(scenario, values=1), consumer(make_scenario(), values=1)]
    for number, (one, other) in enumerate(zip(both, reversed(both), strict=True)):
        (one.folder / "transforms" / "shared_name.py").write_text(f"VALUE = {number}\n")
        one.transform(LEAVES.replace("OTHER", repr(other.name)))
        monkeypatch.setenv("STAGE", f"stage {number}")
        run(one)
        assert json.loads(one.rows()[0]) == [number, f"stage {number}", False, False]
    scenario.transform(PLAIN)
    scenario.topics.produce(scenario.spec.topics[0], [b"next"])
    run(scenario)
    assert scenario.rows()[1:] == [b"next"]


def test_transform_that_stops_spark_or_crashes_stops_nobody_elses(scenario: Scenario, make_scenario: Callable[[], Scenario]) -> None:
    run(consumer(make_scenario(), SPARK.replace("    return records", "    records.sparkSession.stop()\n        return records")))
    (jvm,) = jvms()
    consumer(scenario, PLAIN.replace("return {", "import os; os.abort()\n        return {"))
    attempt = started(scenario)
    assert isinstance(attempt.wait(), TidemarkError)
    run(consumer(make_scenario(), SPARK))
    assert jvms() == [jvm]


@pytest.mark.thorough
def test_avro_is_decoded_in_forks_of_the_daemon(orders: Orders) -> None:
    """The daemon has already imported the decoding library, which starts threads when it is first used."""
    scenario = orders.scenario
    decoded = PLAIN.replace("record.value", 'str(record.data["id"]).encode()')
    assert decoded != PLAIN
    scenario.write(decoded, topics=orders.topic, format={"value": "avro"}).make_sink("payload bytea")
    for number in range(2):
        orders.produce(order(number))
        assert run(scenario).counts["loaded"] == 1
    assert scenario.rows("convert_from(payload, 'UTF8')") == ["0", "1"]
    assert len(jvms()) == 1


def test_processes_that_serve_all_consumers_know_no_credentials(scenario: Scenario) -> None:
    """They get only what they need of a task's environment: a variable that nobody has thought of is not passed on."""
    assert {os.environ[variable] for variable in CREDENTIALS} == {SECRET}
    run(consumer(scenario))
    looked_at = set()
    for top in kept():
        for process in (top, *(child for child in children(top, recursive=True) if name(child) in ("tidemark spark", "java", "python"))):
            with contextlib.suppress(psutil.NoSuchProcess):  # a fork that has just ended, or a zombie
                found = process.environ()
                assert SECRET not in found.values()
                assert not [known for known in (DATABASE_URL, KAFKA_CONFIG, SPARK_CONF, *FILES.values()) if found.get(known)], process
                looked_at.add(process.name())
    assert {"tidemark spark", "java"} <= looked_at


def test_call_of_one_consumer_finds_no_environment_of_another_in_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is a fork of the keeper, so it has whatever the keeper has ever read."""
    for name in ("AIRFLOW_CONN_TIDEMARK_POSTGRES", DATABASE_URL, KAFKA_CONFIG, "SPARK_DB_PASSWORD", "PYTHON_TOKEN"):
        monkeypatch.setenv(name, f"{SECRET}-of-another")
    assert len(keeper_client.call_in_fork(secrets_in_memory)) > 0  # its own
    for name in ("AIRFLOW_CONN_TIDEMARK_POSTGRES", DATABASE_URL, KAFKA_CONFIG, "SPARK_DB_PASSWORD", "PYTHON_TOKEN"):
        monkeypatch.delenv(name)
    assert keeper_client.call_in_fork(secrets_in_memory) == set()


def secrets_in_memory() -> set[bytes]:
    """Of this process. What it looks for does not match itself."""
    found: set[bytes] = set()
    for line in Path("/proc/self/maps").read_text().splitlines():
        place, rights, *_ = line.split()
        if rights.startswith("rw") and "[v" not in line:
            start, end = (int(each, 16) for each in place.split("-"))
            with Path("/proc/self/mem").open("rb") as memory, contextlib.suppress(OSError, ValueError):
                memory.seek(start)
                found |= set(re.findall(SECRET.encode() + b"-of-[a-z]+", memory.read(end - start)))
    return found


@pytest.mark.thorough
@pytest.mark.usefixtures("apart")
def test_application_is_replaced_after_its_number_of_runs(scenario: Scenario, points: Points, monkeypatch: pytest.MonkeyPatch) -> None:
    """The old application ends with its last run."""
    monkeypatch.setattr(keeper_client, "MODULE", "tests.support.few_runs_keeper")
    consumer(scenario)
    run(scenario)
    (first,) = jvms()
    topic = scenario.spec.topics[0]
    scenario.topics.produce(topic, [b"held"])
    point = points.at(Step.COMMIT, topic=topic, start=3)
    second = started(scenario)
    assert point.reached().ancestor(program="java") == first
    other = started(scenario)  # the third run, in a new application
    until(lambda: len(jvms()) == 2, "another application")
    point.release()
    for attempt in (second, other):
        attempt.wait()
    until(lambda: first not in jvms(), "the first application is gone")
    scenario.check()


@pytest.mark.thorough
def test_keeper_whose_socket_is_gone_ends(scenario: Scenario) -> None:
    """A clean-up of the temporary folder may delete the socket. Nothing could reach the keeper any more."""
    run(consumer(scenario))
    scenario.topics.produce(scenario.spec.topics[0], [b"next"])
    running = tree()
    for path in keeper_client._folder().glob("*.sock"):
        path.unlink()
    until(lambda: all_gone(running), "the keeper is gone")
    run(scenario)
    scenario.check()


def test_task_that_can_have_no_keeper_starts_its_driver_itself(scenario: Scenario, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """And logs the reason: here another user could access the folder of the sockets."""
    folder = tmp_path / f"tidemark-{os.geteuid()}"
    folder.mkdir()
    folder.chmod(0o755)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    consumer(scenario)
    attempt = started(scenario)
    assert isinstance(attempt.wait(), Progress), attempt.log
    assert f"no keeper, starting the driver without one: {folder} is not a folder of this user alone" in attempt.log
    scenario.check()

"""``consume__<consumer>`` in a real Airflow. Whatever dies in the middle, every record is stored once and no process is left that could
commit."""

from __future__ import annotations

import contextlib
import json
import re
from dataclasses import dataclass
from urllib.parse import quote

import httpx
import psutil
import pytest
from tests.e2e.lab import BATCH, MARKS, Consumer, Lab, Run
from tests.support.waiting import until

from tidemark.local.processes import gone
from tidemark.offsets.store import TaskIdentity

RECORDS = 1000


COUNTS = {"loaded": RECORDS, "skipped": 0, "retried": 0, "failed": 0, "unaccounted": 0, "sink_rows": RECORDS, "deleted": 0}
ALL_WELL = {"consume": "success", "validate": "success", "publish": "success"}


@dataclass
class Finished:
    """A run without faults, and the command lines of its processes during its second batch."""

    consumer: Consumer
    run: Run
    state: str
    command_lines: list[str]


@pytest.fixture(scope="module")
def finished(lab: Lab) -> Finished:
    """One run for all tests that only look at the results of a run."""
    consumer = lab.consumer("happy")
    consumer.produce(*range(RECORDS))
    run, _ = consumer.trigger_and_stop_in_the_middle()
    seen = []
    for process in lab.family():
        with contextlib.suppress(psutil.Error):  # it has just ended
            seen.append(" ".join(process.cmdline()))
    until(lambda: "progress attempt=" in run.log(), what="the progress in the log")
    consumer.release()
    return Finished(consumer, run, run.wait(), seen)


@pytest.fixture(scope="module")
def ended(lab: Lab) -> dict[str, Run]:
    """Runs by consumer: some read data and files with problems and an empty topic, and then one takes too long. Its time is short, so
    another run has started Spark before."""
    runs: dict[str, Run] = {}
    numbers = {
        "critical": (1, 2, 3_000_000),
        "taken-back": (1, 2, 3_000_000),
        "warning": (1, -2, 3),
        "empty": (),
        "nowhere": (),
        "no-broker": (),
    }
    for name, produced in numbers.items():
        lab.consumer(name).produce(*produced)
        runs[name] = lab.consumer(name).trigger()
    runs["bad"] = Consumer(lab, "bad").trigger()
    for run in runs.values():
        run.wait()
    slow = lab.consumer("timed-out")
    slow.produce(*range(RECORDS))
    slow.brake(0)
    runs[slow.name] = slow.trigger()
    slow.brakes[0].reached()
    runs[slow.name].wait()
    return runs


def half_read(lab: Lab, name: str) -> tuple[Consumer, Run, psutil.Process]:
    """A consumer whose run has stopped in its second batch of three, the run, and its driver."""
    consumer = lab.consumer(name)
    consumer.produce(*range(RECORDS))
    run, driver = consumer.trigger_and_stop_in_the_middle()
    assert consumer.position() == BATCH
    return consumer, run, driver


# Results of a run


def test_run_loads_every_record_once_and_ends_well(lab, finished):
    """Consume, validate and publish succeed at the first try. Rows and position match the topic."""
    assert finished.state == "success"
    assert finished.run.tasks() == ALL_WELL
    assert finished.consumer.rows() == list(range(RECORDS))
    assert finished.consumer.validated() == list(range(RECORDS))
    assert finished.consumer.position() == RECORDS
    assert finished.consumer.attempts() == [("COMMITTED", 1, None)]


def test_asset_event_carries_ranges_counts_and_verdict(lab, finished):
    """Consumers of the asset learn exactly what is new in the sink, once."""
    events = [event for event in lab.client.asset_events(finished.consumer.table) if event.source_run_id == finished.run.run_id]
    assert [(event.source_task_id, event.extra["group"], event.extra["verdict"]) for event in events] == [("publish", "happy", "passed")]
    assert (events[0].extra["ranges"], events[0].extra["counts"]) == ({"happy/0": [[0, RECORDS]]}, COUNTS)


def test_log_of_publish_says_what_it_publishes(lab, finished):
    """In one line: assets, ranges and counts."""
    (line,) = re.findall(r"publishing .*", finished.run.log("publish"))
    counts = " ".join(f"{name}={count}" for name, count in COUNTS.items())
    assert line == f"publishing assets={finished.consumer.table} group=happy verdict=passed ranges=happy/0 [0, {RECORDS}) {counts}"


def test_xcoms_are_small_and_hold_no_data(lab, finished):
    """They hold counts and ranges, but no record, whatever the size of the run."""
    consumed, verdict = finished.run.xcom("consume"), finished.run.xcom("validate")
    assert (consumed["records"], consumed["loaded"], consumed["sink_rows"], consumed["deleted"]) == (RECORDS, RECORDS, RECORDS, 0)
    assert verdict["ranges"] == {"happy/0": [[0, RECORDS]]}
    assert len(json.dumps(consumed)) < 500
    assert len(json.dumps(verdict)) < 2000


def test_task_log_has_the_drivers_lines_and_progress(lab, finished):
    """The log has each of the driver's lines once, at its level and while the driver works. It also shows how far the run is, and how it
    ended."""
    log = finished.run.log()
    assert "attempt begins group=happy" in log
    assert log.count("slice committed group=happy") == 3
    assert re.search(rf"progress attempt=\d+ committed=(0|{BATCH}) of={RECORDS}\b", log)
    assert f"attempt is committed group=happy attempt_id={finished.run.xcom('consume')['attempt_id']} records={RECORDS}" in log
    assert "deleted=" not in log
    assert "Traceback" not in log


def test_airflows_statistics_get_the_counts_of_a_run(lab, finished):
    """They are sent with tags, and also with the consumer in the name, for a StatsD server without tags. Zeros are sent too."""
    tags = "consumer=happy,group=happy,task_id=consume"
    for name, count in {"records": RECORDS, **COUNTS}.items():
        sent = (f"airflow.tidemark.{name},{tags}", f"airflow.tidemark.happy.consume.{name}")
        until(lambda sent=sent: {*sent} <= {*lab.statsd.counters}, what=f"{sent}")
        assert [lab.statsd.counters[one] for one in sent] == [count, count]


def test_passwords_are_seen_nowhere(lab, finished):
    """The passwords of Postgres, Kafka, Spark and Airflow are in no command line, log, rendered template, XCom or row."""
    where = {f"command line {number}": line for number, line in enumerate(finished.command_lines)}
    where |= {str(path): path.read_text(errors="replace") for path in (lab.airflow.folder / "logs").rglob("*.log*") if path.is_file()}
    instances = finished.run.path
    for task in ("consume", "validate", "publish"):
        where[f"instance {task}"] = json.dumps(lab.client.get(f"{instances}/{task}"))
        where[f"xcoms {task}"] = json.dumps(
            [
                lab.client.get(f"{instances}/{task}/xcomEntries/{entry['key']}")
                for entry in lab.client.get(f"{instances}/{task}/xcomEntries")["xcom_entries"]
            ]
        )
        where[f"log {task}"] = finished.run.log(task)
    for table in ("attempt", "batch", "partition_offset", "validation", "validation_result"):
        where[table] = str(lab.sql(f"SELECT row_to_json(t)::text FROM tidemark.{table} t"))
    assert len(finished.command_lines) > 6
    assert "slice committed" in "".join(where.values())
    secrets = (*MARKS, lab.airflow.password, lab.airflow.metadata_url)
    assert [(place, secret) for place, text in where.items() for secret in secrets if secret in text] == []


def test_run_with_nothing_to_read_is_one_task_that_starts_no_driver_and_tells_nobody(lab, ended):
    """The first run creates the positions, in a driver without Spark. From then on, the task finds without a driver that there is nothing
    to read, and skips the other tasks."""
    consumer = lab.consumer("empty")
    lab.check_nothing_runs()
    run = consumer.trigger()
    seen: set[str] = set()

    def ended() -> bool:
        seen.update(lab.drivers_and_jvms())
        return lab.client.run(consumer.dag, run.run_id) in ("success", "failed")

    until(ended)
    assert run.tasks() == {"consume": "success", "validate": "skipped", "publish": "skipped"}
    assert seen == set()
    assert "nothing to read" in run.log()
    assert run.xcom("consume")["records"] == 0
    assert consumer.attempts() == [("COMMITTED", 1, None)] * 2
    assert lab.client.asset_events(consumer.table) == []


def test_try_with_nothing_left_to_read_validates_and_publishes_what_the_one_before_committed(lab):
    """The result of the first try was lost, but its rows were not: no task after the second try is skipped."""
    consumer = lab.consumer("word-lost")
    consumer.produce(1, 2, 3)
    run = lab.trigger(consumer.dag)  # waits, because the DAG is paused
    consumer.read_here(TaskIdentity(consumer.dag, run.run_id, "consume", -1, 0))
    lab.client.unpause(consumer.dag)
    assert run.wait() == "success"
    assert run.tasks() == ALL_WELL
    assert run.xcom("consume")["records"] == 0
    assert consumer.attempts() == [("COMMITTED", 0, None), ("COMMITTED", 1, None)]
    assert [event.extra["counts"]["loaded"] for event in lab.client.asset_events(consumer.table)] == [3]
    assert consumer.validated() == [1, 2, 3]


# Deaths in the middle of a run; `tests.e2e.test_consume_steps` covers the task and its supervisor


@pytest.mark.thorough  # test_consume_steps.py kills tasks with their drivers
def test_killed_driver_is_retried_and_every_record_comes_once(lab):
    """A driver is killed with SIGKILL. The task reports that, and the next try continues after what was committed."""
    consumer, run, driver = half_read(lab, "driver-killed")
    worker = consumer.brakes[-1].reached().process
    driver.kill()
    until(lambda: gone(driver) and gone(worker), what="driver and worker gone")
    consumer.release()
    assert run.wait() == "success"
    assert run.tries() == ["failed", "success"]
    assert "was killed by SIGKILL" in run.log(try_number=1)
    assert consumer.rows() == list(range(RECORDS))
    assert consumer.attempts() == [("FAILED", 1, "DriverDied"), ("COMMITTED", 2, None)]
    loaded = "airflow.tidemark.driver-killed.consume.loaded"
    until(lambda: lab.statsd.counters[loaded] == RECORDS, what="it counts what the failed try had committed, too")


def test_task_marked_failed_leaves_no_driver_and_the_next_run_validates_and_announces_its_rows(lab):
    """A user marks the running task as failed. The driver ends with the next heartbeat, and its attempt is over."""
    consumer, run, driver = half_read(lab, "marked-failed")
    worker = consumer.brakes[-1].reached().process  # it outlives its driver for a moment, and could still commit if it were released
    run.mark("failed")
    until(lambda: gone(driver) and gone(worker), what="driver and worker gone")
    assert run.wait() == "failed"
    assert run.tasks()["validate"] == "upstream_failed"
    assert consumer.rows() == list(range(BATCH))
    until(lambda: [attempt[0] for attempt in consumer.attempts()] == ["FAILED"], what="the attempt is over")
    assert consumer.validated() == []
    consumer.release()
    later = consumer.trigger()
    assert later.wait() == "success"
    assert consumer.validated() == list(range(RECORDS))
    assert "an earlier run had no verdict" in later.log("validate")
    (event,) = lab.client.asset_events(consumer.table)
    assert (event.extra["ranges"], event.extra["counts"]["loaded"]) == ({"marked-failed/0": [[0, RECORDS]]}, RECORDS)
    idle = consumer.trigger()
    assert idle.wait() == "success"
    assert idle.tasks() == {"consume": "success", "validate": "skipped", "publish": "skipped"}  # because the event is noted


@pytest.mark.thorough
def test_task_marked_as_success_commits_no_more_once_its_validation_begins(lab):
    """What it has committed is validated and announced; the next run reads the rest."""
    consumer, run, driver = half_read(lab, "marked-success")
    run.mark("success")
    assert run.wait() == "success"
    consumer.release()
    until(lambda: gone(driver), what="driver gone")
    assert (consumer.rows(), consumer.validated(), consumer.position()) == (list(range(BATCH)), list(range(BATCH)), BATCH)
    assert [attempt[0] for attempt in consumer.attempts()] == ["FAILED"]
    later = consumer.trigger()
    assert later.wait() == "success"
    assert consumer.validated() == list(range(RECORDS))
    ranges = [event.extra["ranges"] for event in lab.client.asset_events(consumer.table)]
    assert ranges == [{"marked-success/0": [[0, BATCH]]}, {"marked-success/0": [[BATCH, RECORDS]]}]


def test_task_that_takes_too_long_leaves_no_driver(lab, ended):
    """execution_timeout ends the driver with the task, and the attempt's row says why."""
    consumer = lab.consumer("timed-out")
    mark = consumer.brakes[0].reached()
    assert ended["timed-out"].tasks()["consume"] == "failed"
    until(lambda: lab.driver(mark.attempt_id) is None, what="driver gone")
    assert consumer.attempts() == [("FAILED", 1, "AirflowTaskTimeout")]
    assert consumer.rows() == []


# Data and configuration errors


def test_critical_verdict_stops_the_asset_event_and_hides_the_rows(lab, ended):
    """The rows are committed and stay. The task ``validate`` fails without a retry, ``publish`` does not run, and the validated view is
    empty. If the consumer's file says so, the rows are removed, and the group is back at its old position."""
    kept, taken_back = lab.consumer("critical"), lab.consumer("taken-back")
    for consumer in (kept, taken_back):
        run = ended[consumer.name]
        assert run.tasks() == {"consume": "success", "validate": "failed", "publish": "upstream_failed"}
        assert run.tries("validate") == ["failed"]
        assert "is critical; nothing is published" in run.log("validate")
        assert lab.client.asset_events(consumer.table) == []
    assert kept.rows() == [1, 2, 3_000_000]
    assert kept.validated() == []
    assert "on_failure: rewind: rewind" in ended["taken-back"].log("validate")
    assert (taken_back.rows(), taken_back.position()) == ([], 0)


def test_warning_is_reported_and_published(lab, ended):
    """Nothing is blocked: the event says that there is a warning, and the log says which."""
    run, consumer = ended["warning"], lab.consumer("warning")
    assert run.tasks() == ALL_WELL
    assert "FAIL 2 [warning]" in run.log("validate")
    assert [event.extra["verdict"] for event in lab.client.asset_events(consumer.table)] == ["warning"]
    assert consumer.validated() == [1, -2, 3]


def test_file_with_a_problem_fails_at_once_with_its_text(lab, ended):
    """The log has place, problem and fix, and the task is not retried. Airflow's home page shows the same text as an import error, which
    hides no DAG."""

    def shown() -> list[dict[str, str]]:
        return [error for error in lab.client.get("importErrors")["import_errors"] if error["filename"].endswith("broken_consumers.py")]

    (error,) = until(shown, "the import error is shown")
    assert 'unknown key "batches"; did you mean "batch"?' in error["stack_trace"]
    assert {"consume__bad", "consume__happy"} <= {dag["dag_id"] for dag in lab.client.get("dags", dag_id_pattern="consume__")["dags"]}
    assert ended["bad"].tries() == ["failed"]
    assert 'unknown key "batches"; did you mean "batch"?' in ended["bad"].log()


def test_missing_connection_fails_at_once_with_its_name(ended):
    """A retry would not create it. The message says what to add and where."""
    assert ended["nowhere"].tries() == ["failed"]
    assert "connection no_such_connection: not found in Airflow; nowhere uses it for postgres" in ended["nowhere"].log()
    assert "Admin > Connections" in ended["nowhere"].log()


def health(lab: Lab, name: str) -> tuple[str, str]:
    """What the page says of a consumer, and why."""
    url = f"{lab.airflow.url}/tidemark/api/groups/{name}"
    answer = httpx.get(url, cookies={"_token": lab.client.token()}, trust_env=False, timeout=60)
    assert answer.status_code == 200, answer.text
    summary = answer.json()["summary"]
    return summary["health"], summary["why"]


def test_page_says_that_a_run_failed_before_it_began_or_waits_for_what_never_comes(lab, ended):
    """Tidemark's own tables have nothing of such runs."""
    run = ended["no-broker"]
    assert health(lab, "no-broker") == ("run failed", f"The run {run.run_id} of the DAG {run.dag} failed before it read anything.")
    waiting = lab.consumer("no-pool").trigger()
    why = "A run of the DAG consume__no-pool waits for the pool no_such_pool, which does not exist."
    until(lambda: health(lab, "no-pool") == ("stopped", why), what="the page names the pool")
    lab.client.patch(f"dags/{waiting.dag}/dagRuns/{quote(waiting.run_id)}", {"state": "failed"})

"""The DAGs of consumer files, as Airflow reads them."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support import dag_reader

from tidemark import project
from tidemark.connections import Connections

DAGS = project.root() / "dags"
FILES = sorted(path.name for path in DAGS.glob("*.py"))

FULL = """
description: Flights that left.
group: flights-group
topics: [flights, flights-late]
transform: flights:transform
sink: {table: analytics.flights}
batch: {max_records: 1234}
schedule: "*/5 * * * *"
offset_reset: latest
retry: {delays: [5m, 1h], order: key}
validation: {suite: flights, on_failure: report}
rewind: {own: false}
airflow: {owner: ann, tags: [lake, gold], retries: 4, retry_delay: 7s, execution_timeout: 20m, pool: loaders}
"""
SMALL = """
topics: [news]
partitions: {news: 0-2}
transform: news:transform
sink: {table: public.news}
"""
BAD = """
topics: [weather]
transform: weather:transform
sink: {table: analytics.weather}
schedule: "*/5 * * *"
asignment: [range]
"""

IMPORTED = """
import socket, sys

def refuse(*_):
    raise AssertionError("a socket was connected while a DAG file was read")

import airflow.sdk
socket.socket.connect = socket.socket.connect_ex = refuse
for source in sys.argv[1:]:
    exec(compile(open(source).read(), source, "exec"), {"__name__": "read", "__file__": source})
heavy = {"pyspark", "great_expectations", "confluent_kafka", "pandas", "pyarrow", "psycopg2", "numpy", "yoyo"}
print(sorted({name.partition(".")[0] for name in sys.modules} & heavy))
"""


def environment(home: Path) -> dict[str, str]:
    """An Airflow whose home is this folder. Its connections lead nowhere."""
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith(("AIRFLOW", "TIDEMARK"))},
        **Connections("postgresql://l:p@127.0.0.1:9/x", {"bootstrap.servers": "127.0.0.1:9"}).env(),
        "AIRFLOW_HOME": str(home),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "AIRFLOW__CORE__DAGS_FOLDER": str(DAGS),
        "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": f"sqlite:///{home}/airflow.db",
    }


@contextlib.contextmanager
def dag_processor(home: Path, hash_seed: int) -> Iterator[Callable[..., dict[str, Any]]]:
    """Reads a DAG file for a folder of consumers and returns what Airflow found. The order of sets depends on the seed."""
    command = [sys.executable, "-P", dag_reader.__file__]
    env = {**environment(home), "PYTHONHASHSEED": str(hash_seed)}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env, cwd=home) as reader:
        assert reader.stdin is not None
        assert reader.stdout is not None
        requests, answers = reader.stdin, reader.stdout

        def run(folder: Path, file: str = "consume.py", task_of: str | None = None, **env: str) -> dict[str, Any]:
            context = {"_AIRFLOW_PARSING_CONTEXT_DAG_ID": task_of} if task_of else {}  # as when Airflow runs a task of this DAG
            request = {"source": str(DAGS / file), "env": {"TIDEMARK_CONSUMERS": str(folder), **context, **env}}
            print(json.dumps(request), file=requests, flush=True)
            answer = json.loads(answers.readline())
            assert "found" in answer, answer["raised"]
            found: dict[str, Any] = answer["found"]
            return found

        yield run


@pytest.fixture(scope="module")
def read(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., dict[str, Any]]]:
    with dag_processor(tmp_path_factory.mktemp("airflow"), 1) as run:
        yield run


@pytest.fixture(scope="module")
def read_by_another(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., dict[str, Any]]]:
    """A DAG processor with another order of sets."""
    with dag_processor(tmp_path_factory.mktemp("airflow"), 25) as run:  # with 2, the tags have the same order as with 1
        yield run


@pytest.fixture(scope="module")
def facts(read: Callable[..., dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What Airflow finds for a full consumer file, a minimal one and an invalid one."""
    folder = tmp_path_factory.mktemp("consumers")
    (folder / "flights.yaml").write_text(FULL)
    (folder / "news.yaml").write_text(SMALL)
    (folder / "weather.yaml").write_text(BAD)
    return {"folder": folder, **read(folder)}


@pytest.mark.parametrize("file", FILES)
def test_dag_file_of_the_project_is_read_without_errors(read, file):
    """With the project's own consumers, every DAG file yields DAGs and no import error. There are two exceptions: broken_consumers.py has
    no DAGs, and watch.py has one only if there are objectives."""
    found = read(project.root() / "include" / "consumers", file)
    assert found["errors"] == {}
    assert bool(found["dags"]) == (file not in ("broken_consumers.py", "watch.py"))


def test_reading_dag_files_imports_nothing_heavy_and_connects_to_nothing(facts, tmp_path):
    """The DAG processor reads them every few seconds: they load no Spark, Kafka, Postgres or pandas, and connect no socket."""
    command = [sys.executable, "-c", IMPORTED, *(str(DAGS / file) for file in FILES if file != "broken_consumers.py")]
    env = environment(tmp_path) | {"TIDEMARK_CONSUMERS": str(facts["folder"])}
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["[]"]), done.stdout + done.stderr


def test_each_consumer_makes_one_dag_that_says_whose_it_is_and_never_overlaps_itself(facts):
    """Even a file with problems makes one. Tasks have retries; consume and validate have a policy."""
    assert sorted(facts["dags"]) == facts["globals"] == ["consume__flights", "consume__news", "consume__weather"]
    for dag_id in ("consume__flights", "consume__news"):
        dag = facts["dags"][dag_id]
        assert {"tidemark", "consume"} <= set(dag["tags"])
        assert (dag["max_active_runs"], dag["catchup"]) == (1, False)
        assert dag["doc"]
        assert dag["owner"]
        for task in dag["tasks"].values():
            assert task["retries"] > 0
            assert task["doc"]


def test_tasks_are_consume_then_validate_then_publish(facts):
    """Each task runs only if the previous one succeeded. The last one has the sink's asset as outlet: invalid data is not announced."""
    tasks = facts["dags"]["consume__flights"]["tasks"]
    assert {name: (task["kind"], task["upstream"], task["outlets"]) for name, task in tasks.items()} == {
        "consume": ("ConsumeOperator", [], []),
        "validate": ("ValidateOperator", ["consume"], []),
        "publish": ("PublishOperator", ["validate"], ["analytics.flights"]),
    }
    assert {task["rule"] for task in tasks.values()} == {"all_success"}


def test_each_table_of_a_consumer_is_an_asset(read, tmp_path):
    """The last task announces them all, and the documentation names them."""
    sinks = "sinks: {a: {table: public.news}, b: {table: public.words}}"
    (tmp_path / "news.yaml").write_text(SMALL.replace("sink: {table: public.news}", sinks))
    dag = read(tmp_path)["dags"]["consume__news"]
    assert dag["tasks"]["publish"]["outlets"] == ["public.news", "public.words"]
    assert "| Loads into | `public.news`, `public.words`, offsets" in dag["doc"]


def test_schedule_has_the_zone_of_the_file_or_airflows(read, tmp_path):
    """The DAG's page names it."""
    (tmp_path / "here.yaml").write_text(SMALL + "schedule: '0 2 * * *'\ntimezone: Asia/Tokyo\n")
    (tmp_path / "there.yaml").write_text(SMALL + "schedule: '0 2 * * *'\n")
    dags = read(tmp_path)["dags"]
    assert [(dags[f"consume__{name}"]["zone"]) for name in ("here", "there")] == ["Asia/Tokyo", "UTC"]
    assert "| Schedule | 0 2 \\* \\* \\* in Asia/Tokyo |" in dags["consume__here"]["doc"]
    assert "| Schedule | 0 2 \\* \\* \\* in UTC |" in dags["consume__there"]["doc"]


def test_settings_of_the_file_arrive_at_the_dag_and_its_tasks(facts):
    """The timeout applies to the consume task only. Airflow's backfill is off: a run reads what the topics contain now. Airflow's search
    matches the start of the display name. Without a schedule in the file, the DAG has none."""
    dag = facts["dags"]["consume__flights"]
    assert (dag["schedule"], dag["description"], dag["owner"]) == ("*/5 * * * *", "Flights that left.", "ann")
    assert dag["tags"] == ["consume", "gold", "lake", "tidemark"]
    assert dag["shown"] == "flights (consume)"
    assert dag["runs"] == ["asset_materialization", "asset_triggered", "manual", "operator_triggered", "scheduled"]
    assert {(task["owner"], task["retries"], task["retry_delay"], task["pool"]) for task in dag["tasks"].values()} == {
        ("ann", 4, 7.0, "loaders")
    }
    assert {name: task["timeout"] for name, task in dag["tasks"].items()} == {"consume": 1200.0, "validate": None, "publish": None}
    assert dag["tasks"]["consume"]["templates"] == {"consumer": "flights"}
    assert facts["dags"]["consume__news"]["schedule"] is None


def test_documentation_tells_what_the_consumer_does(facts):
    """It answers what an operator asks first when a run is red."""
    doc, small = (facts["dags"][f"consume__{name}"]["doc"] for name in ("flights", "news"))
    told = ("Flights that left.", "flights-group", "flights-late", "flights:transform", "analytics.flights", "1,234", "suite `flights`")
    for text in (
        *told,
        "tidemark offsets flights",
        "| Starts at | the latest record |",
        "| Retries | after 5m, 1h, in order per key; run by the DAG `drain_retries` |",
        "on a critical failure: report",
        "| Rewinds | with approval by someone other than the requester |",
    ):
        assert text in doc
    assert "| Retries | none; a record that cannot be loaded fails at once |" in small
    assert "| Rewinds | with approval |" in small
    assert "| Reads | only the partitions `news:0-2`, at most" in small


def test_continuous_consumer_has_a_run_for_each_stretch_of_time_and_one_beside_it_to_take_over(read, tmp_path):
    (tmp_path / "news.yaml").write_text(f"{SMALL}run: continuous\nrun_for: 10m\n")
    dag = read(tmp_path)["dags"]["consume__news"]
    assert (dag["schedule"], dag["max_active_runs"], dag["catchup"]) == ("0:10:00", 2, False)
    assert "back to back, 10m each" in dag["doc"]


def test_drains_run_every_five_minutes_and_when_something_is_due_and_redrives_by_hand(read, tmp_path):
    """Only one run of the drains at a time, whatever the consumers' files say. A failed relay delays nothing, but fails the run. Rows are
    validated before they are announced, separately for each consumer. The trigger that wakes the drains is stored without arguments."""
    (tmp_path / "flights.yaml").write_text(FULL)
    (tmp_path / "weather.yaml").write_text(BAD)
    drains, redrives, discards = (read(tmp_path, f"{name}.py") for name in ("drain_retries", "redrive", "discard"))
    assert "flights: analytics.flights" in json.dumps(redrives["serialized"]), "the form offers the consumers"
    dag = drains["dags"]["drain_retries"]
    assert (dag["max_active_runs"], dag["catchup"]) == (1, False)
    serialized = drains["serialized"]["drain_retries"]["dag"]
    timetable = serialized["timetable"]["__var"]
    assert (timetable["timetable"]["__var"]["expression"], timetable["timetable"]["__var"]["timezone"]) == ("*/5 * * * *", "UTC")
    (asset,) = timetable["asset_condition"]["objects"]
    assert [watcher["trigger"] for watcher in asset["watchers"]] == [
        {"classpath": "tidemark.airflow.triggers.due.DueTrigger", "kwargs": {}}
    ]
    assert {name: (task["kind"], task["upstream"], task["rule"]) for name, task in dag["tasks"].items()} == {
        "relay": ("RelayOperator", [], "all_success"),
        "due": ("DueOperator", ["relay"], "all_done"),
        "drain": ("DrainOperator", ["due"], "all_success"),
        "validate": ("ValidateDrainOperator", ["drain", "due"], "all_done"),
        "publish": ("PublishDrainOperator", ["due", "validate"], "all_success"),
        "done": ("EmptyOperator", ["drain", "publish", "relay"], "none_failed"),
    }
    assert dag["tasks"]["publish"]["outlets"] == ["tidemark_drained"]
    (group,) = (node for _, node in serialized["task_group"]["children"].values() if isinstance(node, dict))
    assert (group["is_mapped"], sorted(group["children"])) == (True, ["drain", "publish", "validate"])
    dag = redrives["dags"]["redrive"]
    assert (dag["schedule"], dag["catchup"]) == (None, False)
    assert {name: task["upstream"] for name, task in dag["tasks"].items()} == {"plan": [], "apply": ["plan"], "drain": ["apply"]}
    dag = discards["dags"]["discard"]
    assert (dag["schedule"], {name: task["upstream"] for name, task in dag["tasks"].items()}) == (None, {"plan": [], "apply": ["plan"]})
    for found in (*drains["dags"].values(), *redrives["dags"].values(), dag):
        assert found["doc"]
        assert {"tidemark", "retries"} <= set(found["tags"])


def test_objectives_of_consumers_are_watched_by_one_dag_with_a_task_for_each(read, tmp_path):
    """The task has its consumer's owner, which callbacks and notifiers use, and no retries. Airflow's limit of failed runs does not apply,
    because it would pause the DAG. Without objectives, the DAG does not exist."""
    (tmp_path / "news.yaml").write_text(SMALL)
    assert read(tmp_path, "watch.py")["dags"] == {}
    (tmp_path / "flights.yaml").write_text(f"{FULL}slo: {{lag: 10m, failed: 1000, freshness: 90m}}\n")
    (tmp_path / "weather.yaml").write_text(f"{BAD}slo: {{lag: 10m}}\n")
    found = read(tmp_path, "watch.py", AIRFLOW__CORE__MAX_CONSECUTIVE_FAILED_DAG_RUNS_PER_DAG="3")
    (dag,) = found["dags"].values()
    assert found["errors"] == {}
    assert (dag["schedule"], dag["max_active_runs"], dag["catchup"]) == ("@continuous", 1, False)
    assert found["serialized"]["watch"]["dag"].get("max_consecutive_failed_dag_runs", 0) == 0
    assert {name: (task["kind"], task["owner"], task["retries"], task["upstream"]) for name, task in dag["tasks"].items()} == {
        "watch": ("WatchOperator", "tidemark", 5, []),
        "objectives__flights": ("ReportOperator", "ann", 0, ["watch"]),
    }
    doc = read(tmp_path)["dags"]["consume__flights"]["doc"]
    assert "| Objectives | lag 10m, freshness 90m, at most 1,000 failed records; watched by the DAG `watch` |" in doc
    assert read(tmp_path, "watch.py", task_of="consume__flights")["dags"] == {}
    assert list(read(tmp_path, "watch.py", task_of="watch")["dags"]) == ["watch"]


def test_task_that_asks_is_the_one_that_acts_and_needs_no_xcom(read, tmp_path):
    """No other task runs between an approval and its action, except for a swap, whose approval is stored with the rewind. The task that
    moves rows emits the asset event."""
    (tmp_path / "flights.yaml").write_text(FULL)
    (rewind,) = read(tmp_path, "rewind.py")["dags"].values()
    assert {name: (task["upstream"], task["outlets"]) for name, task in rewind["tasks"].items()} == {
        "plan": ([], []),
        "apply": (["plan"], ["tidemark_rewound"]),
        "consume": (["apply"], []),
        "verify": (["consume"], []),
        "backfill": (["apply"], []),
        "replay": (["apply"], []),
        "approve": (["replay"], []),
        "swap": (["approve"], ["tidemark_rewound"]),
    }


def test_maintenance_and_drains_begin_by_themselves(read, facts):
    """Neither DAG starts paused: data that nobody removes grows, and due records have to be retried."""
    for file in ("maintain", "drain_retries"):
        assert read(facts["folder"], f"{file}.py")["dags"][file]["paused"] is False


def test_bad_file_makes_a_dag_that_lists_its_problems(facts):
    """Its page shows file, line and fix of every problem. Its tasks fail at once and are not retried."""
    dag = facts["dags"]["consume__weather"]
    assert "weather.yaml:5:11" in dag["doc"]
    assert 'unknown key "asignment"; did you mean "assignment"?' in dag["doc"]
    assert r"\*/5 \* \* \*" in dag["doc"], "Markdown would take the stars away"
    assert dag["doc"].count("weather.yaml:") == 2
    assert (dag["schedule"], dag["max_active_runs"]) == (None, 1)
    assert "bad spec" in dag["tags"]
    assert {name: task["retries"] for name, task in dag["tasks"].items()} == {"consume": 0, "validate": 0, "publish": 0}


BROKEN = {
    "unknown": "sink: {table: a.b}\nasignment: [range]\n",
    "wrong": "sink: {table: a.b}\nmembers: many\n",
    "sinkless": "sink: {table: Not A Table}\n",
    "unclosed": "topics: [weather\n",
}


def test_broken_file_keeps_its_schedule_owner_and_tags(read, tmp_path):
    """A consumer that ran every five minutes keeps its schedule, and each run fails. Without a schedule, its last run would stay green."""
    kept = "schedule: '*/5 * * * *'\nairflow: {owner: ann, tags: [gold], retries: 4}\n"
    for name, text in BROKEN.items():
        (tmp_path / f"{name}.yaml").write_text(text + kept)
    (tmp_path / "news.yaml").write_text(f"{SMALL}run: continuous\nrun_for: 10m\nnonsense: 1\n")
    dags = read(tmp_path)["dags"]
    assert dags.pop("consume__news")["schedule"] == "0:10:00"
    assert sorted(dags) == sorted(f"consume__{name}" for name in BROKEN)
    for dag_id, dag in dags.items():
        assert (dag["schedule"], dag["owner"], dag["tags"]) == ("*/5 * * * *", "ann", ["bad spec", "consume", "gold", "tidemark"])
        assert f"{dag_id.removeprefix('consume__')}.yaml:" in dag["doc"]
        assert {task["retries"] for task in dag["tasks"].values()} == {0}
        assert [task["kind"] for task in dag["tasks"].values()][:2] == ["ConsumeOperator", "ValidateOperator"]


def test_broken_files_are_one_import_error_that_hides_no_dag(read, facts):
    """Airflow's home page counts import errors. The error belongs to a file without DAGs, so every consumer's DAG remains."""
    assert (facts["errors"], len(facts["dags"])) == ({}, 3)
    with pytest.raises(AssertionError) as caught:
        read(facts["folder"], "broken_consumers.py")
    for text in ("weather.yaml:5:11", "weather.yaml:6:1"):
        assert text in str(caught.value)


def test_task_reads_only_its_own_consumer(read, facts):
    """When Airflow runs a task, the DAG file creates only that task's DAG, exactly as the scheduler knows it. Forms then offer no
    choices."""
    for dag_id in ("consume__flights", "consume__weather"):
        found = read(facts["folder"], task_of=dag_id)["serialized"]
        assert found == {dag_id: facts["serialized"][dag_id]}
    for file in ("rewind.py", "redrive.py", "discard.py"):
        assert "flights: " not in json.dumps(read(facts["folder"], file, task_of=file.removesuffix(".py"))["serialized"])


ROLES = {"TIDEMARK_ROLES": "team-orders, analysts"}
FAB = {**ROLES, "AIRFLOW__CORE__AUTH_MANAGER": "airflow.providers.fab.auth_manager.fab_auth_manager.FabAuthManager"}
OWNED = SMALL.replace("news", "orders") + "access: {edit: [team-orders], view: [analysts]}\nslo: {failed: 0}\n"
SHARED = ("rewind", "redrive", "discard", "drain_retries", "maintain", "watch")
GRANTED = {"analysts": {"DAGs": ["can_read"]}, "team-orders": {"DAGs": ["can_edit", "can_read"]}}


def test_consumer_with_access_has_dags_of_its_own_and_leaves_the_others_to_administrators(read, read_by_another, tmp_path):
    """Its four DAGs list its roles. DAGs for all consumers, and those of consumers without ``access``, list none, so that only roles with
    rights on all DAGs can use them. The serialized form is the same each time, although roles and permissions are sets."""
    (tmp_path / "orders.yaml").write_text(OWNED)
    (tmp_path / "news.yaml").write_text(SMALL)
    (tmp_path / "closed.yaml").write_text(SMALL.replace("news", "closed") + "access: {}\n")
    found = {file: read(tmp_path, f"{file}.py", **FAB) for file in ("consume", *SHARED)}
    dags = {dag_id: dag for each in found.values() for dag_id, dag in each["dags"].items()}
    assert {dag_id: dag["access"] for dag_id, dag in dags.items()} == {
        **dict.fromkeys(("consume__orders", "rewind__orders", "redrive__orders", "discard__orders"), GRANTED),
        **{dag_id: {} for dag_id in ("consume__closed", "rewind__closed", "redrive__closed", "discard__closed")},
        **{dag_id: {} for dag_id in ("consume__news", *SHARED)},
    }
    assert "edit: team-orders; view: analysts" in dags["consume__orders"]["doc"]
    for kind, field in (("rewind", "consumers"), ("redrive", "consumer"), ("discard", "consumer")):
        assert set(dags[kind]["params"]) - set(dags[f"{kind}__orders"]["params"]) == {field}
        assert dags[f"{kind}__orders"]["shown"] == f"orders ({kind})"
        assert read_by_another(tmp_path, f"{kind}.py", **FAB)["serialized"] == found[kind]["serialized"]
        for dag_id in (kind, f"{kind}__orders"):
            assert list(read(tmp_path, f"{kind}.py", task_of=dag_id)["dags"]) == [dag_id]


def test_without_access_airflows_permissions_stay_as_they_are(read, facts):
    """The access is None. An empty mapping would revoke what an administrator has granted for a DAG."""
    assert [dag["access"] for dag in facts["dags"].values()] == [None] * 3
    for file in ("rewind", "redrive", "discard", "drain_retries", "maintain"):
        assert [(dag_id, dag["access"]) for dag_id, dag in read(facts["folder"], f"{file}.py", **FAB)["dags"].items()] == [(file, None)]


@pytest.mark.parametrize(
    ("env", "said"),
    [
        ({"AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_USERS": "root:admin,ann:user"}, "SimpleAuthManager ignores the access of single DAGs"),
        ({"AIRFLOW__CORE__AUTH_MANAGER": "company.auth.OtherAuthManager"}, "OtherAuthManager ignores the access of single DAGs"),
        ({**FAB, "TIDEMARK_ROLES": "analysts"}, r'"team-orders" is not in TIDEMARK_ROLES'),
        ({**FAB, "TIDEMARK_ROLES": ""}, r'"analysts" is not in TIDEMARK_ROLES'),
    ],
)
def test_access_that_cannot_be_in_force_is_an_import_error_and_leaves_the_dags_to_administrators(read, tmp_path, env, said):
    """The consumer still loads. Its teams have no access until the problem is fixed; its page and Airflow's home page say why."""
    (tmp_path / "orders.yaml").write_text(OWNED)
    dag = read(tmp_path, **env)["dags"]["consume__orders"]
    assert dag["access"] == {}
    assert "bad access" in dag["tags"]
    assert {task["retries"] for task in dag["tasks"].values()} == {5}
    assert said.replace("_", r"\_") in dag["doc"]
    with pytest.raises(AssertionError) as caught:
        read(tmp_path, "broken_consumers.py", **env)
    assert "orders.yaml:6:" in str(caught.value)
    assert said in str(caught.value)


EVERYBODY = {"AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_ALL_ADMINS": "True", "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_USERS": "ann:user"}


@pytest.mark.parametrize("env", [FAB, {}, EVERYBODY])
def test_access_is_in_force_with_fab_and_where_everybody_is_an_administrator(read, tmp_path, env):
    """In the local Airflow, the only user is an administrator, so a project with teams runs there unchanged."""
    (tmp_path / "orders.yaml").write_text(OWNED)
    assert read(tmp_path, "broken_consumers.py", **{**ROLES, **env})["errors"] == {}


def test_file_that_cannot_name_a_dag_does_not_hide_the_others(read, tmp_path):
    """It gets a DAG of its own, which shows the problem."""
    (tmp_path / "news.yaml").write_text(SMALL)
    for number, name in enumerate(("two words", "ümläut & co", "x" * 246, "a;b", "{{ ds }}", "-")):
        (tmp_path / f"{name}.yaml").write_text(f"group: g{number}\n{SMALL}")
    found = read(tmp_path)
    assert (found["errors"], len(found["dags"])) == ({}, 7)
    assert "bad spec" not in found["dags"]["consume__news"]["tags"]


def test_two_files_that_claim_one_group_are_both_refused(read, tmp_path):
    """Neither runs, because it is unclear which one was meant. Each DAG says so."""
    for name in ("a", "b"):
        (tmp_path / f"{name}.yaml").write_text(f"group: same\n{SMALL}")
    found = read(tmp_path)
    assert {dag_id: "is also claimed by" in dag["doc"] for dag_id, dag in found["dags"].items()} == {"consume__a": True, "consume__b": True}


def test_missing_folder_of_consumers_is_an_import_error_with_its_name(read, tmp_path):
    """A missing folder must not look like a project without consumers."""
    with pytest.raises(AssertionError, match=r"there is no folder of consumers: .*nowhere"):
        read(tmp_path / "nowhere")


def test_reading_twice_gives_the_same_dags(read_by_another, facts, tmp_path):
    """Airflow stores a new version of a DAG whenever its serialized form changes, so the same files must always give the same form."""
    for name, text in (("weather", BAD), ("news", SMALL), ("flights", FULL)):
        (tmp_path / f"{name}.yaml").write_text(text)
    again = read_by_another(tmp_path)["serialized"]
    assert len(again) == 3
    for dag_id in ("consume__flights", "consume__news"):  # the third one's text contains the name of its folder
        assert again[dag_id] == facts["serialized"][dag_id]


def test_ruffs_airflow_rules_find_nothing():
    """All rules, including those in preview."""
    folders = [str(DAGS), str(project.root() / "include" / "tidemark" / "airflow")]
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--preview", "--select", "AIR", *folders]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_airflow_finds_nothing_unstable_in_dag_files(tmp_path, monkeypatch):
    """No value differs from one parse to the next. This is Airflow's own check, which the DAG processor runs."""
    monkeypatch.setenv("AIRFLOW_HOME", str(tmp_path / "airflow"))
    from airflow.utils.dag_version_inflation_checker import check_dag_file_stability

    assert [str(warning) for file in FILES for warning in check_dag_file_stability(str(DAGS / file)).warnings] == []

"""The command line from a user's point of view: what it prints where, its exit status, and its output for programs."""

from __future__ import annotations

import json
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import psycopg2
import pytest
from tests.support.scenario import ARROW, SPARK, Scenario
from tests.support.shell import tidemark
from tests.support.waiting import until

from tidemark import migrations, project
from tidemark.author import check
from tidemark.errors import BadInput
from tidemark.local import LocalStack

CITIES = """
    from typing import TypedDict

    from tidemark.transform import Record


    class City(TypedDict):
        city: str
        population: int | None


    def transform(record: Record) -> City | None:
        return record.json()
"""


@pytest.fixture
def blank(stack: LocalStack, scenario: Scenario) -> Scenario:
    """A scenario whose database was never migrated."""
    scenario.sql("DROP SCHEMA tidemark, tidemark_staging, tidemark_archive CASCADE")
    return scenario


def applied(scenario: Scenario) -> list[str]:
    return [name for (name,) in scenario.sql("SELECT migration_id FROM tidemark.migration ORDER BY 1")]


def as_json(done: subprocess.CompletedProcess[str]) -> Any:
    return json.loads(done.stdout)


# ---- migrate


def test_migrate_brings_a_database_up_to_date_and_then_has_nothing_to_do(blank: Scenario) -> None:
    """Each applied migration is a line on stderr; the second time, nothing changes."""
    first = blank.command("migrate")
    assert (first.returncode, first.stdout) == (0, "")
    assert first.stderr.splitlines() == [f"applied {name}" for name in migrations.known()]
    assert applied(blank) == migrations.known()
    second = tidemark(blank, "migrate")
    assert (second.returncode, second.stderr) == (0, "nothing to apply: the database is current\n")


def test_migrations_at_once_take_turns(blank: Scenario) -> None:
    """The others find nothing left to do."""
    with ThreadPoolExecutor(3) as pool:
        assert sorted(pool.map(migrations.migrate, [blank.database_url] * 3)) == [[], [], migrations.known()]


def test_migrate_leaves_a_newer_database_alone(scenario: Scenario) -> None:
    """A database with migrations that this version does not know is refused, and the error names them. No run writes to it."""
    scenario.sql("UPDATE tidemark.migration SET migration_id = '9999_future' WHERE migration_id = %s", migrations.known()[0])
    done = tidemark(scenario, "migrate")
    assert done.returncode == 1
    assert done.stderr == (
        "The database was migrated by another version of Tidemark: this one does not know 9999_future. "
        "Nothing was changed; use the version that migrated it, or a newer one.\n"
    )
    assert "9999_future" in applied(scenario)
    with pytest.raises(migrations.SchemaMismatch, match="9999_future"):
        scenario.write(topics=scenario.topics.create()).run()


@pytest.mark.parametrize("left", ["some migrations", "only the schema", "only the bookkeeping"])
def test_migration_that_was_killed_half_way_is_gone_on_with(
    blank: Scenario, left: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever a killed process leaves behind does not stop the next one."""
    if left == "only the schema":
        blank.sql("CREATE SCHEMA tidemark")
    else:
        some = [file for file in project.migrations().glob("*.sql") if file.name < "0008"]  # 0008 adds roles
        (tmp_path / "0000_nothing.sql").write_text("SELECT 1")
        for file in some if left == "some migrations" else []:
            (tmp_path / file.name).write_text(file.read_text())
        with monkeypatch.context() as patch:
            patch.setattr(project, "migrations", lambda: tmp_path)
            with pytest.raises(psycopg2.errors.UndefinedTable):  # the grants that follow need a later table
                migrations.migrate(blank.database_url)
        blank.sql("DELETE FROM tidemark.migration WHERE migration_id = '0000_nothing'")
    assert migrations.migrate(blank.database_url)
    assert applied(blank) == migrations.known()


def test_migration_that_fails_leaves_nothing_of_itself_and_says_why(
    blank: Scenario, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The migrations before it stay. The error has Postgres' reason instead of a traceback."""
    for file in project.migrations().glob("*.sql"):
        (tmp_path / file.name).write_text(file.read_text())
    (tmp_path / "9000_bad.sql").write_text("CREATE TABLE tidemark.half (id int); SELECT no_such_function();")
    with monkeypatch.context() as patch:
        patch.setattr(project, "migrations", lambda: tmp_path)
        with pytest.raises(migrations.MigrationFailed, match=r"Migration 9000_bad failed: .*no_such_function"):
            migrations.migrate(blank.database_url)
    assert applied(blank) == migrations.known()
    assert blank.sql("SELECT to_regclass('tidemark.half')") == [(None,)]
    assert migrations.migrate(blank.database_url) == []


def test_migrate_without_migrations_is_refused(blank: Scenario, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It must not report that the database is current."""
    monkeypatch.setattr(project, "migrations", lambda: tmp_path)
    with pytest.raises(BadInput, match=f"{tmp_path} has none"):
        migrations.migrate(blank.database_url)


def test_migration_is_stored_with_its_bookkeeping_or_not_at_all(blank: Scenario, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of a migration stays if the process ends between its last statement and its bookkeeping."""

    def end(*_arguments: object, **_options: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("yoyo.backends.core.postgresql.PostgresqlBackend.mark_one", end)
        with pytest.raises(KeyboardInterrupt):
            migrations.migrate(blank.database_url)
    assert migrations.migrate(blank.database_url) == migrations.known()


def test_commands_on_a_database_that_was_never_migrated_name_the_command_that_does_it(blank: Scenario) -> None:
    blank.write(CITIES, topics=blank.topics.create())
    for command in (("consume",), ("offsets",), ("consumers", "check")):
        done = tidemark(blank, *command, blank.name)
        assert done.returncode == 1
        assert "Run: tidemark migrate" in done.stdout + done.stderr


# ---- consumers check


def test_check_of_a_good_consumer_says_what_it_found(scenario: Scenario) -> None:
    """It prints the transform and its form, the columns, and the topics with partitions and retention; exit status 0."""
    one, two = scenario.topics.create(3), scenario.topics.create(1, retention_ms=str(36 * 3600 * 1000))
    scenario.write(CITIES, topics=[one, two]).make_sink()
    done = tidemark(scenario, "consumers", "check", scenario.name)
    assert done.stderr == ""
    assert done.stdout == (
        f"{scenario.name}  {scenario.spec_file}\n"
        f"  transform  {scenario.name}:transform, function form\n"
        f"  sink       {scenario.table} takes city, population\n"
        f"  topic      {one}: 3 partitions, kept permanently\n"
        f"  topic      {two}: 1 partition, kept for 36h\n"
        "ok\n"
    )
    assert done.returncode == 0


def test_check_of_a_bad_file_shows_every_problem_with_its_line_and_the_fix(scenario: Scenario) -> None:
    """On stdout, with exit status 1; tests/unit/spec/test_problems.py covers the problems."""
    scenario.spec_file.write_text("topics: [flights]\ntransform: cities\nsink: {table: a.b.c}\n")
    done = tidemark(scenario, "consumers", "check", scenario.name)
    assert done.stdout == (
        f'{scenario.spec_file}:2:12: transform is not module:function: "cities"\n'
        "    2 | transform: cities\n"
        "      |            ^^^^^^ write module:function\n"
        f'{scenario.spec_file}:3:15: sink.table is not a table\'s name: "a.b.c"\n'
        "    3 | sink: {table: a.b.c}\n"
        "      |               ^^^^^ write schema.table; the connection says which database\n"
        f"2 problems; {scenario.name} was not loaded\n"
    )
    assert (done.returncode, done.stderr) == (1, "")


def test_check_finds_all_that_is_wrong_with_what_the_file_names(scenario: Scenario) -> None:
    """Topics, suite and sink are all checked even if one of them is wrong; the missing DDL is printed completely."""
    scenario.write(CITIES, topics=[scenario.topics.create(), "no-such-topic"], validation={"suite": "no-such-suite"})
    done = tidemark(scenario, "consumers", "check", scenario.name)
    assert done.returncode == 1
    assert f'{scenario.spec_file}:8:3: topic "no-such-topic" not found on {scenario.topics.servers}' in done.stdout
    assert 'suite "no-such-suite" not found' in done.stdout
    assert f"{scenario.spec_file}:3:10: Table {scenario.table} does not exist." in done.stdout
    assert f'CREATE TABLE "lake"."{scenario.name}" (' in done.stdout
    assert done.stdout.endswith("not ready\n")


def test_check_prints_the_ddl_of_missing_columns(scenario: Scenario) -> None:
    """It shows both schemas and the statement that fixes the table; after that, the consumer is ready."""
    scenario.write(CITIES, topics=scenario.topics.create()).make_sink("city text")
    done = tidemark(scenario, "consumers", "check", scenario.name)
    alter = f'ALTER TABLE "lake"."{scenario.name}" ADD COLUMN "population" bigint;'
    assert done.returncode == 1
    assert done.stdout.splitlines()[3].startswith(f"{scenario.spec_file}:3:10: The output does not fit {scenario.table}:")
    assert "  - the table has no column population\n" in done.stdout
    assert "the output has: city string, population int64, kafka_topic string, kafka_partition int32, kafka_offset int64\n" in done.stdout
    assert "the table has:  city text, kafka_topic_id smallint" in done.stdout
    assert alter in done.stdout.splitlines()
    scenario.sql(alter)
    assert tidemark(scenario, "consumers", "check", scenario.name).returncode == 0


def test_check_for_programs_is_one_document(scenario: Scenario) -> None:
    """It lists all consumers, good and bad, with the same keys, and nothing else is on stdout."""
    topic = scenario.topics.create(2)
    scenario.write(CITIES, topics=topic).make_sink()
    (scenario.folder / "consumers" / "bad.yaml").write_text("topics: []\n")
    done = tidemark(scenario, "consumers", "check", "--output", "json")
    bad, good = sorted(as_json(done), key=lambda one: one["consumer"] != "bad")
    assert done.returncode == 1
    assert good == {
        "consumer": scenario.name,
        "ok": True,
        "form": "function",
        "sinks": [{"table": scenario.table, "columns": ["city", "population"]}],
        "topics": [{"name": topic, "partitions": 2, "retention_s": None, "compacted": False}],
        "expectations": None,
        "problems": [],
        "errors": [],
        "notes": [],
        "ddl": None,
    }
    assert bad["ok"] is False
    assert {problem["line"] for problem in bad["problems"]} >= {1}
    assert all(set(problem) == {"file", "line", "column", "message", "fix"} for problem in bad["problems"])


def test_check_without_services_checks_what_it_can_and_says_what_it_could_not(scenario: Scenario) -> None:
    """Without a database or a broker, as on a laptop or in CI, it still reports what is wrong with the file and the transform."""
    scenario.write(CITIES, topics="cities")
    done = tidemark(scenario, "consumers", "check", env={"TIDEMARK_DATABASE_URL": "", "TIDEMARK_KAFKA_BOOTSTRAP_SERVERS": ""})
    assert done.stdout.splitlines()[2:] == [
        f"  sink       {scenario.table} takes city, population",
        "  note       sink not compared: TIDEMARK_DATABASE_URL is not set",
        "  note       topics not looked up: TIDEMARK_KAFKA_BOOTSTRAP_SERVERS is not set",
        "ok",
    ]
    assert done.returncode == 0


def test_check_notes_a_transform_that_takes_long_to_import(scenario: Scenario, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "SLOW_IMPORT_S", 0.1)
    scenario.write(f"    import time\n\n    time.sleep(0.2)\n{CITIES}", topics="cities")
    done = tidemark(scenario, "consumers", "check", env={"TIDEMARK_DATABASE_URL": "", "TIDEMARK_KAFKA_BOOTSTRAP_SERVERS": ""})
    assert re.search("^  note       importing the transform took [0-9]+ s: in the shared Spark application each", done.stdout, re.MULTILINE)
    assert done.returncode == 0


def test_check_of_a_folder_without_consumers_says_so(scenario: Scenario) -> None:
    """Having nothing to check is not an error."""
    done = tidemark(scenario, "consumers", "check")
    assert (done.returncode, done.stdout) == (0, f"no consumers in {scenario.folder}/consumers\n")


def test_sink_that_is_a_view_is_refused_with_advice_that_can_work(scenario: Scenario) -> None:
    """A view cannot have a unique index, so ALTER TABLE would be bad advice."""
    scenario.write(CITIES, topics=scenario.topics.create()).make_sink()
    scenario.sql(f"ALTER TABLE {scenario.table} RENAME TO {scenario.name}_behind")
    scenario.sql(f"DROP VIEW IF EXISTS {scenario.table}_validated; CREATE VIEW {scenario.table} AS TABLE {scenario.table}_behind")
    done = tidemark(scenario, "consumers", "check", scenario.name)
    assert done.returncode == 1
    assert f"{scenario.table} is a view, which cannot have the unique index" in done.stdout
    assert "ALTER TABLE" not in done.stdout


# ---- sink ddl


@pytest.mark.parametrize("transform", [CITIES, ARROW, pytest.param(SPARK, marks=pytest.mark.thorough)], ids=["function", "arrow", "spark"])
def test_printed_ddl_is_all_that_a_consumer_lacks(scenario: Scenario, transform: str) -> None:
    """stdout has only SQL, so it can be piped into psql; running it once makes the consumer ready."""
    scenario.write(transform, topics=scenario.topics.create())
    in_its_own_process = scenario.command if transform is SPARK else partial(tidemark, scenario)  # because it starts a JVM
    ddl = in_its_own_process("sink", "ddl", scenario.name)
    assert ddl.returncode == 0
    assert ddl.stdout.startswith("CREATE SCHEMA")
    scenario.sql(ddl.stdout)
    checked = in_its_own_process("consumers", "check", scenario.name)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_ddl_of_a_function_that_does_not_say_its_columns_says_how_to(scenario: Scenario) -> None:
    """What a plain function returns cannot be known, so the error shows what to write."""
    scenario.write("from tidemark.transform import Record\n\ndef transform(record: Record) -> dict:\n    return {}\n", topics="t")
    done = tidemark(scenario, "sink", "ddl", scenario.name)
    assert (done.returncode, done.stdout) == (1, "")
    assert "class Row(TypedDict):" in done.stderr


# ---- consume and offsets


def test_run_and_offsets_as_a_person_sees_them(scenario: Scenario) -> None:
    """The run ends with a table of a row per partition and totals that fits a terminal; `offsets` shows the positions. Progress is not on
    stdout."""
    topic = scenario.topics.create(3, name=f"cities-{scenario.name}")
    scenario.topics.produce(topic, ['{"city": "Ulm", "population": 1}', "no json", "null"])
    scenario.topics.produce(topic, ['{"city": "Rom"}'] * 1234, partition=2)
    scenario.write(CITIES, topics=topic, group="cities").make_sink()
    before = scenario.command("offsets", scenario.name, wide=False)
    assert next(line.split()[:4] for line in before.stdout.splitlines() if topic in line) == [f"{topic}/0", "-", "3", "-"]
    done = scenario.command("consume", scenario.name, wide=False)
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines() if "/" in line or "total" in line]
    assert rows == [
        [f"{topic}/0", "0", "3", "1", "1", "1", "0", "0", "1"],
        [f"{topic}/2", "0", "1,234", "1,234", "0", "0", "0", "0", "1,234"],
        ["total", "1,235", "1", "1", "0", "0", "1,235"],
    ]
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert scenario.name in done.stderr
    again = scenario.command("consume", scenario.name)
    assert (again.returncode, again.stdout) == (0, "cities: nothing to read\n")
    after = tidemark(scenario, "offsets", scenario.name)
    rows = [line.replace("0 s", "0s").split()[:8] for line in after.stdout.splitlines() if topic in line]
    assert rows == [
        [f"{topic}/0", "3", "3", "0", "0s", "0", "-", "2"],
        [f"{topic}/1", "0", "0", "0", "0s", "0", "-", "2"],
        [f"{topic}/2", "1,234", "1,234", "0", "0s", "0", "-", "2"],
    ]
    seen = as_json(tidemark(scenario, "offsets", scenario.name, "--output", "json"))
    assert (seen["group"], seen["lag_records"]) == ("cities", 0)
    assert seen["partitions"][2] | {"committed_at": None} == {
        "topic": topic, "partition": 2, "position": 1234, "end": 1234, "lag_records": 0, "validated": 0, "owner": None, "epoch": 2,
        "committed_at": None, "truncated": False, "replaying_until": None, "seconds": 0.0, "health": "idle",
    }  # fmt: skip
    assert seen["partitions"][2]["committed_at"]
    scenario.check()


@pytest.mark.thorough
def test_run_that_a_newer_one_has_taken_over_from_says_that_there_is_nothing_to_do(scenario: Scenario) -> None:
    """The message does not mention epochs. The exit status is 1 because the records may not be loaded yet, so a script that needs them must
    stop."""
    topic = scenario.topics.create()
    scenario.topics.produce(topic, [str(number) for number in range(200)])
    scenario.write(topics=topic, batch={"max_records": 1}).make_sink()
    with ThreadPoolExecutor(1) as pool:
        older = pool.submit(scenario.command, "consume", scenario.name)
        until(lambda: scenario.sql("SELECT 1 FROM tidemark.batch LIMIT 1"))
        scenario.set(batch=None)
        scenario.run()
        done = older.result(180)
    assert done.returncode == 1
    message = " ".join(done.stderr.split())
    assert f"A newer run of {scenario.name} has taken over." in message
    assert "There is nothing to do" in message
    assert "epoch" not in message
    assert "generation" not in message
    scenario.check()


def test_lag_of_a_consumer_that_never_ran_is_unknown(scenario: Scenario) -> None:
    """Without a position, the lag is not known: the first run may start at the end."""
    topic = scenario.topics.create()
    scenario.topics.produce(topic, ["1"] * 10)
    scenario.topics.trim(topic, {0: 4})
    scenario.write(CITIES, topics=topic)
    seen = as_json(tidemark(scenario, "offsets", scenario.name, "--output", "json"))
    assert (seen["lag_records"], seen["partitions"][0]["lag_records"], seen["partitions"][0]["position"]) == (None, None, None)


@pytest.mark.parametrize("command", [("offsets", "x"), ("retries", "count", "x"), ("rewind", "apply", "99"), ("groups", "delete", "x")])
def test_refusal_of_any_command_is_an_object_for_programs(scenario: Scenario, command: tuple[str, ...]) -> None:
    for spelled in (["--output", "json"], ["--output=json"]):
        done = tidemark(scenario, *command, *spelled)
        assert done.returncode == 1
        assert as_json(done) == {"error": {"type": as_json(done)["error"]["type"], "text": done.stderr.rstrip("\n")}}


def test_results_that_were_only_told_are_there_for_programs(scenario: Scenario) -> None:
    """Results that people read on stderr are JSON on stdout for programs."""
    scenario.write(CITIES, topics=scenario.topics.create(2, name=f"t-{scenario.name}")).make_sink()
    topic = f"t-{scenario.name}"
    target = {"topic": topic, "partition": 1}
    assert as_json(tidemark(scenario, "migrate", "--output", "json")) == {"applied": []}
    assert as_json(tidemark(scenario, "pause", scenario.name, f"{topic}:1", "--output", "json")) == {"paused": [target]}
    assert as_json(tidemark(scenario, "resume", scenario.name, "--output", "json")) == {"resumed": [target], "paused": []}
    assert as_json(tidemark(scenario, "groups", "delete", scenario.name, "--output", "json")) == {"deleted": scenario.name}


def test_validate_fills_the_validated_view_outside_airflow(scenario: Scenario, tmp_path: Path) -> None:
    """Each run without a verdict is validated once. A critical verdict stops the view before the run's rows, and the run is validated
    again."""
    topic = scenario.topics.create(1)
    suite = {"name": "s", "expectations": [_at_least("population", 1)]}
    (tmp_path / "cities.json").write_text(json.dumps(suite))
    scenario.write(CITIES, topics=topic, validation={"suite": "cities"}).make_sink()
    validated = f"SELECT city FROM {scenario.table}_validated ORDER BY 1"
    env = {"TIDEMARK_EXPECTATIONS": str(tmp_path)}
    for city, population in (("Ulm", 1), ("Rom", 2), ("Bad", 0)):
        scenario.topics.produce(topic, [json.dumps({"city": city, "population": population})])
        scenario.run()
        if city == "Ulm":
            continue
        done = tidemark(scenario, "validate", scenario.name, "--output", "json", env=env)
        verdicts = [(one["verdict"], one["counts"]["sink_rows"]) for one in as_json(done)["validations"]]
        assert (done.returncode, verdicts) == ((0, [("passed", 1), ("passed", 1)]) if city == "Rom" else (1, [("critical", 1)]))
        assert scenario.sql(validated) == [("Rom",), ("Ulm",)]
    assert "expect_column_values_to_be_between" in done.stderr
    scenario.sql(f"UPDATE {scenario.table} SET population = 1 WHERE city = 'Bad'")
    assert tidemark(scenario, "validate", scenario.name, env=env).returncode == 0
    assert scenario.sql(validated) == [("Bad",), ("Rom",), ("Ulm",)]
    again = tidemark(scenario, "validate", scenario.name, env=env)
    assert (again.returncode, again.stdout) == (0, f"{scenario.name}: nothing to validate\n")


def _at_least(column: str, value: int) -> dict[str, Any]:
    kwargs = {"column": column, "min_value": value}
    return {"type": "expect_column_values_to_be_between", "kwargs": kwargs, "severity": "critical"}


# ---- wrong usage


NOWHERE = "postgresql://someone:secret@127.0.0.1:9/none"


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("TIDEMARK_DATABASE_URL", "", "TIDEMARK_DATABASE_URL: it is not set."),
        ("TIDEMARK_KAFKA_BOOTSTRAP_SERVERS", "", "TIDEMARK_KAFKA_BOOTSTRAP_SERVERS: it is not set."),
        ("TIDEMARK_DATABASE_URL", NOWHERE, "Postgres cannot be used"),
    ],
)
def test_server_that_is_not_named_or_not_available(scenario: Scenario, variable: str, value: str, message: str) -> None:
    """One sentence and no traceback. For an address that is not set, it names the command that sets all of the embedded stack."""
    scenario.write(CITIES, topics="t")
    for command in (("consume",), ("offsets",), *([("consumers", "check")] if value else [])):
        done = tidemark(scenario, *command, scenario.name, env={variable: value})
        assert done.returncode == 1
        assert message in done.stdout + done.stderr
        assert value or "tidemark local env" in done.stderr
        assert "Traceback" not in done.stderr
        assert "secret" not in done.stdout + done.stderr


REWIND = ("--reason", "the transform was wrong")
WRONG = [
    ("consume",),
    ("offsets",),
    ("no-such-command",),
    ("sink", "ddl", "x", "--partitions", "0"),
    ("consume", "x", "--output", "xml"),
    ("rewind", "plan", "x"),
    ("rewind", "plan", "x", *REWIND),
    ("rewind", "plan", *REWIND, "--to-latest"),
    ("rewind", "plan", "x", *REWIND, "--to-latest", "--to-earliest"),
    ("rewind", "plan", "x", *REWIND, "--to-moon"),
    ("rewind", "undo", "1"),
    ("rewind", "apply"),
    ("rewind", "apply", "0"),
    ("rewind", "show", "one"),
    ("rewind", "list", "--limit", "0"),
    ("seek", "x", "flights", "7", *REWIND),
    ("seek", "x", "flights/0", "-1", *REWIND),
]


def test_wrong_usage_ends_with_status_2_and_says_nothing_on_stdout(scenario: Scenario, subtests: pytest.Subtests) -> None:
    """As every Unix command does."""
    assert scenario.command("consume").returncode == 2
    for arguments in WRONG:
        with subtests.test(" ".join(arguments)):
            done = tidemark(scenario, *arguments)
            assert (done.returncode, done.stdout) == (2, "")
            assert "Usage:" in done.stderr

"""Profiles of database roles: each command works with the profile that it needs, and is refused without it. Only the owner can change the
audit log."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
import random
import re
import shlex
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psycopg2
import pytest
from confluent_kafka import Consumer, TopicPartition
from psycopg2.errors import InsufficientPrivilege
from tests.support import json_output
from tests.support.documented import blocks, grants
from tests.support.fetching import execute
from tests.support.forms import REDRIVEN, REWOUND
from tests.support.kafka_topics import Topics
from tests.support.planted import Trap
from tests.support.roles import Roles, made_roles
from tests.support.scenario import Scenario, tidy_imports
from tests.support.transforms import PICKY
from typer.testing import CliRunner

from tidemark import events, migrations, project
from tidemark import roles as granting
from tidemark.cli.common import who
from tidemark.cli.main import app
from tidemark.connections import DATABASE_URL
from tidemark.db import session, transaction
from tidemark.doctor.database import examine_database
from tidemark.doctor.finding import Finding, Level
from tidemark.errors import BadInput, TidemarkError
from tidemark.group.coordinator import Coordinator
from tidemark.group.requests import JoinRequest
from tidemark.local import LocalStack
from tidemark.profiles import PAYLOADS, RIGHTS, SCHEMAS, TABLES, Profile
from tidemark.roles import NotTheOwner, RoleLacks
from tidemark.sink.staging import make_staging
from tidemark.sink.table import Column, Layout
from tidemark.sink.target import Target

PAGE = (project.root() / "docs" / "security.md").read_text(encoding="utf-8")
WHY = ("--reason", "a test of the roles")
BEFORE_PROFILES = (
    "GRANT USAGE ON SCHEMA tidemark TO {role}",
    "GRANT SELECT, INSERT, UPDATE ON ALL TABLES IN SCHEMA tidemark TO {role}",
    "GRANT USAGE ON ALL SEQUENCES IN SCHEMA tidemark TO {role}",
    "GRANT DELETE ON tidemark.group_member, tidemark.lost_range TO {role}",
    "GRANT CREATE ON SCHEMA tidemark TO {role}",
    "GRANT DELETE ON tidemark.batch, tidemark.failed_record TO {role}",
    "GRANT DELETE ON tidemark.rewound_batch, tidemark.rewound_failed_record, tidemark.rewound_lost_range TO {role}",
    "GRANT DELETE ON tidemark.rewound_row, tidemark.undo_floor TO {role}",
    "ALTER DEFAULT PRIVILEGES FOR ROLE {owner} IN SCHEMA tidemark GRANT SELECT, INSERT, UPDATE ON TABLES TO {role}",
    "ALTER DEFAULT PRIVILEGES FOR ROLE {owner} IN SCHEMA tidemark GRANT USAGE ON SEQUENCES TO {role}",
)
"""The grants that the documentation named before there were profiles."""


def query(roles: Roles, role: str, *statements: str) -> list[tuple[Any, ...]]:
    return execute(roles.url(role), *statements)


def refuse(roles: Roles, role: str, *statements: str, match: str | None = None) -> None:
    for statement in statements:
        with pytest.raises(InsufficientPrivilege, match=match):
            query(roles, role, statement)


def lacking(roles: Roles, role: str, profile: Profile) -> list[str]:
    with session(roles.url(role)) as connection, transaction(connection) as cur:
        return granting.missing(cur, profile)


def held(roles: Roles, role: str) -> list[tuple[Any, ...]]:
    """All grants to this role in the schema."""
    statement = f"""
        WITH lists (name, acl, attname) AS (
            SELECT relname::text, relacl, NULL FROM pg_class WHERE relnamespace = 'tidemark'::regnamespace
            UNION ALL
            SELECT relname, attacl, attname FROM pg_class JOIN pg_attribute ON attrelid = pg_class.oid
             WHERE relnamespace = 'tidemark'::regnamespace
            UNION ALL SELECT nspname, nspacl, NULL FROM pg_namespace
            UNION ALL SELECT 'default', defaclacl, NULL FROM pg_default_acl)
        SELECT name, privilege_type, attname FROM lists, aclexplode(acl) WHERE grantee = '"{role}"'::regrole ORDER BY 1, 2, 3
    """
    return query(roles, roles.owner, statement)


# ---- what each command needs


def _command(words: Sequence[str]) -> str:
    """Returns the noun and the verb, or the only word."""
    nouns = ("erase", "groups", "metrics", "retries", "rewind", "redrive")
    return " ".join(words[:2]) if words[0] in nouns else words[0]


def documented_commands() -> dict[Profile, set[str]]:
    """The commands of each profile, from docs/security.md."""
    table = re.findall(r"^\| `(\w+)` \| ((?:`[a-z -]+`(?:, )?)+) \|$", PAGE, re.MULTILINE)
    return {Profile(profile): set(re.findall(r"`([^`]+)`", commands)) for profile, commands in table}


class Story:
    """One consumer and two roles per profile: one with only this profile, and one with all others."""

    def __init__(self, roles: Roles, folder: Path, topics: Topics, monkeypatch: pytest.MonkeyPatch) -> None:
        self.roles, self._monkeypatch = roles, monkeypatch
        self.commands: dict[Profile, set[str]] = {profile: set() for profile in Profile}
        """The commands that were refused without the profile."""
        self.consumer = Scenario(folder, roles.url(roles.owner), topics)
        self.name, self.table = self.consumer.name, self.consumer.table
        self.topic = topic = topics.create()
        topics.produce(topic, ["a", "bad 1", "bad 2", "bad 3", "b"])
        self.consumer.write(PICKY, topics=topic, retry={"delays": ["1h"]}).make_sink()
        self.only = {profile: roles.new(f"only_{profile}", profile) for profile in Profile}
        self.without = {
            profile: roles.new(f"no_{profile}", *(one for one in Profile if one not in (profile, Profile.READER))) for profile in Profile
        }
        self.without[Profile.READER] = roles.new("nobody")
        for role in roles.all:
            roles.give_sink(role, self.table)
        roles.own(f"GRANT DELETE ON {self.table} TO {self.only[Profile.REWINDER]}")

    def call(self, role: str, *words: str) -> Any:
        for name, value in (self.consumer.env() | {"TIDEMARK_DATABASE_URL": self.roles.url(role)}).items():
            self._monkeypatch.setenv(name, value)
        return CliRunner().invoke(app, list(words))

    def each_command(self) -> Iterator[tuple[Profile, list[str]]]:
        """The commands of `COMMANDS`, each with the profile that it needs."""
        for line in COMMANDS.strip().splitlines():
            profile, _, commands = line.partition(": ")
            yield from ((Profile(profile), self.words(command)) for command in commands.split("; "))

    def words(self, command: str) -> list[str]:
        return shlex.split(command.replace("NAME", self.name).replace("TOPIC", self.topic).replace("WHY", shlex.join(WHY)))

    def do(self, profile: Profile, *words: str) -> str:
        """Checks that the role with all other profiles is refused, and that the role with only this profile succeeds. If the command can
        print JSON, it does, as documented."""
        self.refuse(profile, *words)
        prints_json = _command(words) in json_output.OUTPUTS
        done = self.call(self.only[profile], *words, *(["--output", "json"] if prints_json else []))
        assert done.exit_code == 0, (words, done.output, done.exception)
        if prints_json:
            assert json_output.mismatches(_command(words), done.stdout) == []
        return str(done.stdout)

    def refuse(self, profile: Profile, *words: str) -> None:
        refused = self.call(self.without[profile], *words)
        self.commands[profile].add(_command(words))
        assert refused.exit_code == 1, (words, refused.output)
        if profile is Profile.READER:
            assert isinstance(refused.exception, migrations.SchemaHidden), (words, refused.exception)
        else:
            assert isinstance(refused.exception, RoleLacks), (words, refused.exception)
            assert f"lacks rights of the profile {profile}:" in str(refused.exception)
            assert f"tidemark migrate --grant-to {self.without[profile]} --as {profile} " in str(refused.exception)

    def run(self) -> None:
        """Like `do`, for a run in this process."""
        for roles, outcome in ((self.without, pytest.raises(RoleLacks, match="profile runner")), (self.only, contextlib.nullcontext())):
            self.consumer.database_url = self.roles.url(roles[Profile.RUNNER])
            self.consumer.connections = replace(self.consumer.connections, database_url=self.consumer.database_url)
            with outcome:
                self.consumer.run()


@pytest.fixture
def story(roles: Roles, project_dir: Path, topics: Topics, monkeypatch: pytest.MonkeyPatch) -> Iterator[Story]:
    with tidy_imports():
        yield Story(roles, project_dir, topics, monkeypatch)


COLUMNS = "SELECT table_name::text, column_name::text FROM information_schema.columns WHERE table_schema = 'tidemark'"
HELD = """
    SELECT privilege, relname::text, attname::text
      FROM pg_class JOIN pg_attribute ON attrelid = pg_class.oid, unnest(ARRAY['SELECT', 'INSERT', 'UPDATE', 'REFERENCES']) privilege
     WHERE relnamespace = 'tidemark'::regnamespace AND relkind = 'r' AND attnum > 0 AND NOT attisdropped
       AND has_column_privilege(pg_class.oid, attnum, privilege)
    UNION ALL
    SELECT privilege, relname, '' FROM pg_class, unnest(ARRAY['DELETE', 'TRUNCATE', 'TRIGGER']) privilege
     WHERE relnamespace = 'tidemark'::regnamespace AND relkind = 'r' AND has_table_privilege(oid, privilege)
    UNION ALL
    SELECT privilege, relname, '' FROM pg_class, unnest(ARRAY['USAGE', 'SELECT', 'UPDATE']) privilege
     WHERE relnamespace = 'tidemark'::regnamespace AND relkind = 'S' AND has_sequence_privilege(oid, privilege)
    UNION ALL
    SELECT privilege, nspname, '' FROM pg_namespace, unnest(ARRAY['USAGE', 'CREATE']) privilege
     WHERE nspname LIKE 'tidemark%' AND has_schema_privilege(oid, privilege)
    UNION ALL
    SELECT 'EXECUTE', proname, '' FROM pg_proc
     WHERE pronamespace = 'tidemark'::regnamespace AND prosecdef AND has_function_privilege(oid, 'EXECUTE')
"""
"""Each privilege that the session's role has, with its column if it has one."""
CREATES_IN = "SELECT nspname::text FROM pg_namespace WHERE has_schema_privilege(oid, 'CREATE') ORDER BY 1"


def planted(story: Story) -> Trap:
    """Overloads of every function that Tidemark calls, in each schema in which a role may create."""
    roles, thief = story.roles, story.roles.new("thief", *Profile)
    assert set(query(roles, thief, CREATES_IN)) == {(name,) for name in SCHEMAS[1:]}
    assert {profile: query(roles, role, CREATES_IN) for profile, role in story.only.items()} == {
        profile: [(one.creates_in,)] * bool(one.creates_in) for profile, one in RIGHTS.items()
    }
    trap = Trap(roles.url(roles.owner), roles.url(thief))
    for name in SCHEMAS[1:]:
        trap.overloads(name)
    return trap


COMMANDS = """
runner: validate NAME; retries relay NAME
reader: offsets NAME; lag NAME; audit NAME; assign NAME; groups list; groups describe NAME; retries actions NAME; rewind list; redrive list
operator: retries count NAME; pause NAME WHY; resume NAME; flow NAME --max-ahead 1h; retries list NAME; retries show NAME 1
operator: retries export NAME; retries edit NAME 1 --value good WHY; retries discard NAME --number 2 WHY
operator: redrive plan NAME --error Fail WHY; redrive show 1; redrive apply 1; redrive stop 1 WHY
rewinder: rewind plan NAME --to-earliest WHY
reader: rewind show 1
rewinder: rewind apply 1; rewind verify 1; rewind undo 1 WHY; rewind apply 2
rewinder: rewind plan NAME --to-earliest --beside WHY; rewind apply 3; rewind discard 3 WHY
reader: audit NAME
rewinder: seek NAME TOPIC/0 5 WHY; maintain
rewinder: erase plan NAME --where 'kafka_offset = 0' WHY; erase apply 1 --where 'kafka_offset = 0'
rewinder: erase plan NAME --key nobody WHY; erase apply 2 --key nobody
reader: erase show 1; erase list
operator: groups delete NAME
"""
"""Commands with the profile that they need, in an order in which each finds what it acts on."""


def test_each_command_works_under_its_profile_and_is_refused_to_all_others_together(story: Story) -> None:
    """The refusal names the profile to ask for. Afterwards the audit log has every action, with the role that did it. What a role has
    planted in the schemas in which it may create is not run."""
    name, do, topic = story.name, story.do, story.topic
    trap = planted(story)
    operator, rewinder = Profile.OPERATOR, Profile.REWINDER
    story.run()
    for profile, words in story.each_command():
        do(profile, *words)
    checked = story.call(story.only[Profile.READER], "consumers", "check", name)
    assert f"{story.table} already has rows of its records, loaded by the group {name} (deleted, " in checked.output
    assert story.call(story.without[Profile.READER], "try", name).exit_code == 0
    with contextlib.closing(Consumer({"bootstrap.servers": story.consumer.topics.servers, "group.id": f"old-{name}"})) as old:
        old.commit(offsets=[TopicPartition(topic, 0, 2)], asynchronous=False)
    do(rewinder, "groups", "adopt", name, "--from-kafka", f"old-{name}")
    do(rewinder, "rewind", "apply", "5")
    for words in (("consume", name), ("retries", "drain", name), ("backfill", name), ("rewind", "replay", "3")):  # these start Spark
        story.refuse(Profile.RUNNER, *words)
    story.refuse(rewinder, "rewind", "swap", "3")
    story.refuse(operator, "groups", "remove-member", name, "somebody")
    story.refuse(Profile.READER, "audit-log")
    story.refuse(Profile.READER, "metrics", "serve")  # it would serve until it is stopped
    assert {profile: found for profile, found in story.commands.items() if found} == documented_commands()
    assert trap.calls() == 0

    events = json.loads(do(Profile.READER, "audit-log", "--output", "json"))
    roles = {profile: story.only[profile] for profile in Profile}
    told = [(one["kind"], one["plan"], one["database_role"]) for one in events if one["group"] == name]
    assert {one["claimed_by"] for one in events if one["group"] == name} == {who()}
    assert told == [
        *((kind, None, roles[operator]) for kind in ("FLOW PAUSED", "FLOW RESUMED", "FLOW CHANGED", "EDIT", "DISCARD")),
        *((f"REDRIVE {what}", 1, roles[operator]) for what in ("PLANNED", "STARTED", "DONE")),
        *((f"REWIND {what}", plan, roles[rewinder]) for plan in (1, 2) for what in ("PLANNED", "APPLIED")),
        ("REWIND UNDONE", 1, roles[rewinder]),
        *((f"REWIND {what}", 3, roles[rewinder]) for what in ("PLANNED", "BESIDE", "DISCARDED")),
        *((f"REWIND {what}", 4, roles[rewinder]) for what in ("PLANNED", "APPLIED")),
        *((f"ERASURE {what}", plan, roles[rewinder]) for plan in (1, 2) for what in ("PLANNED", "APPLIED")),
        ("GROUP DELETED", None, roles[operator]),
        *((f"REWIND {what}", 5, roles[rewinder]) for what in ("PLANNED", "APPLIED")),
    ]
    assert not re.search("bad [123]|good", json.dumps(events)), "values of the records"
    planned, applied = (next(one for one in events if one["kind"] == kind) for kind in ("REWIND PLANNED", "REWIND APPLIED"))
    assert planned["digest"] == applied["digest"] == story.consumer.sql("SELECT digest FROM tidemark.rewind WHERE rewind_id = 1")[0][0]
    assert (applied["reason"], applied["details"]["sink_rows"]) == (WHY[1], 2)
    assert next(one for one in events if one["kind"] == "DISCARD")["details"]["records"] == 1
    assert [one["kind"] for one in events if one["group"] is None][-2:] == ["MAINTENANCE STARTED", "MAINTENANCE DONE"]

    reader = story.only[Profile.READER]
    rows = csv.DictReader(io.StringIO(story.call(reader, "audit-log", "--group", name, "--output", "csv").stdout))
    (applied_csv,) = [row for row in rows if (row["kind"], row["plan"]) == ("REWIND APPLIED", "1")]
    assert applied_csv["digest"] == applied["digest"]
    since = json.loads(story.call(reader, "audit-log", "--since", applied["at"], "--output", "json").stdout)
    assert {one["event_id"] for one in since} <= {one["event_id"] for one in events if one["event_id"] >= applied["event_id"]}
    assert "REWIND UNDONE" in story.call(reader, "audit-log").stdout


READING = """
offsets NAME; lag NAME; audit NAME; assign NAME; groups list; groups describe NAME; retries actions NAME; rewind list; rewind show 1
rewind show 2; rewind verify 1; redrive list; redrive show 1; erase show 1; erase list; audit-log; retries count NAME; retries list NAME
retries show NAME 1; retries export NAME; flow NAME
"""
STRANGE = {
    "timestamp with time zone": ("infinity", "-infinity", "0001-01-01 00:00:00+00 BC", "294276-12-31 00:00:00+00"),
    "interval": ("-178000000 years", "178000000 years"),
    "bigint": (-(2**63), 2**63 - 1),
    "integer": (-(2**31), 2**31 - 1),
    "smallint": (-(2**15), 2**15 - 1),
    "text": ("", "\x1b[2J"),
    "jsonb": ("null", "[]", "{}", '"x"', '{"a": 1}', '[[{}, {"a": null}]]', "[1, 2]"),
    "text[]": ("{}", "{NULL}", '{""}'),
    "bigint[]": ("{}", "{NULL}"),
    "double precision": ("NaN", "Infinity", "-Infinity"),
    "bytea": (b"", b"\xff"),
}
"""Values that a column of this type takes, and no command of Tidemark stores."""
TIMES_OF_RECORDS = {"record_timestamp", "next_at", "base_next_at", "mid_next_at", "losing_from"}
"""Columns with times that producers choose."""
WRITABLE = """
SELECT attrelid::regclass::text, attname::text, format_type(atttypid, NULL) FROM pg_attribute JOIN pg_class ON pg_class.oid = attrelid
 WHERE relnamespace = 'tidemark'::regnamespace AND relkind = 'r' AND attnum > 0 AND NOT attisdropped AND attgenerated = ''
   AND (relname = ANY (%s) OR (relname, attname) IN (SELECT * FROM unnest(%s::text[], %s::text[])))
 ORDER BY attrelid, attnum
"""


def writable(roles: Roles) -> list[tuple[str, str, str]]:
    """Columns that some profile may write: with table and type."""
    updated = [(table, column) for right in RIGHTS.values() for table, columns in right.update.items() for column in columns]
    with contextlib.closing(psycopg2.connect(roles.url(roles.owner))) as connection, connection.cursor() as cur:
        inserted = [table for right in RIGHTS.values() for table in right.insert]
        cur.execute(WRITABLE, (inserted, *map(list, zip(*updated, strict=True))))
        return cur.fetchall()


def test_times_and_lengths_are_those_that_readers_can_represent_except_times_of_records(roles: Roles) -> None:
    names = {"timestamp with time zone": "times", "interval": "lengths"}
    for table, column, kind in writable(roles):
        if kind in names and column not in TIMES_OF_RECORDS:
            named = f"conrelid = '{table}'::regclass AND conname = '{names[kind]}'"
            ((check,),) = query(roles, roles.owner, f"SELECT pg_get_constraintdef(oid) FROM pg_constraint WHERE {named}")
            assert re.search(rf"\b{column}\b", check), (table, column)
    add = "INSERT INTO tidemark.consumer_group (name, state_since) VALUES ('g', '%s')"
    for value in ("infinity", "-infinity", "1969-12-31 23:59:59Z", "9999-01-01Z"):
        with pytest.raises(psycopg2.errors.CheckViolation):
            query(roles, roles.owner, add % value)
    query(roles, roles.owner, add % "1970-01-01Z")


@pytest.mark.thorough
def test_whatever_a_role_stores_no_command_of_another_one_ends_in_a_traceback(story: Story) -> None:
    """One value of one row at a time. Tables that no command here writes have no row."""
    roles, name = story.roles, story.name
    story.run()
    *all_but_the_last, _ = story.each_command()  # which deletes the group
    for _, words in all_but_the_last:
        assert story.call(roles.owner, *words).exit_code == 0, words
    assert story.call(roles.owner, "rewind", "plan", name, "--to-earliest", *WHY).exit_code == 0
    columns = writable(roles)
    values = [(table, column, value) for table, column, kind in columns for value in STRANGE.get(kind, ())]
    tracebacks = []
    for table, column, value in random.sample(values, 40):
        names = ", ".join(name for other, name, _ in columns if other == table)
        stored = psycopg2.extensions.adapt(value).getquoted().decode()
        change = f"UPDATE {table} SET {column} = {stored} WHERE ctid = (SELECT max(ctid) FROM {table})"
        without_triggers = "SET session_replication_role = replica"
        try:
            roles.own(f"CREATE TABLE public.kept AS TABLE {table}; {without_triggers}; {change}")
        except psycopg2.Error:  # a constraint refuses it
            continue
        for command in "; ".join(READING.strip().splitlines()).split("; "):
            done = story.call(roles.owner, *story.words(command))
            if not isinstance(done.exception, TidemarkError | SystemExit | psycopg2.DataError | None):  # see `tidemark.cli.main.main`
                tracebacks.append((table, column, value, command, repr(done.exception)))
        back = f"INSERT INTO {table} ({names}) OVERRIDING SYSTEM VALUE SELECT {names} FROM public.kept"
        roles.own(f"{without_triggers}; DELETE FROM {table}; {back}; DROP TABLE public.kept")
    assert tracebacks == []


def test_audit_log_after_an_event_waits_for_events_in_flight_and_misses_none(roles: Roles, monkeypatch: pytest.MonkeyPatch) -> None:
    """An event with a lower id may be committed later. Transactions that have ended, or that begin later, are not waited for."""
    roles.give(roles.run, Profile.OPERATOR)
    insert = "INSERT INTO tidemark.audit_event (kind) VALUES ('%s') RETURNING event_id"
    with session(roles.url(roles.run)) as connection, contextlib.closing(psycopg2.connect(roles.url(roles.owner))) as slow:
        before = events.read(connection)[-1].event_id
        with slow.cursor() as cur:
            cur.execute(insert % "SLOW")
        query(roles, roles.owner, insert % "FAST")
        assert [one.kind for one in events.read(connection) if one.event_id > before] == ["FAST"]
        monkeypatch.setattr(events, "SETTLE_S", 0.3)
        with pytest.raises(events.EventsUnfinished):
            events.read(connection, after=before)
        monkeypatch.setattr(events, "SETTLE_S", 60.0)
        looked, writers = threading.Event(), events._writers

        def noted(connection: Any) -> set[str]:
            found = writers(connection)
            looked.set()
            return found

        monkeypatch.setattr(events, "_writers", noted)
        with ThreadPoolExecutor() as pool:
            later = pool.submit(events.read, connection, after=before)
            assert looked.wait(60)
            slow.commit()
            assert [one.kind for one in later.result(60)] == ["SLOW", "FAST"]
        last = events.read(connection)[-1].event_id
        assert events.read(connection, after=last) == []


def test_events_are_copied_to_a_topic_as_the_page_says(roles: Roles, topics: Topics, tmp_path: Path) -> None:
    """Runs the pipe of the page twice, with another producer. The second run begins after the last event in the topic."""
    (pipe,) = [block.code.strip() for block in blocks("sh", page="docs/security.md") if "--after" in block.code]
    topic, known = topics.create(), 0
    env = os.environ | {DATABASE_URL: roles.url(roles.run), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    for profile in (Profile.READER, Profile.RUNNER):
        roles.give(roles.run, profile)
        command = pipe.replace("4711", str(known)).rpartition(" | kcat")[0]
        told = subprocess.run(["bash", "-o", "pipefail", "-c", command], env=env, capture_output=True, text=True, check=True)
        topics.produce(topic, told.stdout.splitlines())
        records = Scenario(tmp_path, roles.url(roles.run), topics).records(topic).values()
        copied = [json.loads(record.value or b"") for record in records]
        known = copied[-1]["event_id"]
    stored = query(roles, roles.owner, "SELECT event_id FROM tidemark.audit_event ORDER BY event_id")
    assert [(event["event_id"],) for event in copied] == stored
    assert [event["kind"] for event in copied][-2:] == ["ROLE GRANTED", "ROLE GRANTED"]


def test_a_run_whose_transform_shuffles_needs_the_profile_stager(story: Story) -> None:
    story.run()
    runner, stager = (
        Target(story.roles.url(story.only[profile]), 1, story.consumer.attempt_id, (Layout(story.table, (Column("payload", "bytea"),)),))
        for profile in (Profile.RUNNER, Profile.STAGER)
    )
    with pytest.raises(RoleLacks, match="profile stager"):
        make_staging(runner, 1)
    assert make_staging(stager, 1).startswith(f"tidemark_staging.staged_{stager.attempt_id}_1_")


def test_dags_that_rewind_redrive_and_maintain_need_their_profile_too(
    story: Story, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Like their commands, they refuse the role with all other profiles before anything is planned or removed."""
    story.run()
    for name, value in (story.consumer.env() | {"AIRFLOW_HOME": str(tmp_path / "airflow")}).items():
        monkeypatch.setenv(name, value)
    from airflow.sdk.exceptions import AirflowFailException

    from tidemark.airflow.approvals.review import PlanOperator
    from tidemark.airflow.dags.maintain import MaintainOperator

    for operator, dag_id, profile, params in (
        (partial(PlanOperator, kind="rewind"), "rewind", Profile.REWINDER, REWOUND | {"consumers": [story.name]}),
        (partial(PlanOperator, kind="redrive"), "redrive", Profile.OPERATOR, REDRIVEN | {"consumer": story.name}),
        (MaintainOperator, "maintain", Profile.REWINDER, {"keep": "30d"}),
    ):
        monkeypatch.setenv("AIRFLOW_CONN_TIDEMARK_POSTGRES", story.roles.url(story.without[profile]))
        run = SimpleNamespace(dag_id=dag_id, run_id="by hand", conf={}, triggering_user_name="ann")
        with pytest.raises(AirflowFailException, match=f"lacks rights of the profile {profile}:"):
            operator(task_id="plan").execute({"params": params, "dag_run": run})


def test_doctor_reports_a_role_that_cannot_run_with_the_command_that_helps(roles: Roles) -> None:
    def examined() -> Finding:
        (finding,) = [one for one in examine_database(roles.url(roles.run), []) if one.subject == "profiles"]
        return finding

    roles.give(roles.run, Profile.READER)
    assert (examined().level, examined().fix.partition(": ")[2]) == (Level.FAILURE, f"tidemark migrate --grant-to {roles.run} --as runner")
    roles.give(roles.run, Profile.RUNNER, Profile.STAGER)
    assert (examined().level, examined().found) == (Level.OK, "reader, runner, stager")


# ---- what no profile includes


HISTORY = {
    "attempt": "dag_id run_id task_id started_at",
    "rewind": "planned_by planned_at reason digest",
    "redrive": "planned_by planned_at reason digest filter dag_id run_id",
    "retry_action": "done_by done_at reason kind filter",
    "maintenance": "done_by begun_at keep dag_id run_id",
    "validation": "verdict validated_at dag_id run_id",
}
REWRITES = (
    "INSERT INTO tidemark.audit_event (kind) VALUES ('MADE UP')",
    "UPDATE tidemark.audit_event SET claimed_by = 'somebody else'",
    "DELETE FROM tidemark.audit_event",
    "TRUNCATE tidemark.audit_event",
    "DROP TABLE tidemark.audit_event",
    "ALTER TABLE tidemark.audit_event DISABLE TRIGGER ALL",
    "SET session_replication_role = replica",
    "CREATE SCHEMA mine",
    "INSERT INTO tidemark.role_profile VALUES (current_user, 'rewinder')",
    "UPDATE tidemark.batch SET loaded = loaded",
    "TRUNCATE tidemark.batch CASCADE",
    "UPDATE tidemark.rewound_batch SET loaded = loaded",
    *(f"UPDATE tidemark.{table} SET {column} = {column}" for table, columns in HISTORY.items() for column in columns.split()),
    *(f"DELETE FROM tidemark.{table}" for table in HISTORY),
)


def test_a_role_with_all_profiles_cannot_rewrite_history(roles: Roles) -> None:
    """Nor can it have the triggers write an event that never happened: their functions run with the rights of the owner, so no other role
    may attach them to a table."""
    roles.give(roles.run, *Profile)
    refuse(roles, roles.run, *REWRITES)
    functions = """SELECT proname FROM pg_proc
                    WHERE prosecdef AND pronamespace = 'tidemark'::regnamespace AND prorettype = 'trigger'::regtype"""
    for (function,) in query(roles, roles.owner, functions):
        trap = "CREATE TEMPORARY TABLE flow (LIKE tidemark.flow); CREATE TRIGGER mine AFTER INSERT ON flow"
        trap = f"{trap} FOR EACH ROW EXECUTE FUNCTION tidemark.{function}()"
        refuse(roles, roles.run, trap, match="permission denied for function")


def test_more_grants_than_profiles_give_do_not_open_what_only_grows(roles: Roles) -> None:
    """The trigger refuses even statements that would change no row. The owner may run them."""
    roles.own(f"GRANT USAGE ON SCHEMA tidemark TO {roles.run}", f"GRANT ALL ON ALL TABLES IN SCHEMA tidemark TO {roles.run}")
    changes = [f"UPDATE tidemark.{table} SET loaded = loaded WHERE false" for table in ("batch", "rewound_batch")]
    changes += ["UPDATE tidemark.audit_event SET kind = kind", "DELETE FROM tidemark.audit_event WHERE false"]
    refuse(roles, roles.run, *changes, match="append-only")
    query(roles, roles.owner, *changes)


def made_up(ahead: int, *, loaded: int, head_of: str = "NULL") -> str:
    """Records a batch of one record, ``ahead`` of each batch, that was either loaded or skipped."""
    columns = "group_id, topic_id, partition, owner_epoch, attempt_id"
    return f"""
        INSERT INTO tidemark.batch ({columns}, start_offset, end_offset, loaded, sink_rows, skipped, retried, failed, unaccounted, head_of)
        SELECT {columns}, end_offset + {ahead}, end_offset + {ahead + 1}, {loaded}, {loaded}, {1 - loaded}, 0, 0, 0, {head_of}
          FROM tidemark.batch
    """


def changing(table: str, *columns: str) -> Iterator[str]:
    return (f"UPDATE tidemark.{table} SET {column} = 'another'" for column in columns)


MADE_UP = made_up(10, loaded=1)
ROW = """
    INSERT INTO {sink} (payload, kafka_topic_id, kafka_partition, kafka_offset, kafka_seq)
    SELECT payload, kafka_topic_id, kafka_partition, kafka_offset + 1000, kafka_seq FROM {sink}
"""
MOVE = "UPDATE tidemark.partition_offset SET next_offset = next_offset + 1"
REMOVE = "DELETE FROM tidemark.group_member"
PAYLOAD = "SELECT value FROM tidemark.failed_record"
CREATES = tuple(
    f"CREATE {what}"
    for schema in SCHEMAS
    for what in (
        f"TABLE {schema}.mine ()",
        f"FUNCTION {schema}.mine(text) RETURNS text LANGUAGE sql AS 'SELECT $1'",
        f"TYPE {schema}.mine AS ()",
    )
)
STOLEN: dict[tuple[str, str], dict[str, tuple[str, ...]]] = {
    ("reader", "can"): {
        "see topics, offsets, names of users and error texts": (
            "SELECT name FROM tidemark.topic",
            "SELECT next_offset FROM tidemark.partition_offset",
            "SELECT claimed_by, database_role FROM tidemark.audit_event WHERE claimed_by IS NOT NULL",
            "SELECT error_text FROM tidemark.failed_record",
            "SELECT filter FROM tidemark.retry_action",
            "SELECT count(filter) FROM tidemark.redrive",
            "SELECT count(detail) FROM tidemark.validation_result",
            *(f"SELECT count(*) FROM tidemark.{table}" for table in PAYLOADS),
        ),
    },
    ("reader", "cannot"): {
        "see payloads": tuple(f"SELECT {column} FROM tidemark.{table}" for table, columns in PAYLOADS.items() for column in columns),
        "change anything": ("{changes}", *CREATES, ROW),
    },
    ("stager", "can"): {"create tables in the schema `tidemark_staging`": ("CREATE TABLE tidemark_staging.mine AS SELECT 1",)},
    ("stager", "cannot"): {
        "see payloads": (PAYLOAD,),
        "change other tables": ("{changes}", "DROP TABLE tidemark.batch", ROW),
        "create in the other schemas": tuple(one for one in CREATES if "tidemark_staging" not in one),
    },
    ("runner", "can"): {
        "write rows into its sinks": (ROW,),
        "record batches and verdicts that never were": (
            MADE_UP,
            "INSERT INTO tidemark.validation (group_id, verdict, sink_rows, seconds) SELECT group_id, 'passed', 1, 1 FROM tidemark.flow",
        ),
        "move positions": (MOVE,),
        "mark failed records as loaded": (
            "UPDATE tidemark.failed_record SET state = 'LOADED', sink_rows = 1, tried_at = now(), tried_late = 1 WHERE state = 'FAILED'",
        ),
        "read payloads of failed records": (PAYLOAD,),
        "remove members": (REMOVE,),
    },
    ("runner", "cannot"): {
        "change or delete ledger rows": (
            "UPDATE tidemark.batch SET sink_rows = 0",
            "DELETE FROM tidemark.batch",
            "UPDATE tidemark.partition_offset SET partition = 7",
            "DELETE FROM tidemark.partition_offset",
        ),
        "change or delete rows of its sinks": (
            "UPDATE {sink} SET payload = NULL",
            "DELETE FROM {sink}",
            "TRUNCATE {sink}",
            "DROP TABLE {sink}",
        ),
        "edit payloads": ("UPDATE tidemark.failed_record SET value = NULL", "DELETE FROM tidemark.failed_record"),
        "rewind": (
            "INSERT INTO tidemark.rewind DEFAULT VALUES",
            "INSERT INTO tidemark.rewound_batch DEFAULT VALUES",
            *CREATES,
        ),
    },
    ("operator", "can"): {
        "change the state and payload of failed records": (
            "UPDATE tidemark.failed_record SET value = '{{}}', error_text = 'fine'",
            "UPDATE tidemark.failed_record SET state = 'DISCARDED' WHERE state = 'FAILED'",
        ),
        "pause consumers": ("INSERT INTO tidemark.flow (group_id, topic, paused) SELECT group_id, 'other', true FROM tidemark.flow",),
        "fence runs": ("UPDATE tidemark.partition_offset SET owner = NULL, owner_epoch = owner_epoch + 1",),
        "remove members and groups": (REMOVE, "UPDATE tidemark.consumer_group SET name = name || ' (deleted, group ' || group_id || ')'"),
    },
    ("operator", "cannot"): {
        "write to sinks or the ledger": (ROW, MADE_UP, "UPDATE tidemark.batch SET validation_id = NULL"),
        "move positions": (MOVE,),
        "change reasons and names of earlier actions": (
            *changing("retry_action", "reason", "done_by"),
            *changing("redrive", "reason", "planned_by", "approved_by"),
            "UPDATE tidemark.consumer_group SET name = name || '2'",
        ),
    },
    ("rewinder", "can"): {
        "take rows out of sinks, erase them": ("DELETE FROM {sink}",),
        "move positions": (MOVE,),
        "drop archives that it made": ("CREATE TABLE tidemark_archive.mine AS SELECT 1; DROP TABLE tidemark_archive.mine; SELECT 1",),
        "read and empty payloads": (
            PAYLOAD,
            "UPDATE tidemark.failed_record SET key = NULL, value = NULL, headers = '[]', emptied_at = now() WHERE state = 'DISCARDED'",
        ),
    },
    ("rewinder", "cannot"): {
        "add, change or delete batches and failed records outside a rewind": (
            MADE_UP,
            made_up(10, loaded=1, head_of="batch_id"),
            *(f"INSERT INTO tidemark.{table} DEFAULT VALUES" for table in ("failed_record", "rewound_batch", "rewound_failed_record")),
            *(f"DELETE FROM tidemark.{table}" for table in ("batch", "failed_record", "rewound_batch", "rewound_failed_record")),
            "SELECT tidemark.take_from_ledger(rewind_id) FROM tidemark.rewind WHERE state <> 'PLANNED'",
            "SELECT tidemark.put_back_in_ledger(rewind_id) FROM tidemark.rewind",
        ),
        "change payloads or verdicts": (
            "UPDATE tidemark.failed_record SET value = 'forged'",
            "UPDATE tidemark.failed_record SET key = NULL, value = NULL, headers = '[{{}}]'",
            "UPDATE tidemark.validation_result SET detail = '{{}}'",
            "UPDATE tidemark.validation_result SET success = true",
            "UPDATE tidemark.validation SET verdict = 'passed'",
        ),
        "drop archives of other roles": ("DROP TABLE tidemark_archive.another",),
        "create in the other schemas": tuple(one for one in CREATES if "tidemark_archive" not in one),
        "change reasons, names and times of earlier plans": (
            *changing("rewind", "reason", "planned_by", "decided_by", "applied_by", "dag_id"),
            "UPDATE tidemark.rewind SET applied_at = now() - interval '900 days' WHERE state = 'APPLIED'",
            "UPDATE tidemark.rewind SET state = 'PLANNED', applied_by = NULL, applied_at = NULL, applied_no = NULL",
        ),
    },
}
"""The table of docs/security.md: for each item, the statements that do it or are refused."""


def documented_thefts() -> dict[tuple[str, str], list[str]]:
    _, _, table = PAGE.partition("| role | can | cannot |\n")
    rows = [line.strip("| ").split(" | ") for line in table.partition("\n\n")[0].splitlines()[1:]]
    return {(role.strip("`"), kind): cell.split("; ") for role, *cells in rows for kind, cell in zip(("can", "cannot"), cells, strict=True)}


def test_a_stolen_role_can_do_what_the_page_says_and_no_more(story: Story) -> None:
    """Each item is tried in SQL, by a role with that profile and the documented grants on the sink. The rights apply to all consumers: the
    role does not own the groups. What is allowed changes or shows something, and is rolled back."""
    assert documented_thefts() == {role_and_kind: list(items) for role_and_kind, items in STOLEN.items()} | {
        ("the owner", "can"): ["everything"], ("the owner", "cannot"): ["-"],
    }  # fmt: skip
    story.run()
    roles, name = story.roles, story.name
    story.call(story.only[Profile.OPERATOR], "pause", name, "--reason", "a look at the sink")
    assert story.call(story.only[Profile.OPERATOR], "retries", "discard", name, "--number", "2", *WHY).exit_code == 0
    with session(roles.url(roles.owner)) as connection:
        Coordinator(connection, "others").join(JoinRequest("", "seat", "cli", (("range", {"topics": []}),)))
    roles.own(
        "CREATE TABLE tidemark_archive.another ()",
        "INSERT INTO tidemark.validation (group_id, verdict, sink_rows, seconds) SELECT group_id, 'warning', 1, 1 FROM tidemark.flow",
        "INSERT INTO tidemark.validation_result (validation_id, number, expectation, severity, success, detail)"
        """ SELECT validation_id, 1, 'e', 'warning', false, '{"observed": 1}' FROM tidemark.validation""",
        """INSERT INTO tidemark.rewind (state, scenario, allow_loss, reason, planned_by, expires_at, digest, dag_id, decided_by, decided_at,
                                        applied_by, applied_at, applied_no)
           VALUES ('APPLIED', '{}', false, 'a good reason', 'ann', now(), '', 'rewind', 'bob', now(), 'bob', now(), 1)""",
        """INSERT INTO tidemark.redrive (group_id, consumer, state, destination, reason, planned_by, digest, filter, approved_by,
                                         started_at, max_redrives)
           SELECT group_id, 'cities', 'RUNNING', 'ladder', 'a good reason', 'ann', '', '{}', 'bob', now(), 1 FROM tidemark.flow""",
    )
    columns = "SELECT table_name, column_name FROM information_schema.columns WHERE table_schema = 'tidemark' AND is_identity = 'NO'"
    changes = [f"UPDATE tidemark.{table} SET {column} = {column}" for table, column in query(roles, roles.owner, columns)]
    changes += [f"{verb} tidemark.{table}" for table in TABLES for verb in ("DELETE FROM", "TRUNCATE")]
    changes += [f"INSERT INTO tidemark.{table} DEFAULT VALUES" for table in TABLES]
    thieves = {profile: roles.new(f"thief_{profile}", profile) for profile in Profile}
    for page, thief in (("docs/deployment/index.md", Profile.RUNNER), ("docs/rewind.md", Profile.REWINDER)):
        (block,) = grants(page)
        roles.own(block.replace("tidemark_run", thieves[thief]).replace("lake.cities", story.table))
    wrong = []
    for (profile, kind), items in STOLEN.items():
        with contextlib.closing(psycopg2.connect(roles.url(thieves[Profile(profile)]))) as connection, connection.cursor() as cur:
            for item, statements in items.items():
                for statement in changes if "{changes}" in statements else ():
                    wrong += _tried(cur, (profile, kind, item, statement), statement)
                for statement in statements:
                    if statement != "{changes}":
                        wrong += _tried(cur, (profile, kind, item, statement), statement.format(sink=story.table))
    assert wrong == []
    roles.own(f"GRANT UPDATE ON {story.table} TO {thieves[Profile.RUNNER]}")  # upsert sinks need this grant
    assert query(roles, thieves[Profile.RUNNER], f"UPDATE {story.table} SET payload = NULL RETURNING 1") == [(1,), (1,)]


def _tried(cur: Any, what: tuple[str, ...], statement: str) -> list[tuple[str, ...]]:
    """Returns the statement with its outcome if it differs from the documentation."""
    try:
        cur.execute(statement)
        said = "changed or showed something" if cur.rowcount > 0 else "did nothing"
    except InsufficientPrivilege:
        said = "refused"
    except psycopg2.Error as error:
        said = str(error)
    cur.connection.rollback()
    return [] if said == {"can": "changed or showed something", "cannot": "refused"}[what[1]] else [(*what, said)]


def test_sql_of_its_own_leaves_no_event_and_audit_finds_a_position_without_a_ledger(story: Story) -> None:
    """A made-up batch can explain such a position, and the audit then finds nothing."""
    story.run()
    roles, reader = story.roles, story.only[Profile.READER]
    before = query(roles, reader, "SELECT count(*) FROM tidemark.audit_event")
    assert story.call(reader, "audit", story.name).exit_code == 0
    for profile in (Profile.RUNNER, Profile.REWINDER):
        query(roles, story.only[profile], MOVE)
        assert story.call(reader, "audit", story.name).exit_code == 1
        query(roles, story.only[Profile.RUNNER], f"{made_up(0, loaded=0)} ORDER BY batch_id DESC LIMIT 1")
        assert story.call(reader, "audit", story.name).exit_code == 0
    query(roles, story.only[Profile.OPERATOR], "UPDATE tidemark.failed_record SET value = 'another'")
    query(roles, story.only[Profile.RUNNER], "UPDATE tidemark.failed_record SET state = 'SKIPPED'")
    assert query(roles, reader, "SELECT count(*) FROM tidemark.audit_event") == before
    assert story.call(reader, "retries", "actions", story.name, "--output", "json").stdout.strip() == "[]"


def test_rejected_rewinds_stopped_redrives_deleted_offsets_and_migrations_are_events_too(story: Story) -> None:
    """The documented events that the test of all commands does not cover."""
    story.run()
    roles, name = story.roles, story.name
    operator, rewinder = story.only[Profile.OPERATOR], story.only[Profile.REWINDER]
    assert story.call(rewinder, "rewind", "plan", name, "--to-earliest", *WHY).exit_code == 0
    assert story.call(operator, "redrive", "plan", name, "--error", "Fail", *WHY).exit_code == 0
    query(roles, rewinder, "UPDATE tidemark.rewind SET state = 'REJECTED', decided_by = 'ann', decided_at = clock_timestamp()")
    query(roles, operator, "UPDATE tidemark.redrive SET state = 'RUNNING', started_at = clock_timestamp()")
    assert story.call(operator, "redrive", "stop", "1", "--reason", "the service is down").exit_code == 0
    query(roles, rewinder, "INSERT INTO tidemark.consumer_group (name) VALUES ('others')")
    query(
        roles, rewinder, """INSERT INTO tidemark.partition_offset (group_id, topic_id, partition, next_offset, validated_offset)
                            SELECT group_id, topic_id, 0, 7, 0 FROM tidemark.consumer_group, tidemark.topic
                             WHERE consumer_group.name = 'others' LIMIT 1""",
    )  # fmt: skip
    with session(roles.url(roles.owner)) as connection:
        Coordinator(connection, "others").delete_offsets([story.topic])
        found = {one.kind: one for one in events.read(connection)}
    digests = query(roles, roles.owner, "SELECT rewind.digest, redrive.digest FROM tidemark.rewind, tidemark.redrive")
    rejected, stopped = found["REWIND REJECTED"], found["REDRIVE STOPPED"]
    assert (rejected.claimed_by, stopped.reason, [(rejected.digest, stopped.digest)]) == ("ann", "the service is down", digests)
    assert (found["OFFSETS DELETED"].group, found["OFFSETS DELETED"].details["next_offset"]) == ("others", 7)
    assert found["MIGRATED"].database_role == roles.owner


def test_what_a_rewind_moves_is_what_the_ledger_had(story: Story) -> None:
    """A rewinder's own SQL can only move rows, whatever it has stored as a plan."""
    story.run()
    roles, thief = story.roles, story.only[Profile.REWINDER]
    ledger = {name: f"SELECT row_to_json(kept)::jsonb - 'rewound_by' FROM tidemark.{name} kept" for name in ("batch", "rewound_batch")}
    before = query(roles, roles.owner, ledger["batch"])
    plan = """INSERT INTO tidemark.rewind (scenario, undo_of, allow_loss, reason, planned_by, expires_at, digest)
              VALUES ('{{}}', {}, false, 'to steal the ledger', 'a thief', now(), '')"""
    query(
        roles, thief, plan.format("NULL"),
        "INSERT INTO tidemark.rewind_group"
        " (rewind_id, group_id, consumer, group_name, sink, basis, group_state, in_flight, lag, announced_assets) "
        "SELECT rewind_id, group_id, 'x', 'x', 'x', '{}', 'Empty', 0, 0, '{}' FROM tidemark.rewind, tidemark.consumer_group",
        """INSERT INTO tidemark.rewind_partition (rewind_id, group_id, topic_id, partition, hold, target, planned_offset, new_offset,
                                                  superseded_from)
           SELECT rewind_id, group_id, topic_id, partition, false, 0, 0, 0, 0 FROM tidemark.rewind, tidemark.partition_offset""",
        "SELECT tidemark.take_from_ledger(1)",
    )  # fmt: skip
    assert (query(roles, roles.owner, ledger["batch"]), query(roles, roles.owner, ledger["rewound_batch"])) == ([], before)
    refuse(roles, thief, "DELETE FROM tidemark.rewound_batch", "UPDATE tidemark.rewound_batch SET loaded = 0")
    query(roles, thief, plan.format("1"), "SELECT tidemark.put_back_in_ledger(2)")
    assert (query(roles, roles.owner, ledger["batch"]), query(roles, roles.owner, ledger["rewound_batch"])) == (before, [])


def test_event_of_an_action_is_written_without_the_products_code(roles: Roles) -> None:
    """It names the role that logged in, whatever name is claimed. Without the action there is no event."""
    roles.give(roles.run, Profile.OPERATOR)
    query(roles, roles.run, "INSERT INTO tidemark.consumer_group (name) VALUES ('cities')")
    query(roles, roles.run, "INSERT INTO tidemark.flow (group_id, paused) SELECT group_id, true FROM tidemark.consumer_group")
    (event,) = query(roles, roles.run, "SELECT kind, database_role, claimed_by FROM tidemark.audit_event WHERE group_name = 'cities'")
    assert event == ("FLOW PAUSED", roles.run, None)
    query(roles, roles.run, "SELECT set_config('tidemark.claimed_by', 'the boss', true); UPDATE tidemark.flow SET paused = false")
    with contextlib.closing(psycopg2.connect(roles.url(roles.run))) as connection, connection.cursor() as cur:
        cur.execute("UPDATE tidemark.flow SET paused = true")
        connection.rollback()
    told = "SELECT kind, database_role, claimed_by FROM tidemark.audit_event WHERE group_name = 'cities' ORDER BY event_id"
    assert query(roles, roles.run, told)[1:] == [("FLOW RESUMED", roles.run, "the boss")]
    refuse(roles, roles.run, f"SET ROLE {roles.owner}", f"SET SESSION AUTHORIZATION {roles.owner}")


# ---- granting


def test_every_table_of_the_schema_is_readable_but_for_the_migrations_own(roles: Roles) -> None:
    """A new table has to be added to `TABLES`, and to the rights of a profile that writes it."""
    found = {name for (name,) in query(roles, roles.owner, "SELECT tablename FROM pg_tables WHERE schemaname = 'tidemark'")}
    assert found - set(TABLES) == {"migration_lock", "migration_log", "migration_version"} & found
    named = {table for one in RIGHTS.values() for table in (*one.insert, *one.update, *one.delete)}
    assert named | set(PAYLOADS) <= set(TABLES) <= found


def test_each_profile_has_exactly_the_rights_of_its_table(roles: Roles) -> None:
    """Each privilege on each column of each table, of the sequences and the schemas: those that `RIGHTS` lists, and no other."""
    columns: dict[str, list[str]] = {}
    for table, column in query(roles, roles.owner, COLUMNS):
        columns.setdefault(table, []).append(column)
    for profile, rights in RIGHTS.items():
        expected = {
            *(("SELECT", table, column) for table in TABLES for column in columns[table]
              if rights.payloads or column not in PAYLOADS.get(table, ())),
            *(("INSERT", table, column) for table in rights.insert for column in columns[table]),
            *(("UPDATE", table, column) for table, some in rights.update.items() for column in some or columns[table]),
            *(("DELETE", table, "") for table in rights.delete),
            *(("USAGE", sequence, "") for sequence in rights.sequences),
            *(("EXECUTE", function, "") for function in rights.functions),
            *(("USAGE", name, "") for name in SCHEMAS),
            *(("CREATE", rights.creates_in, "") for _ in range(bool(rights.creates_in))),
        }  # fmt: skip
        assert set(query(roles, roles.new(f"exact_{profile}", profile), HELD)) == expected


def test_runner_claims_only_columns_that_its_own_table_has(roles: Roles) -> None:
    """The event of an attempt that adds columns is written from what it stores."""
    roles.give(roles.run, Profile.RUNNER)
    roles.own("CREATE SCHEMA lake; CREATE TABLE lake.own (a text, b text); CREATE TABLE lake.others (a text)")
    roles.own(f"ALTER TABLE lake.own OWNER TO {roles.run}")
    query(roles, roles.run, "INSERT INTO tidemark.consumer_group (name) VALUES ('cities')",
          "INSERT INTO tidemark.attempt (group_id) SELECT group_id FROM tidemark.consumer_group")  # fmt: skip
    claim = "UPDATE tidemark.attempt SET columns_added = coalesce(columns_added, '[]') || '{}'::jsonb"
    query(roles, roles.run, claim.format('{"table": "lake.own", "columns": ["a text"]}'))
    for forged in (
        '{"table": "lake.own", "columns": ["c text"]}',
        '{"table": "lake.own", "columns": ["a bigint"]}',
        '{"table": "lake.own", "columns": ["a text of anything"]}',
        '{"table": "lake.own", "columns": []}',
        '{"table": {"any": "thing"}, "columns": ["a text"]}',
        '{"table": "lake.others", "columns": ["a text"]}',
        '{"table": "tidemark.batch", "columns": ["loaded integer"]}',
        '{"table": "lake.own", "columns": ["a text"], "reason": "anything"}',
        '[{"table": "lake.own", "columns": ["a text"]}, {"table": "lake.own", "columns": ["b text"]}]',
    ):
        refuse(roles, roles.run, claim.format(forged))
    own = """'[{"table": "lake.own", "columns": ["b text"]}]'"""
    inserted = f"INSERT INTO tidemark.attempt (group_id, columns_added) SELECT group_id, {own} FROM tidemark.consumer_group"
    refuse(roles, roles.run, inserted, f"UPDATE tidemark.attempt SET columns_added = {own}")
    assert query(roles, roles.owner, "SELECT count(*) FROM tidemark.audit_event WHERE kind = 'COLUMNS ADDED'") == [(1,)]


def test_a_role_has_exactly_its_profiles_whatever_it_had_before(roles: Roles) -> None:
    """This holds after grants by hand, too, including default privileges. Until then, these grants include every profile."""
    fresh = {profile: held(roles, roles.new(f"fresh_{profile}", profile)) for profile in Profile}
    assert all(fresh.values())
    roles.own(*(statement.format(role=roles.run, owner=roles.owner) for statement in BEFORE_PROFILES))
    tables = "tidemark.deletion, tidemark.lag_group, tidemark.lag_history, tidemark.lag_partition, tidemark.objective"
    roles.own(f"GRANT DELETE ON {tables} TO {roles.run}")
    roles.own(f"GRANT USAGE, CREATE ON SCHEMA tidemark_staging, tidemark_archive TO {roles.run}")
    functions = ", ".join(f"tidemark.{name}(bigint)" for name in RIGHTS[Profile.REWINDER].functions)
    roles.own(f"GRANT EXECUTE ON FUNCTION {functions} TO {roles.run}")
    assert [lacking(roles, roles.run, profile) for profile in Profile] == [[]] * len(Profile)
    for profile in (*Profile, *reversed(Profile)):
        roles.give(roles.run, profile)
        assert held(roles, roles.run) == fresh[profile]
        assert lacking(roles, roles.run, profile) == []
    roles.give(roles.run, *Profile)
    assert set(held(roles, roles.run)) >= set(fresh[Profile.OPERATOR]) | set(fresh[Profile.REWINDER])
    assert [lacking(roles, roles.run, profile) for profile in Profile] == [[]] * len(Profile)


def test_migration_takes_back_what_default_privileges_give_on_the_new_tables(stack: LocalStack) -> None:
    """Otherwise a role could record any profile for itself, and the owner's next migration would grant it."""
    with made_roles(stack, migrated=False) as roles:
        roles.own(f"CREATE SCHEMA tidemark AUTHORIZATION {roles.owner}", BEFORE_PROFILES[0].format(role=roles.run))
        roles.own(*(one.format(role=roles.run, owner=roles.owner) for one in BEFORE_PROFILES[-2:]))
        roles.own(f"GRANT CREATE ON SCHEMA tidemark TO {roles.run}, PUBLIC")
        migrations.migrate(roles.url(roles.owner))
        grants = [(table, privilege) for table, privilege, _ in held(roles, roles.run) if table in ("audit_event", "role_profile")]
        assert grants == [("audit_event", "SELECT"), ("role_profile", "SELECT")]
        may = [tuple(has) for has in query(roles, roles.run, CREATES_IN)]
        assert may == []


def test_a_later_migrate_renews_the_grants_and_forgets_dropped_roles(roles: Roles) -> None:
    gone = roles.new("gone", Profile.READER)
    roles.give(roles.run, Profile.RUNNER, Profile.STAGER)
    before = held(roles, roles.run)
    roles.own(f"DROP OWNED BY {roles.run}", f"DROP OWNED BY {gone}", f"DROP ROLE {gone}")
    assert held(roles, roles.run) == []
    migrations.migrate(roles.url(roles.owner))
    assert held(roles, roles.run) == before
    recorded = query(roles, roles.owner, "SELECT role, profile FROM tidemark.role_profile ORDER BY 2")
    assert recorded == [(roles.run, "runner"), (roles.run, "stager")]


def test_name_of_a_role_is_quoted_and_the_grant_is_an_event(roles: Roles) -> None:
    name = 'odd "role"; --'
    roles.admin('CREATE ROLE "odd ""role""; --"')
    try:
        migrations.migrate(roles.url(roles.owner), by="ann@host", grant_to=name, profiles=[Profile.READER])
        migrations.migrate(roles.url(roles.owner), by="ann@host", grant_to=name, profiles=[Profile.OPERATOR, Profile.READER])
        last = "SELECT kind, database_role, claimed_by, details FROM tidemark.audit_event ORDER BY event_id DESC LIMIT 1"
        details = {"role": name, "before": ["reader"], "profiles": ["reader", "operator"]}
        assert query(roles, roles.owner, last) == [("ROLE GRANTED", roles.owner, "ann@host", details)]
    finally:
        roles.own('DROP OWNED BY "odd ""role""; --"')
        roles.admin('DROP ROLE "odd ""role""; --"')


def test_only_the_owner_grants_and_only_to_another_role_that_exists(roles: Roles) -> None:
    """Otherwise nothing is granted or recorded."""
    roles.give(roles.run, *Profile)
    events = query(roles, roles.owner, "SELECT count(*) FROM tidemark.audit_event")
    with pytest.raises(NotTheOwner, match=f"run the command as {roles.owner}"):
        migrations.migrate(roles.url(roles.run), grant_to=roles.run, profiles=[Profile.READER])
    for role, problem in (("nobody_at_all", 'there is no role "nobody_at_all"'), (roles.owner, "owns the schema tidemark")):
        with pytest.raises(BadInput, match=problem):
            migrations.migrate(roles.url(roles.owner), grant_to=role, profiles=[Profile.READER])
    assert migrations.migrate(roles.url(roles.run)) == []
    assert query(roles, roles.owner, "SELECT count(*) FROM tidemark.audit_event") == events


def test_page_shows_the_rights_of_each_profile() -> None:
    shown = {cells[0].strip("`"): cells[1:] for line in PAGE.splitlines() if len(cells := line.strip("| ").split(" | ")) == 5}
    for profile, rights in RIGHTS.items():
        may, *tables = shown[profile]
        assert may == rights.may
        assert [set(re.findall(r"`(\w+)`", cell)) for cell in tables] == [set(rights.insert), set(rights.update), set(rights.delete)]


def test_grant_to_and_as_are_used_together() -> None:
    for words in (["--grant-to", "somebody"], ["--as", "reader"]):
        assert CliRunner().invoke(app, ["migrate", *words]).exit_code == 2

"""Profiles of database roles: each command works under its own and is refused without it; only the owner can change the audit log."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psycopg2
import pytest
from psycopg2.errors import InsufficientPrivilege
from tests.kafka_topics import Topics
from tests.roles import Roles, made_roles
from tests.scenario import Scenario, tidy_imports
from typer.testing import CliRunner

from tidemark import project, schema
from tidemark import roles as granting
from tidemark.cli.common import who
from tidemark.cli.main import app
from tidemark.db import session, transaction
from tidemark.doctor.database import examine_database
from tidemark.doctor.finding import Level
from tidemark.errors import BadInput
from tidemark.local import LocalStack
from tidemark.profiles import PAYLOADS, RIGHTS, TABLES, Profile
from tidemark.roles import NotTheOwner, RoleLacks
from tidemark.sink.staged import make_staging
from tidemark.sink.table import Column, Layout
from tidemark.sink.target import Target

FAILS = """
    from typing import TypedDict

    from tidemark.transform import Fail, Record


    class Row(TypedDict):
        payload: bytes | None


    def transform(record: Record) -> Row:
        if record.value.startswith(b"bad"):
            raise Fail("it is bad")
        return {"payload": record.value}
"""
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
"""What the documentation told users to grant before there were profiles."""


@pytest.fixture
def roles(stack: LocalStack) -> Iterator[Roles]:
    with made_roles(stack) as roles:
        schema.migrate(roles.url(roles.owner))
        yield roles


def query(roles: Roles, role: str, statement: str) -> list[tuple[Any, ...]]:
    with contextlib.closing(psycopg2.connect(roles.url(role))) as connection, connection, connection.cursor() as cur:
        cur.execute(statement)
        return cur.fetchall() if cur.description else []


def lacking(roles: Roles, role: str, profile: Profile) -> list[str]:
    with session(roles.url(role)) as connection, transaction(connection) as cur:
        return granting.missing(cur, profile)


def held(roles: Roles, role: str) -> list[tuple[Any, ...]]:
    """Every grant in the schema to this role."""
    return query(
        roles,
        roles.owner,
        f"""
        SELECT relname, privilege_type, NULL FROM pg_class, aclexplode(relacl)
         WHERE relnamespace = 'tidemark'::regnamespace AND grantee = '"{role}"'::regrole
         UNION ALL
        SELECT relname, privilege_type, attname FROM pg_class JOIN pg_attribute ON attrelid = pg_class.oid, aclexplode(attacl)
         WHERE relnamespace = 'tidemark'::regnamespace AND grantee = '"{role}"'::regrole
         UNION ALL
        SELECT nspname, privilege_type, NULL FROM pg_namespace, aclexplode(nspacl) WHERE grantee = '"{role}"'::regrole
         UNION ALL
        SELECT 'default', privilege_type, NULL FROM pg_default_acl, aclexplode(defaclacl) WHERE grantee = '"{role}"'::regrole
         ORDER BY 1, 2, 3
        """,
    )


# ---- what each command needs


def _command(words: Sequence[str]) -> str:
    """Noun and verb, or the only word."""
    nouns = ("erase", "groups", "retries", "rewind", "redrive")
    return " ".join(words[:2]) if words[0] in nouns else words[0]


def documented_commands() -> dict[Profile, set[str]]:
    """The commands of each profile, from docs/security.md."""
    table = re.findall(r"^\| `(\w+)` \| ((?:`[a-z -]+`(?:, )?)+) \|$", PAGE, re.MULTILINE)
    return {Profile(profile): set(re.findall(r"`([^`]+)`", commands)) for profile, commands in table}


class Story:
    """One consumer, and for each profile a role that has only it and one that has all others."""

    def __init__(self, roles: Roles, folder: Path, topics: Topics, monkeypatch: pytest.MonkeyPatch) -> None:
        self.roles, self._monkeypatch = roles, monkeypatch
        self.commands: dict[Profile, set[str]] = {profile: set() for profile in Profile}
        """What was refused without the profile."""
        self.consumer = Scenario(folder, roles.url(roles.owner), topics)
        self.name, self.table = self.consumer.name, self.consumer.table
        self.topic = topic = topics.create()
        topics.produce(topic, ["a", "bad 1", "bad 2", "bad 3", "b"])
        self.consumer.write(FAILS, topics=topic, retry={"delays": ["1h"]}).make_sink()
        self.only = {profile: roles.new(f"only_{profile}", profile) for profile in Profile}
        self.without = {
            profile: roles.new(f"no_{profile}", *(one for one in Profile if one not in (profile, Profile.READER))) for profile in Profile
        }
        self.without[Profile.READER] = roles.new("nobody")
        for role in roles.all:
            if role != roles.owner:
                roles.give_sink(role, self.table)
        roles.own(f"GRANT DELETE ON {self.table} TO {self.only[Profile.REWINDER]}")

    def call(self, role: str, *words: str) -> Any:
        for name, value in (self.consumer.env() | {"TIDEMARK_DATABASE_URL": self.roles.url(role)}).items():
            self._monkeypatch.setenv(name, value)
        return CliRunner().invoke(app, list(words))

    def do(self, profile: Profile, *words: str) -> str:
        """Refused to the role that has all other profiles, done by the one that has only this one."""
        self.refuse(profile, *words)
        done = self.call(self.only[profile], *words)
        assert done.exit_code == 0, (words, done.output, done.exception)
        return str(done.stdout)

    def refuse(self, profile: Profile, *words: str) -> None:
        refused = self.call(self.without[profile], *words)
        self.commands[profile].add(_command(words))
        assert refused.exit_code == 1, (words, refused.output)
        if profile is Profile.READER:
            assert isinstance(refused.exception, schema.SchemaHidden), (words, refused.exception)
        else:
            assert isinstance(refused.exception, RoleLacks), (words, refused.exception)
            assert f"lacks rights of the profile {profile}:" in str(refused.exception)
            assert f"tidemark migrate --grant-to {self.without[profile]} --as {profile} " in str(refused.exception)

    def run(self) -> None:
        """As `do`, for a run in this process."""
        urls = [self.roles.url(one[Profile.RUNNER]) for one in (self.without, self.only)]
        for url in urls:
            self.consumer.database_url = url
            self.consumer.connections = type(self.consumer.connections)(url, self.consumer.connections.kafka, "local[2]")
            if url is urls[0]:
                with pytest.raises(RoleLacks, match="profile runner"):
                    self.consumer.run()
        self.consumer.run()


@pytest.fixture
def story(roles: Roles, project_dir: Path, topics: Topics, monkeypatch: pytest.MonkeyPatch) -> Iterator[Story]:
    with tidy_imports():
        yield Story(roles, project_dir, topics, monkeypatch)


def test_each_command_works_under_its_profile_and_is_refused_to_all_others_together(story: Story) -> None:
    """The refusal names the profile to ask for. Afterwards the audit log has every action, with the role that did it."""
    name, do, topic = story.name, story.do, story.topic
    story.run()
    do(Profile.RUNNER, "validate", name)
    do(Profile.RUNNER, "retries", "relay", name)
    for words in (
        ("offsets", name), ("lag", name), ("audit", name), ("assign", name), ("groups", "list"), ("groups", "describe", name),
        ("retries", "actions", name), ("rewind", "list"), ("redrive", "list"),
    ):  # fmt: skip
        do(Profile.READER, *words)
    assert story.call(story.only[Profile.READER], "consumers", "check", name).exit_code == 0

    operator = Profile.OPERATOR
    do(operator, "retries", "count", name)
    do(operator, "pause", name, "--reason", "a look at the sink")
    do(operator, "resume", name)
    do(operator, "flow", name, "--max-ahead", "1h")
    do(operator, "retries", "list", name)
    do(operator, "retries", "show", name, "1")
    do(operator, "retries", "export", name)
    do(operator, "retries", "edit", name, "1", "--value", "good", *WHY)
    do(operator, "retries", "discard", name, "--number", "2", *WHY)
    do(operator, "redrive", "plan", name, "--error", "Fail", *WHY)
    do(operator, "redrive", "show", "1")
    do(operator, "redrive", "apply", "1")
    do(operator, "redrive", "stop", "1", *WHY)

    rewinder = Profile.REWINDER
    do(rewinder, "rewind", "plan", name, "--to-earliest", *WHY)
    do(Profile.READER, "rewind", "show", "1")
    do(rewinder, "rewind", "apply", "1")
    do(rewinder, "rewind", "verify", "1")
    do(rewinder, "rewind", "undo", "1", *WHY)
    do(rewinder, "rewind", "apply", "2")
    do(Profile.READER, "audit", name)
    do(rewinder, "seek", name, f"{topic}/0", "5", *WHY)
    do(rewinder, "maintain")
    erased = ("--where", "kafka_offset = 0")
    do(rewinder, "erase", "plan", name, *erased, *WHY)
    do(rewinder, "erase", "apply", "1", *erased)
    do(Profile.READER, "erase", "show", "1")
    do(Profile.READER, "erase", "list")
    do(operator, "groups", "delete", name)
    for words in (("consume", name), ("retries", "drain", name), ("backfill", name)):  # these start Spark
        story.refuse(Profile.RUNNER, *words)
    story.refuse(operator, "groups", "remove-member", name, "somebody")
    story.refuse(Profile.READER, "audit-log")
    assert {profile: found for profile, found in story.commands.items() if found} == documented_commands()

    events = json.loads(do(Profile.READER, "audit-log", "--output", "json"))
    roles = {profile: story.only[profile] for profile in Profile}
    told = [(one["kind"], one["plan"], one["database_role"], one["claimed_by"]) for one in events if one["group"] == name]
    assert told == [
        ("FLOW PAUSED", None, roles[operator], who()),
        ("FLOW RESUMED", None, roles[operator], who()),
        ("FLOW CHANGED", None, roles[operator], who()),
        ("EDIT", None, roles[operator], who()),
        ("DISCARD", None, roles[operator], who()),
        ("REDRIVE PLANNED", 1, roles[operator], who()),
        ("REDRIVE STARTED", 1, roles[operator], who()),
        ("REDRIVE DONE", 1, roles[operator], who()),
        ("REWIND PLANNED", 1, roles[rewinder], who()),
        ("REWIND APPLIED", 1, roles[rewinder], who()),
        ("REWIND PLANNED", 2, roles[rewinder], who()),
        ("REWIND APPLIED", 2, roles[rewinder], who()),
        ("REWIND UNDONE", 1, roles[rewinder], who()),
        ("REWIND PLANNED", 3, roles[rewinder], who()),
        ("REWIND APPLIED", 3, roles[rewinder], who()),
        ("ERASURE PLANNED", 1, roles[rewinder], who()),
        ("ERASURE APPLIED", 1, roles[rewinder], who()),
        ("GROUP DELETED", None, roles[operator], who()),
    ]
    planned, applied = (next(one for one in events if one["kind"] == kind) for kind in ("REWIND PLANNED", "REWIND APPLIED"))
    assert planned["digest"] == applied["digest"] == story.consumer.sql("SELECT digest FROM tidemark.rewind WHERE rewind_id = 1")[0][0]
    assert (applied["reason"], applied["details"]["sink_rows"]) == (WHY[1], 2)
    assert next(one for one in events if one["kind"] == "DISCARD")["details"]["records"] == 1
    assert [one["kind"] for one in events if one["group"] is None][-2:] == ["MAINTENANCE STARTED", "MAINTENANCE DONE"]

    reader = story.only[Profile.READER]
    (applied_csv,) = [
        row for row in csv.DictReader(io.StringIO(story.call(reader, "audit-log", "--group", name, "--output", "csv").stdout))
        if (row["kind"], row["plan"]) == ("REWIND APPLIED", "1")
    ]  # fmt: skip
    assert applied_csv["digest"] == applied["digest"]
    since = json.loads(story.call(reader, "audit-log", "--since", applied["at"], "--output", "json").stdout)
    assert {one["event_id"] for one in since} <= {one["event_id"] for one in events if one["event_id"] >= applied["event_id"]}
    assert "REWIND UNDONE" in story.call(reader, "audit-log").stdout


def test_a_run_whose_transform_shuffles_needs_the_profile_stager(story: Story) -> None:
    story.run()
    runner, stager = (
        Target(story.roles.url(story.only[profile]), 1, story.consumer.attempt_id, Layout(story.table, (Column("payload", "bytea"),)))
        for profile in (Profile.RUNNER, Profile.STAGER)
    )
    with pytest.raises(RoleLacks, match="profile stager"):
        make_staging(runner, 1)
    assert make_staging(stager, 1) == f"tidemark.staged_{stager.attempt_id}_1"


def test_doctor_reports_a_role_that_cannot_run_with_the_command_that_helps(roles: Roles) -> None:
    roles.give(roles.run, Profile.READER)
    (finding,) = [one for one in examine_database(roles.url(roles.run), []) if one.subject == "profiles"]
    assert (finding.level, finding.fix.partition(": ")[2]) == (Level.FAILURE, f"tidemark migrate --grant-to {roles.run} --as runner")
    roles.give(roles.run, Profile.RUNNER, Profile.STAGER)
    (finding,) = [one for one in examine_database(roles.url(roles.run), []) if one.subject == "profiles"]
    assert (finding.level, finding.found) == (Level.OK, "reader, runner, stager")


# ---- what no profile includes


REWRITES = (
    "INSERT INTO tidemark.audit_event (kind) VALUES ('MADE UP')",
    "UPDATE tidemark.audit_event SET claimed_by = 'somebody else'",
    "DELETE FROM tidemark.audit_event",
    "TRUNCATE tidemark.audit_event",
    "DROP TABLE tidemark.audit_event",
    "ALTER TABLE tidemark.audit_event DISABLE TRIGGER ALL",
    "SET session_replication_role = replica",
    "INSERT INTO tidemark.role_profile VALUES (current_user, 'rewinder')",
    "UPDATE tidemark.batch SET loaded = loaded",
    "TRUNCATE tidemark.batch CASCADE",
    "UPDATE tidemark.rewound_batch SET loaded = loaded",
    "UPDATE tidemark.retry_action SET reason = 'another reason'",
    "UPDATE tidemark.rewind SET reason = 'another reason'",
    "UPDATE tidemark.redrive SET planned_by = 'somebody else'",
    "DELETE FROM tidemark.maintenance",
)


def test_a_role_with_all_profiles_cannot_rewrite_history(roles: Roles) -> None:
    roles.give(roles.run, *Profile)
    for statement in REWRITES:
        with pytest.raises(InsufficientPrivilege):
            query(roles, roles.run, statement)


def test_more_grants_than_profiles_give_do_not_open_what_only_grows(roles: Roles) -> None:
    """The trigger refuses even a statement that would change no row. The owner may."""
    roles.own(f"GRANT USAGE ON SCHEMA tidemark TO {roles.run}", f"GRANT ALL ON ALL TABLES IN SCHEMA tidemark TO {roles.run}")
    for statement in (
        "UPDATE tidemark.audit_event SET kind = kind",
        "DELETE FROM tidemark.audit_event WHERE false",
        "UPDATE tidemark.batch SET loaded = loaded WHERE false",
        "UPDATE tidemark.rewound_batch SET loaded = loaded WHERE false",
    ):
        with pytest.raises(InsufficientPrivilege, match="append-only"):
            query(roles, roles.run, statement)
        query(roles, roles.owner, statement)


def test_nobody_can_have_the_triggers_write_an_event_that_never_happened(roles: Roles) -> None:
    """A trigger function is called with the rights of the owner, so no other role may attach it to a table of its own."""
    roles.give(roles.run, *Profile)
    query(roles, roles.run, "SELECT count(*) FROM tidemark.audit_event")
    for (function,) in query(roles, roles.owner, "SELECT proname FROM pg_proc WHERE prosecdef AND pronamespace = 'tidemark'::regnamespace"):
        trap = "CREATE TEMPORARY TABLE flow (LIKE tidemark.flow); CREATE TRIGGER mine AFTER INSERT ON flow"
        with pytest.raises(InsufficientPrivilege, match="permission denied for function"):
            query(roles, roles.run, f"{trap} FOR EACH ROW EXECUTE FUNCTION tidemark.{function}()")


def test_rewinder_moves_batches_into_an_archive_unchanged_and_deletes_none(story: Story) -> None:
    """The archive's row must have the same numbers, and leaves the archive only for the ledger."""
    story.run()
    archive = """
        INSERT INTO tidemark.rewind (scenario, allow_loss, reason, planned_by, expires_at, digest)
        VALUES ('{{}}', false, 'to steal the ledger', 'a thief', now(), '');
        INSERT INTO tidemark.rewound_batch (rewound_by, batch_id, group_id, topic_id, partition, start_offset, end_offset, owner_epoch,
                                            attempt_id, loaded, skipped, retried, failed, unaccounted, sink_rows, committed_at, drained)
        SELECT rewind_id, batch_id, group_id, topic_id, partition, start_offset, end_offset, owner_epoch, attempt_id,
               {loaded}, skipped, retried, failed, unaccounted, sink_rows, committed_at, drained FROM tidemark.batch, tidemark.rewind;
    """
    delete = "DELETE FROM tidemark.batch;"
    for statements in (
        delete,
        archive.format(loaded="loaded - 1") + delete,
        archive.format(loaded="loaded") + delete + "DELETE FROM tidemark.rewound_batch",
    ):
        with pytest.raises(InsufficientPrivilege, match="neither in the ledger nor in the archive"):
            query(story.roles, story.only[Profile.REWINDER], statements)
    query(story.roles, story.only[Profile.REWINDER], archive.format(loaded="loaded") + delete)


def test_event_of_an_action_is_written_without_the_products_code(roles: Roles) -> None:
    """With the role that logged in; nobody has claimed to be a user."""
    roles.give(roles.run, Profile.OPERATOR)
    query(roles, roles.run, "INSERT INTO tidemark.consumer_group (name) VALUES ('cities')")
    query(roles, roles.run, "INSERT INTO tidemark.flow (group_id, paused) SELECT group_id, true FROM tidemark.consumer_group")
    (event,) = query(roles, roles.run, "SELECT kind, database_role, claimed_by FROM tidemark.audit_event WHERE group_name = 'cities'")
    assert event == ("FLOW PAUSED", roles.run, None)


def test_runner_can_neither_delete_nor_change_what_is_stored_nor_plan_a_rewind(story: Story) -> None:
    story.run()
    for statement in (
        "DELETE FROM tidemark.batch",
        "UPDATE tidemark.batch SET sink_rows = 0",
        "DELETE FROM tidemark.failed_record",
        "UPDATE tidemark.failed_record SET value = NULL",
        "UPDATE tidemark.partition_offset SET partition = 7",
        "DELETE FROM tidemark.partition_offset",
        "INSERT INTO tidemark.rewind DEFAULT VALUES",
        "CREATE TABLE tidemark.mine ()",
    ):
        with pytest.raises(InsufficientPrivilege):
            query(story.roles, story.only[Profile.RUNNER], statement)


def test_reader_sees_no_payload(roles: Roles) -> None:
    roles.give(roles.run, Profile.READER)
    for table, columns in PAYLOADS.items():
        query(roles, roles.run, f"SELECT count(*) FROM tidemark.{table}")
        for column in columns:
            with pytest.raises(InsufficientPrivilege):
                query(roles, roles.run, f"SELECT {column} FROM tidemark.{table}")


# ---- granting


def test_every_table_of_the_schema_is_readable_but_for_the_migrations_own(roles: Roles) -> None:
    """A new table has to be added to `TABLES`, and to the rights of a profile that writes it."""
    found = {name for (name,) in query(roles, roles.owner, "SELECT tablename FROM pg_tables WHERE schemaname = 'tidemark'")}
    assert found - set(TABLES) == {"migration_lock", "migration_log", "migration_version"} & found
    named = {table for one in RIGHTS.values() for table in (*one.insert, *one.update, *one.delete)}
    assert named | set(PAYLOADS) <= set(TABLES) <= found


def test_a_role_has_exactly_its_profiles_whatever_it_had_before(roles: Roles) -> None:
    """Also after the grants of earlier documentation, default privileges included."""
    fresh = {}
    for profile in Profile:
        fresh[profile] = held(roles, roles.new(f"fresh_{profile}", profile))
        assert fresh[profile]
    for statement in BEFORE_PROFILES:
        roles.own(statement.format(role=roles.run, owner=roles.owner))
    for profile in (*Profile, *reversed(Profile)):
        roles.give(roles.run, profile)
        assert held(roles, roles.run) == fresh[profile]
        assert lacking(roles, roles.run, profile) == []
    roles.give(roles.run, *Profile)
    assert set(held(roles, roles.run)) >= set(fresh[Profile.OPERATOR]) | set(fresh[Profile.REWINDER])
    assert [lacking(roles, roles.run, profile) for profile in Profile] == [[]] * len(Profile)


def test_grants_of_earlier_documentation_include_every_profile(roles: Roles) -> None:
    """So an installation works after the upgrade as before it, until its owner grants profiles."""
    for statement in BEFORE_PROFILES:
        roles.own(statement.format(role=roles.run, owner=roles.owner))
    assert [lacking(roles, roles.run, profile) for profile in Profile] == [[]] * len(Profile)


def test_migration_takes_back_what_default_privileges_give_on_the_new_tables(stack: LocalStack) -> None:
    """Otherwise a role could record any profile for itself, and the owner's next migration would grant it."""
    with made_roles(stack) as roles:
        roles.own(f"CREATE SCHEMA tidemark AUTHORIZATION {roles.owner}", BEFORE_PROFILES[0].format(role=roles.run))
        roles.own(*(one.format(role=roles.run, owner=roles.owner) for one in BEFORE_PROFILES[-2:]))
        schema.migrate(roles.url(roles.owner))
        grants = [(table, privilege) for table, privilege, _ in held(roles, roles.run) if table in ("audit_event", "role_profile")]
        assert grants == [("audit_event", "SELECT"), ("role_profile", "SELECT")]


def test_a_later_migrate_renews_the_grants_and_forgets_dropped_roles(roles: Roles) -> None:
    gone = roles.new("gone", Profile.READER)
    roles.give(roles.run, Profile.RUNNER, Profile.STAGER)
    before = held(roles, roles.run)
    roles.own(f"DROP OWNED BY {roles.run}", f"DROP OWNED BY {gone}", f"DROP ROLE {gone}")
    assert held(roles, roles.run) == []
    schema.migrate(roles.url(roles.owner))
    assert held(roles, roles.run) == before
    assert query(roles, roles.owner, "SELECT role, profile FROM tidemark.role_profile ORDER BY 2") == [
        (roles.run, "runner"),
        (roles.run, "stager"),
    ]


def test_name_of_a_role_is_quoted_and_the_grant_is_an_event(roles: Roles) -> None:
    name = 'odd "role"; --'
    roles.admin('CREATE ROLE "odd ""role""; --"')
    try:
        schema.migrate(roles.url(roles.owner), by="ann@host", grant_to=name, profiles=[Profile.READER])
        schema.migrate(roles.url(roles.owner), by="ann@host", grant_to=name, profiles=[Profile.OPERATOR, Profile.READER])
        assert query(
            roles, roles.owner, "SELECT kind, database_role, claimed_by, details FROM tidemark.audit_event ORDER BY event_id DESC LIMIT 1"
        ) == [
            ("ROLE GRANTED", roles.owner, "ann@host", {"role": name, "before": ["reader"], "profiles": ["reader", "operator"]}),
        ]
    finally:
        roles.own('DROP OWNED BY "odd ""role""; --"')
        roles.admin('DROP ROLE "odd ""role""; --"')


def test_only_the_owner_grants_and_only_to_another_role_that_exists(roles: Roles) -> None:
    """Nothing is granted or recorded otherwise."""
    roles.give(roles.run, *Profile)
    events = query(roles, roles.owner, "SELECT count(*) FROM tidemark.audit_event")
    with pytest.raises(NotTheOwner, match=f"run the command as {roles.owner}"):
        schema.migrate(roles.url(roles.run), grant_to=roles.run, profiles=[Profile.READER])
    with pytest.raises(BadInput, match='there is no role "nobody_at_all"'):
        schema.migrate(roles.url(roles.owner), grant_to="nobody_at_all", profiles=[Profile.READER])
    with pytest.raises(BadInput, match="owns the schema tidemark"):
        schema.migrate(roles.url(roles.owner), grant_to=roles.owner, profiles=[Profile.READER])
    assert schema.migrate(roles.url(roles.run)) == []
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

"""Addresses and credentials are passed in the environment, and nowhere else."""

from __future__ import annotations

import json
import pickle
import socket
import sys
import threading
from pathlib import Path
from urllib.parse import quote

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tidemark import connections
from tidemark.cli.main import main
from tidemark.connections import BOOTSTRAP_SERVERS, DATABASE_URL, FILES, KAFKA_CONFIG, REGISTRY_CONFIG, SPARK_CONF, Connections, from_env
from tidemark.db import _without_sources, connect, parsed
from tidemark.errors import BadInput, ConnectionRefused, DatabaseUnavailable, PasswordUnavailable
from tidemark.secret import SecretUnreadable
from tidemark.sink.table import Layout
from tidemark.sink.target import Target
from tidemark.spec.user_transform import Form
from tidemark.worker.call_transform import Work

SECRET = "s3cr3t"
ADVICE = "Write postgresql://user:password@host:port/database with names and password percent-encoded: %40 for an @, %2F for a slash."
GOOD = {DATABASE_URL: f"postgresql://me:{SECRET}@db/x", BOOTSTRAP_SERVERS: "kafka:9092"}
KAFKA = {"bootstrap.servers": "kafka:9092", "sasl.password": SECRET}
SPARK = {"spark.authenticate.secret": SECRET}
REGISTRY = {"url": "http://registry", "basic.auth.user.info": f"me:{SECRET}"}
WORDS = st.text(min_size=1, max_size=8).filter(str.strip)


@given(st.dictionaries(WORDS.map(lambda name: f"x.{name}"), WORDS, max_size=4), st.dictionaries(WORDS, WORDS, max_size=4), WORDS, WORDS)
def test_what_env_writes_from_env_reads(kafka: dict[str, str], spark: dict[str, str], servers: str, master: str) -> None:
    """The driver gets the same connections as the Airflow task."""
    given_connections = Connections("postgresql://me@db/x", {"bootstrap.servers": servers, **kafka}, master, spark)
    assert from_env(given_connections.env()) == given_connections


@pytest.mark.parametrize(
    ("env", "what"),
    [
        ({DATABASE_URL: ""}, DATABASE_URL),
        ({BOOTSTRAP_SERVERS: ""}, BOOTSTRAP_SERVERS),
        ({KAFKA_CONFIG: "{"}, KAFKA_CONFIG),
        ({KAFKA_CONFIG: "[1]"}, KAFKA_CONFIG),
        ({SPARK_CONF: "3"}, SPARK_CONF),
        ({KAFKA_CONFIG: '{"enable.auto.commit": true}'}, "Kafka setting enable.auto.commit"),
    ],
)
def test_an_unusable_variable_is_named(env: dict[str, str], what: str) -> None:
    """The message says which one, and what to write instead."""
    with pytest.raises(BadInput) as raised:
        from_env(GOOD | env)
    assert raised.value.what == what
    assert raised.value.fix
    assert SECRET not in str(raised.value)


def test_servers_may_stand_among_the_kafka_settings() -> None:
    """An Airflow connection has them there; the separate variable takes precedence. Spark runs on this machine by default."""
    assert from_env(GOOD) == Connections(GOOD[DATABASE_URL], {"bootstrap.servers": "kafka:9092"}, "local[*]", {})
    extra = {KAFKA_CONFIG: '{"bootstrap.servers": "other:1", "client.id": "x"}'}
    assert connections.kafka_config(extra) == {"bootstrap.servers": "other:1", "client.id": "x"}
    assert connections.kafka_config(GOOD | extra)["bootstrap.servers"] == "kafka:9092"


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    """Each secret in a separate file, with the newline that editors and `kubectl create secret` leave behind."""
    texts = {DATABASE_URL: GOOD[DATABASE_URL], KAFKA_CONFIG: KAFKA, SPARK_CONF: SPARK, REGISTRY_CONFIG: REGISTRY}
    for name, value in texts.items():
        (tmp_path / name).write_text(f"{value if isinstance(value, str) else json.dumps(value)}\n")
    return {FILES[name]: str(tmp_path / name) for name in texts}


def test_secrets_may_stand_in_files(files: dict[str, str]) -> None:
    """The values are the same as from the variables. The driver gets the paths of the files, so that it can read them again."""
    found = from_env(files)
    assert found.read() == Connections(GOOD[DATABASE_URL], KAFKA, spark_conf=SPARK, registry=REGISTRY)
    inherited = {DATABASE_URL: "postgresql://other/x", KAFKA_CONFIG: '{"client.id": "other"}'}
    assert from_env(inherited | found.env()) == found
    assert SECRET not in repr(found)
    resolved = Connections("postgresql://airflow/x", {"bootstrap.servers": "k:1"})
    assert from_env(files | resolved.env()) == resolved, "what Airflow's task has resolved overrides the worker's files"


def test_a_file_is_read_again(files: dict[str, str]) -> None:
    """A new password takes effect when the connections are next read."""
    found = from_env(files)
    before = found.read()
    Path(files[FILES[DATABASE_URL]]).write_text("postgresql://me:new@db/x")
    Path(files[FILES[KAFKA_CONFIG]]).write_text(json.dumps(KAFKA | {"sasl.password": "new"}))
    assert (found.read().database_url, found.read().kafka["sasl.password"]) == ("postgresql://me:new@db/x", "new")
    assert before.read() == before != found.read()


@pytest.mark.parametrize("name", FILES)
def test_a_variable_and_its_file_are_not_set_at_once(files: dict[str, str], name: str) -> None:
    """It would be unclear which of them counts."""
    with pytest.raises(BadInput, match=f"{FILES[name]}: {name} is set too. Set one of them.") as raised:
        from_env(files | {name: GOOD.get(name, "{}")})
    assert SECRET not in str(raised.value)


def test_a_file_that_cannot_be_used_is_named_without_its_text(files: dict[str, str]) -> None:
    """A missing or empty file may be about to be replaced, so it counts as an outage. A file that is not JSON is a mistake."""
    database, kafka = (Path(files[FILES[name]]) for name in (DATABASE_URL, KAFKA_CONFIG))
    kafka.write_text(f"{{ {SECRET}")
    with pytest.raises(BadInput, match=rf"{FILES[KAFKA_CONFIG]} \({kafka}\): it is not JSON") as raised:
        from_env(files)
    assert SECRET not in str(raised.value)
    kafka.write_text(" \n")
    with pytest.raises(SecretUnreadable, match=f"{kafka} cannot be read: it is empty"):
        from_env(files)
    database.unlink()
    with pytest.raises(DatabaseUnavailable, match=f"{database} cannot be read: No such file"):
        connect(database)


def test_no_repr_shows_a_secret() -> None:
    """Objects end up in logs and tracebacks, so their repr hides credentials. Pickling keeps them, because tasks need them."""
    found = Connections(GOOD[DATABASE_URL], KAFKA, spark_conf=SPARK)
    target = Target(found.database_url, 1, 2, (Layout("a.b", ()),))
    work = Work(target, found.kafka, Form.FUNCTION, len)
    for value in (found, target, work):
        assert SECRET not in repr(value)
    assert pickle.loads(pickle.dumps(work)) == work


@pytest.mark.parametrize(
    "url",
    [
        f"postgresql://me:{SECRET}%zz@db/x",
        f"postgresql://me:{SECRET}@[db/x",
        f"postgresql://me:{SECRET}@db/x?nonsense=1",
        f"mysql://me:{SECRET}@db/x",
        SECRET,
    ],
)
def test_a_database_url_that_cannot_be_read_is_refused_without_showing_it(url: str) -> None:
    """libpq's own message quotes the part that it could not read, which may be the password."""
    with pytest.raises(BadInput, match="database URL") as raised:
        connect(url)
    assert SECRET not in str(raised.value)
    assert raised.value.__cause__ is None


def parts_of(password: str) -> set[str]:
    return {password[at : at + 4] for at in range(len(password) - 3)}


@given(st.text("@/?#%:[]&=+,;'\"\\ XYZ789\x00\udc80", min_size=4, max_size=20))
@example("ABCD@EFGH?application_name=IJKL")
@example("ABCD?application_name=EFGH")
@example("ABCD[EFGH")
@example(",7777\x00")
def test_no_part_of_a_password_that_is_not_encoded_is_shown(password: str) -> None:
    """Neither the error nor its causes, which a traceback would print, contain any. libpq takes parts of it for host, port or database."""
    with pytest.raises((BadInput, DatabaseUnavailable)) as raised:
        connect(f"postgresql://me:{password}@127.0.0.1:1/x")
    error: BaseException | None = raised.value
    while error is not None:
        assert not {part for part in parts_of(password) if part in f"{error} {error!r}"} - parts_of(ADVICE)
        error = error.__cause__ or error.__context__


@given(st.text(min_size=1, max_size=20).filter(lambda password: "\x00" not in password))
def test_password_that_is_percent_encoded_is_taken_whatever_it_holds(password: str) -> None:
    """The URL is valid, but nothing listens on its port."""
    with pytest.raises(DatabaseUnavailable, match=r'connection to server at "127.0.0.1", port 1 failed'):
        connect(f"postgresql://me:{quote(password, safe='')}@127.0.0.1:1/x")


@pytest.mark.parametrize("password", ["ABCD@EFGH", "ABCD/EFGH", "ABCD?EFGH", "ABCD%ZZEF", "ABCD@EFGH/IJKL"])
def test_command_line_shows_no_part_of_such_a_password(
    password: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """libpq takes the part before a slash for the port, and quotes it in its message."""
    monkeypatch.setenv(DATABASE_URL, f"postgresql://me:{password}@127.0.0.1:1/x")
    monkeypatch.setattr("sys.argv", ["tidemark", "groups", "list"])
    with pytest.raises(SystemExit):
        main()
    told = "".join([*capfd.readouterr(), caplog.text])
    assert "percent-encoded" in told
    assert not [part for part in parts_of(password) if part in told]


# ---- the source of a password


COMMAND = "aws rds generate-db-auth-token --hostname db & 'x=%'"
SOURCES = {"TIDEMARK_DATABASE_PASSWORD_COMMAND": COMMAND, "TIDEMARK_DATABASE_PASSWORD_CALLABLE": "mine:password"}
LOGIN = {DATABASE_URL: "postgresql://me@127.0.0.1:1/x?sslmode=disable", BOOTSTRAP_SERVERS: "kafka:9092"}


@pytest.mark.parametrize("name", SOURCES)
def test_source_of_the_password_travels_in_the_url(name: str) -> None:
    """So drivers and executors get it the way they get the URL. libpq gets the rest. A driver's own variables do not count again."""
    found = from_env(LOGIN | {name: SOURCES[name]})
    assert isinstance(found.database_url, str)
    assert parsed(found.database_url) == parsed(LOGIN[DATABASE_URL])
    assert from_env({name: "inherited"} | found.env()) == found
    assert [value for _, value in _without_sources(found.database_url)[1]] == [SOURCES[name]]


def test_password_is_asked_for_at_each_connection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The function gets host, port, user and database. An outage does not make it answer twice."""
    monkeypatch.setenv("TIDEMARK_TRANSFORMS", str(tmp_path))
    monkeypatch.setattr("sys.path", list(sys.path))
    (tmp_path / "made_password.py").write_text("asked = []\ndef password(about):\n    asked.append(about)\n    return 'x'")
    url = from_env(LOGIN | {"TIDEMARK_DATABASE_PASSWORD_CALLABLE": "made_password:password"}).database_url
    for _ in range(2):
        with pytest.raises(DatabaseUnavailable, match="port 1 failed"):
            connect(url)
    assert sys.modules["made_password"].asked == 2 * [{"host": "127.0.0.1", "port": "1", "user": "me", "dbname": "x"}]


@pytest.mark.parametrize(
    ("env", "told"),
    [
        (LOGIN | SOURCES, "password_command: password_callable of the database is set too. Remove one of them."),
        (
            GOOD | {"TIDEMARK_DATABASE_PASSWORD_COMMAND": "x"},
            "password_command: a password of the database is set too. Remove one of them.",
        ),
    ],
)
def test_second_source_of_a_password_is_refused(env: dict[str, str], told: str) -> None:
    with pytest.raises(BadInput) as raised:
        connect(from_env(env).database_url)
    assert str(raised.value) == told


@pytest.mark.parametrize("name", SOURCES)
def test_file_of_the_url_and_a_source_of_its_password_are_not_set_at_once(files: dict[str, str], name: str) -> None:
    """A URL without a password is no secret."""
    with pytest.raises(BadInput, match=f"{name}: {FILES[DATABASE_URL]} is set too"):
        from_env(files | {name: "x"})


def test_failed_source_is_named_with_its_variable() -> None:
    """Nothing is connected. It is an outage of Postgres, for all that waits for one to end."""
    url = from_env(LOGIN | {"TIDEMARK_DATABASE_PASSWORD_COMMAND": "false"}).database_url
    told = r"password_command of the database \(TIDEMARK_DATABASE_PASSWORD_COMMAND, .*\): false ended with status 1"
    with pytest.raises(PasswordUnavailable, match=told) as raised:
        connect(url)
    assert isinstance(raised.value, DatabaseUnavailable)


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("postgresql://x@127.0.0.1:1/x", 'connection to server at "127.0.0.1", port 1 failed: Connection refused.'),
        ("postgresql://x@no.such.host.invalid/x", 'could not translate host name "no.such.host.invalid" to address: '),
    ],
    ids=["port", "host"],
)
def test_address_without_postgres_is_named_with_what_to_look_at(url: str, problem: str) -> None:
    with pytest.raises(ConnectionRefused) as raised:
        connect(url)
    assert str(raised.value).startswith(f"Postgres cannot be used: {problem}")
    assert str(raised.value).endswith(" correct TIDEMARK_DATABASE_URL, or the Postgres connection in Airflow.")


def test_server_that_ends_a_connection_during_the_tls_handshake_is_an_outage() -> None:
    """The settings may be right: a server that stops does this too."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def stop() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(8)
                connection.sendall(b"S")

        thread = threading.Thread(target=stop)
        thread.start()
        with pytest.raises(DatabaseUnavailable, match="SSL") as raised:
            connect(f"postgresql://x@127.0.0.1:{server.getsockname()[1]}/x?sslmode=require")
        thread.join()
    assert type(raised.value) is DatabaseUnavailable

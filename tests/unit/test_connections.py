"""Addresses and credentials travel in the environment, and nowhere else."""

from __future__ import annotations

import pickle
from urllib.parse import quote

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tidemark import connections, db
from tidemark.cli.main import main
from tidemark.connections import BOOTSTRAP_SERVERS, DATABASE_URL, KAFKA_CONFIG, SPARK_CONF, Connections, from_env
from tidemark.consume.forms import Work
from tidemark.db import connect
from tidemark.errors import BadInput, DatabaseUnavailable
from tidemark.sink.table import Layout
from tidemark.sink.target import Target
from tidemark.spec.transform import Form

SECRET = "s3cr3t"
GOOD = {DATABASE_URL: f"postgresql://me:{SECRET}@db/x", BOOTSTRAP_SERVERS: "kafka:9092"}
WORDS = st.text(min_size=1, max_size=8).filter(str.strip)


@given(
    st.dictionaries(WORDS.map(lambda name: f"x.{name}"), WORDS, max_size=4),
    st.dictionaries(WORDS, WORDS, max_size=4),
    WORDS,
    WORDS,
)
def test_what_env_writes_from_env_reads(kafka: dict[str, str], spark: dict[str, str], servers: str, master: str) -> None:
    """The driver gets what the Airflow task had."""
    given_connections = Connections("postgresql://me@db/x", {"bootstrap.servers": servers, **kafka}, master, spark)
    assert from_env(given_connections.env()) == given_connections


def test_defaults_are_few() -> None:
    """Spark runs on this machine unless told otherwise; database and broker have to be named."""
    found = from_env(GOOD)
    assert (found.spark_master, found.spark_conf, found.kafka) == ("local[*]", {}, {"bootstrap.servers": "kafka:9092"})


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
    """An Airflow connection has them there; the variable of their own wins."""
    extra = {KAFKA_CONFIG: '{"bootstrap.servers": "other:1", "client.id": "x"}'}
    assert connections.kafka_config(extra) == {"bootstrap.servers": "other:1", "client.id": "x"}
    assert connections.kafka_config(GOOD | extra)["bootstrap.servers"] == "kafka:9092"


def test_no_repr_shows_a_secret() -> None:
    """Values end up in logs and tracebacks; credentials are not printed with them, but travel with a task."""
    found = Connections(GOOD[DATABASE_URL], {"bootstrap.servers": "k:1", "sasl.password": SECRET}, spark_conf={"spark.ui.key": SECRET})
    target = Target(found.database_url, 1, 2, Layout("a.b", ()))
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
    """libpq's own message quotes what it could not read: the password, if it was that."""
    with pytest.raises(BadInput, match="database URL") as raised:
        connect(url)
    assert SECRET not in str(raised.value)
    assert raised.value.__cause__ is None


def parts_of(password: str) -> set[str]:
    return {password[at : at + 4] for at in range(len(password) - 3)}


@given(st.text("@/?#%:[]&=+,;'\"\\ XYZ789\x00\udc80", min_size=4, max_size=20))
@example("ABCD@EFGH")
@example("ABCD@EFGH/IJKL")
@example("ABCD@EFGH?application_name=IJKL")
@example("ABCD?application_name=EFGH")
@example("ABCD/EFGH")
@example("ABCD[EFGH")
@example("ABCD%ZZEF")
@example(",7777\x00")
@settings(deadline=None)
def test_no_part_of_a_password_that_is_not_encoded_is_shown(password: str) -> None:
    """Neither in the error nor in what led to it, which a traceback would print: libpq takes parts of it for host, port or database."""
    with pytest.raises((BadInput, DatabaseUnavailable)) as raised:
        connect(f"postgresql://me:{password}@127.0.0.1:1/x")
    error: BaseException | None = raised.value
    while error is not None:
        assert not {part for part in parts_of(password) if part in f"{error} {error!r}"} - parts_of(str(db._URL_FIX))
        error = error.__cause__ or error.__context__


@given(st.text(min_size=1, max_size=20).filter(lambda password: "\x00" not in password))
@settings(deadline=None)
def test_password_that_is_percent_encoded_is_taken_whatever_it_holds(password: str) -> None:
    """The URL is good; nobody listens at its port."""
    with pytest.raises(DatabaseUnavailable, match=r'connection to server at "127.0.0.1", port 1 failed'):
        connect(f"postgresql://me:{quote(password, safe='')}@127.0.0.1:1/x")


@pytest.mark.parametrize("password", ["ABCD@EFGH", "ABCD/EFGH", "ABCD?EFGH", "ABCD%ZZEF", "ABCD@EFGH/IJKL"])
def test_command_line_shows_no_part_of_such_a_password(
    password: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(DATABASE_URL, f"postgresql://me:{password}@127.0.0.1:1/x")
    monkeypatch.setattr("sys.argv", ["tidemark", "groups", "list"])
    with pytest.raises(SystemExit):
        main()
    told = "".join([*capfd.readouterr(), caplog.text])
    assert "percent-encoded" in told
    assert not [part for part in parts_of(password) if part in told]


def test_password_with_an_unencoded_slash_is_refused_without_being_shown() -> None:
    """libpq takes what follows for the port, and quotes it in its message."""
    with pytest.raises(BadInput) as refused:
        connect("postgresql://user:secret/word@127.0.0.1:5432/db")
    assert "secret" not in str(refused.value)

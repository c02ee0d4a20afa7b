"""Identities without passwords: a broker that demands tokens of seconds, and a Postgres role whose password changes every second."""

from __future__ import annotations

import contextlib
import fcntl
import json
import secrets
import sys
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import psycopg2
import pytest
from tests.support.kafka_topics import Topics
from tests.support.scenario import ARROW, PLAIN, SPARK, LocalEngine, Scenario, tidy_imports
from tests.support.shell import tidemark
from tests.support.token_broker import CLOSED, JAAS, JVM_CALLBACK, TokenKafka, TokenMaker, token_broker
from tests.support.waiting import until

from tidemark.author.check import Surroundings, check
from tidemark.connections import BOOTSTRAP_SERVERS, DATABASE_URL, KAFKA_CONFIG, database_url, from_env
from tidemark.consume import extent, run
from tidemark.db import connect, kept_open, session
from tidemark.errors import BrokerUnavailable, DatabaseUnavailable, TidemarkError
from tidemark.kafka import contact, reader
from tidemark.kafka.cluster import Cluster
from tidemark.kafka.config import checked
from tidemark.kafka.producer import DeliveryStatus, Outgoing, Publisher
from tidemark.kafka.reader import Reader
from tidemark.kafka.truncation import truncated
from tidemark.local import LocalStack, ports
from tidemark.offsets.store import TaskIdentity
from tidemark.records.ranges import TopicPartition
from tidemark.tokens import TokenUnavailable
from tidemark.values.fields import transform_of

COMMAND, CALLABLE = "TIDEMARK_DATABASE_PASSWORD_COMMAND", "TIDEMARK_DATABASE_PASSWORD_CALLABLE"
RECORDS = 50


@pytest.fixture(scope="module")
def broker() -> Iterator[TokenKafka]:
    with token_broker() as running:
        yield running


class Passwords:
    """A role whose password changes again and again, and the command that prints the current one."""

    def __init__(self, stack: LocalStack, folder: Path, every_s: float) -> None:
        self.role = f"role_{uuid.uuid4().hex[:8]}"
        self.used: list[str] = []
        self._file, self._lock, self._every_s = folder / "password", folder / "lock", every_s
        self._admin_url = stack.postgres.url()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def variables(self, url: str) -> dict[str, str]:
        """The variables with which a user connects. The command waits while the password is being changed."""
        return {DATABASE_URL: url_of(url, self.role), COMMAND: f"flock -s {self._lock} cat {self._file}"}

    def change(self) -> None:
        with self._lock.open("w") as lock, contextlib.closing(psycopg2.connect(self._admin_url)) as admin, admin, admin.cursor() as cur:
            fcntl.flock(lock, fcntl.LOCK_EX)
            self.used.append(secrets.token_hex(12))
            cur.execute(f"{'ALTER' if len(self.used) > 1 else 'CREATE'} ROLE {self.role} LOGIN SUPERUSER PASSWORD %s", (self.used[-1],))
            admin.commit()
            self._file.write_text(self.used[-1])

    def _run(self) -> None:
        while not self._ended.wait(self._every_s):
            self.change()

    def __enter__(self) -> Passwords:
        self.change()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        with contextlib.closing(psycopg2.connect(self._admin_url)) as admin, admin, admin.cursor() as cur:
            cur.execute(f"DROP ROLE {self.role}")


@pytest.fixture
def passwords(stack: LocalStack, tmp_path: Path) -> Iterator[Passwords]:
    with Passwords(stack, tmp_path, every_s=1.5) as changing:
        yield changing


def url_of(url: str, role: str) -> str:
    """The URL with this role and without a password."""
    return f"postgresql://{role}@{url.rpartition('@')[2]}"


@pytest.fixture
def consumer(database_url: str, broker: TokenKafka, project_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scenario]:
    """A consumer of a topic on the broker. The test itself uses the listener without logins, and a lasting password."""
    with tidy_imports():
        scenario = Scenario(project_dir, database_url, Topics(broker.bootstrap_servers()))
        monkeypatch.setenv("TIDEMARK_TRANSFORMS", str(project_dir / "transforms"))
        yield scenario.write(topics=scenario.topics.create()).make_sink("payload bytea")


def kafka_of(broker: TokenKafka, **source: str) -> dict[str, str]:
    """Kafka's settings, with the source's setting below ``tidemark.``."""
    servers = {"bootstrap.servers": f"{ports.HOST}:{broker.token_port}", "security.protocol": "SASL_PLAINTEXT"}
    return servers | {"sasl.mechanism": "OAUTHBEARER"} | {f"tidemark.{name.replace('_', '.')}": value for name, value in source.items()}


def environment(scenario: Scenario, kafka: dict[str, str], **more: str) -> dict[str, str]:
    return scenario.env() | {BOOTSTRAP_SERVERS: "", KAFKA_CONFIG: json.dumps(kafka)} | more


def maker_of(scenario: Scenario, lifetime_s: float) -> TokenMaker:
    return TokenMaker.write(scenario.folder / "transforms", f"tokens_{scenario.name}", lifetime_s)


def numbers(count: int) -> list[str]:
    return [str(number) for number in range(count)]


@pytest.mark.parametrize("source", ["function", "command"])
def test_each_kind_of_client_logs_in_with_a_token(source: str, consumer: Scenario, broker: TokenKafka) -> None:
    """Admin clients, the consumers of look-ups, the producer, and both readers. Without a token, no broker answers."""
    maker = maker_of(consumer, 3600)
    named = {"token": f"{maker.module.stem}:token"} if source == "function" else {"token_command": f"{sys.executable} {maker.module}"}
    settings = checked(kafka_of(broker, **named))
    (topic,) = consumer.spec.topics
    part = TopicPartition(topic, 0)
    consumer.topics.produce(topic, numbers(3))
    cluster = Cluster(settings)
    assert [each.name for each in cluster.topics([topic])] == [topic]
    until(lambda: list(cluster.times_at({part: 0})) == [part])  # it waits only a second for a record
    assert cluster.group_offsets(consumer.name, [part]) == {}
    assert truncated(settings, {part: (2, 0)}) == {}
    (report,) = Publisher(settings).publish([Outgoing(topic, 0, None, b"3", [])])
    assert (report.answer, report.offset) == (DeliveryStatus.STORED, 3)
    assert len([token for tokens in maker.tokens().values() for token in tokens]) == 1
    plain = {name: value for name, value in settings.items() if not name.startswith(("sasl", "tidemark", "security"))}
    with pytest.raises(BrokerUnavailable):
        Cluster(plain, timeout_s=2).topics([topic])


def test_advertised_addresses_that_accept_no_connection_are_named(broker: TokenKafka, monkeypatch: pytest.MonkeyPatch) -> None:
    """The broker answers at the given address, and sends its clients to another one."""
    monkeypatch.setattr(contact, "PATIENCE_S", 10.0)  # on a busy machine, the broker may take longer than a user should wait
    servers = f"{ports.HOST}:{broker.misleading_port}"
    message = rf"{servers} answers, but names brokers that accept no connection: {CLOSED} \(Connection refused\)\. Look at advertised"
    with pytest.raises(BrokerUnavailable, match=message):
        Cluster({"bootstrap.servers": servers}).matching("x")


@pytest.mark.usefixtures("reader")
def test_reader_outlives_its_tokens(consumer: Scenario, broker: TokenKafka) -> None:
    """The client renews its token in a thread of its own, also while nobody polls. The broker ends connections with expired tokens."""
    maker = maker_of(consumer, 2)
    (topic,) = consumer.spec.topics
    consumer.topics.produce(topic, numbers(100))
    with contextlib.closing(Reader(checked(kafka_of(broker, token=f"{maker.module.stem}:token")))) as client:
        for start in range(4):
            got = sum(chunk.num_rows for chunk in client.read(TopicPartition(topic, 0), start, 100))
            assert got == 100 - start
            count = len(maker.log.read_text().splitlines())
            until(lambda count=count: len(maker.log.read_text().splitlines()) > count, "the next token")  # type: ignore[misc]


@pytest.mark.usefixtures("reader")
def test_reader_whose_source_fails_reads_on_until_its_token_expires(
    consumer: Scenario, broker: TokenKafka, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Then the read ends as an outage, and the log says why no token came. With a token, the next read works."""
    monkeypatch.setattr(reader, "SILENCE_S", 10)
    maker = maker_of(consumer, 2)
    source = maker.module.read_text()
    (topic,) = consumer.spec.topics
    consumer.topics.produce(topic, numbers(10))
    settings = checked(kafka_of(broker, token_command=f"{sys.executable} {maker.module}"))
    with contextlib.closing(Reader(settings)) as client:
        assert sum(chunk.num_rows for chunk in client.read(TopicPartition(topic, 0), 0, 10)) == 10
        maker.module.write_text("raise SystemExit('no role')")
        own = "token not renewed cause=tidemark.token.command: "  # clients of earlier tests may also still renew their tokens
        until(lambda: own in caplog.text, "the warning")
        assert "ended with status 1: no role. Nothing was connected." in caplog.text
    with pytest.raises(TokenUnavailable, match="ended with status 1: no role"):  # no client of this process has a fresh one
        list(reader.read(settings, TopicPartition(topic, 0), 0, 10))
    maker.module.write_text(source)
    assert sum(chunk.num_rows for chunk in reader.read(settings, TopicPartition(topic, 0), 0, 10)) == 10


def test_continuous_run_outlives_its_tokens_and_passwords(
    consumer: Scenario, broker: TokenKafka, passwords: Passwords, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records arrive while Kafka's token is renewed five times, and Postgres' password is another one for each new session."""
    monkeypatch.setattr(extent, "LOOK_EVERY_S", 0.2)
    over, stop = extent.Continuous.over, threading.Event()
    monkeypatch.setattr(extent.Continuous, "over", lambda self, *args, **named: stop.is_set() or over(self, *args, **named))
    maker = maker_of(consumer, 2)
    consumer.set(run="continuous", run_for="1h")
    variables = environment(consumer, kafka_of(broker, token=f"{maker.module.stem}:token"))
    consumer.connections = from_env(variables | passwords.variables(consumer.database_url))
    attempt = run.open_attempt(consumer.connections.database_url, consumer.spec.group, TaskIdentity())
    engine = LocalEngine(consumer.spec, transform_of(consumer.spec, consumer.folders), consumer.connections, ())
    errors: list[BaseException] = []

    def consume() -> None:
        try:
            run.consume(consumer.spec, consumer.connections, attempt, lambda *_: engine)
        except TidemarkError as error:
            errors.append(error)

    thread = threading.Thread(target=consume)
    thread.start()
    (topic,) = consumer.spec.topics
    sent = 0
    try:
        while len([token for tokens in maker.tokens().values() for token in tokens]) < 6 or len(passwords.used) < 6:
            consumer.topics.produce(topic, numbers(RECORDS))
            sent += RECORDS
            until(lambda sent=sent: errors or len(consumer.rows()) == sent, "the records are loaded")  # type: ignore[misc]
            assert errors == []
    finally:
        stop.set()
        thread.join()
    assert errors == []
    consumer.check()
    assert consumer.attempt(attempt)["state"] == "COMMITTED"


@pytest.mark.thorough
@pytest.mark.parametrize("form", [PLAIN, ARROW], ids=["function", "arrow"])
def test_driver_and_workers_outlive_ten_tokens_and_leave_none_behind(
    form: str, consumer: Scenario, broker: TokenKafka, passwords: Passwords
) -> None:
    """A continuous run with Spark, from the command line. Output, command lines, Spark's event log and all tables have no token and no
    password."""
    history = consumer.folder / "history"
    history.mkdir()
    conf = {"enabled": "true", "dir": history.as_uri(), "rolling.enabled": "false", "compress": "false"}
    maker = maker_of(consumer, 5)
    consumer.transform(form)
    consumer.set(run="continuous", run_for="1s")  # and a minute, in which the next run would start
    env = environment(consumer, kafka_of(broker, token=f"{maker.module.stem}:token"))
    env |= passwords.variables(consumer.database_url)
    env |= {"TIDEMARK_SPARK_CONF": json.dumps({f"spark.eventLog.{name}": value for name, value in conf.items()})}
    done: list[str] = []
    thread = threading.Thread(target=lambda: done.append(str(consumer.command("consume", consumer.name, env=env))))
    thread.start()
    (topic,), sent, lines = consumer.spec.topics, 0, set()
    while thread.is_alive():
        consumer.topics.produce(topic, numbers(RECORDS))
        sent += RECORDS
        lines |= command_lines()
        thread.join(1)
    assert "returncode=0" in done[0], done[0]
    assert consumer.counts()["loaded"] > 20 * RECORDS
    consumer.check()
    by_process = maker.tokens()
    assert max(map(len, by_process.values())) >= 10, "one process outlives its tokens"
    assert len(by_process) >= 2, "driver and workers ask by themselves"
    where = "relkind = 'r' AND relnamespace IN ('tidemark'::regnamespace, 'lake'::regnamespace)"
    tables = consumer.sql(f"SELECT oid::regclass FROM pg_class WHERE {where}")
    rows = "\n".join(str(consumer.sql(f"SELECT t::text FROM {table} t")) for (table,) in tables)
    everything = "\n".join([done[0], rows, *lines, *(file.read_text() for file in history.iterdir())])
    secrets = (*passwords.used, *(token for tokens in by_process.values() for token in tokens))
    assert [secret for secret in secrets if secret in everything] == []


def command_lines() -> set[str]:
    """The command line of every process on this host."""
    found = set()
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found.add(file.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
    return found


@pytest.mark.thorough
def test_spark_form_reads_with_the_jvms_callback(consumer: Scenario, broker: TokenKafka) -> None:
    """Python's clients log in with the function's tokens, Spark's connector with those of the class that the settings name."""
    maker = maker_of(consumer, 5)
    (topic,) = consumer.spec.topics
    consumer.topics.produce(topic, numbers(RECORDS))
    consumer.transform(SPARK)
    kafka = kafka_of(broker, token=f"{maker.module.stem}:token")
    kafka |= {"kafka.sasl.login.callback.handler.class": JVM_CALLBACK, "kafka.sasl.jaas.config": JAAS}
    done = consumer.command("consume", consumer.name, env=environment(consumer, kafka))
    assert done.returncode == 0, done.stderr
    assert consumer.counts() == {"loaded": RECORDS, "sink_rows": RECORDS}
    consumer.check()


# ---- before a run


def test_check_and_doctor_find_what_a_run_would_meet(consumer: Scenario, broker: TokenKafka, tmp_path: Path) -> None:
    """Each names the setting, and goes on to the next part."""
    url = url_of(consumer.database_url, "nobody")
    kafka = kafka_of(broker, token=f"tokens_{consumer.name}:nothing")
    maker_of(consumer, 5)
    env = environment(consumer, kafka, **{DATABASE_URL: url, CALLABLE: "no_such_module:password"})
    for words in (("consumers", "check", consumer.name), ("doctor", consumer.name)):
        done = tidemark(consumer, *words, env=env)
        output = done.stdout + done.stderr
        assert done.returncode == 1, output
        assert f"tidemark.token: module tokens_{consumer.name} has no function nothing" in output
        assert "password_callable of the database" in output
        assert "there is no module no_such_module" in output
    failed = tidemark(consumer, "consume", consumer.name, env=env)
    assert (failed.returncode, "there is no module no_such_module" in failed.stderr) == (1, True)
    assert consumer.sql("SELECT count(*) FROM tidemark.attempt") == [(0,)]


def test_check_refuses_the_spark_form_without_a_callback(consumer: Scenario, broker: TokenKafka, monkeypatch: pytest.MonkeyPatch) -> None:
    maker = maker_of(consumer, 5)
    consumer.transform(SPARK)
    for name, value in environment(consumer, kafka_of(broker, token=f"{maker.module.stem}:token")).items():
        monkeypatch.setenv(name, value)

    def no_schema(*_: object) -> dict[str, object]:
        raise BrokerUnavailable(cause="not asked here")

    report = check(consumer.spec, Surroundings(consumer.folders, no_schema))  # type: ignore[arg-type]
    assert any("Set kafka.sasl.login.callback.handler.class" in str(error) for error in report.errors)


# ---- Postgres


def test_each_new_session_has_the_password_of_its_moment(consumer: Scenario, passwords: Passwords) -> None:
    """Also a second session that keeps a lock for the first one, minutes later."""
    url = database_url(passwords.variables(consumer.database_url))
    with session(url) as first:
        until(lambda: len(passwords.used) > 4)
        for _ in range(5):
            with kept_open(first) as cur:
                cur.execute("SELECT current_user")
                assert cur.fetchone() == (passwords.role,)


def test_password_that_was_replaced_while_it_was_fresh_is_asked_for_again(
    stack: LocalStack, database_url: str, project_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A function may say that its password lives for an hour. If the server refuses it, the function is asked once more."""
    monkeypatch.setenv("TIDEMARK_TRANSFORMS", str(project_dir))
    file, name = project_dir / "password", f"kept_{uuid.uuid4().hex[:8]}"
    (project_dir / f"{name}.py").write_text(f"import pathlib\ndef password(about): return pathlib.Path({str(file)!r}).read_text(), 3600")
    with tidy_imports(), Passwords(stack, project_dir, every_s=3600) as passwords:
        url = f"{url_of(database_url, passwords.role)}?sslmode=disable&password_callable={quote(f'{name}:password', safe='')}"
        for _ in range(2):
            connect(url).close()
            passwords.change()
        file.write_text("wrong")
        with pytest.raises(DatabaseUnavailable, match="password authentication failed"):
            connect(url)

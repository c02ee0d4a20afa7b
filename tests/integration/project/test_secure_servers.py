"""Runs against servers that require TLS, passwords and client certificates. No printed or stored text shows a password.

The product's own servers listen on loopback without encryption, and have no other options. Here the broker's settings are extended just
before it starts, and Postgres is reached through a proxy that accepts only TLS. Everything else (programs, folders, start and stop) is
unchanged.
"""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import json
import selectors
import socket
import socketserver
import ssl
import struct
import tempfile
import threading
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import psycopg2
import pytest
from confluent_kafka import KafkaException
from confluent_kafka.admin import (
    AclBinding,
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ResourcePatternType,
    ResourceType,
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialUpsertion,
)
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import pkcs12
from cryptography.x509.oid import NameOID
from tests.support.kafka_topics import Topics
from tests.support.scenario import ARROW, PLAIN, SPARK, Scenario, tidy_imports
from tests.support.waiting import until

from tidemark import migrations
from tidemark.airflow.connections import resolve
from tidemark.connections import DATABASE_URL, FILES, KAFKA_CONFIG, from_env
from tidemark.db import session
from tidemark.errors import BrokerUnavailable, DatabaseUnavailable
from tidemark.kafka.cluster import Cluster
from tidemark.kafka.config import checked
from tidemark.kafka.security import quoted, to_jvm
from tidemark.local import LocalStack, ports
from tidemark.local.kafka import Kafka
from tidemark.offsets import mirror
from tidemark.records.ranges import Slice, TopicPartition

USER = "loader"
KAFKA_PASSWORD = 'k"4f\\ka; p=w d'
"""Contains every kind of character that must be quoted in a JAAS line."""
POSTGRES_PASSWORD = "p@ss/w:rd%?"
KEY_PASSWORD = "key-passw0rd"
SCRAM = "org.apache.kafka.common.security.scram.ScramLoginModule"
AUTHORITY = "Tidemark test CA"
SSL_REQUEST = struct.pack("!ii", 8, 80877103)
_REFUSAL = b"SFATAL\0VFATAL\0C28000\0Mno encryption, no entry\0\0"
NO_TLS = b"E" + struct.pack("!i", 4 + len(_REFUSAL)) + _REFUSAL
"""A FATAL error as Postgres sends it."""
POLL_S = 0.1
HANDSHAKE_S = 10
ANSWER_S = 60


@dataclass(frozen=True)
class Certificates:
    """A CA for the test and the certificates that it signed, as PEM files."""

    ca: Path
    server: Path
    client: Path
    """Like the server's, certificate and key in one file. The key is not encrypted: Java 17 cannot read today's PEM encryption (PBES2)."""
    key_store: Path
    """The same as PKCS12, encrypted with `KEY_PASSWORD`."""
    stranger: Path
    """A CA that signed none of the certificates."""

    @classmethod
    def make(cls, folder: Path) -> Certificates:
        authority, key = _authority(AUTHORITY)
        stranger, _ = _authority("somebody else's CA")
        made = cls(*(folder / name for name in ("ca.pem", "server.pem", "client.pem", "client.p12", "stranger.pem")))
        made.ca.write_bytes(authority.public_bytes(serialization.Encoding.PEM))
        made.stranger.write_bytes(stranger.public_bytes(serialization.Encoding.PEM))
        certificate, secret = _signed("localhost", authority, key)
        made.server.write_bytes(_pem(secret) + certificate)
        certificate, secret = _signed(USER, authority, key)
        made.client.write_bytes(_pem(secret) + certificate)
        chain = (x509.load_pem_x509_certificate(certificate), [authority])
        how = serialization.BestAvailableEncryption(KEY_PASSWORD.encode())
        made.key_store.write_bytes(pkcs12.serialize_key_and_certificates(USER.encode(), secret, *chain, how))
        return made


class SecureKafka(Kafka):
    """A broker with three client listeners: the product's own without encryption, for the test itself; SASL_SSL; and SSL."""

    def __init__(self, folder: Path, certificates: Certificates) -> None:
        super().__init__(folder, None)
        self.certificates = certificates
        self.sasl_port = ports.find_free()
        self.tls_port = ports.find_free(exclude={self.sasl_port})
        self._iterations = 4096

    def set_password(self, password: str) -> None:
        """Returns when the broker knows it: the controller answers before. Each password has another number of iterations, which can be
        asked for."""
        self._iterations += 1
        info = ScramCredentialInfo(ScramMechanism.SCRAM_SHA_512, self._iterations)
        admin = AdminClient({"bootstrap.servers": self.bootstrap_servers()})
        admin.alter_user_scram_credentials([UserScramCredentialUpsertion(USER, info, password.encode())])[USER].result(ANSWER_S)

        def known() -> bool:
            with contextlib.suppress(KafkaException):  # it does not know the user yet
                infos = admin.describe_user_scram_credentials([USER])[USER].result(ANSWER_S).scram_credential_infos
                return [one.iterations for one in infos] == [self._iterations]
            return False

        until(known, "the broker knows the new password")

    def settings(self, port: int, controller_port: int) -> dict[str, str]:
        while {self.sasl_port, self.tls_port} & {port, controller_port}:  # chosen later, before the first start
            self.sasl_port, self.tls_port = ports.find_free(), ports.find_free(exclude={self.sasl_port})
        lines = super().settings(port, controller_port)
        extra = f",SASL_SSL://{ports.HOST}:{self.sasl_port},SSL://{ports.HOST}:{self.tls_port}"
        lines["listeners"] += extra
        lines["advertised.listeners"] += extra
        lines["listener.security.protocol.map"] += ",SASL_SSL:SASL_SSL,SSL:SSL"
        return lines | {
            "inter.broker.listener.name": "PLAINTEXT",
            # a resource without an ACL is open to everyone; the test itself, on the plaintext listener, may do everything
            "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
            "allow.everyone.if.no.acl.found": "true",
            "super.users": "User:ANONYMOUS",
            "sasl.enabled.mechanisms": "SCRAM-SHA-512",
            "listener.name.sasl_ssl.scram-sha-512.sasl.jaas.config": f"{SCRAM} required;",
            "listener.name.ssl.ssl.client.auth": "required",
            "ssl.keystore.type": "PEM",
            "ssl.keystore.location": str(self.certificates.server),
            "ssl.truststore.type": "PEM",
            "ssl.truststore.location": str(self.certificates.ca),
        }


class TlsFront(socketserver.ThreadingTCPServer):
    """Accepts only TLS connections and passes them on to Postgres, like a company's proxy: the wheel's Postgres is built without TLS.

    Handles only the start of Postgres' protocol: a client that does not request TLS is rejected with a FATAL, as by ``hostssl`` rules.
    Postgres handles passwords and everything else. The end of the block closes all connections.
    """

    request_queue_size = 100

    def __init__(self, certificates: Certificates, target: int) -> None:
        super().__init__((ports.HOST, 0), _Relayed)
        self.target = target
        self.port = int(self.server_address[1])
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.load_cert_chain(certificates.server)
        self.ending = threading.Event()
        self._accepting = threading.Thread(target=self.serve_forever, args=(POLL_S,), name="TLS front")

    def __enter__(self) -> TlsFront:
        self._accepting.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ending.set()
        self.shutdown()
        self._accepting.join()
        self.server_close()  # waits for the connections' threads


class _Relayed(socketserver.BaseRequestHandler):
    server: TlsFront

    def handle(self) -> None:
        self.request.settimeout(HANDSHAKE_S)
        with contextlib.suppress(OSError):
            if self.request.recv(len(SSL_REQUEST), socket.MSG_WAITALL) != SSL_REQUEST:
                self.request.sendall(NO_TLS)
                return
            self.request.sendall(b"S")
            context, address = self.server.context, (ports.HOST, self.server.target)
            with context.wrap_socket(self.request, server_side=True) as client, socket.create_connection(address) as server:
                client.settimeout(None)
                self._relay({client: server, server: client})

    def _relay(self, other: dict[socket.socket, socket.socket]) -> None:
        """Until one side closes its connection. A read returns a whole TLS record, so none waits in the client's buffer."""
        with selectors.DefaultSelector() as selector:
            for side in other:
                selector.register(side, selectors.EVENT_READ)
            while not self.server.ending.is_set():
                for key, _ in selector.select(POLL_S):
                    side = key.fileobj
                    assert isinstance(side, socket.socket)
                    data = side.recv(65536)
                    if not data:
                        return
                    other[side].sendall(data)


class SecureStack(LocalStack):
    """The unchanged embedded Postgres, and the broker with its secure listeners."""

    def __init__(self, folder: Path, certificates: Certificates) -> None:
        super().__init__(folder)
        self.certificates = certificates
        self.kafka: SecureKafka = SecureKafka(self.folder / "kafka", certificates)
        self.postgres_tls_port = 0


def _builder(subject: str, issuer: str, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    names = [x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)]) for text in (subject, issuer)]
    builder = x509.CertificateBuilder().subject_name(names[0]).issuer_name(names[1]).public_key(key)
    builder = builder.serial_number(x509.random_serial_number()).not_valid_before(now - datetime.timedelta(hours=1))
    return builder.not_valid_after(now + datetime.timedelta(days=1))


def _authority(name: str) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    key = ec.generate_private_key(ec.SECP256R1())
    constraints = x509.BasicConstraints(ca=True, path_length=0)
    return _builder(name, name, key.public_key()).add_extension(constraints, critical=True).sign(key, hashes.SHA256()), key


def _signed(name: str, authority: x509.Certificate, authority_key: ec.EllipticCurvePrivateKey) -> tuple[bytes, ec.EllipticCurvePrivateKey]:
    """A certificate for ``name`` and this machine's loopback address, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    names = x509.SubjectAlternativeName([x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address(ports.HOST))])
    builder = _builder(name, AUTHORITY, key.public_key()).add_extension(names, critical=False)
    return builder.sign(authority_key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM), key


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())


RECORDS = 200
SECRETS = (KAFKA_PASSWORD, quoted(KAFKA_PASSWORD)[1:-1], POSTGRES_PASSWORD, quote(POSTGRES_PASSWORD, safe=""), KEY_PASSWORD)


@pytest.fixture(scope="module")
def secure() -> Iterator[SecureStack]:
    """The secure stack, with a login role that may create databases."""
    with tempfile.TemporaryDirectory(prefix="tidemark-tests-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        with SecureStack(folder / "stack", Certificates.make(folder)).running() as stack:
            with contextlib.closing(psycopg2.connect(stack.postgres.url())) as admin:
                admin.autocommit = True
                with admin.cursor() as cur:
                    cur.execute(f"CREATE ROLE {USER} LOGIN CREATEDB PASSWORD %s", (POSTGRES_PASSWORD,))
            stack.kafka.set_password(KAFKA_PASSWORD)
            with TlsFront(stack.certificates, stack.postgres.port()) as front:
                stack.postgres_tls_port = front.port
                yield stack


NAMES = ("passwords", "passwords as the JVM names them", "certificates", "a key store")


@pytest.fixture
def settings(secure: SecureStack) -> dict[str, dict[str, str]]:
    """Kafka's settings by the `NAMES` of what the client has: SASL_SSL with a password, under librdkafka's names and under those of the
    JVM's client, and SSL with a certificate from a PEM file or from an encrypted key store."""
    ca, client = str(secure.certificates.ca), str(secure.certificates.client)
    servers = {
        "bootstrap.servers": f"localhost:{secure.kafka.sasl_port}",
        "security.protocol": "SASL_SSL",
        "sasl.mechanism": "SCRAM-SHA-512",
    }
    jaas = f"{SCRAM} required username={quoted(USER)} password={quoted(KAFKA_PASSWORD)};"
    tls = {"bootstrap.servers": f"localhost:{secure.kafka.tls_port}", "security.protocol": "SSL", "ssl.ca.location": ca}
    store = {"ssl.keystore.location": str(secure.certificates.key_store), "ssl.keystore.password": KEY_PASSWORD}
    found = (
        servers | {"sasl.username": USER, "sasl.password": KAFKA_PASSWORD, "ssl.ca.location": ca},
        servers | {"sasl.jaas.config": jaas, "ssl.truststore.type": "PEM", "ssl.truststore.location": ca},
        tls | {"ssl.certificate.location": client, "ssl.key.location": client},
        tls | store,
    )
    return dict(zip(NAMES, found, strict=True))


@pytest.fixture
def kafka(settings: dict[str, dict[str, str]]) -> dict[str, str]:
    return settings["passwords"]


@pytest.fixture
def consumer(secure: SecureStack, project_dir: Path) -> Iterator[Scenario]:
    """A consumer whose topic and table are on the secure servers. The loader creates and migrates its database over TLS. The test itself
    uses the broker's plaintext listener."""
    name, topics = f"test_{uuid.uuid4().hex[:12]}", Topics(secure.kafka.bootstrap_servers())
    with session(postgres_url(secure, "postgres")) as connection:
        connection.autocommit = True
        with connection.cursor() as cur:
            cur.execute(f"CREATE DATABASE {name}")
    migrations.migrate(postgres_url(secure, name))
    with tidy_imports():
        scenario = Scenario(project_dir, postgres_url(secure, name), topics)
        topic = topics.create(2)
        for partition in range(2):
            topics.produce(topic, (f"{partition}-{number}" for number in range(RECORDS)), partition=partition)
        yield scenario.write(topics=topic).make_sink("payload bytea")


def postgres_url(secure: SecureStack, database: str, **settings: str) -> str:
    query = {"sslmode": "verify-full", "sslrootcert": str(secure.certificates.ca)} | settings
    words = "&".join(f"{key}={quote(value, safe='/')}" for key, value in query.items())
    return f"postgresql://{USER}:{quote(POSTGRES_PASSWORD, safe='')}@localhost:{secure.postgres_tls_port}/{database}?{words}"


def environment(consumer: Scenario, kafka: dict[str, str], **more: str) -> dict[str, str]:
    """The variables that a user exports, with all Kafka settings in ``TIDEMARK_KAFKA_CONFIG``."""
    return {DATABASE_URL: consumer.database_url, "TIDEMARK_KAFKA_BOOTSTRAP_SERVERS": "", KAFKA_CONFIG: json.dumps(kafka)} | more


def check_loaded(consumer: Scenario) -> None:
    assert consumer.counts() == {"loaded": 2 * RECORDS, "sink_rows": 2 * RECORDS}
    consumer.check()


def check_silent(text: str) -> None:
    """Checks that ``text`` contains no password, in any spelling."""
    assert [secret for secret in SECRETS if secret in text] == []


@pytest.mark.usefixtures("reader")
@pytest.mark.sampled("names", "form", "reader")
@pytest.mark.parametrize("form", [PLAIN, ARROW], ids=["function form", "Arrow form"])
@pytest.mark.parametrize("names", NAMES)
def test_forms_that_read_in_python_run_with_either_clients_names(
    form: str, names: str, consumer: Scenario, settings: dict[str, dict[str, str]]
) -> None:
    """SCRAM over TLS with both clients' names, and client certificates. All settings come from the environment."""
    consumer.transform(form)
    consumer.connections = from_env(environment(consumer, settings[names]))
    consumer.run()
    check_loaded(consumer)


def test_a_run_goes_on_when_the_brokers_password_changes(
    consumer: Scenario, secure: SecureStack, kafka: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The settings come from a file. During a batch, the password changes on the broker and in the file. The batch has the old password, so
    the broker refuses it, and the same run retries it."""
    monkeypatch.setattr("tidemark.kafka.reader.SILENCE_S", 5)
    file = tmp_path / "kafka.json"
    file.write_text(json.dumps(kafka))
    rotated = threading.Lock()

    def rotate(_part: Slice) -> None:
        if rotated.acquire(blocking=False):
            secure.kafka.set_password("another")
            file.write_text(json.dumps(kafka | {"sasl.password": "another"}))

    consumer.connections = from_env({DATABASE_URL: consumer.database_url, FILES[KAFKA_CONFIG]: str(file)})
    try:
        consumer.run(before=rotate)
    finally:
        secure.kafka.set_password(KAFKA_PASSWORD)
    assert len(consumer.engine.batches) > 1
    check_loaded(consumer)


def test_libpq_reads_a_passfile_at_each_connection(secure: SecureStack, tmp_path: Path) -> None:
    """The URL has no password, and the one in the file may change."""
    file = tmp_path / "pgpass"
    file.touch(mode=0o600)
    url = postgres_url(secure, "postgres", passfile=str(file)).replace(f":{quote(POSTGRES_PASSWORD, safe='')}@", "@")
    escaped = POSTGRES_PASSWORD.replace(":", r"\:")
    file.write_text("*:*:*:*:guess\n")
    refused = r'^Postgres cannot be used: .*password authentication failed for user "\w+" .* Nothing was changed\. Unless '
    with pytest.raises(DatabaseUnavailable, match=refused), session(url):
        pass
    file.write_text(f"*:*:*:*:{escaped}\n")
    with session(url):
        pass


def test_run_without_rights_on_the_mirrored_group_succeeds_with_one_warning_that_names_the_acl(
    consumer: Scenario, secure: SecureStack, kafka: dict[str, str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The group has an ACL for another user, so the loader may neither describe it nor commit its offsets. DESCRIBE alone is not enough."""
    monkeypatch.setattr(mirror, "FINISH_S", 60.0)
    consumer.set(mirror=True)
    consumer.connections = from_env(environment(consumer, kafka))
    allow(secure, consumer.spec.group, "User:somebody", AclOperation.READ)
    with caplog.at_level("WARNING", "tidemark"):
        consumer.run()
    check_loaded(consumer)
    assert f"does not allow DESCRIBE on group {consumer.spec.group}" in caplog.text
    assert caplog.text.count(f"does not allow READ on group {consumer.spec.group}") == 1
    caplog.clear()
    allow(secure, consumer.spec.group, f"User:{USER}", AclOperation.READ)
    with caplog.at_level("WARNING", "tidemark"):
        consumer.run()
    assert "mirrored" not in caplog.text
    parts = [TopicPartition(*key) for key in consumer.positions()]
    mirrored = Cluster(consumer.connections.kafka).group_offsets(consumer.spec.group, parts)
    assert {(part.topic, part.partition): offset for part, offset in mirrored.items()} == consumer.positions()


def allow(secure: SecureStack, name: str, principal: str, operation: AclOperation, kind: ResourceType = ResourceType.GROUP) -> None:
    """Returns when the rule is in force: the controller answers before."""
    words = (kind, name, ResourcePatternType.LITERAL, principal, "*", operation, AclPermissionType.ALLOW)
    rule, admin = AclBinding(*words), AdminClient({"bootstrap.servers": secure.kafka.bootstrap_servers()})
    admin.create_acls([rule])[rule].result(ANSWER_S)
    until(lambda: admin.describe_acls(AclBindingFilter(*words)).result(ANSWER_S), "the broker knows the rule")


@pytest.mark.parametrize("transform", [PLAIN, pytest.param(SPARK, marks=pytest.mark.thorough)], ids=["function", "spark"])
def test_topic_that_may_be_described_but_not_read_is_refused(
    transform: str, consumer: Scenario, secure: SecureStack, kafka: dict[str, str]
) -> None:
    """With the right that is missing: it is no outage. Its settings may not be read either, which `check` notes."""
    (topic,) = consumer.spec.topics
    allow(secure, topic, f"User:{USER}", AclOperation.DESCRIBE, ResourceType.TOPIC)
    consumer.transform(transform)
    env = environment(consumer, kafka)
    done = consumer.command("consume", consumer.name, env=env)
    assert done.returncode == 1
    assert f"does not allow READ on {topic}. Ask for an ACL that allows it." in done.stderr
    checked = consumer.command("consumers", "check", consumer.name, env=env)
    assert (checked.returncode, "does not allow DESCRIBE_CONFIGS" in checked.stdout) == (0, True)


@pytest.mark.parametrize("names", [NAMES[1], pytest.param(NAMES[3], marks=pytest.mark.thorough)])
def test_the_spark_form_runs_with_the_jvms_client_and_its_history_shows_no_password(
    names: str, consumer: Scenario, settings: dict[str, dict[str, str]]
) -> None:
    """Spark's connector gets the same settings under its own names. Spark's event log, from which its UI shows settings and plans, and the
    driver's output contain no password. Passwords with quotes, backslashes and semicolons work."""
    history = consumer.folder / "history"
    history.mkdir()
    conf = {"enabled": "true", "dir": history.as_uri(), "rolling.enabled": "false", "compress": "false"}
    conf = {f"spark.eventLog.{name}": value for name, value in conf.items()}
    consumer.transform(SPARK)
    env = environment(consumer, settings[names], TIDEMARK_SPARK_CONF=json.dumps(conf))
    done = consumer.command("consume", consumer.name, env=env)
    assert done.returncode == 0, done.stderr
    check_loaded(consumer)
    (log,) = history.iterdir()
    assert "SparkListenerSQLExecutionStart" in log.read_text()
    check_silent(log.read_text() + done.stdout + done.stderr)


@pytest.mark.thorough
def test_airflow_connections_may_use_the_jvms_names_for_a_driver_of_the_spark_form(
    consumer: Scenario, secure: SecureStack, settings: dict[str, dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver that a task starts reads the connections' settings from its environment. Here trust store and key store are PEM files."""
    certificates = settings["certificates"]
    kafka = {"group.id": "any", **to_jvm(certificates), "bootstrap.servers": certificates["bootstrap.servers"]}
    tls = {"sslmode": "verify-full", "sslrootcert": str(secure.certificates.ca)}
    postgres = {"host": "localhost", "port": secure.postgres_tls_port, "login": USER, "password": POSTGRES_PASSWORD, "extra": tls}
    postgres["schema"] = consumer.sql("SELECT current_database()")[0][0]
    monkeypatch.setenv("AIRFLOW_CONN_TIDEMARK_POSTGRES", json.dumps({"conn_type": "postgres", **postgres}))
    monkeypatch.setenv("AIRFLOW_CONN_TIDEMARK_KAFKA", json.dumps({"conn_type": "kafka", "extra": kafka}))
    monkeypatch.setenv("AIRFLOW_CONN_TIDEMARK_SPARK", json.dumps({"conn_type": "spark", "host": "local[2]"}))
    consumer.transform(SPARK)
    done = consumer.command("consume", consumer.name, env=resolve(consumer.spec).env())
    assert done.returncode == 0, done.stderr
    check_loaded(consumer)


def test_a_broker_that_turns_us_away_is_an_outage_told_without_the_password(
    kafka: dict[str, str], settings: dict[str, dict[str, str]], secure: SecureStack
) -> None:
    """A wrong password, a broker with an untrusted certificate, or a listener that requires more than the client offers stops the run."""
    for wrong in (
        kafka | {"sasl.password": "another"},
        kafka | {"ssl.ca.location": str(secure.certificates.stranger)},
        kafka | {"security.protocol": "PLAINTEXT"},
        kafka | {"security.protocol": "SASL_PLAINTEXT"},
        {name: value for name, value in settings["certificates"].items() if "certificate" not in name and "key" not in name},
    ):
        with pytest.raises(BrokerUnavailable) as caught:
            Cluster(checked(wrong), timeout_s=3).topics(["any"])
        check_silent(f"{caught.value} {caught.value!r} {caught.value.__cause__!r}")


def test_a_database_that_turns_us_away_is_told_without_the_password(secure: SecureStack) -> None:
    """No TLS, an untrusted CA, a host name other than the certificate's, a wrong password: each error names its cause and no secret."""
    good, encoded = postgres_url(secure, "postgres"), quote(POSTGRES_PASSWORD, safe="")
    cases = {
        "no encryption": postgres_url(secure, "postgres", sslmode="disable"),
        "certificate verify failed": postgres_url(secure, "postgres", sslrootcert=str(secure.certificates.stranger)),
        "does not match host name": good.replace("@localhost:", "@elsewhere:") + "&hostaddr=127.0.0.1",
        "password authentication failed": good.replace(encoded, "guess"),
    }
    for said, url in cases.items():
        with pytest.raises(DatabaseUnavailable) as caught, session(url):
            pass
        assert said in str(caught.value)
        check_silent(f"{caught.value} {caught.value!r} {caught.value.__cause__!r}")

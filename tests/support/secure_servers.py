"""Postgres and Kafka of the embedded stack, with the requirements of a company's servers: TLS, passwords, client certificates.

The product's own servers listen on loopback without encryption, and have no other options. Here the broker's settings are extended just
before it starts, and Postgres is reached through a proxy that accepts only TLS. Everything else (programs, folders, start and stop) is
unchanged.
"""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import selectors
import socket
import socketserver
import ssl
import struct
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psycopg2
from confluent_kafka.admin import AdminClient, ScramCredentialInfo, ScramMechanism, UserScramCredentialUpsertion
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import pkcs12
from cryptography.x509.oid import NameOID

from tidemark.local import LocalStack, ports
from tidemark.local.kafka import Kafka

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


@dataclass(frozen=True)
class Certificates:
    """A CA for the test and the certificates that it signed, as PEM files."""

    ca: Path
    server: Path
    server_key: Path
    client: Path
    """Certificate and key in one file. The key is not encrypted: Java 17 cannot read today's PEM encryption (PBES2)."""
    key_store: Path
    """The same as PKCS12, encrypted with `KEY_PASSWORD`."""
    stranger: Path
    """A CA that signed none of the certificates."""

    @classmethod
    def make(cls, folder: Path) -> Certificates:
        authority, key = _authority(AUTHORITY)
        stranger, _ = _authority("somebody else's CA")
        made = cls(*(folder / name for name in ("ca.pem", "server.pem", "server.key", "client.pem", "client.p12", "stranger.pem")))
        made.ca.write_bytes(authority.public_bytes(serialization.Encoding.PEM))
        made.stranger.write_bytes(stranger.public_bytes(serialization.Encoding.PEM))
        certificate, secret = _signed("localhost", authority, key)
        made.server.write_bytes(certificate)
        made.server_key.write_bytes(_pem(secret))
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

    def set_password(self, password: str) -> None:
        change = UserScramCredentialUpsertion(USER, ScramCredentialInfo(ScramMechanism.SCRAM_SHA_512, 4096), password.encode())
        admin = AdminClient({"bootstrap.servers": self.bootstrap_servers()})
        admin.alter_user_scram_credentials([change])[USER].result(10)

    def _write_settings(self, name: str, *, port: int, controller_port: int, data: str) -> None:
        super()._write_settings(name, port=port, controller_port=controller_port, data=data)
        while {self.sasl_port, self.tls_port} & {port, controller_port}:  # chosen later, before the first start
            self.sasl_port, self.tls_port = ports.find_free(), ports.find_free(exclude={self.sasl_port})
        file = self.folder / name
        lines = dict(line.split("=", 1) for line in file.read_text().splitlines())
        extra = f",SASL_SSL://{ports.HOST}:{self.sasl_port},SSL://{ports.HOST}:{self.tls_port}"
        lines["listeners"] += extra
        lines["advertised.listeners"] += extra
        lines["listener.security.protocol.map"] += ",SASL_SSL:SASL_SSL,SSL:SSL"
        lines |= {
            "inter.broker.listener.name": "PLAINTEXT",
            # a resource without an ACL is open to everyone; the test itself, on the plaintext listener, may do everything
            "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
            "allow.everyone.if.no.acl.found": "true",
            "super.users": "User:ANONYMOUS",
            "sasl.enabled.mechanisms": "SCRAM-SHA-512",
            "listener.name.sasl_ssl.scram-sha-512.sasl.jaas.config": f"{SCRAM} required;",
            "listener.name.ssl.ssl.client.auth": "required",
            "ssl.keystore.type": "PEM",
            "ssl.keystore.location": str(self.folder / "server.pem"),
            "ssl.truststore.type": "PEM",
            "ssl.truststore.location": str(self.certificates.ca),
        }
        both = self.certificates.server_key.read_text() + self.certificates.server.read_text()
        (self.folder / "server.pem").write_text(both)
        file.write_text("".join(f"{key}={value}\n" for key, value in lines.items()))


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
        self.context.load_cert_chain(certificates.server, certificates.server_key)
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


@contextlib.contextmanager
def running() -> Iterator[SecureStack]:
    """Runs the secure stack within the block, with a login role that may create databases."""
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

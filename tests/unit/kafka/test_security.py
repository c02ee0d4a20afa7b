"""Security settings by librdkafka's names and by the JVM's are translated exactly, or refused without showing a secret."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemark.errors import BadInput
from tidemark.kafka.config import checked, jvm
from tidemark.kafka.security import quoted, to_jvm, to_librdkafka

SCRAM = "org.apache.kafka.common.security.scram.ScramLoginModule"
PLAIN = "org.apache.kafka.common.security.plain.PlainLoginModule"
SECRET = "s3cr3t-word"
SERVERS = {"bootstrap.servers": "broker:9093"}


def jaas(module: str, more: str = "") -> str:
    return f'{module} required username="a" password="{SECRET}"{more};'


LOGIN = {"sasl.username": "a", "sasl.password": SECRET}
EXACT: dict[str, tuple[dict[str, str], dict[str, str], dict[str, str]]] = {
    # settings that have the same name, then those of librdkafka and of the JVM
    "SCRAM over TLS": (
        {"security.protocol": "SASL_SSL", "sasl.mechanism": "SCRAM-SHA-512"},
        {"ssl.ca.location": "/ca.pem", **LOGIN},
        {"ssl.truststore.type": "PEM", "ssl.truststore.location": "/ca.pem", "sasl.jaas.config": jaas(SCRAM)},
    ),
    "PLAIN": (
        {"security.protocol": "SASL_PLAINTEXT", "sasl.mechanism": "PLAIN"},
        LOGIN,
        {"sasl.jaas.config": jaas(PLAIN)},
    ),
    "client certificate in one PEM file": (
        {"security.protocol": "SSL", "ssl.key.password": SECRET},
        {"ssl.certificate.location": "/app.pem", "ssl.key.location": "/app.pem"},
        {"ssl.keystore.type": "PEM", "ssl.keystore.location": "/app.pem"},
    ),
    "certificates in the settings themselves": (
        {"security.protocol": "SSL"},
        {"ssl.ca.pem": "CA", "ssl.certificate.pem": "CERTIFICATE", "ssl.key.pem": "KEY"},
        {"ssl.truststore.type": "PEM", "ssl.truststore.certificates": "CA"}
        | {"ssl.keystore.type": "PEM", "ssl.keystore.certificate.chain": "CERTIFICATE", "ssl.keystore.key": "KEY"},
    ),
    "client certificate in PKCS12": (
        {"security.protocol": "SSL", "ssl.keystore.location": "/app.p12", "ssl.keystore.password": SECRET},
        {},
        {"ssl.keystore.type": "PKCS12"},
    ),
    "host names unchecked": ({}, {"ssl.endpoint.identification.algorithm": "none"}, {"ssl.endpoint.identification.algorithm": ""}),
    "Kerberos of the host's own ticket": ({"sasl.kerberos.service.name": "kafka"}, {}, {}),
}


@pytest.mark.parametrize("case", EXACT)
def test_each_client_gets_the_same_settings_by_its_own_names(case: str) -> None:
    """Settings with a counterpart are translated in both directions; librdkafka's own names stay as they are. A connection that JVM tools
    use, too, may keep both spellings. All settings pass through `checked`; the code behind it sees one spelling only."""
    both, ours, theirs = EXACT[case]
    assert to_jvm(both | ours) == both | theirs
    for written in (theirs, ours, ours | theirs):
        assert to_librdkafka(both | written) == both | ours
    assert checked(SERVERS | both | theirs) == SERVERS | both | ours


@given(st.text(), st.text())
def test_any_user_and_password_survive_the_way_through_a_jaas_line(user: str, password: str) -> None:
    """Quotes, backslashes, semicolons and line breaks in a password are part of the password, not syntax of the line."""
    config = {"sasl.mechanism": "SCRAM-SHA-256", "sasl.username": user, "sasl.password": password}
    assert to_librdkafka(to_jvm(config)) == config


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ('"a b"', "a b"),
        ("'a\"b'", 'a"b'),
        (r'"a\"b\\c"', r'a"b\c'),
        (r'"tab\tnew\nline"', "tab\tnew\nline"),
        (r'"\101\60"', "A0"),
        ("bare-word.1", "bare-word.1"),
    ],
)
def test_a_jaas_value_is_read_as_the_jvm_reads_it(written: str, read: str) -> None:
    """Both kinds of quotes, escapes and bare words are read as by Java's StreamTokenizer."""
    line = f"{SCRAM}  required\n username = {written}\n password={quoted(SECRET)} ;"
    assert to_librdkafka({"sasl.mechanism": "SCRAM-SHA-512", "sasl.jaas.config": line})["sasl.username"] == read


REFUSED_BY_LIBRDKAFKA = {
    "JKS truststore": ({"ssl.truststore.location": "/ca.jks", "ssl.truststore.type": "JKS"}, "ssl.truststore.type"),
    "truststore without a type, which is JKS": ({"ssl.truststore.location": "/ca.jks"}, "ssl.truststore.type"),
    "truststore's password": ({"ssl.truststore.location": "/ca.jks", "ssl.truststore.password": SECRET}, "ssl.truststore.password"),
    "JKS key store": ({"ssl.keystore.location": "/a.jks", "ssl.keystore.type": "JKS"}, "ssl.keystore.type"),
    "PEM texts without the type": ({"ssl.keystore.key": SECRET, "ssl.keystore.certificate.chain": "C"}, "ssl.keystore.type"),
    "password of a PEM key store": ({"ssl.keystore.type": "PEM", "ssl.keystore.password": SECRET}, "ssl.keystore.password"),
    "JVM's provider": ({"ssl.provider": "BC"}, "ssl.provider"),
    "callback class": ({"sasl.client.callback.handler.class": "a.B"}, "sasl.client.callback.handler.class"),
    "module without a mechanism": ({"sasl.jaas.config": jaas(SCRAM)}, "sasl.jaas.config"),
    "both names, with different values": (
        {"sasl.mechanism": "PLAIN", "sasl.username": "a", "sasl.password": "another", "sasl.jaas.config": jaas(PLAIN)},
        "sasl.password",
    ),
    "two mechanisms": ({"sasl.mechanism": "PLAIN", "sasl.mechanisms": "SCRAM-SHA-256"}, "sasl.mechanism"),
}
JAAS = {
    "other login module": ("OAUTHBEARER", f'a.b.OAuthBearerLoginModule required clientSecret="{SECRET}";'),
    "module and mechanism that disagree": ("PLAIN", jaas(SCRAM)),
    "delegation token": ("SCRAM-SHA-256", jaas(SCRAM, more=' tokenauth="true"')),
    "user without a password": ("PLAIN", f'{PLAIN} required username="{SECRET}";'),
    "two modules": ("PLAIN", f"{jaas(PLAIN)} {PLAIN} optional;"),
    "broken line": ("PLAIN", f'{PLAIN} required username="a password={SECRET};'),
}
REFUSED_BY_LIBRDKAFKA |= {
    case: ({"sasl.mechanism": mechanism, "sasl.jaas.config": line}, "sasl.jaas.config") for case, (mechanism, line) in JAAS.items()
}


REFUSED_BY_THE_JVM = {
    "unchecked certificates": ({"enable.ssl.certificate.verification": "False"}, "enable.ssl.certificate.verification"),
    "certificate and key in two files": ({"ssl.certificate.location": "/a.pem", "ssl.key.location": "/a.key"}, "ssl.key.location"),
    "certificate without a key": ({"ssl.certificate.location": "/a.pem"}, "ssl.key.location"),
    "CA given twice": ({"ssl.ca.location": "/ca.pem", "ssl.ca.pem": "CA"}, "ssl.ca.pem"),
    "CA to be found by librdkafka": ({"ssl.ca.location": "probe"}, "ssl.ca.location"),
    "ciphers by OpenSSL's names": ({"ssl.cipher.suites": "ECDHE-RSA-AES256-GCM-SHA384"}, "ssl.cipher.suites"),
    "password for a mechanism that has none": ({"sasl.mechanism": "GSSAPI", **LOGIN}, "sasl.mechanism"),
    "password without a mechanism": (LOGIN, "sasl.mechanism"),
    "OAuth": ({"sasl.oauthbearer.client.secret": SECRET}, "sasl.oauthbearer.client.secret"),
    "keytab": ({"sasl.kerberos.keytab": "/a.keytab"}, "sasl.kerberos.keytab"),
}


@pytest.mark.parametrize("case", REFUSED_BY_LIBRDKAFKA | REFUSED_BY_THE_JVM)
def test_a_setting_that_a_client_cannot_follow_is_refused_by_its_name_alone(case: str) -> None:
    """Nothing is dropped or guessed. The message names the setting and never shows its secret. Only the Spark form refuses settings of
    librdkafka that the JVM lacks."""
    settings, named = (REFUSED_BY_LIBRDKAFKA | REFUSED_BY_THE_JVM)[case]
    config = {**SERVERS, **settings} if case in REFUSED_BY_LIBRDKAFKA else checked({**SERVERS, **settings})
    with pytest.raises(BadInput) as caught:
        (checked if case in REFUSED_BY_LIBRDKAFKA else jvm)(config)
    assert caught.value.what == f"Kafka setting {named}"
    assert SECRET not in f"{caught.value} {caught.value!r}"

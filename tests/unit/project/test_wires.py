"""Missing protection of Postgres, Kafka and Spark across a network. Loopback and Unix sockets need none."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemark.connections import Connections
from tidemark.errors import BadInput
from tidemark.spark.session import _guards
from tidemark.wires import AUTHENTICATE, ENCRYPTED_BY, ENCRYPTION, SECRET, guarded, of_kafka, of_postgres, of_servers, of_spark, on_loopback

PASSWORD = "hunter2"
REMOTE = "spark://m:7077"
VERIFIED = "sslmode=verify-full&sslrootcert=/ca.pem"


@pytest.mark.parametrize(
    ("servers", "named"),
    [
        ("127.0.0.1:9092", ""),
        ("localhost:9092,[::1]:9092,::1", ""),
        ("PLAINTEXT://LOCALHOST:9092", ""),
        ("127.0.0.1:9092,broker:9092", "broker"),
        ("a:1, b:2,SASL_PLAINTEXT://c:3", "a, b, c"),
        ("[fd00::2]:9092", "fd00::2"),
        ("10.0.0.1", "10.0.0.1"),
        ("127.0.0.1.example.org:9092", "127.0.0.1.example.org"),
    ],
)
def test_kafka_in_plain_text_is_found_for_the_servers_that_are_not_here(servers: str, named: str) -> None:
    found = of_kafka({"bootstrap.servers": servers})
    fix = "Set security.protocol to SASL_SSL or SSL, and ssl.ca.location."
    told = f"Kafka at {named} is reached in plain text: security.protocol is PLAINTEXT. {fix}"
    assert [str(one) for one in found] == ([told] if named else [])


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"security.protocol": "sasl_ssl"}, None),
        ({"security.protocol": "SSL", "enable.ssl.certificate.verification": "true"}, None),
        ({"security.protocol": "SASL_PLAINTEXT", "sasl.password": PASSWORD}, "SASL_PLAINTEXT"),
        ({"security.protocol": "SSL", "enable.ssl.certificate.verification": "false"}, "enable.ssl.certificate.verification is false"),
        ({"security.protocol": "SSL", "ssl.endpoint.identification.algorithm": "none"}, "ssl.endpoint.identification.algorithm is none"),
    ],
)
def test_kafka_needs_tls_that_verifies_the_broker(settings: dict[str, str], word: str | None) -> None:
    found = of_kafka({"bootstrap.servers": "broker:9093", **settings})
    assert [word in str(one) for one in found] == ([] if word is None else [True])


@pytest.mark.parametrize(
    ("url", "hosts"),
    [
        ("postgresql:///lake", None),
        ("postgresql://me@127.0.0.1/lake", None),
        ("postgresql://me@localhost,[::1]:5433/lake", None),
        ("postgresql://me@/lake?host=/run/postgresql", None),
        ("postgresql://me@/lake?host=%40abstract", None),
        (f"postgresql://me@db/lake?{VERIFIED}", None),
        ("postgresql://me@db/lake?sslrootcert=system", None),
        ("postgresql://me@db/lake?gssencmode=require", None),
        ("postgresql://me@db/lake?hostaddr=127.0.0.1", None),
        ("postgresql://me@localhost/lake?hostaddr=10.0.0.1", "10.0.0.1"),
        ("postgresql://me@db1,db2/lake?hostaddr=,127.0.0.1", "db1"),
        (f"postgresql://me:{PASSWORD}@db/lake", "db"),
        ("postgresql://me@127.0.0.1,db2/lake", "db2"),
        ("postgresql://me@db1,db2:5433/lake?target_session_attrs=read-write", "db1, db2"),
    ],
)
def test_postgres_below_verify_full_is_found_for_the_hosts_that_are_not_here(url: str, hosts: str | None) -> None:
    """Each host of the URL is checked, and the text names the remote ones."""
    told = [str(one) for one in of_postgres(url)]
    assert [f"Postgres at {hosts} is not verified" in one and PASSWORD not in one for one in told] == ([] if hosts is None else [True])


@pytest.mark.parametrize("mode", ["disable", "allow", "prefer", "require", "verify-ca"])
def test_each_weaker_sslmode_is_found_by_its_name(mode: str) -> None:
    (found,) = of_postgres(f"postgresql://me@db/lake?sslmode={mode}")
    assert f"sslmode is {mode}" in str(found)


@pytest.mark.parametrize("master", ["local", "local[*]", "local[2,4]"])
def test_spark_in_local_mode_is_authenticated_with_a_secret_that_it_generates(master: str) -> None:
    """Every user of the host can connect to its ports. Only root can read what passes over loopback, so nothing is encrypted."""
    added = guarded(master, {})
    assert (on_loopback(master), added, of_spark(master, added)) == (True, {AUTHENTICATE: "true"}, [])
    assert guarded(master, {AUTHENTICATE: "false"}) == {}
    (found,) = of_spark(master, {AUTHENTICATE: "false"})
    assert "every user of this host can fetch them" in str(found)


@pytest.mark.parametrize("master", ["spark://127.0.0.1:7077", "spark://localhost:1,[::1]:2"])
def test_cluster_on_loopback_is_authenticated_and_not_encrypted(master: str) -> None:
    conf = {AUTHENTICATE: "true", SECRET: PASSWORD}
    assert (on_loopback(master), guarded(master, conf), of_spark(master, conf)) == (True, {}, [])


@pytest.mark.parametrize(
    "master", [REMOTE, "spark://127.0.0.1:7077", "spark://127.0.0.1:7077,m2:7077", "yarn", "k8s://https://127.0.0.1:6443"]
)
def test_cluster_has_to_be_authenticated_or_declared_open(master: str) -> None:
    """Kubernetes' API may be on loopback, but the executors are not. If Spark generates the secret, the user needs none."""
    with pytest.raises(BadInput, match=r"spark\.authenticate is not set.*set spark\.authenticate to false") as raised:
        guarded(master, {})
    assert (SECRET in str(raised.value)) is master.startswith("spark://")
    (found,) = of_spark(master, {})
    assert found.found == raised.value.found
    assert guarded(master, {AUTHENTICATE: "false"}) == {}
    (found,) = of_spark(master, {AUTHENTICATE: "false"})
    assert "spark.authenticate is false" in str(found)


def test_a_standalone_cluster_needs_the_secret_that_its_master_has() -> None:
    """Spark would report this too, but as a Java exception."""
    with pytest.raises(BadInput, match=r"spark\.authenticate\.secret: it is not set.*TIDEMARK_SPARK_CONF_FILE"):
        guarded(REMOTE, {AUTHENTICATE: "true"})
    assert guarded("yarn", {AUTHENTICATE: "true"}) != {}


@given(st.dictionaries(st.sampled_from([*ENCRYPTED_BY, "spark.io.encryption.enabled"]), st.sampled_from(["true", "false"])))
def test_an_authenticated_application_is_encrypted_unless_its_settings_decide_otherwise(chosen: dict[str, str]) -> None:
    """No user setting is replaced, and no second way to encrypt RPC is added."""
    conf = {AUTHENTICATE: "true", SECRET: PASSWORD, **chosen}
    added = guarded(REMOTE, conf)
    assert not added.keys() & conf.keys()
    encrypted = sum((conf | added).get(name) == "true" for name in ENCRYPTED_BY)
    assert encrypted >= (chosen.get(ENCRYPTED_BY[0]) != "false")
    assert not (any(conf.get(name) == "true" for name in ENCRYPTED_BY) and ENCRYPTED_BY[0] in added)
    told = [str(one) for one in of_spark(REMOTE, conf | added)]
    assert ["is not encrypted" in one and PASSWORD not in one for one in told] == ([] if encrypted else [True])


def test_start_of_spark_warns_of_what_stays_open(caplog: pytest.LogCaptureFixture) -> None:
    """Nothing is added to an application that was started by spark-submit."""
    authenticated = {AUTHENTICATE: "true", SECRET: PASSWORD}
    assert _guards(REMOTE, authenticated).keys() == ENCRYPTION.keys()
    assert caplog.messages == []
    assert _guards(REMOTE, {AUTHENTICATE: "false"}) == _guards(None, {"spark.master": REMOTE, **authenticated}) == {}
    assert ["spark.authenticate is false" in caplog.messages[0], "is not encrypted" in caplog.messages[1]] == [True, True]
    assert len(caplog.messages) == 2


def test_servers_are_judged_by_what_the_file_of_the_url_holds(tmp_path: Path) -> None:
    file = tmp_path / "url"
    connections = Connections(file, {"bootstrap.servers": "k:9092"})
    file.write_text("postgresql://me@db/lake\n")
    assert [str(one).split()[0] for one in of_servers(connections)] == ["Kafka", "Postgres"]
    file.write_text(f"postgresql://me@db/lake?{VERIFIED}\n")
    assert [str(one).split()[0] for one in of_servers(connections)] == ["Kafka"]

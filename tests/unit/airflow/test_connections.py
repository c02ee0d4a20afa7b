"""Airflow's connections become a database URL, librdkafka's settings and Spark's master, whatever they contain."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import psycopg2.extensions
import pytest
from airflow.sdk import BaseHook, Connection
from airflow.sdk.configuration import clear_secrets_backends_cache
from airflow.sdk.exceptions import AirflowNotFoundException

from tidemark.airflow.connections import kafka_config, registry_config, resolve, spark_settings
from tidemark.connections import DEPLOY_MODE, from_env
from tidemark.db import parsed
from tidemark.errors import BadInput
from tidemark.spec import ConsumerSpec, load_consumer

MARK = "hunter2-p@ss/w:rd?#%&+ é"


def connection(conn_id: str = "c", *, extra: Any = None, **fields: Any) -> Connection:
    return Connection(conn_id=conn_id, **{"conn_type": "generic", **fields}, extra=None if extra is None else json.dumps(extra))


@pytest.fixture
def spec_of(tmp_path: Path) -> Callable[..., ConsumerSpec]:
    """Returns a function that loads a consumer's file, which may have further keys."""

    def load(more: str = "transform: t:t\n") -> ConsumerSpec:
        path = tmp_path / "flights.yaml"
        path.write_text(f"topics: [flights]\nsink: {{table: a.b}}\n{more}")
        return load_consumer(path)

    return load


@pytest.fixture
def spec(spec_of: Callable[..., ConsumerSpec]) -> ConsumerSpec:
    return spec_of()


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> dict[str, Connection]:
    """The connections that Airflow has, by id."""
    found = {
        "tidemark_kafka": connection(extra={"bootstrap.servers": "k:9092"}),
        "tidemark_postgres": connection(host="db"),
        "tidemark_spark": connection(host="local[2]"),
    }

    def get(conn_id: str) -> Any:
        if conn_id not in found:
            raise AirflowNotFoundException(f"The conn_id `{conn_id}` isn't defined")
        return found[conn_id]

    monkeypatch.setattr(BaseHook, "get_connection", staticmethod(get))
    return found


def as_libpq_reads(url: str) -> dict[str, str]:
    return psycopg2.extensions.parse_dsn(url)


TLS = {"sslmode": "verify-full", "sslrootcert": "/etc/c a.pem", "sslpassword": "x y"}
OPTIONS = {"options": "-c search_path=a,b -c work_mem=64MB"}
PASSWORDS = [MARK, "%41", "a b", "a+b", "ä€𝄞", "'\"\\", "postgresql://x", "{{ var }}", "p" * 500]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, {}),
        ({"host": "db"}, {"host": "db"}),
        (
            {"host": "db", "login": "loader", "password": "p", "port": 5433, "schema": "lake"},
            {"host": "db", "user": "loader", "password": "p", "port": "5433", "dbname": "lake"},
        ),
        ({"host": "db", "login": "a@b:c"}, {"host": "db", "user": "a@b:c"}),
        ({"host": "db", "login": "l", "schema": "a/b?c"}, {"host": "db", "user": "l", "dbname": "a/b?c"}),
        ({"host": "/run/pg sql", "login": "l"}, {"host": "/run/pg sql", "user": "l"}),
        ({"host": "::1", "port": 5432}, {"host": "::1", "port": "5432"}),
        ({"host": "[::1]"}, {"host": "::1"}),
        ({"host": "a,b", "port": 6000}, {"host": "a,b", "port": "6000,6000"}),
        ({"host": "a:1,b", "port": 2}, {"host": "a,b", "port": "1,2"}),
        ({"host": "db", "extra": TLS}, {"host": "db", **TLS}),
        ({"host": "db", "extra": OPTIONS}, {"host": "db", **OPTIONS}),
        ({"host": "db", "extra": {"cursor": "dictcursor", "iam": False, "sslmode": "require"}}, {"host": "db", "sslmode": "require"}),
        *(({"host": "db", "login": "l", "password": one}, {"host": "db", "user": "l", "password": one}) for one in PASSWORDS),
    ],
)
def test_postgres_connection_means_the_same_to_libpq_in_the_driver(spec, known, fields, expected):
    """Every field and every TLS setting passes unchanged through the environment; settings for Airflow or SQLAlchemy are omitted."""
    known["tidemark_postgres"] = connection(**fields)
    assert as_libpq_reads(from_env(resolve(spec).env()).database_url) == expected


@pytest.mark.parametrize(
    ("name", "source"),
    [("password_command", "aws rds generate-db-auth-token --hostname db & 'x=%'"), ("password_callable", "mine:password")],
)
def test_source_of_a_password_in_the_extra_reaches_the_driver(spec, known, name, source):
    """In the URL, from which libpq does not get it. Kafka's setting travels among the others."""
    kafka = {"bootstrap.servers": "k:1", "security.protocol": "SASL_SSL", "sasl.mechanism": "OAUTHBEARER", "tidemark.token": "mine:token"}
    known["tidemark_postgres"] = connection(host="db", login="l", extra={name: source, "sslmode": "require"})
    known["tidemark_kafka"] = connection(extra=kafka)
    connections = from_env(resolve(spec).env())
    assert parse_qs(urlsplit(connections.database_url).query) == {name: [source], "sslmode": ["require"]}
    assert parsed(connections.database_url) == {"host": "db", "user": "l", "sslmode": "require"}
    assert connections.kafka == kafka


def test_connections_come_from_a_secrets_backend_and_each_run_asks_it_again(spec, tmp_path, monkeypatch, request):
    """With Airflow's LocalFilesystemBackend, each call resolves the current content of its file."""
    request.addfinalizer(clear_secrets_backends_cache)
    secrets = tmp_path / "connections.json"
    monkeypatch.setenv("AIRFLOW__SECRETS__BACKEND", "airflow.secrets.local_filesystem.LocalFilesystemBackend")
    monkeypatch.setenv("AIRFLOW__SECRETS__BACKEND_KWARGS", json.dumps({"connections_file_path": str(secrets)}))
    for password in ("first", "second"):
        postgres = {"conn_type": "postgres", "host": "db", "login": "loader", "password": password}
        kafka = {"conn_type": "kafka", "extra": {"bootstrap.servers": "k:9092"}}
        spark = {"conn_type": "spark", "host": "local[2]"}
        secrets.write_text(json.dumps({"tidemark_postgres": postgres, "tidemark_kafka": kafka, "tidemark_spark": spark}))
        found = resolve(spec)
        assert (as_libpq_reads(found.database_url)["password"], found.spark_master) == (password, "local[2]")


@pytest.mark.parametrize("kind", ["postgres", "kafka", "spark"])
def test_missing_connection_is_named_with_its_consumer_and_the_fix(spec, known, kind):
    """A user who has never heard of the connection learns what it is for and where to add it."""
    del known[f"tidemark_{kind}"]
    with pytest.raises(BadInput, match=rf"(?s)connection tidemark_{kind}.*flights uses it for {kind}.*Admin > Connections"):
        resolve(spec)


def test_spec_may_name_other_connections(spec_of, known):
    """``connections:`` in the consumer's file decides which connections are looked up."""
    known["lake"] = connection(host="lake")
    known["bus"] = connection(extra={"bootstrap.servers": "bus:9092", "socket.keepalive.enable": True, "group.id": "x"})
    known["cluster"] = connection(host="spark://m", port=7077)
    found = resolve(spec_of("transform: t:t\nconnections: {postgres: lake, kafka: bus, spark: cluster}\n"))
    assert (found.database_url, found.spark_master) == ("postgresql://lake/", "spark://m:7077")
    assert found.kafka == {"bootstrap.servers": "bus:9092", "socket.keepalive.enable": "true"}


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        (None, r"bootstrap\.servers is missing"),
        ({"client.id": "x"}, r"bootstrap\.servers is missing"),
        ({"bootstrap.servers": "k:1", "enable.auto.commit": False}, r"enable\.auto\.commit"),
    ],
)
def test_kafka_settings_that_are_refused_are_those_of_a_named_connection(extra, said):
    with pytest.raises(BadInput, match=f"connection bus: .*{said}"):
        kafka_config(connection("bus", extra=extra))


@pytest.mark.parametrize(
    ("fields", "master"),
    [
        ({}, "local[*]"),
        ({"host": "local"}, "local"),
        ({"host": "local[*]"}, "local[*]"),
        ({"host": "local[2,4]"}, "local[2,4]"),
        ({"host": "yarn"}, "yarn"),
        ({"host": "spark://master", "port": 7077}, "spark://master:7077"),
        ({"host": "spark://master:7077"}, "spark://master:7077"),
        ({"host": "spark://a:7077,b:7077"}, "spark://a:7077,b:7077"),
        ({"host": "master", "port": 7077}, "spark://master:7077"),
        ({"host": "localhost", "port": 7077}, "spark://localhost:7077"),
        ({"host": "k8s://https://api", "port": 6443}, "k8s://https://api:6443"),
        ({"host": "k8s://https://api:6443/path"}, "k8s://https://api:6443/path"),
    ],
)
def test_spark_master_is_made_of_host_and_port(fields, master):
    """The fields are read as by Airflow's Spark provider; a bare host is a standalone master."""
    assert spark_settings(connection(**fields)) == (master, {})


def test_spark_settings_of_the_connection_are_texts():
    """``extra.conf`` is passed on, with booleans as Spark writes them. A queue becomes YARN's queue unless conf names one."""
    conf = {"spark.executor.instances": 2, "spark.dynamicAllocation.enabled": False}
    extra = {"conf": conf, "queue": "night", "deploy-mode": "client"}
    as_text = {"spark.executor.instances": "2", "spark.dynamicAllocation.enabled": "false", "spark.yarn.queue": "night"}
    assert spark_settings(connection(host="yarn", extra=extra)) == ("yarn", as_text)
    extra["conf"] = {"spark.yarn.queue": "day"}
    assert spark_settings(connection(host="yarn", extra=extra))[1]["spark.yarn.queue"] == "day"


@pytest.mark.parametrize("extra", [{"deploy-mode": "cluster"}, {"deploy_mode": "cluster"}, {"conf": {DEPLOY_MODE: "cluster"}}])
@pytest.mark.parametrize("host", ["yarn", "k8s://https://api:6443"])
def test_cluster_mode_is_one_spark_setting_however_it_is_written(host, extra):
    """Only the masters that can run drivers take it."""
    assert spark_settings(connection(host=host, extra=extra)) == (host, {DEPLOY_MODE: "cluster"})
    for other in ("local[2]", "spark://master:7077"):
        with pytest.raises(BadInput, match=r"connection c: .*cannot run drivers\. Set the master to yarn or k8s://"):
            spark_settings(connection(host=other, extra=extra))


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({"deploy-mode": "Cluster"}, "Cluster.*Write client or cluster"),
        ({"deploy-mode": "client", "conf": {DEPLOY_MODE: "cluster"}}, "deploy-mode is client, spark.submit.deployMode in conf is cluster"),
        *(({"conf": conf}, "conf.*not a mapping") for conf in ("spark.a=b", ["spark.a"], 7)),
    ],
)
def test_spark_settings_that_are_refused(extra, said):
    """They are refused before anything starts, and the connection is named."""
    with pytest.raises(BadInput, match=f"connection hive.*{said}"):
        spark_settings(connection("hive", host="yarn", extra=extra))


@pytest.mark.parametrize(
    ("fields", "url"),
    [
        ({"host": "registry", "port": 8081}, "http://registry:8081"),
        ({"host": "registry", "port": 8081, "schema": "https"}, "https://registry:8081"),
        ({"host": "https://registry:8081/apis/ccompat/v7"}, "https://registry:8081/apis/ccompat/v7"),
        ({"extra": {"url": "http://a:1,http://b:1"}}, "http://a:1,http://b:1"),
    ],
)
def test_registry_is_an_http_connection(fields, url):
    """The fields are read as by Airflow's HTTP provider. The host may be a whole URL, because a registry may have a path."""
    assert registry_config(connection(**fields)) == {"url": url}
    with pytest.raises(BadInput, match=r"connection r: it has no host"):
        registry_config(connection("r"))


def test_registry_gets_the_login_and_further_settings(spec, spec_of, known):
    """Only a consumer whose format needs a registry uses the connection."""
    extra = {"ssl.ca.location": "/ca.pem", "timeout": 5}
    known["tidemark_registry"] = connection(host="registry", login="me", password=MARK, extra=extra)
    assert resolve(spec).registry is None
    found = resolve(spec_of("format: {value: avro}\n"))
    assert found.registry == {"url": "http://registry", "basic.auth.user.info": f"me:{MARK}", **extra}
    assert from_env(found.env()) == found
    assert MARK not in repr(found)

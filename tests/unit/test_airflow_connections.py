"""Airflow's connections become a database URL, librdkafka's settings and Spark's master, whatever they contain."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg2.extensions
import pytest

from tidemark.airflow.connections import database_url, kafka_config, registry_config, resolve, spark_settings
from tidemark.connections import from_env
from tidemark.errors import BadInput
from tidemark.spec import ConsumerSpec, load_consumer

MARK = "hunter2-p@ss/w:rd?#%&+ é"


@pytest.fixture
def airflow_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Airflow reads and writes in the test's temporary folder."""
    monkeypatch.setenv("AIRFLOW_HOME", str(tmp_path / "airflow"))


@pytest.fixture
def connection(airflow_home: None) -> Callable[..., Any]:
    """Returns a function that creates an Airflow connection; ``extra`` is a mapping."""
    from airflow.sdk import Connection

    def make(conn_id: str = "c", *, extra: Any = None, **fields: Any) -> Connection:
        return Connection(conn_id=conn_id, **{"conn_type": "generic", **fields}, extra=None if extra is None else json.dumps(extra))

    return make


@pytest.fixture
def spec(tmp_path: Path) -> ConsumerSpec:
    path = tmp_path / "flights.yaml"
    path.write_text("topics: [flights]\ntransform: t:t\nsink: {table: a.b}\n")
    return load_consumer(path)


@pytest.fixture
def known(connection: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The connections that Airflow has, by id."""
    from airflow.sdk import BaseHook
    from airflow.sdk.exceptions import AirflowNotFoundException

    found: dict[str, Any] = {}

    def get(conn_id: str) -> Any:
        if conn_id not in found:
            raise AirflowNotFoundException(f"The conn_id `{conn_id}` isn't defined")
        return found[conn_id]

    monkeypatch.setattr(BaseHook, "get_connection", staticmethod(get))
    found["tidemark_kafka"] = connection("tidemark_kafka", extra={"bootstrap.servers": "k:9092"})
    found["tidemark_postgres"] = connection("tidemark_postgres", host="db", login="loader", password=MARK, schema="lake", port=5432)
    found["tidemark_spark"] = connection("tidemark_spark", host="local[2]")
    return found


def as_libpq_reads(url: str) -> dict[str, str]:
    return psycopg2.extensions.parse_dsn(url)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        pytest.param({"host": "db"}, {"host": "db"}, id="host-alone"),
        pytest.param(
            {"host": "db", "login": "loader", "password": "p", "port": 5433, "schema": "lake"},
            {"host": "db", "user": "loader", "password": "p", "port": "5433", "dbname": "lake"},
            id="all-fields",
        ),
        pytest.param({"host": "db", "password": MARK, "login": "l"}, {"host": "db", "user": "l", "password": MARK}, id="password"),
        pytest.param({"host": "db", "login": "a@b:c"}, {"host": "db", "user": "a@b:c"}, id="login-with-signs"),
        pytest.param(
            {"host": "db", "login": "l", "schema": "a/b?c"}, {"host": "db", "user": "l", "dbname": "a/b?c"}, id="database-with-signs"
        ),
        pytest.param({"host": "/run/pg sql", "login": "l"}, {"host": "/run/pg sql", "user": "l"}, id="socket"),
        pytest.param({"host": "::1", "port": 5432}, {"host": "::1", "port": "5432"}, id="ipv6"),
        pytest.param({"host": "[::1]"}, {"host": "::1"}, id="ipv6-in-brackets"),
        pytest.param({"host": "a,b", "port": 6000}, {"host": "a,b", "port": "6000,6000"}, id="two-hosts"),
        pytest.param({"host": "a:1,b", "port": 2}, {"host": "a,b", "port": "1,2"}, id="two-hosts-with-ports"),
        pytest.param({}, {}, id="nothing-said"),
        pytest.param(
            {"host": "db", "extra": {"sslmode": "verify-full", "sslrootcert": "/etc/c a.pem", "sslpassword": "x y"}},
            {"host": "db", "sslmode": "verify-full", "sslrootcert": "/etc/c a.pem", "sslpassword": "x y"},
            id="tls",
        ),
        pytest.param(
            {"host": "db", "extra": {"options": "-c search_path=a,b -c work_mem=64MB"}},
            {"host": "db", "options": "-c search_path=a,b -c work_mem=64MB"},
            id="options-with-spaces",
        ),
        pytest.param(
            {"host": "db", "extra": {"cursor": "dictcursor", "iam": False, "sslmode": "require"}},
            {"host": "db", "sslmode": "require"},
            id="airflows-own-extra",
        ),
    ],
)
def test_postgres_connection_means_the_same_to_libpq(spec, known, connection, fields, expected):
    """Every field and every TLS setting reaches libpq unchanged; settings for Airflow or SQLAlchemy are omitted."""
    known["tidemark_postgres"] = connection("tidemark_postgres", **fields)
    assert as_libpq_reads(database_url(spec)) == expected


@pytest.mark.parametrize("password", ["%41", "a b", "a+b", "ä€𝄞", "'\"\\", "postgresql://x", "{{ var }}", "p" * 500])
def test_password_survives_the_way_to_the_driver(spec, known, connection, password):
    """The driver reads the same password from its environment that the connection contains."""
    known["tidemark_postgres"] = connection("tidemark_postgres", host="db", login="l", password=password)
    env = resolve(spec).env()
    assert as_libpq_reads(from_env(env).database_url)["password"] == password


def test_resolved_connections_do_not_show_secrets(spec, known):
    """Neither the ``repr`` nor the ``str`` of the resolved connections contains the password or the login."""
    known["tidemark_kafka"].extra = json.dumps({"bootstrap.servers": "k:9092", "sasl.password": MARK})
    shown = f"{resolve(spec)!r} {resolve(spec)}"
    assert MARK not in shown
    assert "loader" not in shown


def test_connections_come_from_a_secrets_backend_and_each_run_asks_it_again(spec, tmp_path):
    """With Airflow's LocalFilesystemBackend, in a separate process as in a task, each call resolves the current content of its file."""
    secrets = tmp_path / "connections.json"
    backend = "airflow.secrets.local_filesystem.LocalFilesystemBackend"
    told = {
        "AIRFLOW_HOME": str(tmp_path / "airflow"),
        "AIRFLOW__SECRETS__BACKEND": backend,
        "AIRFLOW__SECRETS__BACKEND_KWARGS": json.dumps({"connections_file_path": str(secrets)}),
    }
    script = RESOLVE.format(spec=str(tmp_path / "flights.yaml"), secrets=str(secrets), text=BACKEND_TEXT)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("AIRFLOW_")}
    done = subprocess.run([sys.executable, "-c", script], env=kept | told, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert [as_libpq_reads(url)["password"] for url in done.stdout.split()[-2:]] == ["first", "second"]


BACKEND_TEXT = json.dumps(
    {
        "tidemark_postgres": {"conn_type": "postgres", "host": "db", "login": "loader", "password": "PASSWORD"},
        "tidemark_kafka": {"conn_type": "kafka", "extra": {"bootstrap.servers": "k:9092"}},
        "tidemark_spark": {"conn_type": "spark", "host": "local[2]"},
    }
)
RESOLVE = """
from pathlib import Path
from tidemark.airflow.connections import resolve
from tidemark.spec import load_consumer

for password in ("first", "second"):
    Path({secrets!r}).write_text({text!r}.replace("PASSWORD", password))
    print(resolve(load_consumer(Path({spec!r}))).database_url)
"""


@pytest.mark.parametrize("kind", ["postgres", "kafka", "spark"])
def test_missing_connection_is_named_with_its_consumer_and_the_fix(spec, known, kind):
    """A user who has never heard of the connection learns what it is for and where to add it."""
    del known[f"tidemark_{kind}"]
    with pytest.raises(BadInput) as raised:
        resolve(spec)
    text = str(raised.value)
    assert f"connection tidemark_{kind}" in text
    assert f"flights uses it for {kind}" in text
    assert "Admin > Connections" in text


def test_spec_may_name_other_connections(tmp_path, known, connection):
    """``connections:`` in the consumer's file decides which connections are looked up."""
    path = tmp_path / "other.yaml"
    path.write_text("topics: [t]\ntransform: t:t\nsink: {table: a.b}\nconnections: {postgres: lake, kafka: bus, spark: cluster}\n")
    known |= {
        "lake": connection("lake", host="lake"),
        "bus": connection("bus", extra={"bootstrap.servers": "bus:9092"}),
        "cluster": connection("cluster", host="spark://m", port=7077),
    }
    found = resolve(load_consumer(path))
    assert (found.database_url, found.kafka["bootstrap.servers"], found.spark_master) == (
        "postgresql://lake/",
        "bus:9092",
        "spark://m:7077",
    )


def test_kafka_settings_become_texts_as_librdkafka_writes_them(connection):
    """Booleans become lower case and numbers become digits. Nulls are omitted, and so is group.id, which Airflow's form requires."""
    extra = {"bootstrap.servers": "a:1,b:2", "socket.keepalive.enable": True, "socket.timeout.ms": 5000, "client.id": None, "group.id": "x"}
    assert kafka_config(connection(extra=extra)) == {
        "bootstrap.servers": "a:1,b:2",
        "socket.keepalive.enable": "true",
        "socket.timeout.ms": "5000",
    }


@pytest.mark.parametrize("extra", [None, {}, {"bootstrap.servers": ""}, {"client.id": "x"}])
def test_kafka_connection_without_servers_is_refused_by_name(connection, extra):
    """The message names the connection, not only the setting."""
    with pytest.raises(BadInput, match=r"connection tidemark_kafka: .*bootstrap\.servers is missing"):
        kafka_config(connection("tidemark_kafka", extra=extra))


@pytest.mark.parametrize(
    ("key", "value"), [("enable.auto.commit", False), ("auto.offset.reset", "latest"), ("isolation.level", "read_uncommitted")]
)
def test_kafka_setting_that_could_lose_or_double_records_is_refused(connection, key, value):
    """Only Tidemark manages offsets: such a setting stops the run. The message names it and its connection."""
    with pytest.raises(BadInput, match=f"connection bus: .*{key}"):
        kafka_config(connection("bus", extra={"bootstrap.servers": "k:1", key: value}))


@pytest.mark.parametrize(
    ("fields", "master"),
    [
        pytest.param({}, "local[*]", id="nothing-said"),
        pytest.param({"host": "local"}, "local", id="local"),
        pytest.param({"host": "local[*]"}, "local[*]", id="local-all"),
        pytest.param({"host": "local[2,4]"}, "local[2,4]", id="local-with-failures"),
        pytest.param({"host": "yarn"}, "yarn", id="yarn"),
        pytest.param({"host": "spark://master", "port": 7077}, "spark://master:7077", id="standalone"),
        pytest.param({"host": "spark://master:7077"}, "spark://master:7077", id="standalone-port-in-host"),
        pytest.param({"host": "spark://a:7077,b:7077"}, "spark://a:7077,b:7077", id="standalone-two-masters"),
        pytest.param({"host": "master", "port": 7077}, "spark://master:7077", id="bare-host"),
        pytest.param({"host": "localhost", "port": 7077}, "spark://localhost:7077", id="a-host-that-begins-with-local"),
        pytest.param({"host": "k8s://https://api", "port": 6443}, "k8s://https://api:6443", id="kubernetes"),
        pytest.param({"host": "k8s://https://api:6443/path"}, "k8s://https://api:6443/path", id="kubernetes-with-path"),
    ],
)
def test_spark_master_is_made_of_host_and_port(connection, fields, master):
    """The fields are read as by Airflow's Spark provider; a bare host is a standalone master."""
    assert spark_settings(connection(**fields)) == (master, {})


def test_spark_settings_of_the_connection_are_texts(connection):
    """``extra.conf`` is passed on, with booleans as Spark writes them. A queue becomes YARN's queue unless conf names one."""
    extra = {"conf": {"spark.executor.instances": 2, "spark.dynamicAllocation.enabled": False}, "queue": "night", "deploy-mode": "client"}
    assert spark_settings(connection(host="yarn", extra=extra))[1] == {
        "spark.executor.instances": "2",
        "spark.dynamicAllocation.enabled": "false",
        "spark.yarn.queue": "night",
    }
    extra["conf"] = {"spark.yarn.queue": "day"}
    assert spark_settings(connection(host="yarn", extra=extra))[1]["spark.yarn.queue"] == "day"


@pytest.mark.parametrize(
    "extra", [{"deploy-mode": "cluster"}, {"deploy_mode": "cluster"}, {"conf": {"spark.submit.deployMode": "cluster"}}]
)
def test_spark_cluster_mode_is_refused(connection, extra):
    """A driver that runs elsewhere would outlive its task, so it is refused before anything starts. The message says what to do instead."""
    with pytest.raises(BadInput, match=r"connection hive.*cluster.*spark-submit"):
        spark_settings(connection("hive", host="yarn", extra=extra))


@pytest.mark.parametrize("conf", ["spark.a=b", ["spark.a"], 7])
def test_spark_conf_that_is_no_mapping_is_refused(connection, conf):
    """The message says what is wrong with it."""
    with pytest.raises(BadInput, match=r"connection hive.*conf.*not a mapping"):
        spark_settings(connection("hive", host="yarn", extra={"conf": conf}))


@pytest.mark.parametrize(
    ("fields", "url"),
    [
        ({"host": "registry", "port": 8081}, "http://registry:8081"),
        ({"host": "registry", "port": 8081, "schema": "https"}, "https://registry:8081"),
        ({"host": "https://registry:8081/apis/ccompat/v7"}, "https://registry:8081/apis/ccompat/v7"),
        ({"extra": {"url": "http://a:1,http://b:1"}}, "http://a:1,http://b:1"),
    ],
)
def test_registry_is_an_http_connection(connection, fields, url):
    """The fields are read as by Airflow's HTTP provider. The host may be a whole URL, because a registry may have a path."""
    assert registry_config(connection(**fields)) == {"url": url}


def test_registry_gets_the_login_and_further_settings(spec, known, connection, tmp_path):
    """Only a consumer whose format needs a registry uses the connection."""
    extra = {"ssl.ca.location": "/ca.pem", "timeout": 5}
    known["tidemark_registry"] = connection("tidemark_registry", host="registry", login="me", password=MARK, extra=extra)
    assert resolve(spec).registry is None
    file = tmp_path / "orders.yaml"
    file.write_text("topics: [orders]\nformat: {value: avro}\nsink: {table: a.b}\n")
    found = resolve(load_consumer(file))
    assert found.registry == {"url": "http://registry", "basic.auth.user.info": f"me:{MARK}", **extra}
    assert from_env(found.env()) == found
    assert MARK not in repr(found)


def test_registry_without_a_host_is_refused(connection):
    with pytest.raises(BadInput, match=r"connection r: it has no host"):
        registry_config(connection("r"))

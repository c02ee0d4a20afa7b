"""The embedded stack with real servers: it keeps its data, survives every kill, refuses with clear errors, and leaves no process behind."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

import psutil
import psycopg2
import pytest
from tests.support.waiting import until

from tidemark.jvm.errors import FolderUnusable
from tidemark.local import LocalStack, ServerState
from tidemark.local.airflow import LocalAirflow
from tidemark.local.errors import FolderBusy, NotUp, PortInUse, RunningOnAnotherPort, ServerFailed
from tidemark.local.folder import held

NUMBERS = "numbers"
"""The name of a test's table and topic."""
COMMAND = (sys.executable, "-c", "from tidemark.cli.main import main; main()", "local")


def processes_of(folder):
    """All processes that have the folder in their command line or run in it: servers, their children, and programs of a start."""
    found = []
    for process in psutil.process_iter():
        try:
            words = process.cmdline()
            if process.pid != os.getpid() and (any(str(folder) in word for word in words) or Path(process.cwd()).is_relative_to(folder)):
                found.append(" ".join(words))
        except psutil.Error:
            continue
    return found


@contextlib.contextmanager
def own_folder():
    """A folder for a stack's state that Postgres' own user can access even if the tests run as root."""
    path = Path(tempfile.mkdtemp(prefix="tidemark-")).resolve()
    path.chmod(0o711)
    yield path / "state"
    LocalStack(path / "state").reset()
    until(lambda: not processes_of(path))
    shutil.rmtree(path)


@pytest.fixture
def folder():
    with own_folder() as folder:
        yield folder


@pytest.fixture(scope="module")
def lasting_folder():
    with own_folder() as folder:
        yield folder


@pytest.fixture
def stack(lasting_folder, monkeypatch):
    """A running stack. Other tests use it too, so each test has a separate table and topic."""
    monkeypatch.setattr(sys.modules[__name__], "NUMBERS", f"numbers_{uuid.uuid4().hex}")
    stack = LocalStack(lasting_folder)
    stack.up()
    return stack


@contextlib.contextmanager
def put_back(file):
    """The file may be changed or deleted within the block, and is restored afterwards."""
    content, mode = file.read_bytes(), file.stat().st_mode
    yield file
    file.write_bytes(content)
    file.chmod(mode)


def execute(url, statement):
    """Runs one statement in a separate session and returns its rows, if any."""
    connection = psycopg2.connect(url)
    try:
        with connection, connection.cursor() as cursor:
            cursor.execute(statement)
            return cursor.fetchall() if cursor.description else []
    finally:
        connection.close()


def store(stack, *numbers):
    """Puts numbers into a table and, in one transaction, into a topic."""
    from confluent_kafka import Producer
    from confluent_kafka.admin import AdminClient, NewTopic

    env = stack.env()
    execute(env["TIDEMARK_DATABASE_URL"], f"CREATE TABLE IF NOT EXISTS {NUMBERS} (number int)")
    servers = {"bootstrap.servers": env["TIDEMARK_KAFKA_BOOTSTRAP_SERVERS"]}
    admin = AdminClient(servers)
    if NUMBERS not in admin.list_topics(timeout=10).topics:
        admin.create_topics([NewTopic(NUMBERS, 1, 1)])[NUMBERS].result(180)
    producer = Producer(servers | {"transactional.id": "test"})
    producer.init_transactions(20)
    producer.begin_transaction()
    for number in numbers:
        execute(env["TIDEMARK_DATABASE_URL"], f"INSERT INTO {NUMBERS} VALUES ({number})")
        producer.produce(NUMBERS, str(number))
    producer.commit_transaction(20)


def stored(stack):
    """Returns the numbers in the table and those in the topic, in order."""
    from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, TopicPartition

    env = stack.env()
    rows = [number for (number,) in execute(env["TIDEMARK_DATABASE_URL"], f"SELECT number FROM {NUMBERS} ORDER BY number")]
    settings = {"group.id": "test", "enable.partition.eof": True, "isolation.level": "read_committed"}
    consumer = Consumer(settings | {"bootstrap.servers": env["TIDEMARK_KAFKA_BOOTSTRAP_SERVERS"]})
    consumer.assign([TopicPartition(NUMBERS, 0, OFFSET_BEGINNING)])
    records = []
    try:
        while True:
            message = consumer.poll(20)
            assert message is not None
            if message.error():
                assert message.error().code() == KafkaError._PARTITION_EOF
                return rows, records
            records.append(int(message.value()))
    finally:
        consumer.close()


def states(stack):
    return [server.state for server in stack.status()]


def command(folder, *words, **env):
    """Runs ``tidemark local`` in a separate process. ``env`` replaces variables; None removes one."""
    environment = {name: value for name, value in (os.environ | env).items() if value is not None}
    words = (*COMMAND, *words, "--folder", str(folder))
    return subprocess.run(words, env=environment, capture_output=True, text=True, check=False, timeout=300)


def test_a_table_and_a_topic_outlive_a_restart_and_keep_their_addresses(stack):
    """``down`` stops everything, and ``up`` brings back the same data on the same ports. A transaction works with the single broker."""
    before = stack.env()
    store(stack, 1, 2, 3)
    stack.down()
    assert states(stack) == [ServerState.STOPPED] * 2
    assert processes_of(stack.folder) == []
    with pytest.raises(NotUp):
        stack.env()
    LocalStack(stack.folder).up()
    assert stack.env() == before
    assert stored(stack) == ([1, 2, 3], [1, 2, 3])


def test_up_on_a_running_stack_says_so_and_changes_nothing(stack):
    """The processes and addresses stay the same."""
    before, told = stack.status(), []
    stack.up(told.append)
    assert told == ["already up"]
    assert [(server.pid, server.address) for server in stack.status()] == [(server.pid, server.address) for server in before]


def test_status_tells_process_address_version_and_size_of_each_server(stack):
    postgres, kafka = stack.status()
    assert (postgres.name, kafka.name) == ("Postgres", "Kafka")
    for server in (postgres, kafka):
        assert server.state is ServerState.RUNNING
        assert server.pid is not None
        assert psutil.pid_exists(server.pid)
        assert server.address is not None
        assert server.address.startswith("127.0.0.1:")
        assert server.data_bytes > 0
        assert server.log.exists()
    assert (postgres.version or "").startswith("18.")
    assert kafka.version == "4.3.1"


def test_servers_listen_on_loopback_only(stack):
    """The broker requires no password, so it must not be reachable from outside. Postgres has no Unix socket: its path could be too
    long."""
    for server in stack.status():
        sockets = psutil.Process(server.pid).net_connections(kind="all")
        listening = {connection.laddr.ip.removeprefix("::ffff:") for connection in sockets if connection.status == psutil.CONN_LISTEN}
        assert listening == {"127.0.0.1"}
        assert [path for path in (connection.laddr for connection in sockets if connection.family == socket.AF_UNIX) if path] == []


def test_postgres_wants_the_generated_password_which_only_the_owner_can_read(stack):
    url = stack.env()["TIDEMARK_DATABASE_URL"]
    password = url.split(":")[2].split("@")[0]
    with pytest.raises(psycopg2.OperationalError, match="password authentication failed"):
        psycopg2.connect(url.replace(password, "wrong"))
    file = stack.folder / "postgres" / "password"
    assert file.read_text() == password
    assert file.stat().st_mode & 0o777 == 0o600
    assert execute(url, "SHOW fsync") == [("on",)]
    assert execute(url, "SELECT rolpassword LIKE 'SCRAM-SHA-256$%' FROM pg_authid WHERE rolname = 'postgres'") == [(True,)]


def test_a_further_database_is_made_once_and_its_url_returned(stack):
    """Asking for it again keeps its contents. Any name is quoted correctly."""
    url = stack.create_database("airflow")
    execute(url, "CREATE TABLE kept (n int)")
    assert stack.create_database("airflow") == url
    assert execute(url, "SELECT count(*) FROM kept") == [(0,)]
    assert execute(stack.create_database('odd "name"/x'), "SELECT current_database()") == [('odd "name"/x',)]


def test_killed_servers_count_as_died_and_come_back_with_their_data(stack):
    """SIGKILL of both leaves a stale postmaster.pid, lock files and an unclean log. ``up`` recovers from all of them."""
    store(stack, 1, 2)
    until(lambda: stored(stack) == ([1, 2], [1, 2]))  # a single broker killed before it writes a marker loses the marker
    before = stack.env()
    stack.kill_postgres()
    stack.kill_kafka()
    assert states(stack) == [ServerState.DIED] * 2
    stack.up()
    assert stack.env() == before
    assert stored(stack) == ([1, 2], [1, 2])


def test_postgres_killed_under_load_comes_back_at_once(stack):
    """Its children hold the shared memory a moment longer than the server lives. The start waits for that instead of failing."""
    url = stack.env()["TIDEMARK_DATABASE_URL"]
    sleeper = psycopg2.connect(url)
    try:
        with sleeper.cursor() as cursor:
            cursor.execute("CREATE TABLE t AS SELECT generate_series(1, 100000)")
        sleeper.commit()
        stack.kill_postgres()
        stack.start_postgres()
        assert execute(url, "SELECT count(*) FROM t") == [(100000,)]
    finally:
        sleeper.close()


def test_each_server_can_be_restarted_alone(stack):
    """This includes Postgres' immediate stop, after which the next start runs recovery. The other server keeps running."""
    store(stack, 1)
    postgres, kafka = (server.pid for server in stack.status())
    stack.stop_kafka()
    assert states(stack) == [ServerState.RUNNING, ServerState.STOPPED]
    stack.start_kafka()
    stack.stop_postgres(immediate=True)
    assert states(stack) == [ServerState.STOPPED, ServerState.RUNNING]
    stack.start_postgres()
    stack.stop_postgres()
    stack.start_postgres()
    after = stack.status()
    assert after[0].pid != postgres
    assert after[1].pid != kafka
    assert stored(stack) == ([1], [1])


def test_a_pid_file_that_names_another_program_does_not_stop_the_start(stack):
    """After a reboot, the pid in postmaster.pid may belong to any program. Postgres alone would take that for a running server."""
    stack.kill_postgres()
    pid_file = stack.folder / "postgres" / "data" / "postmaster.pid"
    lines = pid_file.read_text().splitlines()
    pid_file.write_text("\n".join([str(os.getpid()), *lines[1:]]) + "\n")
    stack.up()
    assert states(stack) == [ServerState.RUNNING] * 2


@pytest.mark.sampled
@pytest.mark.parametrize("delay_s", [0.3, 0.6, 0.9, 1.2, 1.6])
def test_an_up_that_was_killed_at_any_moment_is_completed_by_the_next(folder, delay_s):
    """SIGKILL arrives while folders, initial data or servers are being created. ``up`` works afterwards, with one server of each kind."""
    killed = subprocess.Popen([*COMMAND, "up", "--folder", str(folder)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    time.sleep(delay_s)  # the test varies this moment
    killed.kill()
    killed.wait()
    stack = LocalStack(folder)
    stack.up()
    store(stack, 7)
    assert stored(stack) == ([7], [7])
    until(lambda: len([words for words in processes_of(folder) if "kafka.Kafka" in words]) == 1)
    until(lambda: len([words for words in processes_of(folder) if "bin/postgres -D" in words]) == 1)
    stack.down()
    until(lambda: processes_of(folder) == [])


def test_an_interrupted_up_stops_what_it_has_started(folder):
    """Ctrl-C leaves no process running."""
    asked = subprocess.Popen([*COMMAND, "up", "--folder", str(folder)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    until(lambda: LocalStack(folder).kafka.process() is not None)
    asked.send_signal(signal.SIGINT)
    assert asked.wait(60) != 0
    until(lambda: processes_of(folder) == [])


def test_half_written_files_are_not_an_error(stack):
    """After a power failure, server.json may be empty. Running servers are still found, and the next start finds their data."""
    store(stack, 5)
    for server in ("postgres", "kafka"):
        (stack.folder / server / "server.json").write_text("")
    assert states(stack) == [ServerState.RUNNING] * 2
    stack.down()
    assert processes_of(stack.folder) == []
    (stack.folder / "kafka" / "data.new-0").mkdir()
    (stack.folder / "postgres" / "data.new-0.password").touch()
    stack.up()
    assert stored(stack) == ([5], [5])
    assert list(stack.folder.glob("*/data.new*")) == []


def test_a_second_command_at_the_same_time_is_refused_and_harms_nothing(folder):
    """One of two ``up`` commands wins. The other names the process that uses the folder, and can simply be repeated."""
    first = subprocess.Popen([*COMMAND, "up", "--folder", str(folder)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    until((folder / "lock").exists)
    until(lambda: (folder / "lock").read_text() == str(first.pid))
    with pytest.raises(FolderBusy, match=f"process {first.pid}"):
        LocalStack(folder).up()
    assert first.wait(60) == 0
    assert states(LocalStack(folder)) == [ServerState.RUNNING] * 2
    with held(folder), pytest.raises(FolderBusy):
        LocalStack(folder).down()


def test_a_port_that_was_asked_for_is_had_or_refused(folder):
    """It is refused before anything starts, and the error names the option. Without the option, a free port replaces a used one."""
    with socket.socket() as used:
        used.bind(("127.0.0.1", 0))
        used.listen()
        port = used.getsockname()[1]
        with pytest.raises(PortInUse, match=rf"Postgres cannot listen on 127\.0\.0\.1:{port}.*--postgres-port"):
            LocalStack(folder, postgres_port=port).up()
        with pytest.raises(PortInUse, match=rf"Kafka cannot listen on 127\.0\.0\.1:{port}.*--kafka-port"):
            LocalStack(folder, kafka_port=port).up()
        assert processes_of(folder) == []
    stack = LocalStack(folder, kafka_port=port)
    stack.up()
    assert stack.env()["TIDEMARK_KAFKA_BOOTSTRAP_SERVERS"] == f"127.0.0.1:{port}"
    with pytest.raises(RunningOnAnotherPort, match=f"Kafka runs on port {port}"):
        LocalStack(folder, kafka_port=port + 1).up()


def test_ports_that_somebody_else_took_meanwhile_are_replaced(stack):
    """The data stays. Only the addresses change, and ``up`` says so."""
    store(stack, 1)
    addresses = [server.address for server in stack.status()]
    stack.down()
    taken = [socket.create_server(("127.0.0.1", int(address.split(":")[1]))) for address in addresses]
    told = []
    try:
        stack.up(told.append)
    finally:
        for listener in taken:
            listener.close()
    assert len([step for step in told if "now in use by another program" in step]) == 2
    assert not set(addresses) & {server.address for server in stack.status()}
    assert stored(stack) == ([1], [1])


def test_a_server_that_does_not_come_up_tells_the_lines_of_its_log_that_matter(stack):
    """The other server, which the same call had started, is stopped again."""
    stack.down()
    with put_back(stack.folder / "postgres" / "data" / "postgresql.conf") as file:
        file.write_text("no_such_setting = 1\n")
        with pytest.raises(
            ServerFailed, match=r'Postgres ended while starting\. Its log is .*(?s:.*)unrecognized configuration parameter "no_such'
        ):
            stack.up()
        assert processes_of(stack.folder) == []


def test_reset_stops_and_deletes_only_the_stacks_own_files(folder):
    """Other files in the folder stay."""
    stack = LocalStack(folder)
    stack.up()
    store(stack, 1)
    (stack.folder / "theirs").touch()
    stack.reset()
    assert [path.name for path in stack.folder.iterdir()] == ["theirs"]
    assert processes_of(stack.folder) == []
    stack.up()
    assert execute(stack.env()["TIDEMARK_DATABASE_URL"], "SELECT to_regclass('numbers')") == [(None,)]


def test_a_folder_with_an_awkward_and_long_path_works(folder):
    """Too long for a Unix socket, with spaces, quotes, a comma (Kafka's separator of folders), a colon and non-ASCII letters."""
    folder.mkdir(mode=0o711)
    stack = LocalStack(folder / ('it\'s a "long" path, with: süß ' + "x" * 90))
    (folder).chmod(0o711)
    stack.up()
    try:
        store(stack, 1)
        stack.down()
        stack.up()
        assert stored(stack) == ([1], [1])
    finally:
        stack.reset()


def test_a_stack_without_its_password_says_so(stack):
    """The password is stored in one file. Without it nobody can connect, and creating a new one requires a reset."""
    stack.down()
    with put_back(stack.folder / "postgres" / "password") as file:
        file.unlink()
        with pytest.raises(FolderUnusable, match=r"tidemark local reset"):
            stack.up()
        assert processes_of(stack.folder) == []


def test_the_commands_start_show_point_and_stop(folder):
    """Results go to stdout, everything else to stderr, and a shell can eval the output of ``env``. The registry starts only on request,
    stays up during an ``up`` without the option, and its address is passed to Airflow."""
    assert command(folder, "up", "--registry").returncode == 0
    told = json.loads(command(folder, "status", "--output", "json").stdout)
    assert [(server["name"], server["state"]) for server in told] == [
        ("Postgres", "running"),
        ("Kafka", "running"),
        ("Registry", "running"),
    ]
    evaluated = subprocess.run(["sh", "-c", f"{command(folder, 'env').stdout}\nenv"], capture_output=True, text=True, check=True).stdout
    assert set(evaluated.splitlines()) >= {f"{name}={value}" for name, value in LocalStack(folder).env().items()}
    url = f"http://{told[2]['address']}/apis/ccompat/v7"
    assert f"TIDEMARK_REGISTRY_URL={url}" in evaluated.splitlines()
    connections = LocalAirflow.on(LocalStack(folder), folder / "airflow").env
    assert json.loads(connections["AIRFLOW_CONN_TIDEMARK_REGISTRY"]) == {"conn_type": "http", "host": url}
    again = command(folder, "up")
    assert again.returncode == 0
    assert "already up" in again.stderr
    assert f"Postgres {told[0]['version']} at {told[0]['address']}" in again.stdout
    down = command(folder, "down")
    assert (down.returncode, down.stderr.splitlines()[-1]) == (0, "The servers are stopped; their data is kept.")
    assert states(LocalStack(folder)) == [ServerState.STOPPED] * 3
    assert processes_of(folder) == []
    down = command(folder, "down")
    assert (down.returncode, down.stderr.splitlines()[-1]) == (0, f"No server was running in {folder}.")
    assert command(folder, "env").returncode == 1
    assert "Registry" not in command(folder, "up").stdout
    assert "TIDEMARK_REGISTRY_URL" not in LocalStack(folder).env()
    assert command(folder, "reset", "--yes").returncode == 0
    assert not folder.exists()


def test_without_java_up_fails_with_one_text(folder, tmp_path):
    """There is no traceback, and nothing is started."""
    done = command(folder, "up", JAVA_HOME=None, PATH=str(tmp_path))
    assert done.returncode == 1
    assert "Java 17 or newer is needed; JAVA_HOME is not set: no java is on PATH" in done.stderr.replace("\n", " ")
    assert "Traceback" not in done.stderr
    assert processes_of(folder) == []


def test_with_an_old_java_up_fails_with_the_version_found(folder, tmp_path):
    java = tmp_path / "bin" / "java"
    java.parent.mkdir()
    java.write_text("#!/bin/sh\necho 'openjdk version \"11.0.2\"' >&2\n")
    java.chmod(0o755)
    done = command(folder, "up", JAVA_HOME=str(tmp_path))
    assert done.returncode == 1
    assert "its version is 11" in done.stderr.replace("\n", " ")


def test_without_network_and_cache_up_fails_with_what_to_do(folder, tmp_path):
    """A real Ivy, a mirror that refuses connections, and an empty cache."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # bound but not listening, so it refuses connections
        mirror = f"http://127.0.0.1:{closed.getsockname()[1]}/maven"
        done = command(folder, "up", TIDEMARK_CACHE=str(tmp_path / "cache"), TIDEMARK_MAVEN_MIRROR=mirror)
    assert done.returncode == 1
    assert f"could not be fetched from the mirror {mirror}" in done.stderr.replace("\n", " ")
    assert "Connection refused" in done.stderr.replace("\n", " ")
    assert processes_of(folder) == []


def test_with_a_cache_up_needs_no_network(folder):
    """The mirror is not contacted once the jars are cached."""
    LocalStack(folder).kafka.prepare(lambda _: None)
    done = command(folder, "up", TIDEMARK_MAVEN_MIRROR="http://127.0.0.1:9/maven")
    assert done.returncode == 0, done.stderr

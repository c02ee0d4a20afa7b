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
from tests.support.fetching import fetched
from tests.support.kafka_topics import Topics
from tests.support.private_files import assert_own_files
from tests.support.scenario import Scenario
from tests.support.waiting import until

from tidemark.connections import BOOTSTRAP_SERVERS, DATABASE_URL
from tidemark.jvm.errors import FolderUnusable
from tidemark.local import LocalStack, ServerState, ports
from tidemark.local.airflow import LocalAirflow
from tidemark.local.errors import NotUp, PortInUse, RunningOnAnotherPort, ServerFailed

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
def own_folder(name):
    """A folder for a stack's state that Postgres' own user can access even if the tests run as root."""
    path = Path(tempfile.mkdtemp(prefix="tidemark-")).resolve()
    path.chmod(0o711)
    yield path / name
    LocalStack(path / name).reset()
    until(lambda: not processes_of(path))
    shutil.rmtree(path)


@pytest.fixture
def folder():
    with own_folder("state") as folder:
        yield folder


@pytest.fixture(scope="module")
def lasting_folder():
    """Its path is too long for a Unix socket, and has spaces, quotes, a comma (Kafka's separator of folders), a colon and a letter that is
    not ASCII."""
    with own_folder('it\'s a "long" path, with: süß ' + "x" * 90) as folder:
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
    with contextlib.closing(psycopg2.connect(url)) as connection, connection, connection.cursor() as cursor:
        cursor.execute(statement)
        return fetched(cursor)


def servers_of(stack):
    env = stack.env()
    return Scenario(stack.folder, env[DATABASE_URL], Topics(env[BOOTSTRAP_SERVERS]))


def store(stack, *numbers):
    """Puts numbers into a new table and, in one transaction, into a new topic."""
    servers = servers_of(stack)
    servers.topics.create(name=NUMBERS)
    servers.topics.transaction(NUMBERS, [str(number) for number in numbers])
    servers.sql(f"CREATE TABLE {NUMBERS} AS SELECT unnest(%s) AS number", list(numbers))


def stored(stack):
    """Returns the numbers in the table and those in the topic, in order."""
    servers = servers_of(stack)
    rows = servers.sql(f"SELECT number FROM {NUMBERS} ORDER BY number")
    return [number for (number,) in rows], [int(record.value) for record in servers.records(NUMBERS).values()]


def states(stack):
    return [server.state for server in stack.status()]


def command(folder, *words, **env):
    """Runs ``tidemark local`` in a separate process. ``env`` replaces variables; None removes one."""
    environment = {name: value for name, value in (os.environ | {"TIDEMARK_STATE": str(folder)} | env).items() if value is not None}
    return subprocess.run((*COMMAND, *words), env=environment, capture_output=True, text=True, check=False, timeout=300)


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


def test_status_tells_process_address_version_and_size_of_each_server_and_another_up_changes_nothing(stack):
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
    told = []
    stack.up(told.append)
    assert told == ["already up"]
    assert [(server.pid, server.address) for server in stack.status()] == [(server.pid, server.address) for server in (postgres, kafka)]


def test_servers_listen_on_loopback_only(stack):
    """The broker requires no password, so it must not be reachable from outside. Postgres has no Unix socket: its path could be too
    long."""
    for server in stack.status():
        sockets = psutil.Process(server.pid).net_connections(kind="all")
        listening = {connection.laddr.ip.removeprefix("::ffff:") for connection in sockets if connection.status == psutil.CONN_LISTEN}
        assert listening == {"127.0.0.1"}
        assert [path for path in (connection.laddr for connection in sockets if connection.family == socket.AF_UNIX) if path] == []


def test_postgres_wants_the_generated_password_which_only_the_owner_can_read(stack):
    url = stack.env()[DATABASE_URL]
    password = url.split(":")[2].split("@")[0]
    with pytest.raises(psycopg2.OperationalError, match="password authentication failed"):
        psycopg2.connect(url.replace(password, "wrong"))
    file = stack.folder / "postgres" / "password"
    assert file.read_text() == password
    assert file.stat().st_mode & 0o777 == 0o600
    assert execute(url, "SHOW fsync") == [("on",)]
    assert execute(url, "SELECT rolpassword LIKE 'SCRAM-SHA-256$%' FROM pg_authid WHERE rolname = 'postgres'") == [(True,)]


def test_no_other_user_reads_or_writes_a_file_of_the_stack(stack):
    """Kafka's records, settings and logs lie below a folder that only its user may enter, and so do Postgres' data. `test_registry` looks
    at the registry's."""
    for folder in (stack.kafka.folder, stack.postgres.data):
        assert folder.stat().st_mode & 0o077 == 0
    assert_own_files(stack.kafka)


def test_a_further_database_is_made_once_and_its_url_returned(stack):
    """Asking for it again keeps its contents. Any name is quoted correctly."""
    url = stack.create_database("airflow")
    execute(url, "CREATE TABLE kept (n int)")
    assert stack.create_database("airflow") == url
    assert execute(url, "SELECT count(*) FROM kept") == [(0,)]
    assert execute(stack.create_database('odd "name"/x'), "SELECT current_database()") == [('odd "name"/x',)]


def test_killed_servers_count_as_died_and_come_back_with_their_data(stack):
    """SIGKILL of both leaves a stale postmaster.pid, lock files and an unclean log. ``up`` recovers from all of them, also after Postgres'
    immediate stop. Each server can be stopped and started alone."""
    store(stack, 1, 2)
    before = stack.env()
    stack.kill(stack.postgres)
    stack.kill(stack.kafka)
    assert states(stack) == [ServerState.DIED] * 2
    stack.up()
    assert stack.env() == before
    assert stored(stack) == ([1, 2], [1, 2])
    stack.stop_postgres_immediately()
    assert states(stack) == [ServerState.STOPPED, ServerState.RUNNING]
    stack.start(stack.postgres)
    stack.stop(stack.kafka)
    assert states(stack) == [ServerState.RUNNING, ServerState.STOPPED]
    stack.start(stack.kafka)
    assert stored(stack) == ([1, 2], [1, 2])


@pytest.mark.thorough
def test_postgres_killed_under_load_comes_back_at_once(stack):
    """Its children hold the shared memory a moment longer than the server lives. The start waits for that instead of failing. After a
    reboot, the pid in postmaster.pid may belong to any program, which Postgres alone would take for a running server."""
    url = stack.env()[DATABASE_URL]
    with contextlib.closing(psycopg2.connect(url)) as sleeper, sleeper.cursor() as cursor:
        cursor.execute(f"CREATE TABLE {NUMBERS} AS SELECT generate_series(1, 100000)")
        sleeper.commit()
        stack.kill(stack.postgres)
        pid_file = stack.folder / "postgres" / "data" / "postmaster.pid"
        pid_file.write_text("\n".join([str(os.getpid()), *pid_file.read_text().splitlines()[1:]]) + "\n")
        stack.start(stack.postgres)
    assert execute(url, f"SELECT count(*) FROM {NUMBERS}") == [(100000,)]


def begun(folder):
    """Starts ``tidemark local up`` in a separate process, as a terminal does: a shell lets its background jobs, and what they start, ignore
    Ctrl-C."""
    command = ["env", "--default-signal=INT", f"TIDEMARK_STATE={folder}", *COMMAND, "up"]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


@pytest.mark.thorough
@pytest.mark.sampled
@pytest.mark.parametrize("delay_s", [0.3, 0.6, 0.9, 1.2, 1.6])
def test_an_up_that_was_killed_at_any_moment_is_completed_by_the_next(folder, delay_s):
    """SIGKILL arrives while folders, initial data or servers are being created. ``up`` works afterwards, with one server of each kind."""
    killed = begun(folder)
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


@pytest.mark.thorough
def test_an_interrupted_up_stops_what_it_has_started(folder):
    """Ctrl-C leaves no process running."""
    asked = begun(folder)
    until((folder / "kafka" / "log.txt").exists)  # its JVM needs a second or more before it answers
    asked.send_signal(signal.SIGINT)
    assert asked.wait(180) != 0
    until(lambda: processes_of(folder) == [])


@pytest.mark.thorough
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


def test_a_port_that_was_asked_for_is_had_or_refused(folder):
    """It is refused before anything starts, and the error names the option. Without the option, a free port replaces a used one."""
    with socket.socket() as used:
        port = ports.find_free()
        used.bind(("127.0.0.1", port))
        used.listen()
        with pytest.raises(PortInUse, match=rf"Postgres cannot listen on 127\.0\.0\.1:{port}.*--postgres-port"):
            LocalStack(folder, postgres_port=port).up()
        with pytest.raises(PortInUse, match=rf"Kafka cannot listen on 127\.0\.0\.1:{port}.*--kafka-port"):
            LocalStack(folder, kafka_port=port).up()
        assert processes_of(folder) == []
    stack = LocalStack(folder, postgres_port=port)
    stack.start(stack.postgres)
    assert f"@127.0.0.1:{port}/" in stack.postgres.url()
    with pytest.raises(RunningOnAnotherPort, match=f"Postgres runs on port {port}"):
        LocalStack(folder, postgres_port=port + 1).up()


@pytest.mark.thorough
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


def test_up_that_fails_says_why_and_leaves_no_server_running(stack):
    """The other server, which the same call had started, is stopped again. The password is stored in one file: without it, nobody can
    connect, and a new one requires a reset."""
    stack.down()
    telling = r'Postgres ended while starting\. Its log is .*(?s:.*)unrecognized configuration parameter "no_such'
    with put_back(stack.folder / "postgres" / "data" / "postgresql.conf") as file:
        file.write_text("no_such_setting = 1\n")
        with pytest.raises(ServerFailed, match=telling):
            stack.up()
    with put_back(stack.folder / "postgres" / "password") as file:
        file.unlink()
        with pytest.raises(FolderUnusable, match=r"tidemark local reset"):
            stack.up()
    assert processes_of(stack.folder) == []


def test_reset_stops_and_deletes_only_the_stacks_own_files(folder):
    """Other files in the folder stay."""
    stack = LocalStack(folder)
    stack.start(stack.postgres)
    execute(stack.postgres.url("postgres"), "CREATE TABLE numbers (number int)")
    (stack.folder / "theirs").touch()
    stack.reset()
    assert [path.name for path in stack.folder.iterdir()] == ["theirs"]
    assert processes_of(stack.folder) == []
    stack.start(stack.postgres)
    assert execute(stack.postgres.url("postgres"), "SELECT to_regclass('numbers')") == [(None,)]


def test_the_commands_start_show_point_and_stop(folder):
    """Results go to stdout, everything else to stderr, and a shell can eval the output of ``env``. The registry starts only on request,
    stays up during an ``up`` without the option, and its address is passed to Airflow."""
    assert "Registry" not in command(folder, "up").stdout
    assert "TIDEMARK_REGISTRY_URL" not in LocalStack(folder).env()
    assert command(folder, "up", "--registry").returncode == 0
    told = json.loads(command(folder, "status", "--output", "json").stdout)
    assert [(server["name"], server["state"]) for server in told] == [(name, "running") for name in ("Postgres", "Kafka", "Registry")]
    evaluated = subprocess.run(["sh", "-c", f"{command(folder, 'env').stdout}\nenv"], capture_output=True, text=True, check=True).stdout
    assert set(evaluated.splitlines()) >= {f"{name}={value}" for name, value in LocalStack(folder).env().items()}
    url = f"http://{told[2]['address']}/apis/ccompat/v7"
    assert f"TIDEMARK_REGISTRY_URL={url}" in evaluated.splitlines()
    connections = LocalAirflow.on(LocalStack(folder), folder / "airflow").env
    assert json.loads(connections["AIRFLOW_CONN_TIDEMARK_REGISTRY"]) == {"conn_type": "http", "host": url}
    again = command(folder, "up")
    assert (again.returncode, "already up" in again.stderr) == (0, True)
    assert f"Postgres {told[0]['version']} at {told[0]['address']}" in again.stdout
    for last_line in ("The servers are stopped; their data is kept.", f"No server was running in {folder}."):
        down = command(folder, "down")
        assert (down.returncode, down.stderr.splitlines()[-1]) == (0, last_line)
        assert states(LocalStack(folder)) == [ServerState.STOPPED] * 3
        assert processes_of(folder) == []
    assert command(folder, "env").returncode == 1
    assert command(folder, "reset", "--yes").returncode == 0
    assert not folder.exists()

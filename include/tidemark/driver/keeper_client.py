"""Requests to a keeper: fork a driver, call a function, lend the shared Spark application.

    task  --run-->  keeper  --forks-->  driver
                      |                   |
                      |<------attach------+
                      +--starts-->  shared Spark application, whose address the driver gets

The keeper (`tidemark.spark.keeper`) is a resident process. It has imported a driver's modules, so a forked driver starts at once. It keeps
one local Spark application, so that small runs share a JVM. The first task that needs a keeper starts it. It ends after `IDLE_S` without a
run.

It also calls functions in a fork (`call_in_fork`), for import-bound calls.

A connection belongs to one fork. If a process ends, the others notice because their connections close: the keeper kills the fork of a task
that has ended, and the kernel kills the forks of a keeper that has ended.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, TypeVar

from tidemark import project
from tidemark.driver.environment import driver_env, interpreter, separate
from tidemark.errors import Unavailable

T = TypeVar("T")

KEEPER = "TIDEMARK_KEEPER"
"""In the environment of a driver that a keeper has forked: the keeper's socket."""
MODULE = "tidemark.spark.keeper"
IDLE_S = 600.0
START_S = 60.0
"""How long a task waits for a keeper to start, and for its answer."""
ATTACH_S = 330.0
"""Longer than the JVM may take to start."""
MESSAGE_BYTES = 1024 * 1024
PROCESS_NAMES = ("JAVA_HOME", "PATH", "LD_LIBRARY_PATH")
"""Variables that select a keeper and its JVM, beside Python's and Spark's."""
EXTRA_NAMES = "TIDEMARK_KEEPER_ENV"
"""Names of further variables for processes that serve several consumers, comma-separated."""
PASSED_NAMES = frozenset({
    *PROCESS_NAMES, EXTRA_NAMES,
    "AIRFLOW_HOME", "TIDEMARK_HOME", "TIDEMARK_CACHE", "TIDEMARK_MAVEN_MIRROR",
    "TIDEMARK_LOCAL_AIRFLOW",  # by which `tidemark local` finds the processes of its Airflow
    "HOME", "USER", "LOGNAME", "TMPDIR", "TZ", "LANG", "LANGUAGE", "VIRTUAL_ENV", "CC",
    "JAVA_TOOL_OPTIONS", "JDK_JAVA_OPTIONS", "_JAVA_OPTIONS",
})  # fmt: skip
"""Variables of a task's environment that such processes get, beside Python's and Spark's settings. Only drivers get the rest: Airflow's own
secrets, connections and the credentials of consumers."""
PREFIXES = ("PYTHON", "SPARK_", "PYSPARK_", "LC_", "MALLOC_")
SECRETS = re.compile(r"(?i)passw|secret|token|key|credential")
"""Names of variables that such a process does not get, even with one of the prefixes."""


class KeeperUnavailable(Exception):
    """No keeper runs, and none could be started. The caller starts the driver itself."""


class CallDied(Unavailable):
    """The process that was started for a call ended without a result."""

    def __str__(self) -> str:
        return "A process that was started for this task was killed or crashed. Its commits stay."


class ForkedDriver:
    """A driver forked by a keeper, with the part of `subprocess.Popen`'s interface that its caller uses."""

    def __init__(self, connection: socket.socket, pid: int, stdout: IO[str]) -> None:
        self._connection = connection
        self.pid, self.stdout = pid, stdout
        self.returncode: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        """Waits for the end and returns the exit status; `-SIGKILL` if the keeper has ended, because the kernel then kills its drivers.

        Raises `subprocess.TimeoutExpired`.
        """
        if self.returncode is None:
            self._connection.settimeout(timeout)
            try:
                message = receive(self._connection)
            except TimeoutError:
                raise subprocess.TimeoutExpired([MODULE], timeout or 0.0) from None
            self.returncode = -signal.SIGKILL if message is None else int(message["status"])
            self._connection.close()
        return self.returncode


def start_driver(command: Sequence[str], env: Mapping[str, str]) -> ForkedDriver:
    """Has the keeper fork a driver. Starts a keeper if none runs.

    ``command`` is a Python script with its arguments. ``env``: the driver's whole environment. Raises `KeeperUnavailable`.
    """
    read, write = os.pipe()
    stdout = os.fdopen(read, errors="replace")
    try:
        connection, pid = _request_fork(env, {"run": list(command)}, write)
    except BaseException:
        stdout.close()
        raise
    finally:
        os.close(write)
    return ForkedDriver(connection, pid, stdout)


def call_in_fork(function: Callable[[], T]) -> T:
    """Calls a function in a fork of the keeper, which has imported Great Expectations, with this process's environment.

    Function, result and error are pickled. Raises the function's error, `CallDied`, and `KeeperUnavailable` before the call.
    """
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            connection, _ = _request_fork(driver_env(os.environ), {"call": True}, theirs.fileno())
        with connection:
            answer = _exchange(ours, pickle.dumps(function))
    return result(answer)  # type: ignore[no-any-return]


def _exchange(channel: socket.socket, question: bytes) -> bytes:
    """The answer of a fork; empty if it ends before it has read the question."""
    try:
        channel.sendall(question)
        channel.shutdown(socket.SHUT_WR)
        with channel.makefile("rb") as stream:
            return stream.read()
    except ConnectionError:
        return b""


def result(answer: bytes) -> Any:
    """The result in the answer to a call. Raises its error, and `CallDied` for an empty answer."""
    if not answer:
        raise CallDied()
    value, error = pickle.loads(answer)  # noqa: S301 - pickled by our own process
    if error is not None:
        raise error
    return value


def attach_application(group: str, master: str, conf: Mapping[str, str]) -> tuple[int, str] | None:
    """Port and secret of the shared Spark application with these settings, once it runs. `None` if no keeper forked this process, or if the
    application did not start.

    This process uses the application until it ends. The keeper then cancels the jobs of ``group``.
    """
    path = os.environ.get(KEEPER)
    if path is None:
        return None
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.settimeout(ATTACH_S)
        connection.connect(path)
        settings = [master, dict(conf)]
        key = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
        with secrets_file(settings) as file:
            send(connection, {"attach": group, "settings": key}, [file])
        address = receive(connection)
    except OSError:
        address = None
    if address is None or "port" not in address:
        connection.close()
        return None
    connection.detach()  # stays open as long as this process lives
    return address["port"], address["secret"]


@contextlib.contextmanager
def secrets_file(secrets: Any) -> Iterator[int]:
    """A file in memory with these values, for a fork of the keeper. The keeper does not read it: later forks for other consumers share its
    memory."""
    file = os.memfd_create("secrets")
    try:
        os.write(file, json.dumps(secrets, sort_keys=True).encode())
        yield file
    finally:
        os.close(file)


def read_secrets(file: int) -> Any:
    """Reads a `secrets_file`."""
    return json.loads(os.pread(file, os.fstat(file).st_size, 0))


def send(connection: socket.socket, message: Mapping[str, Any], files: Sequence[int] = ()) -> None:
    socket.send_fds(connection, [json.dumps(message).encode()], files)


def receive(connection: socket.socket) -> dict[str, Any] | None:
    """The next message. `None` if the other side has closed the connection."""
    return receive_files(connection)[0]


def receive_files(connection: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    """The next message with its file descriptors."""
    try:
        data, files, _, _ = socket.recv_fds(connection, MESSAGE_BYTES, 2)
    except ConnectionError:
        return None, []
    return (json.loads(data) if data else None), files


def stop_keepers() -> None:
    """Stops all keepers of this project, with their drivers and applications."""
    for path in sorted(_folder().glob("*.sock")):
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.connect(str(path))
            send(connection, {"stop": True})
            receive(connection)


def socket_path(env: Mapping[str, str]) -> Path:
    """The socket of the keeper for processes with this environment. Each Python, and each version of Tidemark or its packages in its
    environment, has its own keeper."""
    if separate():
        folders = sorted(Path(interpreter()).absolute().parents[1].glob("lib*/python*/*-packages"))
        package = next((folder / "tidemark" for folder in folders if (folder / "tidemark").is_dir()), None)
    else:
        folders = [Path(place) for place in sys.path if place.endswith("-packages") and Path(place).is_dir()]
        package = Path(__file__).resolve().parents[1]
    packages = [folder.stat().st_mtime_ns for folder in folders]
    files = [] if package is None else project.files_below(package, "*.py")
    sources = [(str(file), file.stat().st_mtime_ns) for file in files]
    settings = {
        name: value
        for name, value in env.items()
        if name in {*PROCESS_NAMES, EXTRA_NAMES, *_extra_names(env)} or name.startswith(("PYTHON", "SPARK_"))
    }
    key = json.dumps([interpreter(), sources, packages, sorted(settings.items())])
    return _folder() / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.sock"


def _extra_names(env: Mapping[str, str]) -> set[str]:
    return {name.strip() for name in env.get(EXTRA_NAMES, "").split(",")}


def _folder() -> Path:
    """The folder of the sockets. Only this user may enter it, because a keeper runs any code sent to it. A socket's path has at most 107
    bytes."""
    try:
        folder = project.own_tmp()
    except PermissionError as error:
        raise KeeperUnavailable(str(error)) from None
    own = folder / hashlib.sha256(str(project.state()).encode()).hexdigest()[:8]
    own.mkdir(mode=0o700, exist_ok=True)
    return own


def _request_fork(env: Mapping[str, str], request: Mapping[str, Any], file: int) -> tuple[socket.socket, int]:
    """Has the keeper fork a process that gets ``file``. Starts a keeper if none runs. Returns the connection and the pid."""
    connection = _connect(env)
    try:
        with secrets_file(dict(env)) as variables:
            send(connection, {**request, "folder": str(Path.cwd())}, [file, variables])
        answer = receive(connection)
    except OSError as error:
        connection.close()
        raise KeeperUnavailable(str(error)) from error
    if answer is None:
        connection.close()
        raise KeeperUnavailable(f"it ended or could not fork; its log is {socket_path(env).with_suffix('.log')}")
    return connection, answer["pid"]


def _connect(env: Mapping[str, str]) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MESSAGE_BYTES)
    connection.settimeout(START_S)
    try:
        path = socket_path(env)
        if not _try_connect(connection, path):
            with _file_lock(path.with_suffix(".lock")):
                if not _try_connect(connection, path):
                    _start_keeper(connection, path, env)
    except BaseException as error:
        connection.close()
        if isinstance(error, OSError):
            raise KeeperUnavailable(str(error)) from error
        raise
    return connection


def _try_connect(connection: socket.socket, path: Path) -> bool:
    try:
        connection.connect(str(path))
    except (FileNotFoundError, ConnectionRefusedError):
        return False
    return True


def _start_keeper(connection: socket.socket, path: Path, env: Mapping[str, str]) -> None:
    names = PASSED_NAMES | _extra_names(env)
    keeper_env = {name: value for name, value in env.items() if name in names or (name.startswith(PREFIXES) and not SECRETS.search(name))}
    with path.with_suffix(".log").open("w") as log:
        keeper = subprocess.Popen(
            [interpreter(), "-m", MODULE, str(path)],
            env=keeper_env,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    deadline = time.monotonic() + START_S
    while not _try_connect(connection, path):
        if keeper.poll() is not None or time.monotonic() > deadline:
            raise KeeperUnavailable(f"it did not start; its log is {path.with_suffix('.log')}")
        time.sleep(0.02)
    keeper.returncode = 0  # it outlives this process: avoids a warning and a wait


@contextlib.contextmanager
def _file_lock(path: Path) -> Iterator[None]:
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield

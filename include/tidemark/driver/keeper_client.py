"""What tasks and drivers ask a keeper: to fork a driver, to call a function, to lend its Spark application.

    task  --run-->  keeper  --forks-->  driver
                      |                   |
                      |<------attach------+
                      +--starts-->  shared Spark application, whose address the driver gets

The keeper (`tidemark.spark.keeper`) is a resident process. It has imported what a driver needs, so a forked driver starts at once, and it
keeps one local Spark application, so that small runs share a JVM. The first task that needs a keeper starts it. It ends after `IDLE_S`
without a run.

It also calls functions in a fork (`called`), for what takes longer to import than to do.

A connection belongs to one fork. If one of the processes ends, the others notice by the end of their connection: the keeper kills the fork
of a task that is gone, and the kernel kills the forks of a keeper that is gone.
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
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeVar

from tidemark import project
from tidemark.errors import Unavailable

T = TypeVar("T")

KEEPER = "TIDEMARK_KEEPER"
"""In the environment of a driver that a keeper has forked: the keeper's socket."""
MODULE = "tidemark.spark.keeper"
IDLE_S = 600.0
START_S = 60.0
"""How long a task waits for a keeper, and for its answer."""
ATTACH_S = 330.0
"""Longer than the JVM may take to start."""
MESSAGE_BYTES = 1024 * 1024
OF_PROCESSES = ("JAVA_HOME", "PATH", "LD_LIBRARY_PATH")
"""Variables that decide what a keeper and its JVM are, beside Python's and Spark's."""
MORE = "TIDEMARK_KEEPER_ENV"
"""Names of further variables for processes that serve several consumers, separated by commas."""
NEEDED = frozenset({
    *OF_PROCESSES, MORE,
    "AIRFLOW_HOME", "TIDEMARK_HOME", "TIDEMARK_CACHE", "TIDEMARK_MAVEN_MIRROR",
    "TIDEMARK_LOCAL_AIRFLOW",  # by which `tidemark local` finds the processes of its Airflow
    "HOME", "USER", "LOGNAME", "TMPDIR", "TZ", "LANG", "LANGUAGE", "VIRTUAL_ENV", "CC",
    "JAVA_TOOL_OPTIONS", "JDK_JAVA_OPTIONS", "_JAVA_OPTIONS",
})  # fmt: skip
"""What such processes get of a task's environment, beside Python's and Spark's settings. The rest is for drivers only: Airflow's own
secrets, connections and the credentials of consumers."""
PREFIXES = ("PYTHON", "SPARK_", "PYSPARK_", "LC_", "MALLOC_")
SECRETS = re.compile(r"(?i)passw|secret|token|key|credential")
"""Names that no variable with one of the prefixes has for such a process."""


class KeeperUnavailable(Exception):
    """There is no keeper, and none could be started. The caller starts the driver itself."""


@dataclass(kw_only=True, eq=False)
class CallDied(Unavailable):
    """The process that a keeper has forked for a call ended without a result."""

    def __str__(self) -> str:
        return "The process that a keeper had forked for this task was killed or crashed. What it had committed stays."


class KeptDriver:
    """A driver that a keeper has forked, with the part of `subprocess.Popen`'s interface that its caller uses."""

    def __init__(self, connection: socket.socket, pid: int, stdout: IO[str]) -> None:
        self._connection = connection
        self.pid, self.stdout = pid, stdout
        self.returncode: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        """Waits for the end, and returns the exit status; `-SIGKILL` if the keeper is gone, because the kernel then kills its drivers.

        Raises `subprocess.TimeoutExpired`.
        """
        if self.returncode is None:
            self._connection.settimeout(timeout)
            try:
                said = receive(self._connection)
            except TimeoutError:
                raise subprocess.TimeoutExpired([MODULE], timeout or 0.0) from None
            self.returncode = -signal.SIGKILL if said is None else int(said["status"])
            self._connection.close()
        return self.returncode


def start_driver(command: Sequence[str], env: Mapping[str, str]) -> KeptDriver:
    """Asks the keeper to fork a driver. If there is none, starts one first.

    ``command`` is a Python script with its arguments. ``env``: the driver's whole environment. Raises `KeeperUnavailable`.
    """
    read, write = os.pipe()
    stdout = os.fdopen(read, errors="replace")
    try:
        connection, pid = _asked(env, {"run": list(command)}, write)
    except BaseException:
        stdout.close()
        raise
    finally:
        os.close(write)
    return KeptDriver(connection, pid, stdout)


def called(function: Callable[[], T]) -> T:
    """Calls a function in a fork of the keeper, which has Great Expectations, with this process's environment.

    Function, result and error are pickled. Raises what the function raises, `CallDied`, and `KeeperUnavailable` before it is called.
    """
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            connection, _ = _asked(os.environ, {"call": True}, theirs.fileno())
        with connection:
            ours.sendall(pickle.dumps(function))
            ours.shutdown(socket.SHUT_WR)
            with ours.makefile("rb") as answer:
                said = answer.read()
    if not said:
        raise CallDied()
    result, error = pickle.loads(said)  # noqa: S301 - pickled by our own fork
    if error is not None:
        raise error
    return result  # type: ignore[no-any-return]


def attached(group: str, master: str, conf: Mapping[str, str]) -> tuple[int, str] | None:
    """Port and secret of the shared Spark application with these settings, once it runs. `None` if this process was not forked by a keeper,
    or if the application did not start.

    The application is borrowed until this process ends. The keeper then cancels the jobs of ``group``.
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
        with unread(settings) as file:
            send(connection, {"attach": group, "settings": key}, [file])
        said = receive(connection)
    except OSError:
        said = None
    if said is None or "port" not in said:
        connection.close()
        return None
    connection.detach()  # stays open as long as this process lives
    return said["port"], said["secret"]


@contextlib.contextmanager
def unread(secrets: Any) -> Iterator[int]:
    """A file in memory with these values, for a fork of the keeper. The keeper itself does not read it: all its later forks, of other
    consumers, share its memory."""
    file = os.memfd_create("secrets")
    try:
        os.write(file, json.dumps(secrets, sort_keys=True).encode())
        yield file
    finally:
        os.close(file)


def read_in_fork(file: int) -> Any:
    """What `unread` has written."""
    return json.loads(os.pread(file, os.fstat(file).st_size, 0))


def send(connection: socket.socket, message: Mapping[str, Any], files: Sequence[int] = ()) -> None:
    socket.send_fds(connection, [json.dumps(message).encode()], files)


def receive(connection: socket.socket) -> dict[str, Any] | None:
    """The next message. `None` if the other side has closed the connection."""
    return receive_files(connection)[0]


def receive_files(connection: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    """The next message with the file descriptors that came with it."""
    try:
        said, files, _, _ = socket.recv_fds(connection, MESSAGE_BYTES, 2)
    except ConnectionError:
        return None, []
    return (json.loads(said) if said else None), files


def stop_keepers() -> None:
    """Asks all keepers of this project to end, with their drivers and applications."""
    for path in sorted(_folder().glob("*.sock")):
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.connect(str(path))
            send(connection, {"stop": True})
            receive(connection)


def socket_path(env: Mapping[str, str]) -> Path:
    """Where the keeper for processes with this environment listens. Another Python, and another version of Tidemark or of its packages, has
    a keeper of its own."""
    package = Path(__file__).resolve().parents[1]
    sources = sorted((str(file.relative_to(package)), file.stat().st_mtime_ns) for file in package.rglob("*.py"))
    packages = [Path(place).stat().st_mtime_ns for place in sys.path if place.endswith("-packages") and Path(place).is_dir()]
    settings = {
        name: value for name, value in env.items() if name in {*OF_PROCESSES, MORE, *_more(env)} or name.startswith(("PYTHON", "SPARK_"))
    }
    key = json.dumps([sys.executable, sources, packages, sorted(settings.items())])
    return _folder() / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.sock"


def _more(env: Mapping[str, str]) -> set[str]:
    return {name.strip() for name in env.get(MORE, "").split(",")}


def _folder() -> Path:
    """Only this user may enter it, because a keeper runs what it is sent. Short: the path of a socket has at most 107 bytes."""
    try:
        folder = project.own_tmp()
    except PermissionError as error:
        raise KeeperUnavailable(str(error)) from None
    own = folder / hashlib.sha256(str(project.state()).encode()).hexdigest()[:8]
    own.mkdir(mode=0o700, exist_ok=True)
    return own


def _asked(env: Mapping[str, str], what: Mapping[str, Any], file: int) -> tuple[socket.socket, int]:
    """Asks the keeper to fork a process that gets ``file``. If there is no keeper, starts one first. Returns the connection and the pid."""
    connection = _connected(env)
    try:
        with unread(dict(env)) as variables:
            send(connection, {**what, "folder": str(Path.cwd())}, [file, variables])
        said = receive(connection)
    except OSError as error:
        connection.close()
        raise KeeperUnavailable(str(error)) from error
    if said is None:
        connection.close()
        raise KeeperUnavailable("it ended")
    return connection, said["pid"]


def _connected(env: Mapping[str, str]) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MESSAGE_BYTES)
    connection.settimeout(START_S)
    try:
        path = socket_path(env)
        if not _reached(connection, path):
            with _locked(path.with_suffix(".lock")):
                if not _reached(connection, path):
                    _started(connection, path, env)
    except BaseException as error:
        connection.close()
        if isinstance(error, OSError):
            raise KeeperUnavailable(str(error)) from error
        raise
    return connection


def _reached(connection: socket.socket, path: Path) -> bool:
    try:
        connection.connect(str(path))
    except (FileNotFoundError, ConnectionRefusedError):
        return False
    return True


def _started(connection: socket.socket, path: Path, env: Mapping[str, str]) -> None:
    needed = NEEDED | _more(env)
    own = {name: value for name, value in env.items() if name in needed or (name.startswith(PREFIXES) and not SECRETS.search(name))}
    with path.with_suffix(".log").open("w") as log:
        keeper = subprocess.Popen(
            [sys.executable, "-m", MODULE, str(path)],
            env=own,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    deadline = time.monotonic() + START_S
    while not _reached(connection, path):
        if keeper.poll() is not None or time.monotonic() > deadline:
            raise KeeperUnavailable(f"it did not start; its log is {path.with_suffix('.log')}")
        time.sleep(0.02)
    keeper.returncode = 0  # it outlives this process: no warning, no wait


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield

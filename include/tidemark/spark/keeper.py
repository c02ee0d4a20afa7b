"""The keeper: a resident process that forks drivers and keeps one Spark application for small runs. See `tidemark.driver.keeper_client`.

    python -m tidemark.spark.keeper SOCKET

It is a single thread that waits for messages, so that it can fork at any time, and it holds no secrets of consumers. What it starts::

    keeper ─┬─ driver, one per run: its own session, environment and output; killed when its task is gone
            ├─ call of a function, likewise
            └─ holder, one per application: starts the JVM and cancels the jobs of drivers that are gone
                  └─ JVM ── Python daemon ── Python workers, a fresh fork for each task

The kernel kills drivers and holders when the keeper ends, a JVM ends with its holder, and its daemon and workers end with the JVM.

An application serves `RUNS_PER_APPLICATION` runs, then the next one starts: whatever runs have left in the JVM (sessions, cached plans,
classes of generated code) is gone with it.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import os
import pickle
import runpy
import selectors
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from tidemark.driver.keeper_client import IDLE_S, KEEPER, read_in_fork, receive, receive_files, send
from tidemark.driver.process import PARENT, die_with_parent
from tidemark.errors import TidemarkError
from tidemark.quality.suite import great_expectations

IMPORTS = (
    "numpy",
    "pandas",
    "pgpq",
    "psycopg2",
    "confluent_kafka.admin",
    "pyarrow.compute",
    "pyspark.sql.functions",
    "pyspark.sql.pandas.types",
    "tidemark.values.fields",
    "tidemark.consume.run",
    "tidemark.formats.avro",
    "tidemark.rewind",
    "tidemark.spark.engine",
    "tidemark.spark.shared",
)
"""What drivers import."""
RUNS_PER_APPLICATION = 500
LOOK_EVERY_S = 5.0
_PR_SET_NAME = 15


@dataclass
class _Application:
    settings: str
    """A hash of them."""
    channel: socket.socket
    """To its holder."""
    address: dict[str, Any] | None = None
    """Port and secret, once it runs."""
    served: int = 0
    tenants: dict[socket.socket, str] = field(default_factory=dict)
    """Connections of the drivers that use it, with their job groups. Without an address, they are waiting for it."""


@dataclass
class _Driver:
    task: socket.socket
    pid: int
    ended: int
    """A pidfd, which can be read once the process has ended."""


class Keeper:
    """Serves until it has been idle for `IDLE_S`, is asked to stop, or its socket's file is gone."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._selector = selectors.DefaultSelector()
        fresh = path.with_suffix(".new")
        fresh.unlink(missing_ok=True)
        self._server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._server.bind(str(fresh))
        self._server.listen(128)
        fresh.rename(path)
        self._inode = path.stat().st_ino
        self._selector.register(self._server, selectors.EVENT_READ, self._accept)
        self._drivers: dict[socket.socket, _Driver] = {}
        self._applications: dict[str, _Application] = {}
        """Those for the next runs, by the hash of Spark's settings."""
        self._busy_at = time.monotonic()
        self._stopping = False

    def serve(self) -> None:
        while not self._stopping:
            for key, _ in self._selector.select(LOOK_EVERY_S):
                if self._selector.get_map().get(key.fd) is key:  # not closed meanwhile
                    key.data(key.fileobj)
            if self._drivers:
                self._busy_at = time.monotonic()
            elif time.monotonic() - self._busy_at > IDLE_S or not self._is_ours():
                break
        self._server.close()
        if self._is_ours():
            self._path.unlink()

    def _is_ours(self) -> bool:
        with contextlib.suppress(FileNotFoundError):
            return self._path.stat().st_ino == self._inode
        return False

    def _accept(self, server: socket.socket) -> None:
        connection, _ = server.accept()
        self._selector.register(connection, selectors.EVENT_READ, self._first)

    def _first(self, connection: socket.socket) -> None:
        """The first message of a connection says what it is for."""
        said, files = receive_files(connection)
        if said is None:
            self._close(connection)
        elif "run" in said:
            self._fork(connection, files, partial(_become_driver, said))
        elif "call" in said:
            great_expectations()  # once: the fork would import it, and so would the next one
            self._fork(connection, files, partial(_become_call, said))
        elif "attach" in said:
            self._attach(connection, said, files[0])
            os.close(files[0])
        elif "stop" in said:
            self._stopping = True

    def _close(self, connection: socket.socket) -> None:
        with contextlib.suppress(KeyError, ValueError):  # it is not registered, or closed
            self._selector.unregister(connection)
        connection.close()

    # Drivers

    def _fork(self, task: socket.socket, files: Sequence[int], become: Callable[[int, dict[str, str]], NoReturn]) -> None:
        """A process for a task, which gets the first of the files. The second one has its environment."""
        parent = os.getpid()
        gc.freeze()  # forks share what is not looked at
        pid = os.fork()
        if pid == 0:
            become(files[0], {**read_in_fork(files[1]), KEEPER: str(self._path), PARENT: str(parent)})
        for file in files:
            os.close(file)
        driver = self._drivers[task] = _Driver(task, pid, os.pidfd_open(pid))
        self._selector.modify(task, selectors.EVENT_READ, self._task_gone)
        self._selector.register(driver.ended, selectors.EVENT_READ, lambda _: self._driver_ended(driver))
        with contextlib.suppress(OSError):  # the task is gone; its connection says so
            send(task, {"pid": pid})

    def _task_gone(self, task: socket.socket) -> None:
        """The task reads only, so this is the end of its connection: it is killed, or has stopped following the driver."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._drivers[task].pid, signal.SIGKILL)
        self._selector.unregister(task)

    def _driver_ended(self, driver: _Driver) -> None:
        status = self._reap(driver.pid, driver.ended)
        with contextlib.suppress(OSError):
            send(driver.task, {"status": os.waitstatus_to_exitcode(status)})
        del self._drivers[driver.task]
        self._close(driver.task)

    def _reap(self, pid: int, ended: int) -> int:
        """Takes the status of a process that has ended from the system, which keeps it as a zombie until then."""
        self._selector.unregister(ended)
        os.close(ended)
        return os.waitpid(pid, 0)[1]

    # The application

    def _attach(self, driver: socket.socket, said: dict[str, Any], file: int) -> None:
        settings = said["settings"]
        application = self._applications.get(settings)
        if application is None or application.served >= RUNS_PER_APPLICATION:
            full, application = application, self._start_application(settings, file)
            self._applications[settings] = application
            if full is not None:
                self._release(full)
        application.served += 1
        application.tenants[driver] = said["attach"]
        self._selector.modify(driver, selectors.EVENT_READ, lambda _: self._driver_gone(application, driver))
        self._offer(application, driver)

    def _offer(self, application: _Application, driver: socket.socket) -> None:
        if application.address is not None:
            with contextlib.suppress(OSError):  # the driver is gone; its connection says so
                send(driver, application.address)

    def _driver_gone(self, application: _Application, driver: socket.socket) -> None:
        self._close(driver)
        with contextlib.suppress(OSError):  # the holder is gone; its channel says so
            send(application.channel, {"cancel": application.tenants.pop(driver)})
        self._release(application)

    def _release(self, application: _Application) -> None:
        """Ends an application that has served its number of runs, once the last one is over."""
        if application is not self._applications.get(application.settings) and not application.tenants:
            self._close(application.channel)

    def _start_application(self, settings: str, file: int) -> _Application:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            _become_holder(read_in_fork(file), theirs, {PARENT: str(parent)})
        theirs.close()
        ended = os.pidfd_open(pid)
        self._selector.register(ended, selectors.EVENT_READ, lambda _: self._reap(pid, ended))
        application = _Application(settings, ours)
        self._selector.register(ours, selectors.EVENT_READ, lambda _: self._holder_said(application))
        return application

    def _holder_said(self, application: _Application) -> None:
        said = receive(application.channel)
        if said is not None:
            application.address = said
            for driver in application.tenants:
                self._offer(application, driver)
            return
        self._close(application.channel)  # the holder has ended, and the JVM with it
        if self._applications.get(application.settings) is application:
            del self._applications[application.settings]
        if application.address is None:  # it did not start: its drivers start their own
            for driver in application.tenants:
                with contextlib.suppress(OSError):
                    send(driver, {"error": "the application did not start"})


def _become_driver(said: dict[str, Any], output: int, env: dict[str, str]) -> NoReturn:
    """Goes on as the driver, as if it had been started with this command, environment, folder and output."""

    def run() -> None:
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.close(output)
        _take_place(said, env)
        sys.argv = said["run"]
        runpy.run_path(sys.argv[0], run_name="__main__")

    words = said["run"]
    name = f"attempt {words[words.index('--attempt') + 1]}" if "--attempt" in words else "tidemark driver"
    _forked(name, keep=output, act=run)


def _become_call(said: dict[str, Any], channel: int, env: dict[str, str]) -> NoReturn:
    """Calls the function that comes through the channel, and sends its result or error."""

    def run() -> None:
        _take_place(said, env)
        die_with_parent()
        with socket.socket(fileno=channel) as connection, connection.makefile("rb") as given:
            function = pickle.loads(given.read())  # noqa: S301 - pickled by our own caller
            try:
                answer = pickle.dumps((function(), None))
            except TidemarkError as error:
                answer = pickle.dumps((None, error))
            except Exception as error:  # noqa: BLE001 - the caller raises it; not every error can be pickled
                answer = pickle.dumps((None, RuntimeError(f"{type(error).__name__}: {error}")))
            connection.sendall(answer)

    _forked("tidemark call", keep=channel, act=run)


def _take_place(said: dict[str, Any], env: dict[str, str]) -> None:
    """Sets the environment and the working folder of the process that asks."""
    os.environ.clear()
    os.environ.update(env)
    time.tzset()
    os.chdir(said["folder"])


def _become_holder(settings: Sequence[Any], channel: socket.socket, added: dict[str, str]) -> NoReturn:
    def run() -> None:
        from tidemark.spark.shared import hold

        os.environ.update(added)
        die_with_parent()
        hold(channel, *settings)

    _forked("tidemark spark", keep=channel.fileno(), act=run)


def _forked(name: str, *, keep: int, act: Any) -> NoReturn:
    """Runs ``act`` in a process that has just been forked, with nothing of its parent's open but ``keep``. Ends it with the exit status."""
    status = 1
    try:
        os.setsid()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for file in [int(entry) for entry in os.listdir("/proc/self/fd")]:  # noqa: PTH208 - numbers
            if file > 2 and file != keep:
                with contextlib.suppress(OSError):  # the one that listed them
                    os.close(file)
        _set_name(name)
        gc.enable()
        act()
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 - as the interpreter does at its top level
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            atexit._run_exitfuncs()  # noqa: SLF001 - the end of the interpreter, without taking all modules apart
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def _set_name(name: str) -> None:
    """Names the process in ``ps -o comm`` and ``top``. Its command line stays the keeper's."""
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)


def main() -> None:
    path = Path(sys.argv[1])
    for name in IMPORTS:
        importlib.import_module(name)
    _set_name("tidemark keeper")
    gc.collect()
    Keeper(path).serve()


if __name__ == "__main__":
    main()

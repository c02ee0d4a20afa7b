"""The keeper: a resident process that forks drivers and keeps one Spark application for small runs. See `tidemark.driver.keeper_client`.

    python -m tidemark.spark.keeper SOCKET

It waits for messages in a single thread, so that it can fork at any time, and it holds no secrets of consumers. Its processes::

    keeper ─┬─ driver, one per run: its own session, environment and output; killed when its task ends
            ├─ call of a function, likewise
            └─ holder, one per application: starts the JVM and cancels the jobs of drivers that have ended
                  └─ JVM ── Python daemon ── Python workers, a fresh fork for each task

The kernel kills drivers and holders when the keeper ends, a JVM ends with its holder, and its daemon and workers end with the JVM.

An application serves `RUNS_PER_APPLICATION` runs, then a new one starts. This frees what runs leave in a JVM: sessions, cached plans and
generated classes.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import os
import runpy
import select
import selectors
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from tidemark.driver.call import answer
from tidemark.driver.keeper_client import IDLE_S, KEEPER, read_secrets, receive, receive_files, send
from tidemark.driver.process import PARENT, die_with_parent, renew_random
from tidemark.quality.suite import great_expectations
from tidemark.spark.releases import cancel_jobs
from tidemark.spark.session import end_jvm, start_shared

IMPORTS = (
    "numpy",
    "pandas",
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
)
"""Modules that drivers import."""
RUNS_PER_APPLICATION = 500
LOOK_EVERY_S = 5.0
JVM_LOOK_EVERY_S = 1.0
_PR_SET_NAME = 15


@dataclass
class _Application:
    settings: str
    """The hash of the Spark settings."""
    channel: socket.socket
    """The connection to its holder."""
    address: dict[str, Any] | None = None
    """Port and secret, once it runs."""
    served: int = 0
    tenants: dict[socket.socket, str] = field(default_factory=dict)
    """Connections of the drivers that use it, with their job groups. Until the address is set, they wait for it."""


@dataclass
class _Driver:
    task: socket.socket
    pid: int
    ended: int
    """A pidfd, readable once the process has ended."""


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
        """The applications for the next runs, by the hash of Spark's settings."""
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
        self._selector.register(connection, selectors.EVENT_READ, self._dispatch)

    def _dispatch(self, connection: socket.socket) -> None:
        """Handles the first message of a connection: run, call, attach or stop. An error closes only this connection: its process then does
        without the keeper."""
        files: list[int] = []
        try:
            message, files = receive_files(connection)
            if message is None:
                self._close(connection)
            elif "run" in message:
                self._fork(connection, files, partial(_become_driver, message))
            elif "call" in message:
                with contextlib.suppress(Exception):  # the call meets the same error and reports it
                    great_expectations()  # imported once here instead of in each fork
                self._fork(connection, files, partial(_become_call, message))
            elif "attach" in message:
                self._attach(connection, message, files[0])
            elif "stop" in message:
                self._stopping = True
        except Exception:  # noqa: BLE001 - other drivers run
            traceback.print_exc()
            self._close(connection)
        finally:
            for file in files:
                os.close(file)

    def _close(self, connection: socket.socket) -> None:
        with contextlib.suppress(KeyError, ValueError):  # not registered, or already closed
            self._selector.unregister(connection)
        connection.close()

    # Drivers

    def _fork(self, task: socket.socket, files: Sequence[int], become: Callable[[int, dict[str, str]], NoReturn]) -> None:
        """Forks a process for a task. The process gets the first of the files; the second holds its environment."""
        added = {KEEPER: str(self._path), PARENT: str(os.getpid())}
        gc.freeze()  # garbage collection would copy pages that forks share
        pid, ended = _forked(lambda: become(files[0], {**read_secrets(files[1]), **added}))
        driver = self._drivers[task] = _Driver(task, pid, ended)
        self._selector.modify(task, selectors.EVENT_READ, self._on_task_closed)
        self._selector.register(ended, selectors.EVENT_READ, lambda _: self._on_driver_ended(driver))
        with contextlib.suppress(OSError):  # the task has ended; its connection closes
            send(task, {"pid": pid})

    def _on_task_closed(self, task: socket.socket) -> None:
        """Kills the driver. The task only reads, so its connection has closed: it was killed, or has stopped following the driver."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._drivers[task].pid, signal.SIGKILL)
        self._selector.unregister(task)

    def _on_driver_ended(self, driver: _Driver) -> None:
        status = self._reap(driver.pid, driver.ended)
        with contextlib.suppress(OSError):
            send(driver.task, {"status": os.waitstatus_to_exitcode(status)})
        del self._drivers[driver.task]
        self._close(driver.task)

    def _reap(self, pid: int, ended: int) -> int:
        """Reaps an ended process and returns its wait status."""
        self._selector.unregister(ended)
        os.close(ended)
        return os.waitpid(pid, 0)[1]

    # The application

    def _attach(self, driver: socket.socket, message: dict[str, Any], file: int) -> None:
        settings = message["settings"]
        application = self._applications.get(settings)
        if application is None or application.served >= RUNS_PER_APPLICATION:
            exhausted, application = application, self._start_application(settings, file)
            self._applications[settings] = application
            if exhausted is not None:
                self._release(exhausted)
        application.served += 1
        application.tenants[driver] = message["attach"]
        self._selector.modify(driver, selectors.EVENT_READ, lambda _: self._on_driver_closed(application, driver))
        self._send_address(application, driver)

    def _send_address(self, application: _Application, driver: socket.socket) -> None:
        if application.address is not None:
            with contextlib.suppress(OSError):  # the driver has ended; its connection closes
                send(driver, application.address)

    def _on_driver_closed(self, application: _Application, driver: socket.socket) -> None:
        self._close(driver)
        with contextlib.suppress(OSError):  # the holder has ended; its channel closes
            send(application.channel, {"cancel": application.tenants.pop(driver)})
        self._release(application)

    def _release(self, application: _Application) -> None:
        """Ends an application that has served `RUNS_PER_APPLICATION` runs, once the last run is over."""
        if application is not self._applications.get(application.settings) and not application.tenants:
            self._close(application.channel)

    def _start_application(self, settings: str, file: int) -> _Application:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        added = {PARENT: str(os.getpid())}
        with theirs:
            pid, ended = _forked(lambda: _become_holder(read_secrets(file), theirs, added))
        self._selector.register(ended, selectors.EVENT_READ, lambda _: self._reap(pid, ended))
        application = _Application(settings, ours)
        self._selector.register(ours, selectors.EVENT_READ, lambda _: self._on_holder_message(application))
        return application

    def _on_holder_message(self, application: _Application) -> None:
        address = receive(application.channel)
        if address is not None:
            application.address = address
            for driver in application.tenants:
                self._send_address(application, driver)
            return
        self._close(application.channel)  # the holder has ended, and the JVM with it
        if self._applications.get(application.settings) is application:
            del self._applications[application.settings]
        if application.address is None:  # it did not start: its drivers start their own
            for driver in application.tenants:
                with contextlib.suppress(OSError):
                    send(driver, {"error": "the application did not start"})


def _forked(become: Callable[[], NoReturn]) -> tuple[int, int]:
    """Forks a process for ``become``. Returns its pid and a pidfd, readable once it has ended. Leaves no process if it raises."""
    pid = os.fork()
    if pid == 0:
        try:
            become()
        except BaseException:  # noqa: BLE001 - the fork must never go on as the keeper
            traceback.print_exc()
        finally:
            os._exit(1)
    _lead_group(pid)
    try:
        return pid, os.pidfd_open(pid)
    except OSError:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise


def _become_driver(message: dict[str, Any], output: int, env: dict[str, str]) -> NoReturn:
    """Runs the driver in this process, as if started with this command, environment, folder and output."""

    def run() -> None:
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.close(output)
        _adopt_environment(message, env)
        sys.argv = message["run"]
        runpy.run_path(sys.argv[0], run_name="__main__")

    command = message["run"]
    name = f"attempt {command[command.index('--attempt') + 1]}" if "--attempt" in command else "tidemark driver"
    _run_forked(name, keep_open=output, run=run)


def _become_call(message: dict[str, Any], channel: int, env: dict[str, str]) -> NoReturn:
    """Receives a function through the channel, calls it, and sends its result or error."""

    def run() -> None:
        _adopt_environment(message, env)
        die_with_parent()
        with socket.socket(fileno=channel) as connection, connection.makefile("rb") as stream:
            connection.sendall(answer(stream.read()))

    _run_forked("tidemark call", keep_open=channel, run=run)


def _adopt_environment(message: dict[str, Any], env: dict[str, str]) -> None:
    """Sets the environment and the working folder of the requesting process."""
    os.environ.clear()
    os.environ.update(env)
    time.tzset()
    os.chdir(message["folder"])


def _become_holder(settings: Sequence[Any], channel: socket.socket, added: dict[str, str]) -> NoReturn:
    def run() -> None:
        os.environ.update(added)
        die_with_parent()
        _hold(channel, *settings)

    _run_forked("tidemark spark", keep_open=channel.fileno(), run=run)


def _hold(channel: socket.socket, master: str, conf: Mapping[str, str]) -> None:
    """Starts the application and sends its address. Returns when ``channel`` closes or the JVM ends."""
    from pyspark import SparkContext

    spark = start_shared(master, conf)
    gateway: Any = SparkContext._gateway  # noqa: SLF001 - what a second Python process needs to connect
    send(channel, {"port": gateway.gateway_parameters.port, "secret": gateway.gateway_parameters.auth_token})
    context = spark.sparkContext._jsc.sc()  # noqa: SLF001 - Python's interface lacks the method
    while gateway.proc.poll() is None:
        if not select.select([channel], [], [], JVM_LOOK_EVERY_S)[0]:
            continue
        message = receive(channel)
        if message is None:
            break
        cancel_jobs(context, message["cancel"])
    end_jvm()


def _run_forked(name: str, *, keep_open: int, run: Any) -> NoReturn:
    """Runs ``run`` in a newly forked process and ends it with the exit status. Closes all files of the parent except ``keep_open``."""
    status = 1
    try:
        _lead_group(0)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for file in [int(entry) for entry in os.listdir("/proc/self/fd")]:  # noqa: PTH208 - numbers
            if file > 2 and file != keep_open:
                with contextlib.suppress(OSError):  # the descriptor of the listing itself
                    os.close(file)
        _set_name(name)
        gc.enable()
        renew_random()
        run()
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 - as the interpreter does at its top level
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            atexit._run_exitfuncs()  # noqa: SLF001 - the interpreter's exit, without tearing down all modules
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def _lead_group(pid: int) -> None:
    """Makes a fork lead a process group of its own; 0 is the caller. The keeper and the fork both call it, so that the group exists before
    anybody can be asked to kill it, and before the fork starts other processes."""
    with contextlib.suppress(OSError):  # the fork has ended
        os.setpgid(pid, pid)


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

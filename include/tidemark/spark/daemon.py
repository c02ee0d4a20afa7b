"""PySpark's daemon, which forks the Python workers of a JVM, with two additions. Set as ``spark.python.daemon.module``.

It imports the modules for a slice once, instead of in each worker. A fork takes 10 ms, the imports take most of a second.

A worker ends as soon as its task does. When a job is cancelled, the JVM only closes the connection, and a worker that waits for Postgres or
runs a transform would not notice. The worker's whole process group ends, including processes that a transform has started. When
the daemon ends, as it does with the JVM, it kills the process groups of all its workers.
"""

from __future__ import annotations

import contextlib
import functools
import os
import select
import signal
import socket
import threading
from typing import Any

import confluent_kafka  # noqa: F401, TID253
import datafusion  # noqa: F401
import psycopg2  # noqa: F401
import pyarrow.compute  # noqa: F401, TID253
import pyspark.worker  # noqa: F401, TID253
from pyspark import daemon  # noqa: TID253

import tidemark.spark.engine  # noqa: F401
from tidemark.driver.process import children, renew_random
from tidemark.kafka.compiled import library
from tidemark.worker.slice_worker import collect_less_garbage


def _end_with_connection(work: Any) -> Any:
    """Wraps PySpark's function that serves a connection: its worker ends when the connection closes."""
    reused = bool(os.environ.get("SPARK_REUSE_WORKER"))

    def worker(connection: socket.socket, authenticated: bool) -> Any:
        watch(connection)
        status = work(connection, authenticated)
        if status or not reused:
            _kill_when_closed(connection)
        return status

    @functools.cache  # a worker serves one connection, task after task
    def watch(connection: socket.socket) -> None:
        os.setpgid(0, 0)
        renew_random()
        threading.Thread(target=_kill_when_closed, args=(connection,), daemon=True).start()

    return worker


def _kill_when_closed(connection: socket.socket) -> None:
    closed = select.poll()
    closed.register(connection, select.POLLRDHUP)
    closed.poll()
    os.killpg(0, signal.SIGKILL)


def _kill_workers() -> None:
    """Kills the workers that are left, each with its process group. None of them gets the signal with which PySpark ends its own group.

    A worker's own thread may never get a turn: a regular expression, for example, may hold the interpreter's lock for years.
    """
    for pid in children():
        for kill in (os.killpg, os.kill):  # it leads no group yet if it has just been forked
            with contextlib.suppress(ProcessLookupError):
                kill(pid, signal.SIGKILL)


def main() -> None:
    library()  # compiled or loaded once
    collect_less_garbage()
    daemon.worker = _end_with_connection(daemon.worker)
    try:
        daemon.manager()
    finally:
        _kill_workers()


if __name__ == "__main__":
    main()

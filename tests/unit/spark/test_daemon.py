"""The daemon that forks Python workers, without a JVM: what forks share with it, and what happens to them when it ends."""

from __future__ import annotations

import socket
import struct
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest
from tests.support.waiting import until

from tidemark.local.processes import gone

CODE = """if True:
    import re, struct, subprocess

    import numpy
    from pyspark import daemon

    from tidemark.spark import daemon as extended

    def worker(connection, authenticated):
        if connection.recv(1) == b"r":
            connection.sendall(numpy.random.bytes(8))
        else:
            started = subprocess.Popen(["sleep", "600"], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
            connection.sendall(struct.pack("!q", started.pid))
            re.match("(a+)+$", 60 * "a" + "b")  # holds the interpreter's lock for years
        return 0

    daemon.worker = worker
    extended.main()
"""
"""The daemon, with workers that do what a transform may do."""

FORKS = """if True:
    import os, sys

    import numpy.random

    from tidemark.spark.keeper import _run_forked

    for _ in range(2):
        if os.fork() == 0:
            _run_forked("fork", keep_open=1, run=lambda: print(numpy.random.random()))
        os.wait()
"""


@pytest.fixture
def daemon() -> Iterator[subprocess.Popen[bytes]]:
    """It ends at the latest with its standard input, as with a JVM."""
    with subprocess.Popen([sys.executable, "-c", CODE], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        yield process


def ask(connection: socket.socket, what: bytes) -> tuple[int, bytes]:
    """The worker's process id and its answer of 8 bytes."""
    connection.sendall(what)
    answer = b""
    while len(answer) < 12:
        answer += connection.recv(12 - len(answer))
    return struct.unpack("!i", answer[:4])[0], answer[4:]


def test_workers_draw_their_own_random_numbers_and_end_with_their_daemon(daemon: subprocess.Popen[bytes]) -> None:
    """NumPy's generator was seeded when the daemon imported it. A worker may be in C code that never returns: Python's threads, which watch
    its connection, get no turn then. What it has started ends with it."""
    assert daemon.stdin is not None
    assert daemon.stdout is not None
    address = ("127.0.0.1", struct.unpack("!i", daemon.stdout.read(4))[0])
    with (
        socket.create_connection(address) as first,
        socket.create_connection(address) as second,
        socket.create_connection(address) as third,
    ):
        assert ask(first, b"r")[1] != ask(second, b"r")[1]
        pid, answer = ask(third, b"s")
        worker, started = psutil.Process(pid), psutil.Process(*struct.unpack("!q", answer))
        daemon.stdin.close()
        daemon.wait()
        until(lambda: gone(worker), "the worker has ended")
        until(lambda: gone(started), "the process that it has started has ended")


def test_forks_of_the_keeper_draw_their_own_random_numbers() -> None:
    done = subprocess.run([sys.executable, "-c", FORKS], capture_output=True, check=True)
    first, second = done.stdout.split()
    assert first != second

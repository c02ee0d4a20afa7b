"""The daemon that forks Python workers, without a JVM."""

from __future__ import annotations

import socket
import struct
import subprocess
import sys
from collections.abc import Iterator

import pytest

CODE = """if True:
    import numpy
    from pyspark import daemon

    from tidemark.spark import daemon as extended

    def worker(connection, authenticated):
        connection.sendall(numpy.random.bytes(8))
        return 0

    daemon.worker = worker
    extended.main()
"""

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


def numbers(connection: socket.socket) -> bytes:
    """What a worker has drawn. Its process id comes first."""
    answer = b""
    while len(answer) < 12:
        answer += connection.recv(12 - len(answer))
    return answer[4:]


def test_workers_draw_their_own_random_numbers(daemon: subprocess.Popen[bytes]) -> None:
    """NumPy's generator was seeded when the daemon imported it."""
    assert daemon.stdout is not None
    address = ("127.0.0.1", struct.unpack("!i", daemon.stdout.read(4))[0])
    with socket.create_connection(address) as first, socket.create_connection(address) as second:
        assert numbers(first) != numbers(second)


def test_forks_of_the_keeper_draw_their_own_random_numbers() -> None:
    done = subprocess.run([sys.executable, "-c", FORKS], capture_output=True, check=True)
    first, second = done.stdout.split()
    assert first != second

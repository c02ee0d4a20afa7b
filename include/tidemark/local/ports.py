"""Free ports on loopback."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Collection

HOST = "127.0.0.1"
_CHOICE = range(20_000, 30_000)
"""Below the range of outgoing connections, so that a port is still free at the next start."""
_TRIES = 100


def is_free(port: int) -> bool:
    """Whether a server could listen on the port now. Ignores connections in TIME_WAIT, which do not hinder the servers."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
        return True


def find_free(*, exclude: Collection[int] = ()) -> int:
    """A free port that is not in ``exclude``."""
    for _ in range(_TRIES):
        port = secrets.choice(_CHOICE)
        if port not in exclude and is_free(port):
            return port
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def accepts(port: int) -> bool:
    """Whether a server accepts connections on the port."""
    try:
        with socket.create_connection((HOST, port), timeout=1):
            return True
    except OSError:
        return False

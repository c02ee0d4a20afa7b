"""Ports for tests of servers that are not there."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator


@contextlib.contextmanager
def closed_port() -> Iterator[int]:
    """Yields a port on which nothing listens. It is taken meanwhile, so no other server gets it."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield int(taken.getsockname()[1])

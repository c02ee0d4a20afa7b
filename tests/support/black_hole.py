"""Proxies in front of Postgres whose connections fail: silently, or at a commit."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from urllib.parse import parse_qs, urlsplit


class BlackHole:
    """A TCP proxy on loopback, whose connections stay open when no data passes any more; `url` is its address.

    ``swallow``: data is acknowledged and discarded. ``stand_still``: nothing is read any more, so the TCP windows close.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._host = parts.hostname or parse_qs(parts.query).get("host", ["127.0.0.1"])[0]
        self._port = parts.port or 5432
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"postgresql://{parts.netloc.rpartition('@')[0]}@127.0.0.1:{self._listener.getsockname()[1]}{parts.path}?sslmode=disable"
        self.swallow, self.stand_still, self._closing = threading.Event(), threading.Event(), threading.Event()
        self._open: list[socket.socket] = []
        self._start(self._accept)

    def close(self) -> None:
        self._closing.set()
        for each in (self._listener, *self._open):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _start(self, act: object, *arguments: object) -> None:
        threading.Thread(target=act, args=arguments, daemon=True).start()  # type: ignore[arg-type]

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client = self._listener.accept()[0]
                server = self._connect()
                self._open += [client, server]
                self._start(self._pass, client, server)
                self._start(self._pass, server, client)

    def _connect(self) -> socket.socket:
        if not self._host.startswith("/"):
            return socket.create_connection((self._host, self._port))
        server = socket.socket(socket.AF_UNIX)
        server.connect(f"{self._host}/.s.PGSQL.{self._port}")
        return server

    def _pass(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if self.stand_still.is_set():
                    self._closing.wait()
                    return
                if not self.swallow.is_set():
                    target.sendall(data)
            target.shutdown(socket.SHUT_RDWR)


class CommitCut(BlackHole):
    """Cuts a connection at its COMMIT, ``before`` or ``after`` Postgres receives it.

    ``hung``: the client's side is cut before, and Postgres does not notice. ``closed``: new connections are refused after the cut.
    """

    COMMIT = b"Q\0\0\0\x0bCOMMIT\0"

    def __init__(self, url: str, cut: str, *, closed: bool = False) -> None:
        self.cuts, self._cut, self._closed = 0, cut, closed
        super().__init__(url)

    def _pass(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if self.COMMIT in data and not self.cuts:
                    self.cuts += 1
                    if self._closed:
                        self._listener.shutdown(socket.SHUT_RDWR)
                    if self._cut == "before":
                        target.shutdown(socket.SHUT_RDWR)
                    source.shutdown(socket.SHUT_RDWR)  # the answer cannot be delivered
                    if self._cut == "after":
                        target.sendall(data)
                    return
                target.sendall(data)
            target.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def before(url: str) -> Iterator[BlackHole]:
    """A proxy between clients and the Postgres at ``url``, closed after the block."""
    hole = BlackHole(url)
    try:
        yield hole
    finally:
        hole.close()

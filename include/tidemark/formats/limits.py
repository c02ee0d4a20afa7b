"""Limits time and size of an exchange with an HTTP server. httpx limits only the wait for the next byte, neither the total time nor the
number of bytes."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any


class AnswerTooLong(Exception):
    """A response exceeded a limit, which the text names."""


class Limits:
    """Limits for the requests of ``httpx.Client`` objects, which it changes."""

    def __init__(self, *clients: Any, within_s: float, max_bytes: int) -> None:
        """``within_s``: for an exchange with all its requests. ``max_bytes``: for the body of a response."""
        self._within_s, self._max_bytes = within_s, max_bytes
        self._sockets: list[socket.socket] = []
        self._deadline = float("inf")
        for client in clients:
            client.event_hooks = {"request": [self._begin], "response": [self._bound_body]}

    @contextlib.contextmanager
    def exchange(self) -> Iterator[None]:
        """Applies the limits to the requests of the block as one exchange. Raises `AnswerTooLong`."""
        self._deadline = time.monotonic() + self._within_s
        clock = threading.Timer(self._within_s, self._shut_down)
        clock.daemon = True
        clock.start()
        try:
            yield
        except Exception as error:
            self._require_time(error)
            raise
        finally:
            clock.cancel()

    def close(self) -> None:
        """Closes all connections: confluent-kafka's client never closes the one to the token server."""
        for connection in self._sockets:
            connection.close()

    def _require_time(self, cause: Exception | None = None) -> None:
        if time.monotonic() >= self._deadline:
            raise AnswerTooLong(f"it has not answered completely within {self._within_s:g} s") from cause

    def _shut_down(self) -> None:
        """Wakes the thread that waits for the server."""
        for connection in self._sockets:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _begin(self, request: Any) -> None:
        self._require_time()
        request.headers["Accept-Encoding"] = "identity"
        request.extensions = {**request.extensions, "trace": self._track}

    def _track(self, event: str, info: Mapping[str, Any]) -> None:
        if event.endswith((".connect_tcp.complete", ".start_tls.complete")):
            self._sockets.append(info["return_value"].get_extra_info("socket"))
            self._require_time()

    def _bound_body(self, response: Any) -> None:
        if response.headers.get("Content-Encoding", "identity") != "identity":
            raise AnswerTooLong("its answer is compressed, although that was not asked for")
        response.stream = _bounded(response.stream, self._max_bytes)


def _bounded(stream: Any, max_bytes: int) -> Any:
    base = next(kind for kind in type(stream).__mro__ if kind.__name__ == "SyncByteStream")  # of the client's httpx, one of two variants

    class Bounded(base):  # type: ignore[misc, valid-type]
        def __iter__(self) -> Iterator[bytes]:
            remaining = max_bytes
            for chunk in stream:
                remaining -= len(chunk)
                if remaining < 0:
                    raise AnswerTooLong(f"its answer has more than {max_bytes:,} bytes")
                yield chunk

        def close(self) -> None:
            stream.close()

    return Bounded()

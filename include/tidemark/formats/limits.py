"""What one question to an HTTP server may take. httpx limits how long it waits for the next byte, but not for the last one, and not how
many there are."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping


class AnswerTooLong(Exception):
    """The text says which limit the answer exceeded."""


class Limits:
    """Limits for the requests of ``httpx.Client`` objects, which it changes."""

    def __init__(self, *clients: Any, within_s: float, max_bytes: int) -> None:
        """``within_s``: for a question with all of its requests. ``max_bytes``: for the body of an answer."""
        self._within_s, self._max_bytes = within_s, max_bytes
        self._sockets: list[socket.socket] = []
        self._until = float("inf")
        for client in clients:
            client.event_hooks = {"request": [self._begin], "response": [self._bound]}

    @contextlib.contextmanager
    def question(self) -> Iterator[None]:
        """The requests of the block belong to one question. Raises `AnswerTooLong`."""
        self._until = time.monotonic() + self._within_s
        clock = threading.Timer(self._within_s, self._cut)
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
        """Closes the connections, also those that a client does not know: confluent-kafka's never closes that to the server of tokens."""
        for each in self._sockets:
            each.close()

    def _require_time(self, cause: Exception | None = None) -> None:
        if time.monotonic() >= self._until:
            raise AnswerTooLong(f"it has not answered completely within {self._within_s:g} s") from cause

    def _cut(self) -> None:
        """Wakes the thread that waits for the server."""
        for each in self._sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def _begin(self, request: Any) -> None:
        self._require_time()
        request.headers["Accept-Encoding"] = "identity"
        request.extensions = {**request.extensions, "trace": self._note}

    def _note(self, event: str, info: Mapping[str, Any]) -> None:
        if event.endswith((".connect_tcp.complete", ".start_tls.complete")):
            self._sockets.append(info["return_value"].get_extra_info("socket"))
            self._require_time()

    def _bound(self, response: Any) -> None:
        if response.headers.get("Content-Encoding", "identity") != "identity":
            raise AnswerTooLong("its answer is compressed, although that was not asked for")
        response.stream = _bounded(response.stream, self._max_bytes)


def _bounded(stream: Any, most: int) -> Any:
    base = next(each for each in type(stream).__mro__ if each.__name__ == "SyncByteStream")  # of the client's httpx, of which there are two

    class Bounded(base):  # type: ignore[misc, valid-type]
        def __iter__(self) -> Iterator[bytes]:
            left = most
            for chunk in stream:
                left -= len(chunk)
                if left < 0:
                    raise AnswerTooLong(f"its answer has more than {most:,} bytes")
                yield chunk

        def close(self) -> None:
            stream.close()

    return Bounded()

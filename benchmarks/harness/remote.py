"""An object in a process of its own, whose methods are called through a pipe."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from collections.abc import Callable
from typing import Any


class Remote:
    """Not thread-safe. A forked process shares the memory of this one; a spawned one imports what it needs."""

    def __init__(self, build: Callable[..., Any], *args: Any, method: str = "spawn") -> None:
        context: Any = multiprocessing.get_context(method)
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, build, args), daemon=True)
        self._process.start()
        theirs.close()

    def ask(self, method: str, *args: Any) -> Any:
        self.begin(method, *args)
        return self.answer()

    def begin(self, method: str, *args: Any) -> None:
        """Calls the method; `answer` waits for its end."""
        self._pipe.send((method, args))

    def answer(self) -> Any:
        """Raises `RuntimeError` if the method has failed."""
        failed, value = self._pipe.recv()
        if failed:
            raise RuntimeError(value)
        return value

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._pipe.send(None)
        self._pipe.close()
        self._process.join(10)


def _serve(pipe: Any, build: Callable[..., Any], args: tuple[Any, ...]) -> None:
    service = build(*args)
    with contextlib.suppress(EOFError):
        while (request := pipe.recv()) is not None:
            method, parameters = request
            try:
                pipe.send((False, getattr(service, method)(*parameters)))
            except Exception as error:  # noqa: BLE001 - raised again where it was called
                pipe.send((True, f"{type(error).__name__}: {error}"))
    os._exit(0)

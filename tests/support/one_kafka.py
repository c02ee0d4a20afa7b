"""One Kafka for all workers of ``make test``: an idle broker takes 4 % of a core. The first worker that needs it starts it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from tidemark.local import LocalStack
from tidemark.local.postgres import DATABASE

FOLDER = "TIDEMARK_TEST_KAFKA"
"""The folder of the broker, in the environment of the workers."""


def offer() -> Callable[[], None]:
    """From now on, workers may share a broker. Returns what ends that."""
    folder = os.environ[FOLDER] = tempfile.mkdtemp(prefix="tidemark-kafka-")

    def end() -> None:
        stack = LocalStack(Path(folder))
        stack.stop(stack.kafka)
        shutil.rmtree(folder, ignore_errors=True)
        os.environ.pop(FOLDER, None)

    return end


def is_shared() -> bool:
    return FOLDER in os.environ


def shared() -> LocalStack:
    return LocalStack(Path(os.environ[FOLDER]))


@contextlib.contextmanager
def started(stack: LocalStack) -> Iterator[None]:
    """Starts the stack's Postgres, and gives it the shared broker."""
    broker = shared()
    with (broker.folder / "turn").open("w") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        broker.start(broker.kafka)
    stack.kafka = broker.kafka
    stack.start(stack.postgres)
    stack.create_database(DATABASE)
    try:
        yield
    finally:
        stack.stop(stack.postgres)

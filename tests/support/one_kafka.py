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
from tidemark.local.kafka import Kafka
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


class Patient(Kafka):
    """A broker that stays registered when a busy machine lets it stand still for a while. It is never killed."""

    def settings(self, port: int, controller_port: int) -> dict[str, str]:
        return {**super().settings(port, controller_port), "broker.session.timeout.ms": "60000"}


def shared() -> LocalStack:
    stack = LocalStack(Path(os.environ[FOLDER]))
    stack.kafka = Patient(stack.kafka.folder, None)
    return stack


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

"""Calls a function in the driver's environment, for callers that lack its packages or would wait for their import.

python -m tidemark.driver.call        # reads the pickled function from standard input, writes the pickled answer to standard output
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import TypeVar

from tidemark.driver.environment import driver_env, interpreter, require_same_version, require_tidemark, separate
from tidemark.driver.keeper_client import KeeperUnavailable, call_in_fork, result
from tidemark.driver.process import child_env, die_with_parent
from tidemark.errors import TidemarkError, message_of
from tidemark.packages import optional

T = TypeVar("T")


def call(function: Callable[[], T], *, with_keeper: bool) -> T:
    """Calls a function in the driver's environment: in a fork of a keeper if possible, in this process if it has the same environment, in a
    new process otherwise.

    In another process, function, result and error are pickled. Raises the function's error, `BadInput`, `VersionsDiffer` and
    `CallDied`.
    """
    if with_keeper:
        try:
            return call_in_fork(function)
        except KeeperUnavailable:
            pass
    return _call_in_process(function) if separate() else function()


def _call_in_process(function: Callable[[], T]) -> T:
    command, env = [interpreter(), "-m", __name__], child_env(driver_env(os.environ))
    done = subprocess.run(command, env=env, input=pickle.dumps(function), stdout=subprocess.PIPE, check=False)
    if not done.stdout:
        require_tidemark()
    return result(done.stdout)  # type: ignore[no-any-return]


def answer(pickled: bytes) -> bytes:
    """Calls a pickled function. The answer has its result or its error."""
    try:
        with optional():
            require_same_version()
            return pickle.dumps((pickle.loads(pickled)(), None))  # noqa: S301 - pickled by our own caller
    except TidemarkError as error:
        return pickle.dumps((None, error))
    except Exception as error:  # noqa: BLE001 - the caller raises it; not every error can be pickled
        return pickle.dumps((None, RuntimeError(f"{type(error).__name__}: {message_of(error)}")))


def main() -> None:
    die_with_parent()
    with os.fdopen(os.dup(1), "wb") as output:
        os.dup2(2, 1)  # what the function prints is not part of the answer
        output.write(answer(sys.stdin.buffer.read()))


if __name__ == "__main__":
    main()

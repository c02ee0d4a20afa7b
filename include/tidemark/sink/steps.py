"""The seven steps of a commit, numbered the same in code, docs and tests."""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable
from enum import IntEnum

from tidemark.records.ranges import Slice


class Step(IntEnum):
    """A step of a slice's commit; reported just before it runs."""

    BEGIN = 1
    MOVE_OFFSET = 2
    COPY_ROWS = 3
    COPY_FAILED = 4
    LEDGER = 5
    COMMIT = 6
    RECEIPT = 7


Hook = Callable[[Step, Slice], None]


def reached(step: Step, part: Slice) -> None:
    """Calls the hook ``TIDEMARK_STEP_HOOK=module:function``, if set, in the committing process. For fault injection and tracing."""
    if (hook := _hook(os.environ.get("TIDEMARK_STEP_HOOK"))) is not None:
        hook(step, part)


@functools.cache
def _hook(name: str | None) -> Hook | None:
    if not name:
        return None
    module, _, function = name.partition(":")
    hook: Hook = getattr(importlib.import_module(module), function)
    return hook

"""What is written in C, because Python objects for each value would take most of the CPU: the reader and the encoder.

A wheel for Linux brings the library for its machine. Elsewhere, or if the sources have changed, the machine's C compiler compiles it at
first use, into the cache that all projects share (``TIDEMARK_CACHE``). Where that fails, Python does the same, more slowly.

Modules::

    build  compiles the C files: ``reader.c`` for `tidemark.kafka.compiled`, ``encoder.c`` for `tidemark.sink.compiled_rows`
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import platform
import shutil
import subprocess
import sysconfig
import tempfile
from importlib import resources
from pathlib import Path

from tidemark.jvm.jars import cache
from tidemark.native import build

log = logging.getLogger(__name__)


@functools.cache
def library() -> ctypes.CDLL | None:
    """Loads the compiled library. `None` if that fails; logs the reason once per process."""
    try:
        return _load()
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:  # RuntimeError: there is no home directory
        log.warning("records are read and encoded without compiled code, which takes more CPU cause=%s", error)
        return None


def _load() -> ctypes.CDLL:
    folder = resources.files(__name__)
    sources = {name: folder.joinpath(name).read_bytes() for name in build.SOURCES}
    name = build.file_name(sources)
    with contextlib.suppress(OSError):
        return ctypes.CDLL(str(folder.joinpath(name)))
    target = cache() / "compiled" / f"{sysconfig.get_platform()}-{platform.libc_ver()[0]}-{name}"
    with contextlib.suppress(OSError):  # missing or damaged
        return ctypes.CDLL(str(target))
    with contextlib.ExitStack() as ends:
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            fresh = Path(tempfile.mkdtemp(prefix=".", dir=target.parent))
        except OSError:  # the cache is not writable: compile for this process only
            fresh = Path(tempfile.mkdtemp())
        ends.callback(shutil.rmtree, fresh, ignore_errors=True)
        compiled = build.compile_into(fresh, sources)
        return ctypes.CDLL(str(compiled.replace(target) if fresh.parent == target.parent else compiled))

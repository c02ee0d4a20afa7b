"""The compiled library where no wheel brings it: it is compiled at first use, or Python does its work."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.support.sanitized import run_sanitized

LOADED = """
from tidemark import native
from tidemark.kafka import compiled
print("compiled" if native.library() and compiled.library() else "python")
"""


def started(cache: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Runs a process that needs the library, with this cache."""
    variables = {name: value for name, value in os.environ.items() if name != "CC"}
    command = [sys.executable, "-c", LOADED]
    return subprocess.run(command, env=variables | {"TIDEMARK_CACHE": str(cache)} | env, capture_output=True, text=True, check=True)


def test_processes_that_need_it_at_once_leave_one_file(tmp_path: Path) -> None:
    """The workers of an executor start like this. Later processes need no compiler, unless the file is damaged."""
    with ThreadPoolExecutor(4) as pool:
        done = list(pool.map(lambda _: started(tmp_path), range(4)))
    assert [(each.stdout, each.stderr) for each in done] == [("compiled\n", "")] * 4
    (library,) = (tmp_path / "compiled").iterdir()
    modified = library.stat().st_mtime_ns
    assert started(tmp_path, PATH="").stdout == "compiled\n"
    assert library.stat().st_mtime_ns == modified
    library.write_bytes(b"not a library")
    assert started(tmp_path).stdout == "compiled\n"
    assert library.read_bytes() != b"not a library"


def test_cache_that_cannot_be_written_costs_a_compilation(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = started(tmp_path / "file")
    assert (done.stdout, done.stderr) == ("compiled\n", "")


@pytest.mark.parametrize(
    ("env", "cause"),
    [({"PATH": ""}, "there is no C compiler"), ({"CC": "false"}, "false failed"), ({"CC": "/no/such/cc"}, "No such file")],
    ids=["none", "fails", "missing"],
)
def test_without_a_compiler_python_does_the_work_and_says_so_once(tmp_path: Path, env: dict[str, str], cause: str) -> None:
    done = started(tmp_path, **env)
    assert done.stdout == "python\n"
    assert done.stderr.startswith("records are read and encoded without compiled code, which takes more CPU cause=")
    assert cause in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.thorough
def test_encoder_touches_no_byte_outside_of_its_buffers(tmp_path: Path) -> None:
    """The tests of the encoder pass with AddressSanitizer and UndefinedBehaviorSanitizer."""
    words = ["-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", "tests/unit/sink/test_encoders.py"]
    run_sanitized(words, tmp_path, "address", "undefined")

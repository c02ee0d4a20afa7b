"""Compiles this package's C files to one shared library. Imports no other package: the build of the wheel runs it without any."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

SOURCES = ("reader.c", "encoder.c")
FLAGS = ("-O2", "-std=c11", "-shared", "-fPIC")
COMPILERS = ("cc", "gcc", "clang")
LIMIT_S = 60
ERROR_BYTES = 512
OLDEST_GLIBC = 17
"""manylinux_2_17, the oldest glibc 2.x that pip's tags know for both machines."""
_MACHINES = {62: "x86_64", 183: "aarch64"}
"""By the number of the machine in an ELF file."""


def file_name(sources: Mapping[str, bytes]) -> str:
    """The library's name, derived from its sources: a library of other sources is not found."""
    about = (sorted(sources.items()), FLAGS)
    return f"tidemark-{hashlib.sha256(repr(about).encode()).hexdigest()[:16]}.so"


def compile_into(folder: Path, sources: Mapping[str, bytes]) -> Path:
    """Returns the path of the compiled library. Raises `OSError` or `subprocess.SubprocessError`."""
    compiler = shlex.split(os.environ.get("CC", "")) or [name for name in COMPILERS if shutil.which(name)][:1]
    if not compiler:
        raise FileNotFoundError(f"there is no C compiler ({', '.join(COMPILERS)})")
    for name, source in sources.items():
        (folder / name).write_bytes(source)
    result = folder / file_name(sources)
    command = [*compiler, *FLAGS, "-o", str(result), *(str(folder / name) for name in sources)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    if run.returncode != 0:
        raise OSError(f"{compiler[0]} failed: {' '.join(run.stderr.split())[-ERROR_BYTES:]}")
    with result.open("rb") as file:
        os.fsync(file.fileno())
    return result


def wheel_tag(library: Path) -> str | None:
    """The tag of a wheel with this library, by the machine and the glibc that the file asks for. `None` if there is none."""
    content = library.read_bytes()
    machine = _MACHINES.get(int.from_bytes(content[18:20], "little"))
    if content[:4] != b"\x7fELF" or machine is None or platform.libc_ver()[0] != "glibc":
        return None
    needed = max([OLDEST_GLIBC, *(int(minor) for minor in re.findall(rb"GLIBC_2\.(\d+)", content))])
    return f"py3-none-manylinux_2_{needed}_{machine}"


if __name__ == "__main__":  # beside the sources, where `tidemark.native` looks for it first
    here = Path(__file__).parent
    compile_into(here, {name: (here / name).read_bytes() for name in SOURCES})

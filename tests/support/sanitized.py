"""Runs Python with the C files compiled with gcc's sanitizers, which end it at any access outside of a buffer."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def python(cache: Path, sanitizers: str, *arguments: str) -> None:
    """Runs Python with these arguments. Arrow's buffers come from malloc."""
    names = [f"lib{'a' if each == 'address' else 'ub'}san.so" for each in sanitizers.split(",")]
    preloaded = [
        subprocess.run(["gcc", f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout.strip()
        for name in (*names, "libstdc++.so")
    ]
    assert all(map(os.path.isabs, preloaded)), "gcc's sanitizers are missing"
    env = os.environ | {
        "CC": f"gcc -fsanitize={sanitizers} -fno-sanitize-recover=all",
        "TIDEMARK_CACHE": str(cache),
        "LD_PRELOAD": " ".join(preloaded),
        "ASAN_OPTIONS": "detect_leaks=0",  # Python leaks a lot of memory at exit
        "ARROW_DEFAULT_MEMORY_POOL": "system",
        "PYTHONMALLOC": "malloc",
    }
    env.pop("TIDEMARK_TEST_SHARD", None)
    done = subprocess.run([sys.executable, *arguments], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert any((cache / "compiled").glob("*.so"))

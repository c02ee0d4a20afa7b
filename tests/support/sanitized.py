"""Runs Python with our C code compiled under gcc's sanitizers."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

LIBRARIES = {"address": "libasan.so", "undefined": "libubsan.so"}


def run_sanitized(words: Sequence[str], cache: Path, *kinds: str) -> None:
    """Runs Python with these arguments, which must succeed. Arrow's buffers come from malloc. ``cache``: an empty folder."""
    preloaded = [
        subprocess.run(["gcc", f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout.strip()
        for name in (*(LIBRARIES[kind] for kind in kinds), "libstdc++.so")
    ]
    assert all(map(os.path.isabs, preloaded)), "gcc's sanitizers are missing"
    env = os.environ | {
        "CC": f"gcc -fsanitize={','.join(kinds)} -fno-sanitize-recover=all",
        "TIDEMARK_CACHE": str(cache),
        "LD_PRELOAD": " ".join(preloaded),
        "ASAN_OPTIONS": "detect_leaks=0",  # Python leaks a lot of memory at exit
        "ARROW_DEFAULT_MEMORY_POOL": "system",
        "PYTHONMALLOC": "malloc",
    }
    env.pop("TIDEMARK_TEST_SHARD", None)
    done = subprocess.run([sys.executable, *words], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert any((cache / "compiled").glob("*.so"))

"""The folder with the stack's state: creates it with the right permissions, and lets one command at a time change it."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from tidemark.jvm.errors import FolderUnusable
from tidemark.local.errors import FolderBusy


def make(folder: Path) -> None:
    """Creates the folder unless it exists. Only its owner has access, but the server's user may enter root's folder.

    An existing folder keeps its permissions. Raises `FolderUnusable` if it cannot be created or written.
    """
    try:
        if not folder.is_dir():
            folder.mkdir(parents=True)
            folder.chmod(0o711 if os.geteuid() == 0 else 0o700)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise FolderUnusable(folder=folder, cause="it is not writable", fix=_FIX)
    except OSError as error:
        raise FolderUnusable(folder=folder, cause=f"it cannot be created ({error.strerror})", fix=_FIX) from error


def write_private(path: Path, text: str) -> None:
    """Replaces ``path`` atomically with a file that only its owner can read."""
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    draft.touch(mode=0o600)
    draft.write_text(text, encoding="utf-8")
    draft.replace(path)


_FIX = "Choose another folder with TIDEMARK_STATE."


@contextlib.contextmanager
def held(folder: Path) -> Iterator[None]:
    """Holds the folder's lock, at most until the process ends. Raises `FolderBusy` at once if another command holds it."""
    path = folder / "lock"
    while True:
        try:
            lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise FolderUnusable(folder=folder, cause=f"it cannot be written ({error.strerror})", fix=_FIX) from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.read(lock, 32).decode(errors="replace").strip()
            os.close(lock)
            raise FolderBusy(folder=folder, holder=f"process {holder}" if holder else "just started") from error
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(lock), path.stat()):
                break
        os.close(lock)  # a reset has deleted the file we hold
    try:
        os.ftruncate(lock, 0)
        os.write(lock, str(os.getpid()).encode())
        yield
    finally:
        with contextlib.suppress(OSError):
            os.ftruncate(lock, 0)
        os.close(lock)

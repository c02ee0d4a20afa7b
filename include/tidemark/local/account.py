"""The system user that runs Postgres if the caller is root, because Postgres refuses to run as root."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import stat
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tidemark.jvm.errors import FolderUnusable

NAME = "pgserver"
"""The user that the Postgres wheel itself creates for this purpose; a machine needs only one."""
_TRIES = 20


@dataclass(frozen=True, slots=True)
class SystemUser:
    """A system user other than the caller."""

    name: str
    uid: int
    gid: int

    def switch(self) -> dict[str, Any]:
        """Arguments for `subprocess.run` that start a command as this user, without the caller's groups."""
        return {"user": self.uid, "group": self.gid, "extra_groups": []}

    def own(self, path: Path) -> None:
        os.chown(path, self.uid, self.gid)


def server_account() -> SystemUser | None:
    """None for an ordinary caller; for root the user `NAME`, created if it does not exist.

    Raises `FolderUnusable` if it cannot be created.
    """
    if os.geteuid() != 0:
        return None
    for _ in range(_TRIES):
        try:
            entry = pwd.getpwnam(NAME)
            return SystemUser(name=NAME, uid=entry.pw_uid, gid=entry.pw_gid)
        except KeyError:
            made = _make()
        if made:
            time.sleep(0.1)  # another process may be creating it, or hold the lock of the user database
    raise FolderUnusable(
        folder=Path.cwd(),
        cause=f"Postgres refuses to run as root, and its user {NAME} could not be created: {made}",
        fix="Run as an ordinary user, or create the user yourself.",
    )


def own_uids() -> set[int]:
    """The users whose processes can be servers of this caller."""
    uids = {os.geteuid()}
    if os.geteuid() == 0:
        with contextlib.suppress(KeyError):
            uids.add(pwd.getpwnam(NAME).pw_uid)
    return uids


def _make() -> str:
    """Create the user; return an empty text, or why it failed."""
    useradd = shutil.which("useradd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
    if useradd is None:
        return "useradd was not found"
    done = subprocess.run([useradd, "--system", "--user-group", "--no-create-home", NAME], capture_output=True, text=True, check=False)
    return done.stderr.strip() or f"useradd ended with {done.returncode}" if done.returncode else ""


def check_reachable(account: SystemUser, *paths: Path) -> None:
    """Return if the account can enter all folders above ``paths``; raises `FolderUnusable` with the folder that it cannot enter.

    The permissions of folders outside the stack are never changed: opening /root to all users is the owner's decision.
    """
    for path in paths:
        tried = subprocess.run(["/bin/sh", "-c", 'test -x "$1"', "sh", path], cwd="/", check=False, **account.switch())
        if tried.returncode == 0:
            continue
        barrier = next((folder for folder in reversed(path.resolve().parents) if not _passes(account, folder)), path)
        mode = stat.S_IMODE(barrier.stat().st_mode)
        raise FolderUnusable(
            folder=path,
            cause=f"Postgres cannot run as root, and its system user {account.name} may not enter {barrier} (mode {mode:04o})",
            fix=f"Allow it with: chmod o+x {barrier}. Or use another folder (--folder, TIDEMARK_STATE), or run as an ordinary user.",
        )


def _passes(account: SystemUser, folder: Path) -> bool:
    status = folder.stat()
    if status.st_uid == account.uid:
        return bool(status.st_mode & stat.S_IXUSR)
    if status.st_gid == account.gid:
        return bool(status.st_mode & stat.S_IXGRP)
    return bool(status.st_mode & stat.S_IXOTH)

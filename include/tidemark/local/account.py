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
_FIRST_CLOSED = 'for path; do test -x "$path" || { printf %s "$path"; exit; }; done'


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
    """The user `NAME` for root, created if necessary; None for an ordinary caller.

    Raises `FolderUnusable` if the user cannot be created.
    """
    if os.geteuid() != 0:
        return None
    for _ in range(_TRIES):
        try:
            entry = pwd.getpwnam(NAME)
            return SystemUser(name=NAME, uid=entry.pw_uid, gid=entry.pw_gid)
        except KeyError:
            problem = _create_user()
        if problem:
            time.sleep(0.1)  # another process may be creating it, or hold the lock of the user database
    raise FolderUnusable(
        folder=Path.cwd(),
        cause=f"Postgres refuses to run as root, and its user {NAME} could not be created: {problem}",
        fix="Run as an ordinary user, or create the user yourself.",
    )


def own_uids() -> set[int]:
    """The users whose processes can be servers of this caller."""
    uids = {os.geteuid()}
    if os.geteuid() == 0:
        with contextlib.suppress(KeyError):
            uids.add(pwd.getpwnam(NAME).pw_uid)
    return uids


def _create_user() -> str:
    """Creates the user. Returns the error text, empty on success."""
    useradd = shutil.which("useradd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
    if useradd is None:
        return "useradd was not found"
    process = subprocess.run([useradd, "--system", "--user-group", "--no-create-home", NAME], capture_output=True, text=True, check=False)
    return process.stderr.strip() or f"useradd ended with {process.returncode}" if process.returncode else ""


def check_reachable(account: SystemUser, *paths: Path) -> None:
    """Raises `FolderUnusable`, with the folder, unless the account can enter all folders above ``paths``.

    Never changes permissions of folders outside the stack: opening /root to all users is the owner's decision.
    """
    for path in paths:
        command: list[str | Path] = ["/bin/sh", "-c", _FIRST_CLOSED, "sh", *reversed(path.resolve().parents), path]
        probe = subprocess.run(command, cwd="/", stdout=subprocess.PIPE, check=True, **account.switch())
        if not probe.stdout:
            continue
        barrier = Path(os.fsdecode(probe.stdout))
        mode = stat.S_IMODE(barrier.stat().st_mode)
        raise FolderUnusable(
            folder=path,
            cause=f"Postgres cannot run as root, and its system user {account.name} may not enter {barrier} (mode {mode:04o})",
            fix=f"Allow it with: chmod o+x {barrier}. Or use another folder (TIDEMARK_STATE), or run as an ordinary user.",
        )

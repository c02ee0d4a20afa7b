"""Errors of the embedded stack; each text has the cause and the fix."""

from __future__ import annotations

from pathlib import Path

from tidemark.errors import Refused, Unavailable


class PortInUse(Refused):
    """Another program listens on the requested port."""

    server: str
    port: int
    option: str

    def __str__(self) -> str:
        return (
            f"{self.server} cannot listen on 127.0.0.1:{self.port}: the port is in use. "
            f"Stop the program that listens there, choose another {self.option}, or omit {self.option} to use a free port."
        )


class RunningOnAnotherPort(Refused):
    """The server already runs on another port than the requested one."""

    server: str
    port: int
    requested: int

    def __str__(self) -> str:
        return f"{self.server} runs on port {self.port}, not on {self.requested}. To move it: tidemark local down, then up again."


class FolderBusy(Unavailable):
    """Another command is changing the stack of this folder."""

    folder: Path
    holder: str

    def __str__(self) -> str:
        return f"Another command ({self.holder}) is working on the stack in {self.folder}. Try again after it has ended."


class ServerFailed(Unavailable):
    """A server ended, or did not answer in time; ``lines`` are the last lines of its log."""

    server: str
    what: str
    log: Path
    lines: str

    def __str__(self) -> str:
        tail = f"\nThe last lines of its log:\n{self.lines}" if self.lines else ""
        return f"{self.server} {self.what}. Its log is {self.log}.{tail}"


class NotUp(Refused):
    """A required server is not running."""

    server: str
    folder: Path

    def __str__(self) -> str:
        return f"{self.server} of the stack in {self.folder} is not running. Start it with: tidemark local up"

"""Reads files that hold a secret, as Docker and Kubernetes mount them."""

from __future__ import annotations

from pathlib import Path

from tidemark.errors import Unavailable


class SecretUnreadable(Unavailable):
    """The file of a secret is missing, empty or unreadable, perhaps only while it is being replaced."""

    path: Path
    cause: str

    def __str__(self) -> str:
        return f"{self.path} cannot be read: {self.cause}. Mount the secret there, readable for this user; replace the file by renaming."


def read(path: Path) -> str:
    """Reads the file's text, stripped of white space. Raises `SecretUnreadable`."""
    try:
        text = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        cause = error.strerror or str(error) if isinstance(error, OSError) else "it is not UTF-8"
        raise SecretUnreadable(path=path, cause=cause) from None
    if not text:
        raise SecretUnreadable(path=path, cause="it is empty")
    return text

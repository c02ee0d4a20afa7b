"""Which files a server of the local stack writes."""

from __future__ import annotations

from pathlib import Path

from tidemark.local.server import Server


def assert_own_files(server: Server) -> None:
    """Every file that the server has opened for writing is in its folder, which nobody else may enter."""
    assert server.folder.stat().st_mode & 0o077 == 0
    process = server.process()
    assert process is not None
    opened = {Path(file.path) for file in process.open_files() if file.mode != "r" and Path(file.path).suffix != ".jar"}
    assert {file for file in opened if not file.is_relative_to(server.folder)} == set()
    assert (server.folder / "tmp").is_dir()

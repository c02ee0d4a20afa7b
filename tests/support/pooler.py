"""PgBouncer in front of the tests' Postgres, with the settings of docs/deployment/index.md."""

from __future__ import annotations

import contextlib
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from tests.support import needs
from tests.support.waiting import until
from tidemark import project
from tidemark.local import ports
from tidemark.local.account import server_account

MODES = ("transaction", "session")


@dataclass(frozen=True, slots=True)
class Pooler:
    port: int

    def url(self, url: str) -> str:
        """The URL that leads to a Postgres database through this pooler."""
        known = urlsplit(url)
        return known._replace(netloc=f"{known.username}@{ports.HOST}:{self.port}").geturl()


def documented() -> list[str]:
    """The documented settings with a value, as ``name = number``."""
    text = (Path(project.root()) / "docs" / "deployment" / "index.md").read_text()
    return re.findall(r"`(\w+ = \d+)`", text.partition("### PgBouncer\n")[2].partition("\n### ")[0])


@contextlib.contextmanager
def pooler(postgres_url: str, mode: str) -> Iterator[Pooler]:
    """Runs a pooler that connects every client as the role of ``postgres_url``, whatever role the client names."""
    program = needs.program("pgbouncer")
    assert program is not None
    known, port, account = urlsplit(postgres_url), ports.find_free(), server_account()
    with tempfile.TemporaryDirectory(prefix="tidemark-pooler-") as name:
        folder = Path(name)
        settings = folder / "pgbouncer.ini"
        settings.write_text(
            f"""
            [databases]
            * = host={known.hostname} port={known.port} user={known.username} password={known.password}
            [pgbouncer]
            listen_addr = {ports.HOST}
            listen_port = {port}
            unix_socket_dir =
            auth_type = any
            pool_mode = {mode}
            logfile = {folder}/log
            """.replace("\n            ", "\n")
            + "\n".join(documented())
        )
        if account is not None:  # PgBouncer refuses to run as root
            account.own(folder)
            account.own(settings)
        command, switch = [program, "--quiet", str(settings)], account.switch() if account else {}
        with subprocess.Popen(command, cwd="/", **switch) as process:
            try:
                until(lambda: ports.accepts(port) or process.poll() is not None)
                assert process.poll() is None, (folder / "log").read_text()
                yield Pooler(port)
            finally:
                process.terminate()
                process.wait()

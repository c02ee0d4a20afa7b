"""``make demo``, as a newcomer runs it: Airflow, a driver that is killed, retries, and a comparison with the source."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tidemark import project

LIMIT_S = 900


@pytest.mark.parametrize(("days", "batch"), [(31, 3_000), pytest.param(365, 120_000, marks=pytest.mark.thorough)])
def test_demo_kills_a_driver_and_accounts_for_every_record(days: int, batch: int, tmp_path: Path) -> None:
    """A month has one truncated record and one airline for each retry; its batches are small, so that the kill comes between two."""
    consumers = tmp_path / "consumers"
    shutil.copytree(project.consumers(), consumers)
    file = consumers / "departures.yaml"
    file.write_text(file.read_text().replace("max_records: 120000", f"max_records: {batch}"))
    with tempfile.TemporaryDirectory(prefix="tidemark-demo-", ignore_cleanup_errors=True) as folder:
        Path(folder).chmod(0o755)  # if root runs this, Postgres runs as another user
        env = {**os.environ, "TIDEMARK_STATE": folder, "TIDEMARK_CONSUMERS": str(consumers)}
        command = [sys.executable, "-m", "demo", "--days", str(days)]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "kill -9" in done.stdout
    assert "of these killed: 1." in done.stdout

"""``make demo``, as a newcomer runs it: Airflow, a driver that is killed, retries, a comparison with the source, and a rewind beside while
a reader polls the table. `make test` shows the same with less data, in the other modules of this folder."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

LIMIT_S = 900


@pytest.mark.thorough
def test_demo_kills_a_driver_and_accounts_for_every_record() -> None:
    with tempfile.TemporaryDirectory(prefix="tidemark-demo-", ignore_cleanup_errors=True) as folder:
        Path(folder).chmod(0o755)  # if root runs this, Postgres runs as another user
        env = {**os.environ, "TIDEMARK_STATE": folder}
        done = subprocess.run([sys.executable, "-m", "demo"], env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "kill -9" in done.stdout
    assert "of these killed: 1." in done.stdout
    text = " ".join(done.stdout.split())
    compared = re.search(r"an hour to ([\d,]+) delays.* equal, ([\d,]+) changed, 0 gone, 0 new", text)
    assert compared is not None, text[-3000:]
    assert compared[1] == compared[2], "verify found exactly the damaged rows"
    looks = re.search(r"Of ([\d,]+) looks of the reader, ([\d,]+) saw all old rows, then ([\d,]+) all new rows, and 0 a gap\.", text)
    assert looks is not None, text[-3000:]
    total, old, new = (int(number.replace(",", "")) for number in looks.groups())
    assert total == old + new
    assert old > 0
    assert new > 0

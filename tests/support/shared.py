"""Resources that the tests of a folder share. They stop before the tests of other folders: an idle Airflow takes almost half a core."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

TESTS = Path(__file__).parent.parent
SHARED = {TESTS / name: ExitStack() for name in ("e2e", "chaos")}
"""What to stop after the last test of each folder."""


def stop_unless_needed_by(item: pytest.Item | None) -> None:
    for folder, ends in SHARED.items():
        if item is None or folder not in item.path.parents:
            ends.close()
